"""Workers that stand still: Celery's main loop does not turn, so no task is received, started or ended.

The loop of each worker touches a file twice a second. If that stops for longer than any fault of the storm lasts, the
worker is asked for the stacks of its threads, which its log then has.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import bootsteps

from tests.smoke.proc import Proc

STILL_SECONDS = 30.0
"""So long Celery itself may take to find RabbitMQ again after a restart: it waits for 2, 4, 6, 8 and 10 seconds."""
_TURN_SECONDS = 0.5
_ASK = signal.SIGUSR2


class Stillness:
    """Looks at the files. ``found``: the workers that stood still, each time anew that one did."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reported: dict[int, float] = {}
        self.found: list[str] = []
        self.longest = 0.0

    def look(self, workers: Sequence[Proc]) -> list[Proc]:
        """Look at each worker, and ask those that stand still why; returns these."""
        standing = []
        for worker in workers:
            with contextlib.suppress(FileNotFoundError):  # it has not turned yet
                turned = turns(self._folder, worker.pid).stat().st_mtime
                still = time.time() - turned
                self.longest = max(self.longest, still)
                if worker.is_running and still > STILL_SECONDS and self._reported.get(worker.pid) != turned:
                    self._reported[worker.pid] = turned
                    self.found.append(f"{worker.log.name} stands still; its log has the stacks of its threads")
                    os.kill(worker.pid, _ASK)
                    standing.append(worker)
        return standing


def turns(folder: Path, pid: int) -> Path:
    """The file that the main loop of this process touches."""
    return folder / "at" / f"loop-{pid}"


def step(folder: Path) -> type[bootsteps.StartStopStep]:
    """The worker's part: a bootstep that has the main loop touch the file."""

    class Turns(bootsteps.StartStopStep):
        def start(self, parent: Any) -> None:  # the bootstep's signature
            faulthandler.register(_ASK, file=sys.__stderr__, all_threads=True)

        def register_with_event_loop(self, parent: Any, hub: Any) -> None:
            hub.call_repeatedly(_TURN_SECONDS, turns(folder, os.getpid()).touch)

    return Turns
