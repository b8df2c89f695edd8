"""The faults of a chaos run: it kills only workers that it started, and drops only messages of its own dispatcher."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from celery_durable.model import DueRun
from celery_durable.tasks.publishing import Publisher, PublishReport, SendState

_DROP_BELOW, _REPEAT_BELOW = 0.2, 0.4
_EXIT_SECONDS = 10.0


class OwnWorker:
    """A worker with one pool process, in its own process group, so that Ctrl-C does not reach it."""

    def __init__(self, app: str | None, node: str, queues: Sequence[str], log: Path) -> None:
        self.node, self.log = node, log
        app_option = [] if app is None else ["-A", app]
        options = ["-Q", ",".join(queues), "-n", node, "--pool", "prefork", "--concurrency", "1", "--loglevel", "INFO"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  # this very program, for the app that we were given
                [sys.executable, "-m", "celery", *app_option, "worker", *options, *quiet],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether its process has not exited."""
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it takes messages."""
        return self.is_running and "ready." in self.read_log()

    def read_log(self) -> str:
        """Return the log of the worker up to now."""
        return self.log.read_text(errors="replace")

    def pool_process_id(self) -> int | None:
        """Return the id of the pool process; None if there is none."""
        return next(iter(_find_children(self._process.pid)), None)

    def signal_pool_process(self, pid: int, number: int) -> bool:
        """Signal the pool process if it is still a child of this worker. Returns whether it was signalled."""
        if pid not in _find_children(self._process.pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def signal_group(self, number: int) -> None:
        """Signal the worker and its pool process."""
        if self.is_running:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the worker and its pool process."""
        self.signal_group(signal.SIGKILL)
        self._process.wait(_EXIT_SECONDS)

    def terminate(self) -> None:
        """Send SIGTERM. The worker finishes its current step and releases its run."""
        if self.is_running:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the worker to exit, and kill it after 10 s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # its pool process may have outlived it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_EXIT_SECONDS)


def _find_children(parent: int) -> list[int]:
    """Return the ids of the direct child processes that are alive, from /proc, or else from ps."""
    proc = Path("/proc")
    if (proc / str(os.getpid()) / "stat").exists():
        return [pid for pid, parent_id in _proc_parents(proc) if parent_id == parent]
    output = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout  # noqa: S607
    pairs = (line.split() for line in output.splitlines())
    return [int(pid) for pid, parent_id in pairs if int(parent_id) == parent]


def _proc_parents(proc: Path) -> list[tuple[int, int]]:
    found = []
    for entry in proc.iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent_id = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found.append((int(entry.name), int(parent_id)))
    return found


class Messenger:
    """The publisher of the dispatcher of a chaos run. It drops some messages and sends others twice."""

    def __init__(self, publisher: Publisher, rng: random.Random) -> None:
        self._publisher, self._rng = publisher, rng
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter(dropped=0, repeated=0)

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        """Publish like `Publisher`, but unreliably. A dropped message is reported as sent; a sweep sends it again."""
        sent: list[int] = []
        for index in range(len(due_runs)):
            chance = self._rng.random()
            times = 0 if chance < _DROP_BELOW else 1 if chance > _REPEAT_BELOW else 2
            sent += [index] * times
            with self._lock:
                self.done["dropped"] += times == 0
                self.done["repeated"] += times == 2
        report = self._publisher.publish([due_runs[index] for index in sent]) if sent else PublishReport([])
        states = [SendState.SENT] * len(due_runs)
        for index, state in zip(sent, report.states, strict=True):
            states[index] = state
        return PublishReport(states)

    def repeat(self, due: DueRun) -> None:
        """Publish a superfluous message."""
        self._publisher.publish([due])
        with self._lock:
            self.done["repeated"] += 1
