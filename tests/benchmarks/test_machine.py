"""A round is noisy if others use the machine, also if they do so through the database server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT
from tests.services import DATABASES

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
