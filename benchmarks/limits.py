"""The yardstick: a plain loop of single-row INSERT and COMMIT with psycopg on the same server."""

from __future__ import annotations

import multiprocessing
import time

import psycopg
from measuring import Answer, Question
from servers import NAME, address, execute

SECONDS = 3.0


def questions(seconds: float = SECONDS) -> dict[str, Question]:
    execute("CREATE TABLE bench_row (id bigserial primary key, a bigint, b text, c text)")
    return {
        "limit1": Question("INSERT + COMMIT, psycopg, 1 connection", None, lambda: insert_loop(1, seconds)),
        "limit2": Question("INSERT + COMMIT, psycopg, 2 connections", None, lambda: insert_loop(2, seconds)),
    }


def insert_loop(connections: int, seconds: float) -> Answer:
    """Commits per second of plain inserts, one process for each connection."""
    with multiprocessing.get_context("spawn").Pool(connections) as pool:
        return {"per_second": sum(pool.map(insert_rows, [seconds] * connections))}


def insert_rows(seconds: float) -> float:
    with psycopg.connect(address(NAME), prepare_threshold=0) as conn:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            conn.execute("INSERT INTO bench_row (a, b, c) VALUES (%s, %s, %s)", (count, "name", '{"x":1}'))
            conn.commit()
            count += 1
        return count / (time.perf_counter() - began)
