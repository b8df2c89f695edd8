"""Who uses the processors of this machine, from /proc."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from servers import NAME

SERVERS = ("postgres", "redis-server", "mariadbd")
"""Programs that work for the benchmark, although it did not start them."""
BACKEND = re.compile(r" (\S+) (?:\S+\(\d+\)|\[local\]) ")
"""In the title of a client's backend: the database and where the client is."""
OTHERS_AT_MOST = 0.1
"""The share of the processors that others may use while something is measured."""


class OthersMeter:
    """Measures the share of the processors that is used by others: not by this process, its children or the servers.

    ``servers``: the names of the programs that work for the benchmark, although it did not start them.
    """

    def __init__(self, servers: tuple[str, ...] = SERVERS) -> None:
        self._servers = servers
        self._before = self._read()

    def share(self) -> float:
        """The share since this was made."""
        total, others = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return max(0.0, others / max(1, total))

    def _read(self) -> tuple[int, int]:
        """Ticks of all processors, and those of them that others used."""
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        total, idle = sum(ticks), ticks[3] + ticks[4]
        processes = dict(read_processes())

        def is_mine(pid: int) -> bool:
            while pid in processes and pid != os.getpid():
                pid = processes[pid].parent
            return pid == os.getpid()

        ours = (
            each
            for pid, each in processes.items()
            if is_mine(pid) or (each.name in self._servers and serves_benchmark(pid, each.name))
        )
        return total, total - idle - sum(each.ticks for each in ours)


def wait_until_quiet(timeout: float) -> None:
    """Return when others have left the machine alone for half a second, or after so many seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        others = OthersMeter()
        time.sleep(0.5)
        if others.share() <= OTHERS_AT_MOST:
            break


class Process(NamedTuple):
    """What the system knows of a process. ``ticks``: its CPU time, with that of the children that it has reaped."""

    name: str
    parent: int
    session: int
    ticks: int


def read_processes() -> Iterator[tuple[int, Process]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            yield int(stat.parent.name), Process(name, int(fields[1]), int(fields[3]), sum(map(int, fields[11:15])))


def serves_benchmark(pid: int, name: str) -> bool:
    """Whether a process is a server that works for the benchmark. Backends of other databases work for others."""
    database = read_database(pid) if name == "postgres" else None
    return name in SERVERS and (database is None or database.startswith(NAME))


def read_database(pid: int) -> str | None:
    """The database that a backend of PostgreSQL is connected to; None for its other processes."""
    with suppress(OSError):  # it has ended meanwhile
        return find_database(Path(f"/proc/{pid}/cmdline").read_text())
    return None


def find_database(title: str) -> str | None:
    found = BACKEND.search(title)
    return found[1] if found else None


def cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session, and of what they reaped."""
    ticks = sum(process.ticks for _, process in read_processes() if process.session == session)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_of_leader(session: int) -> float:
    """CPU time of the process that leads a session, such as the main process of a worker. 0 if it has ended."""
    with suppress(OSError):
        ticks = Path(f"/proc/{session}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def cpu_of_programs(name: str) -> float:
    """CPU time of all processes of a program, and of what they reaped."""
    ticks = sum(process.ticks for _, process in read_processes() if process.name == name)
    return ticks / os.sysconf("SC_CLK_TCK")
