"""The engine and plain Celery run a small round of `make bench`; the other contenders are installed by it alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.docs.blocks import ROOT
from tests.support.services import BROKERS, DATABASES, missing, missing_tool

pytestmark = pytest.mark.slow  # each round starts workers and servers

RATES = {
    "engine": ["steps10", "threads10"],
    "celery": ["noop", "chain"],
}
COSTS = {"worker_cpu_ms", "worker_main_cpu_ms", "postgres_cpu_ms", "redis_cpu_ms", "wal_bytes"}


@pytest.fixture
def bench(store_url: str) -> dict[str, str]:
    """The environment of a benchmark that meets no other one."""
    try:
        redis.Redis.from_url(BROKERS["redis"]).ping()
    except redis.ConnectionError as error:
        missing("redis", f"{BROKERS['redis']} does not answer ({error})")
    name = f"durable_bench_{uuid.uuid4().hex[:8]}"
    return {"BENCH_NAME": name, "BENCH_POSTGRESQL_URL": DATABASES["postgresql"], "BENCH_BROKER": BROKERS["redis"]}


def ask(bench: dict[str, str], *names: str, instances: int = 40) -> dict[str, dict[str, Any]]:
    """One round, which others may disturb: the answers by question."""
    options = ["--rounds", "1", "--tries", "1", "--instances", str(instances)]
    command = [sys.executable, "benchmarks/run.py", *options, *names]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | bench, capture_output=True, text=True, check=False)
    assert re.search(r"^[01] rounds; [01] left out", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {line["question"]: line for line in lines}


def commands_with(text: str) -> list[str]:
    """The commands of all processes that contain it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text(errors="replace"))
    return [command for command in found if text in command]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("contender", RATES)
def test_a_contender_runs_a_round(bench: dict[str, str], contender: str) -> None:
    # Of 40, one that runs only a fifth has ended all before a busy machine begins to measure.
    answers = ask(bench, *RATES[contender], instances=40 if contender == "engine" else 400)
    for name in RATES[contender]:
        assert answers[name].keys() >= COSTS
        assert answers[name]["per_second"] > 0
        assert answers[name]["worker_cpu_ms"] > 0
    with redis.Redis.from_url(BROKERS["redis"]) as client:
        assert list(client.scan_iter(f"{bench['BENCH_NAME']}:*", count=1000)) == []
    assert list(Path("/var/tmp").glob(f"{bench['BENCH_NAME']}*")) == []
    assert commands_with(f"/var/tmp/{bench['BENCH_NAME']}") == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_what_the_engine_sends_is_counted(bench: dict[str, str]) -> None:
    answer = ask(bench, "counts")["counts"]
    assert answer["statements"] >= 1
    assert 1 <= answer["round_trips"] < 2
    assert answer["transactions"] >= 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_engine_is_measured_on_the_other_databases(bench: dict[str, str]) -> None:
    answers = ask(bench | {"BENCH_MARIADB_URL": DATABASES["mariadb"]}, "mariadb10", "sqlite10")
    if "left_out" in answers["mariadb10"]:
        missing_tool("mariadb")
    for name in ("mariadb_limit2", "mariadb10", "sqlite_limit1", "sqlite10"):
        assert answers[name]["per_second"] > 0
    assert all(answers[name]["worker_cpu_ms"] > 0 for name in ("mariadb10", "sqlite10"))
    assert list(Path("/var/tmp").glob(f"{bench['BENCH_NAME']}*")) == []


@pytest.mark.timeout(300)  # sleeps have to end
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_waits_for_the_engine_are_measured(bench: dict[str, str]) -> None:
    answers = ask(bench, "start", "event", "wakeup", "burst")
    assert all(0 < answers[name]["p50_ms"] <= answers[name]["p99_ms"] for name in ("start", "event", "wakeup"))
    assert all(answers[name]["call_p50_ms"] > 0 for name in ("start", "event"))
    assert 0 < answers["burst"]["p50_ms"] <= answers["burst"]["last_ms"]
