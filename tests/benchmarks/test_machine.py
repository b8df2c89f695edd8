"""A round is noisy if others use the machine, also if they do so through the database server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT
from tests.smoke.proc import postgresql_programs
from tests.support.services import DATABASES

PROGRAM = """
import json, psycopg
from machine import serves_benchmark
from servers import SERVER, address
with psycopg.connect(address(SERVER.database)) as conn:
    pid, name = conn.execute("SELECT pg_backend_pid(), current_database()").fetchone()
    walwriter, = conn.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'").fetchone()
    print(json.dumps([name, serves_benchmark(pid, "postgres"), serves_benchmark(walwriter, "postgres")]))
"""


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_backend_of_another_database_works_for_others(store_url: str) -> None:
    def look(bench_name: str) -> tuple[str, bool, bool]:
        environment = {"BENCH_NAME": bench_name, "BENCH_POSTGRESQL_URL": DATABASES["postgresql"]}
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT / "benchmarks", env=os.environ | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return tuple(json.loads(ran.stdout))

    name, is_ours, is_walwriter_ours = look("durable_bench")
    assert (is_ours, is_walwriter_ours) == (False, True)
    assert look(name) == (name, True, True)


OWN_SERVER = """
import os, psycopg, sys
sys.path.insert(0, "queue_benchmark")
from local_postgresql import USER, LocalPostgresql
from machine import read_processes
server = LocalPostgresql("")
try:
    server.make()
    server.stop()
    server.start()
    with psycopg.connect(f"postgres://{USER}@127.0.0.1:{server.port}/postgres") as conn:
        pid, = conn.execute("SELECT pg_backend_pid()").fetchone()
        processes = dict(read_processes())
    while pid not in (os.getpid(), 1):
        pid = processes[pid].parent
    print(pid == os.getpid())
finally:
    server.remove()
"""


@pytest.mark.slow
@pytest.mark.skipif(postgresql_programs() is None, reason="PostgreSQL's initdb and pg_ctl are not installed")
def test_a_server_that_the_benchmark_starts_does_not_count_as_others() -> None:
    """Its processes descend from the benchmark, so their time is known, also after they have ended."""
    ran = subprocess.run(
        [sys.executable, "-c", OWN_SERVER], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False
    )
    assert ran.stdout == "True\n", ran.stderr
