"""The yardstick: plain INSERTs with psycopg on the same server, each committed by itself, and what the disk can do."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time

import psycopg
from measuring import Answer, Question
from servers import NAME, address, execute

SECONDS = 3.0
PAGE = bytes(8192)


def questions(seconds: float = SECONDS) -> dict[str, Question]:
    execute("CREATE TABLE bench_row (id bigserial primary key, a bigint, b text, c text)")

    def inserts(processes: int) -> Question:
        title = f"INSERT in autocommit, psycopg, {processes} process{'es' if processes > 1 else ''}"
        return Question(title, None, lambda: insert_loop(processes, seconds))

    return {
        "fsync": Question("writes of 8 KiB with fdatasync, one after the other", None, lambda: sync_loop(seconds)),
        **{f"limit{processes}": inserts(processes) for processes in (1, 2, 8)},
    }


def sync_loop(seconds: float) -> Answer:
    """Writes per second that the disk of /var/tmp confirms; /tmp may be in memory."""
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            os.pwrite(file.fileno(), PAGE, 0)
            os.fdatasync(file.fileno())
            count += 1
        return {"per_second": count / (time.perf_counter() - began)}


def insert_loop(processes: int, seconds: float) -> Answer:
    """Commits per second of plain inserts. Autocommit takes one round trip; BEGIN, INSERT and COMMIT take three."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return {"per_second": sum(pool.map(insert_rows, [seconds] * processes, chunksize=1))}


def insert_rows(seconds: float) -> float:
    with psycopg.connect(address(NAME), autocommit=True, prepare_threshold=0) as conn, conn.cursor() as cursor:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            cursor.execute("INSERT INTO bench_row (a, b, c) VALUES (%s, %s, %s)", (count, "name", '{"x":1}'))
            count += 1
        return count / (time.perf_counter() - began)
