"""What is left of a run when the harness has stopped its replicas, and whether it still ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psycopg

STATUSES = "SELECT status, count(*) FROM workflow_instance GROUP BY status"
FINISH_SECONDS = 120


def count_statuses(url: str) -> dict[str, int]:
    with psycopg.connect(url) as conn:
        return dict(conn.execute(STATUSES).fetchall())


def count_unfinished(url: str) -> int:
    return sum(count for status, count in count_statuses(url).items() if status in ("active", "waiting"))


def finish_jobs(url: str, adapter: Path) -> dict[str, int]:
    """Run a replica that creates nothing, until no job is unfinished, or for two minutes; returns how many ended."""
    environment = os.environ | {"DATABASE_URL": url, "PRODUCER_RATE": "0"}
    environment.pop("PRODUCER_RATE_CONTROL_FILE", None)
    end = time.monotonic() + FINISH_SECONDS
    if count_unfinished(url):
        process = subprocess.Popen([sys.executable, str(adapter)], env=environment, stdout=subprocess.DEVNULL)
        try:
            while count_unfinished(url) and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    raise RuntimeError(f"the replica that finishes the jobs ended with {process.wait(timeout=0.5)}")
        finally:
            process.terminate()
            process.wait(timeout=30)
    statuses = count_statuses(url)
    complete = statuses.get("complete", 0)
    return {"jobs": sum(statuses.values()), "complete": complete, "not_complete": sum(statuses.values()) - complete}
