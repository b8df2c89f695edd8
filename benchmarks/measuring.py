"""Measures work that waits when its workers start: how much of it ends in a second, and what each part costs.

The measurement begins when a tenth has ended: by then the processes have started and have compiled their statements.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from machine import cpu_of_leader, cpu_of_programs, cpu_seconds
from servers import query_one
from wire import CountingProxy

HERE = Path(__file__).parent
SCRATCH = Path(tempfile.mkdtemp(prefix="durable-bench-"))
PREFORK, PREFORK8 = ("-c", "2", "-P", "prefork"), ("-c", "8", "-P", "prefork")
THREADS, SOLO = ("-c", "16", "-P", "threads"), ("-P", "solo")
POLL_SECONDS = 0.05
"""Seldom enough that counting a few ten thousand rows costs no contender more than a hundredth of the processors."""
MODULES = {"restate-sdk": "restate"}
"""What packages are imported as, if not by their names."""

Answer = dict[str, float]

_running: list[subprocess.Popen[bytes]] = []


class Question(NamedTuple):
    """The first number of its answer is compared with that of ``reference``, another question."""

    title: str
    reference: str | None
    ask: Callable[[], Answer]
    packages: Sequence[str] = ()
    """What must be installed beside this package."""
    programs: Sequence[str] = ()
    """Programs that must be found, too."""
    servers: Sequence[tuple[str, int]] = ()
    """Hosts and ports at which a server must answer."""

    def missing(self) -> list[str]:
        packages = [name for name in self.packages if importlib.util.find_spec(module_of(name)) is None]
        programs = [name for name in self.programs if find_program(name) is None]
        return (
            packages
            + programs
            + [f"a server at {host}:{port}" for host, port in self.servers if not listens(host, port)]
        )


def listens(host: str, port: int) -> bool:
    """Whether a server takes connections there."""
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True


def module_of(package: str) -> str:
    return MODULES.get(package, package.replace("-", "_"))


def find_program(name: str) -> str | None:
    """The path of a program. BENCH_RESTATE_SERVER, for example, may name `restate-server`; else PATH is searched."""
    return shutil.which(os.environ.get(f"BENCH_{name.upper().replace('-', '_')}", name))


class Costs:
    """What all processes have used until now: CPU milliseconds, WAL bytes, and what a proxy has counted.

    ``servers``: by name, the sessions of servers that are used instead of PostgreSQL and Redis.
    """

    def __init__(self, sessions: Sequence[int], servers: Mapping[str, int], proxy: CountingProxy | None) -> None:
        self._sessions, self._servers, self._proxy = sessions, servers, proxy

    def read(self) -> dict[str, float]:
        main = sum(map(cpu_of_leader, self._sessions)) * 1000
        worker = {"worker_cpu_ms": sum(map(cpu_seconds, self._sessions)) * 1000, "worker_main_cpu_ms": main}
        if self._servers:
            return worker | {f"{name}_cpu_ms": cpu_seconds(pid) * 1000 for name, pid in self._servers.items()}
        costs = {
            **worker,
            "postgres_cpu_ms": cpu_of_programs("postgres") * 1000,
            "redis_cpu_ms": cpu_of_programs("redis-server") * 1000,
            "wal_bytes": float(query_one("SELECT pg_current_wal_insert_lsn() - '0/0'")),
        }
        return costs | (self._proxy.counts() if self._proxy else {})


def measure(
    done: Callable[[], int],
    total: int,
    *,
    sessions: Sequence[int],
    servers: Mapping[str, int] = MappingProxyType({}),
    proxy: CountingProxy | None = None,
    timeout: float = 120,
) -> Answer:
    """Parts per second and the costs of a part, from a tenth of the parts on until ``total`` of them are done."""
    costs = Costs(sessions, servers, proxy)
    wait_for(lambda: done() >= max(1, total // 10), timeout)
    before, finished, began = costs.read(), done(), time.perf_counter()
    wait_for(lambda: done() >= total, timeout)
    took, after = time.perf_counter() - began, costs.read()
    ran = total - finished
    assert ran > 0, "all of it had ended before the measurement began: ask for more instances"
    return {"per_second": ran / took} | {name: (after[name] - before[name]) / ran for name in after}


@contextmanager
def program(*command: str, **environment: str) -> Iterator[int]:
    """A process in a session of its own, ended with all its children. All of them write one log."""
    with (SCRATCH / "processes.log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        _running.append(process)
        try:
            yield process.pid
        finally:
            if process in _running:
                _running.remove(process)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def kill(pid: int) -> None:
    """End a program and all its children at once, as a machine does that loses its power."""
    _running[:] = [process for process in _running if process.pid != pid]
    os.killpg(pid, signal.SIGKILL)


def processes(*command: str, **environment: str):
    return program(sys.executable, *command, **environment)


def worker(*options: str, app: str = "project", **environment: str):
    return processes("-m", "celery", "-A", app, "worker", "-l", "warning", *options, **environment)


def beat():
    return processes("-m", "celery", "-A", "project", "beat", "-l", "warning", "-s", str(SCRATCH / "schedule"))


def wait_for(condition: Callable[[], bool], timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end or any(process.poll() for process in _running):  # a code other than 0: it has failed
            raise TimeoutError(f"the workers have failed, or did not finish in time: see {SCRATCH}/processes.log")
        time.sleep(POLL_SECONDS)
