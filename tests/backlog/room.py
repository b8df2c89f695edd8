"""Servers, processes and rows of one measurement: everything is its own, so it may be filled and flushed."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
import sqlalchemy as sa

from celery_durable import CreateOptions
from celery_durable.config import Settings
from tests.smoke.proc import PostgresqlCluster, Proc, RedisServer, until
from tests.smoke.site import Site

NAME = "backlog"
ASIDE = f"aside-{NAME}"
"""A queue that no worker consumes."""
_PLAIN = ("poll_seconds", "grace_seconds", "redispatch_seconds", "redispatch_max_seconds", "lease_seconds")

_MESSAGES = """
INSERT INTO workflow_outbox
    (id, kind, name, payload, instance_pk, run_number, attempts, run_at, next_check_at, created_at)
SELECT 'm-' || n, 'task', 'media.mark', :body, 0, 1, 0, :at, :at, :at FROM generate_series(1, :count) n
"""
_INSTANCES = """
INSERT INTO workflow_instance
    (workflow, instance_id, kind, run_number, status, run_at, next_check_at, wake_reason, priority, dispatch_count,
     crash_count, pause_requested, version, queue, sent_at, created_at, updated_at)
SELECT 'elsewhere', 'i-' || n, 'replay', 1, 'active', :at + n, :at + n, 'wake', mod(n, 2), 0, 0, false, 1, :queue,
       :sent, :at, :at FROM generate_series(1, :count) n
"""
_LATENESS = """
SELECT (r.completed_at - s.wake_at) / 1e6 FROM workflow_run r
JOIN workflow_step s ON s.instance_pk = r.instance_pk AND s.run_number = r.run_number AND s.name = 'nap'
WHERE r.completed_at IS NOT NULL
"""
_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_STATISTICS = (
    "SELECT sum(total_exec_time + total_plan_time) / 1000 AS seconds, sum(calls) AS calls FROM pg_stat_statements"
)


class Room:
    """A PostgreSQL, a Redis and an application with the default settings."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        plain = Settings()
        defaults = {f"durable_{name}": getattr(plain, name) for name in _PLAIN} | {"worker_prefetch_multiplier": 4}
        counting = ("shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track_planning=on")
        self.postgresql, self.redis = PostgresqlCluster(*counting), RedisServer(folder)
        self.site = Site(NAME, folder, self.redis.url, self.postgresql.url, defaults | settings)
        self.queue = str(self.site.app.conf.durable_queue)
        self.execute("CREATE EXTENSION pg_stat_statements")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.site.logs())
        self.site.close()
        self.redis.proc.clean_up()
        self.postgresql.clean_up()

    # --- the database ---------------------------------------------------------------------------

    def execute(self, query: str, **given: Any) -> None:
        with self.site.engine.connect() as connection:
            connection.execute(sa.text(query), given)

    def scalars(self, query: str, **given: Any) -> list[Any]:
        with self.site.engine.connect() as connection:
            return list(connection.execute(sa.text(query), given).scalars())

    def count(self, table: str, where: str = "true") -> int:
        return int(self.scalars(f"SELECT count(*) FROM {table} WHERE {where}")[0])

    def store_messages(self, count: int, *, due_in: float = 0.0) -> None:
        """So many messages in the outbox, for a queue that nobody consumes."""
        at = self.scalars(_NOW)[0] + round(due_in * 1e6)
        self.execute(
            _MESSAGES, at=at, count=count, body=f'{{"args":[1],"kwargs":{{}},"options":{{"queue":"{ASIDE}"}}}}'
        )
        self.execute("ANALYZE workflow_outbox")

    def store_due(self, count: int, *, are_sent: bool = False) -> None:
        """So many due instances of a queue that nobody consumes; ``are_sent``: each with a hint under way."""
        at = self.scalars(_NOW)[0] - 3_600_000_000
        self.execute(_INSTANCES, at=at, count=count, queue=ASIDE, sent=at if are_sent else None)
        self.execute("VACUUM ANALYZE workflow_instance")

    def lateness(self) -> list[float]:
        """How many seconds each instance of `nap` that has ended ended after its sleep was over."""
        return [float(each) for each in self.scalars(_LATENESS)]

    def database_load(self, seconds: float) -> tuple[float, float]:
        """What all processes cost the database for so long: seconds of statements, and statements, per second."""
        self.execute("SELECT pg_stat_statements_reset()")
        began = time.monotonic()
        time.sleep(seconds)  # the length of the measurement
        took = time.monotonic() - began
        with self.site.engine.connect() as connection:
            row = connection.execute(sa.text(_STATISTICS)).one()
        return float(row.seconds) / took, float(row.calls) / took

    # --- the broker -----------------------------------------------------------------------------

    def length(self, queue: str) -> int:
        with redis.Redis(port=self.redis.port) as client:
            return int(client.llen(f"{NAME}:{queue}"))

    def fill_queue(self, queue: str, count: int) -> None:
        """Messages that nobody will read."""
        with redis.Redis(port=self.redis.port) as client:
            for _ in range(0, count, 1000):
                client.lpush(f"{NAME}:{queue}", *["{}"] * 1000)

    def remove_half(self, queue: str) -> None:
        """Half of a queue's messages are gone, any of them; the others keep their order."""
        key = f"{NAME}:{queue}"
        with redis.Redis(port=self.redis.port) as client:
            messages = client.lrange(key, 0, -1)
            kept = sorted(random.Random(1).sample(range(len(messages)), len(messages) // 2))
            with client.pipeline() as pipe:
                pipe.delete(key).rpush(key, *[messages[index] for index in kept]).execute()

    def remove_all(self, queue: str) -> None:
        with redis.Redis(port=self.redis.port) as client:
            client.delete(f"{NAME}:{queue}")

    # --- instances ------------------------------------------------------------------------------

    def create(self, count: int, params: Any = None, *, workflow: str = "chain") -> None:
        """So many more instances, in batches."""
        site = self.site
        begin = len(site.instances)
        for first in range(begin, begin + count, 100):
            last = min(first + 100, begin + count)
            batch = [CreateOptions(id=f"b-{number}", params=params) for number in range(first, last)]
            site.instances += site.workflow(workflow).create_batch(batch)

    def completed(self) -> int:
        return self.count("workflow_instance", "status = 'complete'")

    def wait_for_completed(self, count: int, seconds: float) -> float:
        """Wait until so many have completed; returns how long that took."""
        began = time.monotonic()
        until(f"{count} instances complete", lambda: self.completed() >= count, seconds, pause=0.1)
        return time.monotonic() - began

    def passes(self, *workers: Proc) -> int:
        """How many of our messages the workers have received."""
        return sum(len(re.findall(r"Task durable:\S+ received", each.text())) for each in workers)
