"""The adapter for the public benchmark of queues keeps that benchmark's protocol: one process, JSON lines, SIGTERM."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import sqlalchemy as sa

from tests.docs.blocks import ROOT
from tests.support.services import BROKERS, missing

FOLDER = ROOT / "benchmarks/queue_benchmark"
REQUIRED = {"claim_p50_ms", "claim_p95_ms", "claim_p99_ms", "enqueue_rate", "completion_rate", "queue_depth"}
PERCENTILES = {f"{what}_p{share}_ms" for what in ("claim", "end_to_end", "producer_call") for share in (50, 95, 99)}

on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


class Adapter:
    """A replica with one thread, which samples every second."""

    def __init__(self, environment: dict[str, str], log: Path, **options: str) -> None:
        given = {"SAMPLE_EVERY_S": "1", "WORKER_COUNT": "1", **options}
        self._log = log
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(FOLDER / "adapter.py")], env=os.environ | environment | given,
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text(encoding="utf-8")[-3000:]
        return json.loads(line)

    def read_until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The lines up to the wanted one; a thread that has died would let this wait for the test's own timeout."""
        lines = [self.read()]
        while not is_wanted(lines[-1]):
            lines.append(self.read())
        return lines

    def stop(self) -> tuple[int, str]:
        """SIGTERM: the code of its exit, and what was left to read."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=30)
        return self.process.returncode, rest


@pytest.fixture
def environment(store_url: str) -> Iterator[dict[str, str]]:
    try:
        redis.Redis.from_url(BROKERS["redis"]).ping()
    except redis.ConnectionError as error:
        missing("redis", f"{BROKERS['redis']} does not answer ({error})")
    name = f"queue_benchmark_{uuid.uuid4().hex[:8]}"
    url = sa.make_url(store_url).set(drivername="postgres").render_as_string(hide_password=False)
    yield {"DATABASE_URL": url, "BENCH_BROKER": BROKERS["redis"], "BENCH_NAME": name}
    with redis.Redis.from_url(BROKERS["redis"]) as client:
        for key in client.scan_iter(f"{name}:*", count=1000):
            client.delete(key)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Adapter]]:
    started: list[Adapter] = []

    def start_one(**options: str) -> Adapter:
        started.append(Adapter(environment, tmp_path / "adapters.log", **options))
        return started[-1]

    yield start_one
    for adapter in started:
        with adapter.process:
            adapter.process.kill()


def is_completion(line: dict[str, Any]) -> bool:
    return line.get("metric") == "completion_rate" and line["value"] > 0


@pytest.mark.gate
@on_postgresql
def test_a_replica_describes_itself_then_samples_and_ends_at_sigterm(start, store_url: str) -> None:
    adapter = start(PRODUCER_RATE="20")
    descriptor, *lines = adapter.read_until(is_completion)
    lines += adapter.read_until(lambda line: line["metric"] == "running_depth")
    code, rest = adapter.stop()
    assert code == 0
    lines += map(json.loads, rest.splitlines())

    manifest = json.loads((FOLDER / "adapter.json").read_text(encoding="utf-8"))
    assert descriptor["kind"] == "descriptor"
    assert {name: descriptor[name] for name in ("system", "event_tables", "event_indexes", "extensions")} == {
        name: manifest[name] for name in ("system", "event_tables", "event_indexes", "extensions")
    }
    with psycopg.connect(sa.make_url(store_url).set(drivername="postgres").render_as_string(False)) as conn:
        for relation in [*manifest["event_tables"], *manifest["event_indexes"]]:
            assert conn.execute("SELECT to_regclass(%s) IS NOT NULL", (relation,)).fetchone() == (True,), relation

    assert {line["metric"] for line in lines} == REQUIRED | PERCENTILES | {"producer_target_rate", "running_depth"}
    assert {(line["kind"], line["system"], line["instance_id"]) for line in lines} == {("adapter", "celery_durable", 0)}
    assert {(line["subject_kind"], line["subject"]) for line in lines} == {("adapter", ""), ("queue", "jobs0")}
    windows = [(line["value"], line["window_s"]) for line in lines if line["metric"] == "enqueue_rate"]
    assert sum(rate * length for rate, length in windows) / sum(length for _, length in windows) == pytest.approx(
        20, rel=0.5
    )
    last = {line["metric"]: line["value"] for line in lines}
    assert 0 < last["claim_p50_ms"] <= last["claim_p95_ms"] <= last["claim_p99_ms"]


@pytest.mark.slow
@on_postgresql
def test_the_rate_follows_the_file_of_the_benchmark(start, tmp_path: Path) -> None:
    file = tmp_path / "producer_rate.txt"
    file.write_text("0")
    adapter = start(PRODUCER_RATE="20", PRODUCER_RATE_CONTROL_FILE=str(file), BENCH_INSTANCE_ID="1")
    adapter.read()
    rates = [line["value"] for line in adapter.read_until(is_target) if line["metric"] == "enqueue_rate"]
    assert rates == [0]
    file.write_text("30.0")
    lines = adapter.read_until(lambda line: line["metric"] == "enqueue_rate" and line["value"] > 0)
    lines += adapter.read_until(is_target)
    assert lines[-1]["value"] == 30
    assert {line["instance_id"] for line in lines} == {1}
    assert "queue_depth" not in {line["metric"] for line in lines}  # only replica 0 observes the database


def is_target(line: dict[str, Any]) -> bool:
    return line["metric"] == "producer_target_rate"


@pytest.mark.slow
@on_postgresql
def test_jobs_of_every_queue_are_done(start, store_url: str) -> None:
    adapter = start(PRODUCER_RATE="40", BENCH_QUEUE_COUNT="3")
    adapter.read()
    for queue in ("jobs0", "jobs1", "jobs2"):
        adapter.read_until(lambda line, queue=queue: line["subject"] == queue and line["value"] > 0)
    adapter.stop()
    with psycopg.connect(sa.make_url(store_url).set(drivername="postgres").render_as_string(False)) as conn:
        queues = conn.execute("SELECT DISTINCT queue FROM workflow_instance WHERE status = 'complete'").fetchall()
    assert sorted(queues) == [("jobs0",), ("jobs1",), ("jobs2",)]


@pytest.mark.slow
@on_postgresql
def test_jobs_that_are_left_end_with_another_replica(start, environment: dict[str, str], monkeypatch) -> None:
    adapter = start(PRODUCER_MODE="depth-target", TARGET_DEPTH="100")
    adapter.read()
    adapter.read_until(is_completion)
    adapter.stop()

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    leftovers = runpy.run_path(str(FOLDER / "leftovers.py"))
    assert leftovers["count_unfinished"](environment["DATABASE_URL"]) > 0
    ended = leftovers["finish_jobs"](environment["DATABASE_URL"], FOLDER / "adapter.py")
    assert ended["jobs"] == ended["complete"] >= 100
    assert ended["not_complete"] == 0
