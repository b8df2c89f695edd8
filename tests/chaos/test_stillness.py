"""A worker whose main loop does not turn is counted once, and its log gets the stacks of its threads."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.chaos.stillness import STILL_SECONDS, Stillness, turns
from tests.smoke.proc import Proc, python

# As a worker does it; it stands in `read`.
_STANDS = """
import faulthandler, os, signal
faulthandler.register(signal.SIGUSR2, all_threads=True)
print("ready.", flush=True)
def stands(): os.read(os.pipe()[0], 1)
stands()
"""


def turn(folder: Path, worker: Proc, *, ago: float) -> None:
    at = time.time() - ago
    turns(folder, worker.pid).touch()
    os.utime(turns(folder, worker.pid), (at, at))


def test_a_worker_that_stands_still_is_counted_once_each_time_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    worker, stillness = Proc(python("-c", _STANDS), log=tmp_path / "worker.log"), Stillness(tmp_path)
    try:
        worker.wait_for_log("ready")
        stillness.look([worker])  # it has not turned yet
        turn(tmp_path, worker, ago=STILL_SECONDS / 2)
        stillness.look([worker])
        assert stillness.found == []
        turn(tmp_path, worker, ago=2 * STILL_SECONDS)
        assert stillness.look([worker]) == [worker]
        assert stillness.look([worker]) == []
        found = "worker.log stands still; its log has the stacks of its threads"
        assert stillness.found == [found]
        assert stillness.longest > 2 * STILL_SECONDS
        worker.wait_for_log("in stands")
        turn(tmp_path, worker, ago=3 * STILL_SECONDS)
        stillness.look([worker])
        assert stillness.found == [found, found]
    finally:
        worker.clean_up()
