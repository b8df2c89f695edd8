"""Where the storm takes place: a database and a broker of its own, workers and beats, a proxy before the database."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from tests.chaos import flows, galera
from tests.chaos.galera import GaleraCluster
from tests.chaos.replicated import ReplicatedPostgresql
from tests.chaos.stillness import Stillness
from tests.smoke.fault_proxy import FaultProxy
from tests.smoke.proc import MariadbServer, Proc, RabbitmqServer, RedisServer, postgresql_programs
from tests.smoke.proxy import TcpProxy
from tests.smoke.site import Site

LEASE_SECONDS = 2.0
AT_TASK = "a task"
"""What a pool process says that does a step's task."""
_SETTLING_SECONDS = 0.5
"""For a worker that stands still to write its stacks. They are evidence for people; no check depends on them."""
_CELERY_GAVE_UP = (
    "Could not start worker processes",
    "Unrecoverable error: ValueError('file descriptor is None')",
)
PAIRS = ("redis+postgresql", "rabbitmq+mariadb", "redis+mariadb", "rabbitmq+postgresql", "redis+galera")
_DATABASES: dict[str, type[ReplicatedPostgresql | MariadbServer | GaleraCluster]] = {
    "postgresql": ReplicatedPostgresql,
    "mariadb": MariadbServer,
    "galera": GaleraCluster,
}

_SETTINGS: dict[str, Any] = {
    "durable_lease_seconds": LEASE_SECONDS,
    "durable_pass_seconds": 2.0,
    "durable_redispatch_max_seconds": 4.0,
    "durable_max_crashes": 1_000_000,  # what dies here dies of the storm
    "durable_lost_limit": 1_000_000,
    "broker_heartbeat": 4,  # a connection to RabbitMQ that has gone silent is found out by Celery, in twice the time
}
# As docs/how-to/outages.md asks for: without a bound a worker waits for ever on a connection that has gone silent.
_BROKER_OPTIONS: dict[str, dict[str, Any]] = {
    "redis": {
        "global_keyprefix": "chaos:",
        "socket_timeout": 5,
        "socket_connect_timeout": 5,
        "health_check_interval": 5,
    },
    "rabbitmq": {"read_timeout": 5, "write_timeout": 5},
}
_CONNECTIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    "mysql": "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user = 'root'",
}
# As the drivers send it; not a part of READ COMMITTED or AUTOCOMMIT.
_COMMIT = {"postgresql": b"COMMIT\x00", "mysql": b"\x03COMMIT"}
_CUT = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}


def missing_programs(pair: str) -> list[str]:
    """What has to be installed for this pair and is not."""
    broker, database = pair.split("+")
    there = {
        "redis": RedisServer.program is not None,
        "rabbitmq": RabbitmqServer.program is not None and RabbitmqServer.mapper is not None,
        "postgresql": postgresql_programs() is not None,
        "mariadb": all(MariadbServer.programs),
        "galera": all(MariadbServer.programs) and not galera.missing_parts(),
    }
    return [name for name in (broker, database) if not there[name]]


class ChaosSite(Site):
    project = "tests.chaos.project"
    build = staticmethod(flows.build)
    detoured = ("worker", "beat")


class Arena:
    """Everything that may be hurt. All of it was started here, and is ended by `close`, whatever happened to it."""

    def __init__(self, pair: str, folder: Path, *, workers: int = 2, beats: int = 2) -> None:
        self.pair, self.folder = pair, folder
        self._ready_since: dict[int, float] = {}
        self.stillness = Stillness(folder)
        broker, database = pair.split("+")
        with contextlib.ExitStack() as started:
            self.database = _DATABASES[database]()
            started.callback(self.database.clean_up)
            self.broker = RedisServer(folder) if broker == "redis" else RabbitmqServer(folder)
            started.callback(self._close_broker)
            self.hanging_database = FaultProxy(("127.0.0.1", self.database.port))
            started.callback(self.hanging_database.close)
            self.proxy = TcpProxy(("127.0.0.1", self.hanging_database.port))
            started.callback(self.proxy.close)
            self.hanging_broker = FaultProxy(("127.0.0.1", urlsplit(self.broker.url).port or 0))
            started.callback(self.hanging_broker.close)
            self.site = self._make_site()
            started.callback(self.site.close)
            self.workers = [self.site.worker(concurrency=3, wait=False) for _ in range(workers)]
            self.beats = [self.site.beat(wait=False) for _ in range(beats)]
            for worker in self.workers:
                worker.wait_for_log(r"ready\.", 60)
            self._started = started.pop_all()

    def _make_site(self) -> ChaosSite:
        (self.folder / "at").mkdir()
        direct = self.database.url
        proxied = sa.make_url(direct).set(host="127.0.0.1", port=self.proxy.port)
        return ChaosSite(
            "chaos",
            self.folder,
            urlsplit(self.broker.url)._replace(netloc=self._detour()).geturl(),
            proxied.render_as_string(hide_password=False),
            _SETTINGS | {"broker_transport_options": _BROKER_OPTIONS[self.pair.split("+")[0]]},
            control_port=self.proxy.control_port,
            bodies_url=direct,
        )

    def _detour(self) -> str:
        user, at, _ = urlsplit(self.broker.url).netloc.rpartition("@")
        return f"{user}{at}127.0.0.1:{self.hanging_broker.port}"

    def close(self) -> None:
        self._started.close()

    def _close_broker(self) -> None:
        (self.broker.proc if isinstance(self.broker, RedisServer) else self.broker).clean_up()

    # --- who is there ---------------------------------------------------------------------------

    def replace(self, crew: list[Proc], fallen: Proc) -> None:
        """Start another in the place of one that is gone."""
        start = self.site.worker if crew is self.workers else self.site.beat
        options = {"concurrency": 3} if crew is self.workers else {}
        crew[crew.index(fallen)] = start(wait=False, **options)

    def fallen(self) -> list[str]:
        """Workers and beats that ended without being killed; others are in their places now."""
        for worker in self.stillness.look(self.workers):  # as a liveness probe would have it
            time.sleep(_SETTLING_SECONDS)  # it writes its stacks
            end_group(worker)
            self.replace(self.workers, worker)
        found = []
        for crew in (self.workers, self.beats):
            for proc in [proc for proc in crew if not proc.is_running]:
                # Celery's own answers to a pool process that dies in the worker's first moment, or just when the worker
                # connects anew (celery issue 9250); the process that runs the workers starts them again.
                if not any(answer in proc.text() for answer in _CELERY_GAVE_UP):
                    found.append(f"{proc.log.name} ended by itself with exit code {proc.process.returncode}")
                self.replace(crew, proc)
        return found

    def ready_workers(self) -> list[Proc]:
        """Those whose pool has been up for a moment: a process that dies earlier takes the whole worker with it."""
        now = time.monotonic()
        for worker in self.workers:
            if worker.pid not in self._ready_since and worker.is_running and "ready." in worker.text():
                self._ready_since[worker.pid] = now
        return [worker for worker in self.workers if now - self._ready_since.get(worker.pid, now) > _SETTLING_SECONDS]

    def passes(self) -> list[tuple[int, str]]:
        """Pool processes that are at a pass, with the id of its task."""
        return [(pid, what) for pid, what in self._at_work() if what != AT_TASK]

    def tasks(self) -> list[int]:
        """Pool processes that do the task of a step."""
        return [pid for pid, what in self._at_work() if what == AT_TASK]

    def _at_work(self) -> list[tuple[int, str]]:
        found = []
        for worker in self.ready_workers():
            for pid in worker.children():
                with contextlib.suppress(OSError):
                    if task_id := (self.folder / "at" / str(pid)).read_text():
                        found.append((pid, task_id))
        return found

    def holds_claim(self, task_id: str) -> bool:
        """Whether the claim of a run is held by this task."""
        i = self.site.durable.internals.store.tables.instance.c
        with contextlib.suppress(sa.exc.DBAPIError), self.site.engine.connect() as connection:
            return connection.execute(sa.select(i.id).where(i.claim_task_id == task_id)).first() is not None
        return False

    @property
    def commit_message(self) -> bytes:
        """By what a request that commits is known."""
        return _COMMIT[self.site.engine.dialect.name]

    def cut_connection(self, choose: Any) -> bool:
        """Have the server end one client's connection."""
        kind = self.site.engine.dialect.name
        with contextlib.suppress(sa.exc.DBAPIError), self.site.engine.connect() as connection:
            found = connection.exec_driver_sql(_CONNECTIONS[kind]).scalars().all()
            if found:
                connection.exec_driver_sql(_CUT[kind].format(int(choose(sorted(found)))))
                return True
        return False

    def forget_messages(self) -> bool:
        """Take from the broker all it knows, or, where that is not possible, all that waits in our queue."""
        with contextlib.suppress(Exception):
            if isinstance(self.broker, RedisServer):
                self.broker.flush()
            elif not self.broker.answers():  # connecting would take longer than a storm may rest
                return False
            else:
                with self.site.app.connection_for_write(self.broker.url) as connection:  # without a detour
                    connection.connect()
                    connection.default_channel.queue_purge(self.site.durable.internals.settings.queue)
            return True
        return False


def send_signal(pid: int, number: int, *, group: int) -> bool:
    """Signal a process if it (still) belongs to a group that one of our processes leads; True when it got it."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == group:
            os.kill(pid, number)
            return True
    return False


def send_group_signal(proc: Proc, number: int) -> bool:
    """Signal one of our processes with all its children."""
    if not proc.is_running:
        return False
    os.killpg(proc.pid, number)
    return True


def end_group(proc: Proc) -> None:
    send_group_signal(proc, signal.SIGKILL)
    proc.process.wait(30)
