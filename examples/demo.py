"""Kill a worker during a payment, and watch the order finish: `make demo`, or `python examples/demo.py`.

It runs order_approval.py on real `celery worker` processes, with SQLite and messages in files: no server needed.
The counts at the end come from the databases. If a count is wrong, it exits with 1. It leaves the database of the order
in demo.sqlite3, for the dashboard.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
LEFT = ROOT / "demo.sqlite3"
ORDER = "order-1001"
LEASE_SECONDS = 2
PATIENCE_SECONDS = 30
BAR = 40
STEPS = ["record order", "charge card", "ask for approval", "wait for approval", "mark shipped", "tell customer"]
# A solo worker is one process, so one kill -9 ends it. The other options make it start faster.
WORKER_OPTIONS = ["--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]
BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"


# --- output -------------------------------------------------------------------------------------


class Story:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def paint(self, text: str, colour: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.has_colour else text

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def tell(self, what: str, remark: str = "", colour: str = BOLD) -> None:
        clock = self.paint(f"{time.monotonic() - self.began:5.1f} s", DIM)
        self.say(f"{clock}  {self.paint(f'{what:<34}', colour)} {remark}".rstrip())

    def note(self, text: str) -> None:
        self.say(f"{'':9}{self.paint(text, DIM)}")


# --- the worker ---------------------------------------------------------------------------------


@dataclass
class World:
    """A temporary folder with the databases and the messages, and the processes that were started in it."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stop_signal: int = 0

    def environment(self) -> dict[str, str]:
        return {
            "DURABLE_EXAMPLES_DIR": str(self.folder),
            "PAYMENTS_DATABASE_URL": f"sqlite:///{self.folder}/payments.sqlite3",
            "PAYMENTS_ANSWER_SECONDS": "10",
            "DURABLE_LEASE_SECONDS": str(LEASE_SECONDS),
        }

    def start_worker(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "examples.order_approval", "worker", *WORKER_OPTIONS],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(worker)
        return worker

    def await_(self, what: str, is_so: Callable[[], bool]) -> None:
        """Poll until ``is_so`` returns True; exit if the worker dies or it takes too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            if self.stop_signal:  # Python drops an exception of a signal handler that runs within a destructor
                raise SystemExit(128 + self.stop_signal)
            if time.monotonic() > deadline or self.processes[-1].poll() is not None:
                raise SystemExit(f"\nThis did not happen: {what}. The end of the worker's log:\n\n{self.log_tail()}")
            time.sleep(0.02)

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def rows(self, database: str, query: str) -> list[tuple[object, ...]]:
        """Read a database with plain SQL, so that the proof does not depend on celery_durable."""
        with closing(sqlite3.connect(self.folder / f"{database}.sqlite3", timeout=10)) as connection:
            return connection.execute(query).fetchall()

    def count(self, database: str, query: str) -> int:
        return int(str(self.rows(database, query)[0][0]))


@contextmanager
def world() -> Iterator[World]:
    """Create a world, and remove its folder and processes at the end, also after an interrupt."""
    made = World(Path(tempfile.mkdtemp(prefix="celery_durable-demo-")))

    def stop(number: int, _: FrameType | None) -> None:
        made.stop_signal = number
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    before = dict(os.environ)
    for name in ("CELERY_BROKER_URL", "DURABLE_DATABASE_URL"):  # restored at the end
        os.environ.pop(name, None)
    os.environ.update(made.environment())
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(made.folder, ignore_errors=True)


# --- the story ----------------------------------------------------------------------------------


def run(story: Story, here: World) -> None:
    """Run the demo up to the finished order."""
    from examples import order_approval as shop

    shop.durable.migrate()
    shop.create_tables()

    first = here.start_worker()
    story.tell("$ celery worker", f"process {first.pid}", CYAN)
    handle = shop.order.create(shop.OrderIn(order_id=ORDER, cents=12500), id=ORDER)
    story.tell(f'$ order.create(id="{ORDER}")', "one row in the database", CYAN)

    seen = {"charge card"}  # printed separately below

    def watch() -> None:
        """Print the steps that were committed since the last call."""
        for step in handle.history().steps:
            if step.status == "completed" and step.name not in seen:
                seen.add(step.name)
                story.tell(f"  {step.name}", f"committed{REMARKS.get(step.name, '')}", GREEN)

    def has_started(times: int) -> bool:
        watch()
        return here.count("payments", "SELECT count(*) FROM payment_request") >= times

    here.await_("the payment starts", lambda: has_started(1))
    here.await_("the bank takes the money", lambda: here.count("payments", "SELECT count(*) FROM payment") == 1)
    story.tell("  charge card", "the bank has taken the money, but its response is on the way ...", YELLOW)
    time.sleep(1)  # for the reader
    first.kill()
    first.wait()
    story.tell(f"$ kill -9 {first.pid}", "during the step: paid, but not recorded", RED)

    second = here.start_worker()
    story.tell("$ celery worker", f"process {second.pid}", CYAN)
    story.note(f"The dead worker's lease ends after {LEASE_SECONDS} s. (The demo shortened this; normally it is 30 s.)")
    here.await_("the payment starts again", lambda: has_started(2))
    story.tell("  charge card", "starts again with the same idempotency key", YELLOW)
    seen.remove("charge card")

    def is_waiting() -> bool:
        watch()
        return handle.status().status == "waiting"

    here.await_("the order waits for approval", is_waiting)
    story.tell("  wait for approval", "waits without a process; it could wait for weeks ...", YELLOW)
    time.sleep(1.5)  # for the reader
    handle.send_event("approval", {"approved": True, "by": "eve"})
    story.tell('$ handle.send_event("approval")', "eve approves", CYAN)

    def is_over() -> bool:
        watch()
        return handle.status().status.is_terminal

    here.await_("the order ends", is_over)
    story.tell(f"{ORDER} is {handle.status().status}", f'its result is "{handle.status().output}"')


REMARKS = {
    "record order": ", with a row in the shop's own table",
    "charge card": "; the bank knew the key and charged nothing more",
}


def timeline(story: Story) -> None:
    """Print when each step ran, as recorded in the database."""
    from examples import order_approval as shop

    history = shop.order.get(ORDER).history()
    ends = [step.finished_at for step in history.steps if step.finished_at is not None]
    whole = (max(ends) - history.created_at).total_seconds()
    story.say(f"\n{story.paint('The timeline, from the database', BOLD)}")
    for step in history.steps:
        begin, end = step.started_at or step.created_at, step.finished_at
        assert begin is not None
        assert end is not None
        left, right = ((at - history.created_at).total_seconds() for at in (begin, end))
        first, last = int(left / whole * BAR), int(right / whole * BAR)
        bar = " " * first + ("#" if step.type == "do" else "-") * max(1, last - first)
        tries = "" if step.attempts <= 1 else f"attempt {step.attempts}"
        story.say(f"  {step.name:<18}{left:5.1f} s  |{story.paint(f'{bar:<{BAR + 1}}', CYAN)}| {tries}".rstrip())


def prove(story: Story, here: World) -> bool:
    """Print counts from the databases. Returns whether all are right."""
    steps = here.rows("durable", "SELECT name, count(*) FROM workflow_step WHERE status = 'completed' GROUP BY name")
    requests, keys = here.rows("payments", "SELECT count(*), count(DISTINCT idempotency_key) FROM payment_request")[0]
    payments = here.rows("payments", "SELECT cents, refunded FROM payment")
    orders = here.rows("durable", "SELECT state, payment, changes FROM orders")
    rows = here.count("durable", "SELECT count(*) FROM workflow_step")
    facts = [
        (
            f"{len(steps)} steps, {rows} rows: each step is recorded once",
            sorted(steps, key=str) == sorted((name, 1) for name in STEPS) and rows == len(STEPS),
        ),
        (
            f"the payment started {requests} times, with {keys} idempotency key",
            (requests, keys) == (2, 1)
            and here.rows("durable", "SELECT attempts FROM workflow_step WHERE name = 'charge card'") == [(2,)],
        ),
        (f"the bank charged the card {len(payments)} time", payments == [(12500, 0)]),
        (
            f"the shop's own table: {len(orders)} order, changed 3 times (new, charged, shipped)",
            orders == [("shipped", "pay_1", 3)],
        ),
    ]
    story.say(f"\n{story.paint('The proof, counted in the databases', BOLD)}")
    for text, is_so in facts:
        story.say(f"  {story.paint('ok   ', GREEN) if is_so else story.paint('WRONG', RED)}  {text}")
    return all(is_so for _, is_so in facts)


def leave_database(here: World) -> str:
    """Copy the database of the order, and return the command that shows it in a browser."""
    LEFT.unlink(missing_ok=True)
    with closing(sqlite3.connect(here.folder / "durable.sqlite3")) as made, closing(sqlite3.connect(LEFT)) as left:
        made.backup(left)
    program = os.path.relpath(Path(sys.executable).with_name("celery-durable"), ROOT)
    return f"{program} dashboard --database-url sqlite:///{LEFT.name}"


def main() -> int:
    sys.path[0] = str(ROOT)
    story = Story()
    story.say(story.paint("A worker is killed during a payment. The order continues.", BOLD))
    story.say("Real Celery workers, SQLite, no server. The workflow: examples/order_approval.py\n")
    with world() as here:
        run(story, here)
        timeline(story)
        if not prove(story, here):
            story.say(f"\nA count is wrong. The end of the worker's log:\n\n{here.log_tail()}")
            return 1
        dashboard = leave_database(here)
    story.say(f"\nSee the order in a browser: {dashboard}")
    story.say(f"\nThat took {time.monotonic() - story.began:.0f} s. Next: README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
