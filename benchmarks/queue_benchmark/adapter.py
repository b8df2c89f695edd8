"""This engine as a system of the public benchmark hardbyte/postgresql-job-queue-benchmarking: one process, JSON lines.

The process has a Celery worker on a pool of threads with the dispatcher, a thread that creates jobs, and a thread that
samples. The benchmark sets the environment: DATABASE_URL, PRODUCER_RATE, WORKER_COUNT and the others that its adapters
read. BENCH_BROKER names the Redis. SIGTERM ends the process as it ends a Celery worker; SIGKILL kills all of it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TextIO

import psycopg
import sqlalchemy as sa
from jobs import DATABASE, QUEUES, app, claims, claims_by_queue, completions, durable, ends, workflows
from meters import WINDOW_SECONDS, LatencyMeter, RateMeter

from celery_durable import CreateOptions, DurableError
from celery_durable.store.migrations import migrate

HERE = Path(__file__).parent
MANIFEST = json.loads((HERE / "adapter.json").read_text())
DEPTH_SECONDS = 1.0
DEPTHS = """SELECT count(*) FILTER (WHERE claim_token IS NULL), count(*) FILTER (WHERE claim_token IS NOT NULL)
FROM workflow_instance WHERE workflow = ANY(%s) AND status = 'active'"""


class Options(NamedTuple):
    """What the benchmark asks for. ``instance``: the number of this replica; only 0 observes the database."""

    instance: int
    rate: float
    mode: str
    target_depth: int
    batch_max: int
    batch_seconds: float
    workers: int
    payload_bytes: int
    sample_seconds: float
    rate_file: str | None

    @classmethod
    def read(cls) -> Options:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        return cls(
            instance=number("BENCH_INSTANCE_ID", 0),
            rate=float(os.environ.get("PRODUCER_RATE", "800")),
            mode=os.environ.get("PRODUCER_MODE", "fixed"),
            target_depth=number("TARGET_DEPTH", 1000),
            batch_max=number("PRODUCER_BATCH_MAX", 128),
            batch_seconds=number("PRODUCER_BATCH_MS", 25) / 1000,
            workers=number("WORKER_COUNT", 32),
            payload_bytes=number("JOB_PAYLOAD_BYTES", 256),
            sample_seconds=float(os.environ.get("SAMPLE_EVERY_S", "5")),
            rate_file=os.environ.get("PRODUCER_RATE_CONTROL_FILE"),
        )


class Output:
    """Standard output, for JSON lines only: what Celery prints goes to standard error instead."""

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self._file: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(self, kind: str, **fields: object) -> None:
        line = {"kind": kind, "system": MANIFEST["system"], "instance_id": self._instance, **fields}
        self._file.write(json.dumps(line) + "\n")

    def write_sample(self, metric: str, value: float, window: float, queue: str = "") -> None:
        """``queue``: what the sample is about, if not all queues."""
        more = {"subject_kind": "queue" if queue else "adapter", "subject": queue, "window_s": round(window, 3)}
        self.write("adapter", t=now(), metric=metric, value=round(value, 3), **more)


class Depths:
    """How many jobs wait for a worker, and how many a worker has claimed, as last seen."""

    waiting, claimed = 0, 0

    def watch(self) -> None:
        """Look every second. Without a database they stay as they were."""
        while True:
            with suppress(psycopg.Error), psycopg.connect(libpq_address(), autocommit=True) as conn:
                while True:
                    self.waiting, self.claimed = conn.execute(DEPTHS, (QUEUES,)).fetchone() or (0, 0)
                    time.sleep(DEPTH_SECONDS)
            time.sleep(DEPTH_SECONDS)


class Producer:
    """Creates jobs in batches, at a rate or up to a depth, for each queue in turn.

    A batch that fails is dropped: its caller got an error.
    """

    def __init__(self, options: Options, depths: Depths) -> None:
        self._options, self._depths = options, depths
        self.created, self.calls, self.target = RateMeter(), LatencyMeter(), 0.0
        self._queues = itertools.cycle(QUEUES)

    def run(self) -> None:
        credit, last = 0.0, time.monotonic()
        while True:
            time.sleep(self._options.batch_seconds)
            elapsed, last = time.monotonic() - last, time.monotonic()
            if self._options.mode == "depth-target":
                credit = self._options.target_depth - self._depths.waiting
            else:
                self.target = self._read_rate()
                credit += self.target * elapsed  # what really passed, so that a slow call lowers no rate
            count = min(math.floor(credit), self._options.batch_max)
            if count > 0:
                credit -= count
                self._create(count)
                if self._options.mode == "depth-target":
                    self._depths.waiting += count

    def _create(self, count: int) -> None:
        began, queue = time.time(), next(self._queues)
        params = {"created_at": began, "queue": queue, "padding": "x" * self._options.payload_bytes}
        try:
            workflows[queue].create_batch([CreateOptions(uuid.uuid4().hex, params) for _ in range(count)])
        except (sa.exc.SQLAlchemyError, DurableError) as error:
            print(f"{count} jobs were not created: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            self.created.add(count)
            self.calls.note((time.time() - began) * 1000)

    def _read_rate(self) -> float:
        """The rate of the phase: the benchmark writes it to a file."""
        if self._options.rate_file is not None:
            with suppress(OSError, ValueError):
                return float(Path(self._options.rate_file).read_text())
        return self._options.rate


class Sampler:
    """Writes a line for each metric at each full multiple of the seconds between samples."""

    def __init__(self, options: Options, output: Output, producer: Producer, depths: Depths) -> None:
        self._options, self._output, self._producer, self._depths = options, output, producer, depths

    def run(self) -> None:
        while True:
            time.sleep(self._options.sample_seconds - time.time() % self._options.sample_seconds)
            self.sample()

    def sample(self) -> None:
        meters = {"claim": claims, "end_to_end": ends, "producer_call": self._producer.calls}
        for name, meter in meters.items():
            for share, value in zip((50, 95, 99), meter.percentiles((0.5, 0.95, 0.99)), strict=True):
                self._output.write_sample(f"{name}_p{share}_ms", value, WINDOW_SECONDS)
        for queue, meter in claims_by_queue.items():
            self._output.write_sample("claim_p99_ms", *meter.percentiles((0.99,)), WINDOW_SECONDS, queue)
        self._output.write_sample("enqueue_rate", *self._producer.created.read())
        self._output.write_sample("completion_rate", *completions.read())
        self._output.write_sample("producer_target_rate", self._producer.target, 0)
        if self._options.instance == 0:
            self._output.write_sample("queue_depth", self._depths.waiting, 0)
            self._output.write_sample("running_depth", self._depths.claimed, 0)


def now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def libpq_address() -> str:
    return DATABASE.set(drivername="postgresql").render_as_string(hide_password=False)


def main() -> None:
    options = Options.read()
    output, depths = Output(options.instance), Depths()
    _, schema_version = migrate.upgrade(durable.internals.store)
    tables = {name: MANIFEST[name] for name in ("event_tables", "event_indexes", "extensions", "db_name")}
    versions = {"version": version("celery-durable"), "schema_version": schema_version}
    output.write("descriptor", **tables, **versions, started_at=now())
    producer = Producer(options, depths)
    sampler = Sampler(options, output, producer, depths)
    loops = [producer.run, sampler.run, *([depths.watch] if options.instance == 0 else [])]
    for loop in loops:
        threading.Thread(target=loop, name=loop.__qualname__, daemon=True).start()
    concurrency = ["-P", "threads", "-c", str(options.workers)]
    name = f"{MANIFEST['system']}{options.instance}@localhost"
    try:
        app.worker_main(["worker", *concurrency, "-Q", ",".join(QUEUES), "-n", name, "-l", "warning"])
    finally:
        sampler.sample()


if __name__ == "__main__":
    main()
