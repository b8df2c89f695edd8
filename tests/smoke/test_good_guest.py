"""One application of somebody else's with Durable and without it, through the same script and the same faults (LAW 8).

What differs is listed in docs/how-to/existing-app.md, "What Durable adds to your processes".
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery import chord, group

from celery_durable.store.migrations import migrate
from tests.smoke.fault_proxy import FaultProxy
from tests.smoke.host import HostConfig, build
from tests.smoke.proc import Proc, RabbitmqServer, RedisServer, kill_child, open_connections, until
from tests.smoke.site import POSTGRESQL
from tests.smoke.test_guest import start_beat, start_worker
from tests.support.services import missing

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(900)]

IDLE_SECONDS = 2
"""After which Redis closes a connection."""
PRIORITIES = (9, 0, 6, 3, 9, 0)
RANKED = len(PRIORITIES)
BROKER_CONNECTIONS, DATABASE_CONNECTIONS = 1, 2
"""How many of its own Durable may have in a process."""


@dataclass
class Observed:
    """What the host can see."""

    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often a task began and ended, by its id."""
    signals: Counter[str] = field(default_factory=Counter)
    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By type and name of the task, while nothing was wrong."""
    results: dict[str, Any] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """In which tasks of several priorities began."""
    left: dict[str, int] = field(default_factory=dict)
    """How many messages are left in its queues."""
    keys: dict[str, Any] = field(default_factory=dict)
    """What is left in Redis: the sizes of lists, hashes and sets."""
    exit_codes: dict[str, int] = field(default_factory=dict)
    broker_connections: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of a process and, the most, of one of its children."""
    database_connections: dict[str, int] = field(default_factory=dict)
    """The most of a process or of one of its children."""
    reconnects: int = 0


class Script:
    """The application's day."""

    def __init__(
        self, folder: Path, broker: RedisServer | RabbitmqServer, backend: RedisServer, database_url: str | None
    ) -> None:
        self.broker, self.backend, self.database_url = broker, backend, database_url
        self.proxy = FaultProxy(("127.0.0.1", broker.port))
        is_redis = isinstance(broker, RedisServer)
        self.config = HostConfig(
            "host",
            str(folder),
            broker.url.replace(str(broker.port), str(self.proxy.port)),
            database_url,
            {
                "result_backend": f"redis://127.0.0.1:{backend.port}/1",
                "task_routes": {"late": {"queue": "slow"}, "double": {"queue": "green"}},
                "broker_transport_options": {"queue_order_strategy": "priority"} if is_redis else {},
                "task_queue_max_priority": None if is_redis else 10,
                "beat_schedule": {"tick": {"task": "tick", "schedule": 1.0}},
                "worker_send_task_events": True,
                "broker_connection_retry_on_startup": True,
            },
        )
        self.app = build(self.config)
        self.procs: dict[str, Proc] = {}
        self.seen = Observed()

    def close(self) -> None:
        for proc in self.procs.values():
            proc.clean_up()
        self.app.close()
        self.proxy.close()

    def run(self) -> Observed:
        try:
            self._start()
            with self._events():
                self._calm()
            self._idle()
            self._reset()
            self._killed()
            self._warm()
            self._measure()
            self._stop()
        except BaseException as error:
            logs = "\n".join(f"--- {name}\n{proc.text()[-3000:]}" for name, proc in self.procs.items())
            raise AssertionError(f"{error!r}\n{logs}") from error
        return self.seen

    # --- acts -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self.worker("main", "--concurrency=2")
        self.worker("slow", "--concurrency=1", "-Q", "slow")
        self.worker("green", "--pool=gevent", "--concurrency=10", "-Q", "green")
        self.procs["beat"] = start_beat(self.config)
        if self.database_url is not None:  # Durable is in use, so that it holds what it ever holds
            durable = vars(self.app)["durable"]
            migrate.upgrade(durable.internals.store)
            assert durable.workflows["errand"].create(21).result("60 seconds") == 42
        else:
            assert self.app.tasks["double"].delay(21).get(timeout=60) == 42

    def _calm(self) -> None:
        for number in range(4):
            self.send("limited", f"limited-{number}")
        self.wait(lambda: sum(self.count("begin", f"limited-{number}") for number in range(4)) == 4)
        times = sorted(at for what, id_, _, at in self.lines() if id_.startswith("limited"))
        assert times[-1] - times[0] >= 1.0, times
        self.seen.results["moody"] = self.send("moody", "moody").get(timeout=60)
        mocks = group(self.app.signature("double", (number,)) for number in range(6))
        self.seen.results["chord"] = chord(mocks, self.app.signature("total"), app=self.app)().get(timeout=60)
        for number, priority in enumerate(PRIORITIES):
            self.send("early", f"ranked-{number}-{priority}", 0.0, queue="ranked", priority=priority)
        self.worker("ranked", "--concurrency=1", "-Q", "ranked")
        self.wait(lambda: sum(id_.startswith("ranked") for what, id_, *_ in self.lines() if what == "end") == RANKED)
        self.seen.order = [id_ for what, id_, *_ in self.lines() if id_.startswith("ranked") and what == "begin"]
        begin = len(self.ticks())
        self.wait(lambda: len(self.ticks()) >= begin + 5)
        ticks = self.ticks()[begin:]
        assert len(ticks) <= ticks[-1] - ticks[0] + 3, ticks  # none is sent twice

    def _idle(self) -> None:
        """Redis closes the connection of a full worker; nothing is lost by it, and nobody need connect anew."""
        for number in range(3):
            self.send("late", f"idle-{number}", 2.0 * IDLE_SECONDS)
        self.wait(lambda: all(self.count("end", f"idle-{number}") for number in range(3)))
        self.seen.reconnects = self.procs["slow"].text().count("Trying to re-establish the connection")

    def _reset(self) -> None:
        """All connections to the broker are cut while a task that acknowledges late is at work: it comes again."""
        self.send("late", "reset")
        self.wait(lambda: self.count("begin", "reset") == 1)
        self.proxy.reset()
        self.procs["slow"].wait_for_log("Trying to re-establish the connection")
        self.send("late", "after-reset", 0.0)
        self.open("reset")
        self.wait(lambda: self.count("end", "reset") == 2)
        self.wait(lambda: self.count("end", "after-reset") == 1)

    def _killed(self) -> None:
        """A pool process dies: a task that acknowledges late runs again, another one has failed."""
        self.send("late", "killed")
        self.send("early", "lost")
        for id_ in ("killed", "lost"):
            self.wait(lambda id_=id_: self.count("begin", id_) == 1)
            kill_child(next(pid for _, found, pid, _ in self.lines() if found == id_))
        self.wait(lambda: self.count("begin", "killed") == 2)
        self.open("killed")
        self.wait(lambda: self.count("end", "killed") == 1)
        failed = self.app.AsyncResult("lost")
        self.wait(lambda: failed.state == "FAILURE")
        self.seen.results["lost"] = type(failed.result).__name__

    def _warm(self) -> None:
        """A worker is told to stop: what runs ends, what waits is done by the next."""
        self.send("late", "running")
        self.wait(lambda: self.count("begin", "running") == 1)
        self.send("late", "waiting", 0.0)
        ending = threading.Timer(1.0, lambda: self.open("running"))
        ending.start()
        self.stop("slow")
        self.worker("slow", "--concurrency=1", "-Q", "slow")
        self.wait(lambda: self.count("end", "waiting") == 1)

    def _measure(self) -> None:
        """What stays open: what was used just now Redis closes after a while."""
        begin = len(self.ticks())
        to_broker: dict[str, list[tuple[int, int]]] = {name: [] for name in self.procs}
        port = sa.make_url(self.database_url).port if self.database_url is not None else None

        def look() -> bool:
            for name, proc in self.procs.items():
                to_broker[name].append(self.connections(proc, self.proxy.port))
                if port is not None:
                    held = max(self.connections(proc, port))
                    self.seen.database_connections[name] = max(held, self.seen.database_connections.get(name, 0))
            return len(self.ticks()) > begin + 2 * IDLE_SECONDS

        until("connections are counted", look, pause=0.2)
        for name, seen in to_broker.items():
            self.seen.broker_connections[name] = (min(main for main, _ in seen), min(child for _, child in seen))

    def _stop(self) -> None:
        self.stop("beat")
        self.wait(lambda: not self.left("celery") and not self.left("durable"))
        for name in list(self.procs):
            self.stop(name)
        for what, id_, *_ in self.lines():
            self.seen.runs[what, id_] += 1
        del self.seen.runs["tick", "tick"]  # as many as there were seconds
        self.seen.signals.update(line for line in self.config.signals.read_text().splitlines() if "tick" not in line)
        self.seen.left = {name: self.left(name) for name in ("celery", "slow", "green", "ranked")}
        with redis.Redis(port=self.backend.port, decode_responses=True) as client:
            sizes = {"list": client.llen, "hash": client.hlen, "set": client.scard, "zset": client.zcard}
            self.seen.keys = {key: sizes[client.type(key)](key) for key in client.scan_iter()}

    # --- means ----------------------------------------------------------------------------------

    def worker(self, name: str, *options: str) -> None:
        self.procs[name] = start_worker(self.config, *options, name=name)

    def stop(self, name: str) -> None:
        self.seen.exit_codes[name] = self.procs.pop(name).terminate()

    def send(self, task: str, id_: str, *args: Any, **options: Any) -> Any:
        return self.app.tasks[task].apply_async(args, task_id=id_, **options)

    def open(self, id_: str) -> None:
        self.config.gate(id_).touch()

    def wait(self, look: Any) -> None:
        until("the script goes on", look, 90)

    def lines(self) -> list[tuple[str, str, int, float]]:
        found = [line.split() for line in self.config.runs_so_far().splitlines()]
        return [(what, id_, int(pid), float(at)) for what, id_, pid, at in found]

    @staticmethod
    def connections(proc: Proc, port: int) -> tuple[int, int]:
        """How many a process has, and the most of one of its children; what a fork left a child is its parent's."""
        own = open_connections(proc.pid, port)
        return len(own), max((len(open_connections(pid, port) - own) for pid in proc.children()), default=0)

    def left(self, queue: str) -> int:
        """How many messages are in a queue, asked past the proxy."""
        with self.app.connection_for_read(self.broker.url) as connection:
            try:
                return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
            except connection.channel_errors:  # there is none
                return 0

    def count(self, what: str, id_: str) -> int:
        return sum((what, id_) == line[:2] for line in self.lines())

    def ticks(self) -> list[float]:
        return [at for what, _, _, at in self.lines() if what == "tick"]

    @contextlib.contextmanager
    def _events(self) -> Iterator[None]:
        """Count the events of the application's own tasks that the block sends."""
        names: dict[str, str] = {}

        def count(event: dict[str, Any]) -> None:
            name = names.setdefault(event.get("uuid", ""), event.get("name", ""))
            is_foreign = name not in ("", "tick") and not name.startswith("celery_durable.")
            if event["type"].startswith("task-") and is_foreign:
                self.seen.events[event["type"], name] += 1

        with self.app.connection_for_read(self.broker.url) as connection:
            receiver = self.app.events.Receiver(connection, handlers={"*": count})
            listening = threading.Thread(target=receiver.capture, kwargs={"limit": None, "wakeup": False}, daemon=True)
            listening.start()
            self.wait(lambda: names)  # workers that live say so every two seconds
            yield
            self.wait(lambda: self.seen.events["task-succeeded", "early"] == RANKED)
            receiver.should_stop = True
            listening.join(10)


def through_the_day(folder: Path, broker: str, database_url: str | None) -> Observed:
    folder.mkdir()
    redis_server = RedisServer(folder, "--timeout", str(IDLE_SECONDS))
    server = redis_server if broker == "redis" else RabbitmqServer(folder)
    script = Script(folder, server, redis_server, database_url)
    try:
        return script.run()
    finally:
        script.close()
        redis_server.proc.clean_up()
        if isinstance(server, RabbitmqServer):
            server.clean_up()


@POSTGRESQL
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_durable_changes_nothing_for_its_host(tmp_path: Path, store_url: str, broker: str) -> None:
    if RedisServer.program is None:
        missing("a Redis of its own", "redis-server is not installed")
    if broker == "rabbitmq" and (RabbitmqServer.program is None or RabbitmqServer.mapper is None):
        missing("a RabbitMQ of its own", "rabbitmq-server is not installed")
    plain = through_the_day(tmp_path / "plain", broker, None)
    ours = through_the_day(tmp_path / "durable", broker, store_url)
    assert ours.runs == plain.runs
    assert ours.signals == plain.signals
    assert ours.events == plain.events
    assert ours.results == plain.results
    assert ours.order == plain.order
    assert ours.exit_codes == plain.exit_codes
    assert ours.reconnects == plain.reconnects == 0
    assert ours.left == plain.left
    assert {key: size for key, size in ours.keys.items() if "durable" not in key} == plain.keys
    for name, counts in ours.broker_connections.items():
        for counted, before in zip(counts, plain.broker_connections[name], strict=True):
            assert counted <= before + BROKER_CONNECTIONS, (name, ours, plain)
    assert max(ours.database_connections.values()) <= DATABASE_CONNECTIONS, ours
