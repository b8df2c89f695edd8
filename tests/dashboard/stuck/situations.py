"""Situations in which instances are stuck, made as they happen: processes die, servers stop, people type wrongly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable
from celery_durable.insight.explain import Code
from celery_durable.model import Status
from celery_durable.store.migrations import migrate
from tests.dashboard.stuck.shop import EXPIRED, GOOD, HANGS, KILLS, build
from tests.smoke.proc import Proc, RedisServer, python, until
from tests.support.databases import empty_database

_QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO")


@dataclass
class World:
    """The shop with a broker and a database of its own, a worker, a beat, and some instances that are well."""

    folder: Path
    broker: RedisServer
    engine: sa.Engine
    app: Celery = field(init=False)
    is_off: bool = False
    """Whether the shop's settings switch execution off."""
    procs: list[Proc] = field(default_factory=list)
    sessions: list[sa.Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = build(self.broker.url, self.database_url)
        migrate.upgrade(self.durable.internals.store)

    @property
    def durable(self) -> Durable:
        found: Durable = vars(self.app)["durable"]
        return found

    @property
    def database_url(self) -> str:
        return self.engine.url.render_as_string(hide_password=False)

    def close(self) -> None:
        for proc in self.procs:
            proc.clean_up()
        for session in self.sessions:
            session.close()
        self.durable.close()
        self.app.close()

    def start(self, *argv: str, **environment: str) -> Proc:
        log = self.folder / f"{len(self.procs)}-{argv[0]}.log"
        env = {"SHOP_BROKER": self.broker.url, "SHOP_DATABASE": self.database_url, "C_FORCE_ROOT": "1", **environment}
        env["SHOP_IS_OFF"] = str(int(self.is_off))
        proc = Proc(python("-m", "celery", "-A", "tests.dashboard.stuck.project", *argv), log=log, env=env)
        self.procs.append(proc)
        return proc

    def start_worker(self, name: str = "worker1", **environment: str) -> Proc:
        worker = self.start("worker", "--concurrency", "2", "-n", f"{name}@shop", *_QUIET, **environment)
        worker.wait_for_log(r"ready\.")
        return worker

    def start_beat(self) -> Proc:
        schedule = self.folder / f"schedule-{len(self.procs)}"
        beat = self.start("beat", "--schedule", str(schedule), "--pidfile=", "--loglevel=INFO")
        beat.wait_for_log("The durable dispatcher is running")
        return beat

    def create(self, workflow: str, params: Any, *ids: str) -> None:
        for each in ids:
            self.durable.workflows[workflow].create(params, id=each)

    def wait_for(self, workflow: str, id: str, *statuses: Status) -> None:
        handle = self.durable.workflows[workflow].get(id)
        until(f"{workflow}/{id} is {statuses}", lambda: handle.status().status in statuses)

    def wait_until_it_runs(self, workflow: str, id: str) -> None:
        handle = self.durable.workflows[workflow].get(id)
        until(f"{workflow}/{id} runs", lambda: handle.explain().code is Code.RUNNING)

    def execute(self, *statements: str) -> None:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for each in statements:
                connection.exec_driver_sql(each)

    def open_session(self) -> sa.Connection:
        """Open a session of somebody else, which stays open."""
        self.sessions.append(self.engine.connect())
        return self.sessions[-1]

    def let_be_well(self) -> tuple[Proc, Proc]:
        """Start a worker and a beat, and let some instances run and wait as usual."""
        worker, beat = self.start_worker(), self.start_beat()
        self.create("payment", GOOD, *(f"p-{number}" for number in range(6)))
        self.create("reminder", 86_400, "r-100", "r-101")
        self.create("order", GOOD, "o-10", "o-11")
        self.wait_for("order", "o-11", Status.WAITING)
        self.wait_for("payment", "p-5", Status.COMPLETE)
        return worker, beat


@contextmanager
def open_world(folder: Path) -> Iterator[World]:
    """Make a world of processes of this process's own."""
    folder.mkdir(parents=True, exist_ok=True)
    broker = RedisServer(folder)
    try:
        with empty_database("postgresql", "stuck") as engine:
            world = World(folder, broker, engine)
            try:
                yield world
            finally:
                world.close()
    finally:
        broker.proc.clean_up()


@dataclass(frozen=True)
class Situation:
    """``plant`` makes it, and leaves it as it is until the pages were read. ``complaint``: what people say of it.

    ``cause`` and ``remedy``: what a reader of the pages should find; ``shows``: what one of the pages has to show.
    """

    plant: Callable[[World], None]
    complaint: str
    cause: str
    remedy: str
    shows: Sequence[str]

    @property
    def name(self) -> str:
        return self.plant.__name__


SITUATIONS: list[Situation] = []


def _situation(complaint: str, **told: Any) -> Callable[[Callable[[World], None]], None]:
    return lambda plant: SITUATIONS.append(Situation(plant, complaint, **told))


@_situation(
    "No order has gone through for some minutes.",
    cause="The only worker process has died (kill -9). Nobody consumes the queue durable.",
    remedy="Start a worker again (celery -A shop worker). The claimed order continues by itself.",
    shows=("WORKER_SILENT: order/o-21", "celery -A shop worker"),
)
def dead_worker(world: World) -> None:
    worker, _ = world.let_be_well()
    world.create("order", HANGS, "o-20")
    world.wait_until_it_runs("order", "o-20")
    os.killpg(worker.pid, signal.SIGKILL)
    world.create("order", GOOD, "o-21", "o-22")


@_situation(
    "The album al-7 does not get ready.",
    cause="The tasks of the step resize wait in the queue images, and no worker consumes that queue.",
    remedy="Start a worker of the queue images (celery -A shop worker -Q images).",
    shows=("'images'", "celery -A shop worker -Q images"),
)
def no_consumer(world: World) -> None:
    world.let_be_well()
    world.create("album", ["a.jpg", "b.jpg", "c.jpg", "d.jpg"], "al-7")
    world.wait_for("album", "al-7", Status.WAITING)


@_situation(
    "The reminder r-5 did not go out, although its time has come. Others did.",
    cause="Another database session (psql, idle in a transaction) holds a lock on the row of r-5.",
    remedy="End that transaction or session: commit it, or pg_terminate_backend of its pid.",
    shows=("DUE_NOT_DISPATCHED: reminder/r-5", "(idle in transaction)", "pg_terminate_backend"),
)
def blocked_row(world: World) -> None:
    world.let_be_well()
    world.create("reminder", 5, "r-5", "r-6")
    world.wait_for("reminder", "r-5", Status.WAITING)
    session = world.open_session()
    session.exec_driver_sql("SET application_name = 'psql'")
    session.exec_driver_sql("SELECT * FROM workflow_instance WHERE instance_id = 'r-5' FOR UPDATE")
    world.wait_for("reminder", "r-6", Status.COMPLETE)


@_situation(
    "Customers get no invoices today.",
    cause="The step compute tax fails in all nine invoices: tax.internal:8443 refuses connections.",
    remedy="Bring the tax service back, then retry all nine at once.",
    shows=("invoice compute tax", "tax.internal:8443", "Retry all 9"),
)
def failing_group(world: World) -> None:
    world.let_be_well()
    world.create("invoice", 1, *(f"i-{number}" for number in range(9)))
    world.create("payment", EXPIRED, "p-77")
    for number in range(9):
        world.wait_for("invoice", f"i-{number}", Status.ERRORED)


@_situation(
    "Reminders do not go out any more.",
    cause="Celery beat, which runs the dispatcher, has died: nobody sends the messages of due runs.",
    remedy="Start beat again (celery -A shop beat).",
    shows=("DUE_NOT_DISPATCHED: reminder/r-", "beat@", "celery -A shop beat"),
)
def no_dispatcher(world: World) -> None:
    _, beat = world.let_be_well()
    world.create("reminder", 10, "r-5", "r-6", "r-7")
    world.wait_for("reminder", "r-7", Status.WAITING)
    os.killpg(beat.pid, signal.SIGKILL)


@_situation(
    "The order o-30 was approved, but it is not shipped.",
    cause="An event was sent with the type aproval, but the order waits for approval: a typing mistake.",
    remedy="Send the event again with the right type (durable send-event order o-30 approval), and correct the sender.",
    shows=('"aproval"', "celery -A shop durable send-event order o-30 approval"),
)
def wrong_event(world: World) -> None:
    world.let_be_well()
    world.create("order", GOOD, "o-30")
    world.wait_for("order", "o-30", Status.WAITING)
    world.durable.workflows["order"].get("o-30").send_event("aproval", {"by": "ada"})


@_situation(
    "Card payments hang: c-41, c-42 and c-43 are not charged.",
    cause="The limit acquirer allows one at once, and card_payment c-40 holds it: its step charge does not end.",
    remedy="Find out why c-40 hangs, and end it (terminate), or raise the limit (durable limits set acquirer).",
    shows=("LIMITED", "card_payment/c-40", "celery -A shop durable limits show acquirer"),
)
def full_limit(world: World) -> None:
    world.let_be_well()
    world.create("card_payment", HANGS, "c-40")
    world.wait_until_it_runs("card_payment", "c-40")
    world.create("card_payment", GOOD, "c-41", "c-42", "c-43")
    world.wait_for("card_payment", "c-43", Status.WAITING)


@_situation(
    "The archive ar-9 was not made.",
    cause="Item 2 of the map resize failed: torn.jpg is no JPEG. The other items are done.",
    remedy="Replace the picture torn.jpg, then retry ar-9 (only the failed item runs again), or skip the step.",
    shows=("item 2: torn.jpg", "celery -A shop durable retry archive ar-9"),
)
def failed_item(world: World) -> None:
    world.let_be_well()
    world.create("archive", ["a.jpg", "b.jpg", "torn.jpg", "c.jpg", "d.jpg"], "ar-9")
    world.wait_for("archive", "ar-9", Status.ERRORED)


@_situation(
    "The booking b-3 failed.",
    cause="Its child, a payment, failed at the step charge: the card expired.",
    remedy="Get a valid card, then retry the booking with its family (--family), which retries the child first.",
    shows=("CardDeclined", "payment/", "Retry with its family"),
)
def failed_child(world: World) -> None:
    world.let_be_well()
    world.create("booking", EXPIRED, "b-3")
    world.wait_for("booking", "b-3", Status.ERRORED)


@_situation(
    "Did the bank transfer t-8 go out, or not?",
    cause="The worker's process died in the step transfer, which may not be repeated (on_lost=fail): nobody knows "
    "whether the money was sent.",
    remedy="Ask the bank. If it was sent, set the result of the step; if not, retry. Not a blind retry.",
    shows=("OUTCOME_UNKNOWN", "durable retry bank_transfer t-8", "durable set-result bank_transfer t-8 transfer"),
)
def unknown_outcome(world: World) -> None:
    world.let_be_well()
    world.create("bank_transfer", KILLS, "t-8")
    world.wait_for("bank_transfer", "t-8", Status.ERRORED)


@_situation(
    "Nothing has moved for two minutes.",
    cause="The broker (Redis) is down: it refuses connections.",
    remedy="Start Redis again. Everything then continues by itself.",
    shows=("BROKER_UNAVAILABLE: order/o-60", "Connection refused"),
)
def broker_outage(world: World) -> None:
    world.let_be_well()
    world.broker.stop()
    world.create("order", GOOD, "o-60", "o-61")


@_situation(
    "Since the deploy of this morning nothing works.",
    cause="The tables are older than the code: the migration was not run.",
    remedy="celery -A shop durable migrate.",
    shows=("The tables are at revision 0005", "celery -A shop durable migrate"),
)
def old_tables(world: World) -> None:
    world.let_be_well()
    for proc in world.procs:
        proc.terminate()
    tables = ("DROP TABLE workflow_hold", "DROP TABLE workflow_limit")
    world.execute(*tables, "UPDATE workflow_schema_version SET version_num = '0005'")


@_situation(
    "The shop refuses new orders, and orders stand still.",
    cause="The database is read-only.",
    remedy="Make it writable again (or point durable_database_url at the primary). Then all continues by itself.",
    shows=("DUE_NOT_DISPATCHED: reminder/r-5", "read-only", "durable_database_url"),
)
def read_only_database(world: World) -> None:
    world.let_be_well()
    world.create("reminder", 5, "r-5")
    world.wait_for("reminder", "r-5", Status.WAITING)
    name = world.engine.url.database
    world.execute(
        f"ALTER DATABASE {name} SET default_transaction_read_only = on",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()",
    )


@_situation(
    "The order o-50 has stopped in the middle, and new ones do not begin.",
    cause="The worker process is frozen (SIGSTOP): it is there, but writes no heartbeat.",
    remedy="Look at its machine, and restart the worker.",
    shows=("WORKER_SILENT: order/o-51", "celery -A shop inspect ping -d worker1@shop"),
)
def frozen_worker(world: World) -> None:
    worker, _ = world.let_be_well()
    world.create("order", HANGS, "o-50")
    world.wait_until_it_runs("order", "o-50")
    os.killpg(worker.pid, signal.SIGSTOP)
    world.create("order", GOOD, "o-51")


@_situation(
    "Refunds, which are new since today, do not happen.",
    cause="The worker runs older code that does not know the workflow refund.",
    remedy="Deploy the new code to the worker and restart it.",
    shows=("NOT_REGISTERED: refund/rf-1", "worker1@shop"),
)
def old_code(world: World) -> None:
    world.start_worker(SHOP_IS_NEW="0")
    world.start_beat()
    world.create("payment", GOOD, *(f"p-{number}" for number in range(6)))
    world.create("refund", GOOD, "rf-1", "rf-2")


@_situation(
    "The payment p-66 takes for ever.",
    cause="Each worker process that runs its step charge dies by a signal: the step kills it.",
    remedy="Read the worker's log for the reason (memory, native code) and fix it; terminate p-66 if need be.",
    shows=("WorkerLostError", "SIGKILL"),
)
def crashing_step(world: World) -> None:
    world.let_be_well()
    world.create("payment", KILLS, "p-66")


@_situation(
    "The reminders r-5, r-6 and r-7 should have gone out. Others did.",
    cause="Somebody has paused these three instances.",
    remedy="Find out why, then resume them, all at once.",
    shows=("PAUSED", "celery -A shop durable resume reminder r-5"),
)
def paused(world: World) -> None:
    world.let_be_well()
    world.create("reminder", 10, "r-5", "r-6", "r-7", "r-8")
    for each in ("r-5", "r-6", "r-7"):
        world.wait_for("reminder", each, Status.WAITING)
        world.durable.workflows["reminder"].get(each).pause()
    world.wait_for("reminder", "r-8", Status.COMPLETE)


@_situation(
    "Nothing is worked off.",
    cause="Execution is switched off: durable_execution_enabled is False.",
    remedy="Turn durable_execution_enabled on again.",
    shows=("EXECUTION_DISABLED: payment/p-1", "durable_execution_enabled"),
)
def switched_off(world: World) -> None:
    world.is_off = True
    world.start_worker()
    world.start_beat()
    world.create("payment", GOOD, "p-1", "p-2")
