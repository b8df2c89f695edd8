"""`chaos` on somebody's staging: it strikes what it has started, tells what it found, and leaves nothing behind."""

from __future__ import annotations

import random
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery_durable.model import DueRun, RunRef
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing.chaos_run import Messenger
from tests.cli.conftest import Shop
from tests.cli.test_processes import Folder
from tests.support.services import BROKERS, missing

SHOP = """
import pathlib, time
from celery import Celery
from celery_durable import Durable

app = Celery("shop", broker={broker!r})
app.conf.broker_transport_options = {{"global_keyprefix": "{name}:"}}
app.conf.durable_queue = "durable-{name}"
app.conf.durable_database_url = "sqlite:///{path}/shop.sqlite3"
app.conf.durable_lease_seconds = 2.0
app.conf.durable_redispatch_seconds = 1.0
durable = Durable(app)

def pack(number):
    time.sleep(0.2)
    with pathlib.Path("packed").open("a") as packed:
        packed.write(f"{{number}}\\n")
    return number

@durable.workflow(name="order")
def order(event, step):
    return [step.do(f"pack {{number}}", pack, number) for number in range(6)]
"""


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Folder]:
    """A folder with an application on Redis and SQLite, and ten orders that nobody works on yet."""
    name, url = f"chaos-{uuid.uuid4().hex[:10]}", BROKERS["redis"]
    client = redis.Redis.from_url(url)
    try:
        client.ping()
    except redis.ConnectionError as error:
        missing("redis", f"{url} does not answer ({error})")
    folder = Folder(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP.format(broker=url, name=name, path=tmp_path))
    assert folder.celery("-A", "shop", "durable", "migrate").returncode == 0
    program = "import shop; [shop.order.create(id=f'o-{number}') for number in range(10)]"
    assert folder.python("-c", program).returncode == 0
    yield folder
    for process in folder.started:
        process.kill()
        process.wait()
    for key in client.scan_iter(f"{name}:*", count=1000):
        client.delete(key)
    client.close()


def processes_of(pid: int) -> list[str]:
    """The command lines of workers that the chaos of this process has started, and that live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if re.search(rf"chaos-\d+-{pid}@chaos", command):
            found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(180)
def test_chaos_kills_what_it_started_and_finds_nothing_lost(staging: Folder) -> None:
    chaos = staging.start("-A", "shop", "durable", "chaos", "--minutes", "0.2", "--seed", "5", "--yes")
    assert chaos.wait(120) == 0, staging.log()
    said = dict(line.split("\t") for line in staging.log().splitlines() if "\t" in line)
    assert int(said["pool processes killed"]) + int(said["workers killed"]) > 0
    assert int(said["messages repeated"]) > 0
    assert said["instances seen"] == "10"
    assert said["violations"] == "0"
    assert int(said["steps recorded meanwhile"]) > 0
    assert "seed 5, 2 workers, 0.2 min; Ctrl-C stops it" in staging.log()
    assert processes_of(chaos.pid) == []


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_chaos_that_is_interrupted_ends_what_it_started_and_tells_what_it_did(staging: Folder, number: int) -> None:
    chaos = staging.start("-A", "shop", "durable", "chaos", "--minutes", "5", "--workers", "1", "--yes")
    staging.wait((staging.path / "packed").exists, "a step of its worker")
    staging.wait(lambda: bool(processes_of(chaos.pid)), "a worker")  # it may have killed the first one meanwhile
    chaos.send_signal(number)
    assert chaos.wait(40) == 130, staging.log()
    assert "Stopping the started workers. Press Ctrl-C again to kill them.\n" in staging.log()
    assert "violations\t0\n" in staging.log()
    for action in ("pool processes killed", "workers killed", "messages dropped", "messages repeated"):
        assert re.search(rf"^{action}\t\d+$", staging.log(), re.MULTILINE), action  # also what was not done
    assert processes_of(chaos.pid) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_does_not_start_ends_chaos_with_what_it_said(staging: Folder) -> None:
    with (staging.path / "shop.py").open("a") as shop:
        shop.write("\nimport sys\nif 'worker' in sys.argv:\n    sys.exit('no workers on Sundays')\n")
    done = staging.celery("-A", "shop", "durable", "chaos", "--yes", "--seed", "1")
    assert done.returncode == 1
    assert done.stderr == (
        "seed 1, 2 workers, 1 min; Ctrl-C stops it\n"
        "error: A worker could not be started.\n"
        "hint: Its last log line: no workers on Sundays\n"
    )


def test_chaos_asks_before_it_begins(shop: Shop) -> None:
    shop.app.conf.broker_url = "redis://127.0.0.1:1/0"
    said = shop.pipe("chaos", "--minutes", "2.5", stdin="n\n")
    assert (said.out, said.code) == ("", 1)
    place = shop.durable.internals.store.engine.url
    asked = f"Start 2 workers on {place}, and kill them, drop and repeat messages for 2.5 min? [y/N]: "
    assert said.err == f"{asked}n\nAborted!\n"


def test_chaos_needs_a_broker_between_processes(shop: Shop) -> None:
    said = shop.pipe("chaos", "--yes")
    assert (said.out, said.code) == ("", 1)
    assert said.err == (
        "error: The broker does not connect processes, so there are no workers to kill.\n"
        "hint: Set broker_url, and set task_always_eager to False: chaos needs workers in separate processes.\n"
    )


class Post:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[DueRun] = []

    def publish(self, due_runs: list[DueRun]) -> PublishReport:
        self.sent += due_runs
        return PublishReport.of(len(due_runs), SendState.SENT)


def test_some_messages_are_dropped_some_repeated_and_all_are_counted() -> None:
    post = Post()
    messenger = Messenger(post, random.Random(1))
    due_runs = [DueRun(RunRef("order", f"o-{number}", 1), "durable") for number in range(100)]
    assert set(messenger.publish(due_runs).states) == {SendState.SENT}  # also what was dropped, as far as it can tell
    times = [post.sent.count(due) for due in due_runs]
    assert set(times) == {0, 1, 2}
    assert messenger.done == {"dropped": times.count(0), "repeated": times.count(2)}
    messenger.repeat(due_runs[0])
    assert post.sent[-1] == due_runs[0]
    assert messenger.done["repeated"] == times.count(2) + 1
