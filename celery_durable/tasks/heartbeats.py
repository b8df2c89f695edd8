"""Heartbeats: every ten seconds, a dispatcher or a worker writes that it is alive, at best effort, in one statement."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

from celery_durable.housekeeping import Job, reset_in_child
from celery_durable.model import HEARTBEAT_INTERVAL, SWEEP_TASK, Outage
from celery_durable.runtime import Runtime
from celery_durable.store import heartbeats
from celery_durable.store.engine import Store
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.engine.time_limits import LOOP

logger = logging.getLogger("celery_durable.heartbeat")

_PERIOD_SECONDS = HEARTBEAT_INTERVAL.total_seconds()
_WRITES_PER_CLEANUP = 60
LANE = "heartbeat row"
"""The lane of the jobs that write the row of this process, so that they use one connection to the database."""


class ProcessHeartbeat:
    """The heartbeat row of this process, from `register` on, and its job. A forked child registers again.

    ``store`` is called when the first heartbeat is due, so a worker without a usable database starts too.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        runtime: Runtime,
        *,
        queues: Callable[[], Sequence[str]],
        workflows: Callable[[], Sequence[str]],
    ) -> None:
        self._store, self._runtime, self._queues, self._workflows = store, runtime, queues, workflows
        self._job = Job("durable-heartbeat", self.beat, lane=LANE)
        self.is_row_needed = False
        self._kind: Literal["dispatcher", "worker"] = "worker"
        self._pool: str | None = None
        self._is_failing = False
        self.reset_in_child()
        reset_in_child(self)

    def reset_in_child(self) -> None:
        self._id: str | None = None
        self._write_count, self._has_row, self._is_ending = 0, False, False
        self._last_check_at, self._next_check_at = -math.inf, math.inf
        self._outages: Sequence[Outage] = ()

    def register(self, kind: Literal["dispatcher", "worker"], node: str, *, pool: str | None = None) -> None:
        """Give this process a row id. A worker that also hosts beat counts as a worker."""
        self._pool = pool or self._pool
        if self._id is None:
            self.reset_in_child()
            self._id = self._runtime.new_token()
        elif kind == "dispatcher":
            return
        self._kind, self._node = kind, node

    @property
    def row_id(self) -> str | None:
        """The id of this process's row; None before `register` and after the row was removed."""
        return self._id

    def start(self) -> None:
        """Write a heartbeat now and every ten seconds, until `stop`."""
        self._is_ending = False
        self._job.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Remove the row, unless ``is_row_needed``, and end the job; waits for at most ``timeout`` seconds."""
        self._is_ending = True
        self._job.start()
        self._job.wait(timeout)

    def record_check(self, *, seconds_ago: float, seconds_to_next: float) -> None:
        """Record the dispatcher's last check for due work and its next one. The first check is written at once."""
        now, is_first = self._runtime.monotonic(), math.isinf(self._last_check_at)
        self._last_check_at, self._next_check_at = now - seconds_ago, now + seconds_to_next
        if is_first:
            self._job.wake()

    def record_outages(self, outages: Sequence[Outage]) -> None:
        """Record what keeps the process from its work, since when by this machine's clock."""
        is_changed = _outage_keys(outages) != _outage_keys(self._outages)
        self._outages = outages
        if is_changed:
            self._job.wake()

    def beat(self) -> float:
        """Write the heartbeat, or remove the row after `stop`; returns the seconds to the next one. Never raises."""
        if self._is_ending:
            self._remove_row()
            return math.inf
        try:
            if self._id is not None:
                self._write(self._id, self._runtime.monotonic())
        except Exception as exc:  # noqa: BLE001  # no work may fail because a heartbeat cannot be written
            if not self._is_failing:
                logger.warning("This process cannot write its heartbeat and will retry: %s", describe_fault(exc))
            self._is_failing = True
        else:
            self._is_failing = False
        return _PERIOD_SECONDS

    def _write(self, id_: str, now: float) -> None:
        wall = self._runtime.wall_clock()
        update = heartbeats.HeartbeatUpdate(
            id_,
            self._kind,
            self._node,
            os.getpid(),
            queues=self._queues() if self._kind == "worker" else (),
            workflows=self._workflows(),
            swept_ago=_duration(now - self._last_check_at),
            wakes_in=_duration(self._next_check_at - now),
            pool=self._pool,
            outages=[(each, max(wall - each.since, timedelta(0))) for each in self._outages],
        )
        self._store().transact_once(lambda tx: heartbeats.upsert(tx, update))
        self._has_row = True
        if update.swept_ago is not None and self._write_count % _WRITES_PER_CLEANUP == 0:
            self._store().transact_once(heartbeats.delete_old)
        self._write_count += 1

    def _remove_row(self) -> None:
        if self.is_row_needed:
            return
        id_, self._id = self._id, None
        if id_ is None or not self._has_row or self._is_failing:
            return
        try:
            self._store().transact_once(lambda tx: heartbeats.delete(tx, id_))
        except Exception as exc:  # noqa: BLE001  # a dispatcher removes the row when it is an hour old
            logger.info("This process cannot delete its heartbeat; a dispatcher will: %s", describe_fault(exc))


class SweepTaskHeartbeat:
    """The heartbeat of the `sweep` task, for a beat that hosts no dispatcher."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._due_at = -math.inf

    def is_only_sweeper(self) -> bool:
        """Whether no dispatcher sweeps, so that no process remembers when a queue was empty."""
        return not self._store.read(lambda tx: heartbeats.has_recent_sweep(tx, excluding=SWEEP_TASK), timeouts=LOOP)

    def write_if_due(self, node: str) -> None:
        """Write the heartbeat if this process has not just written it; never raises."""
        now = self._runtime.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _PERIOD_SECONDS
        update = heartbeats.HeartbeatUpdate(SWEEP_TASK, "dispatcher", node, os.getpid(), swept_ago=timedelta(0))
        try:
            self._store.transact_once(lambda tx: heartbeats.upsert(tx, update))
        except Exception as exc:  # noqa: BLE001  # the sweep is done whether or not the heartbeat is written
            logger.info("The sweep task cannot write its heartbeat: %s", describe_fault(exc))


def _outage_keys(outages: Sequence[Outage]) -> set[tuple[str, str, str]]:
    return {(each.what, each.where, each.error) for each in outages}


def _duration(seconds: float) -> timedelta | None:
    return None if math.isinf(seconds) else timedelta(seconds=max(0.0, seconds))
