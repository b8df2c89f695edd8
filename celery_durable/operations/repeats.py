"""Creating under an id that may exist: postpone the instance, run it once more after its run, or run it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from celery_durable import notify, values
from celery_durable.errors import InstanceAlreadyExists, InstanceNotFound, InstantInvalid, StartTooFar, ValueRefused
from celery_durable.model import DueRun, IfExists, IfRunning, InstanceRow, RunRef, to_us
from celery_durable.operations.context import OperationContext
from celery_durable.store.engine import Tx
from celery_durable.store.instances import instances, lifecycle, next_runs
from celery_durable.store.instances.next_runs import NextRun
from celery_durable.store.runs.runs import RunStart
from celery_durable.values import Duration


@dataclass(frozen=True, slots=True)
class Start:
    """When an instance starts, at the latest ``at_latest`` after its creation, and what happens if it exists."""

    at: datetime | timedelta | None
    at_latest: timedelta | None
    if_exists: IfExists
    if_running: IfRunning | None

    @property
    def repeats(self) -> bool:
        """Whether an instance that exists may run again."""
        return self.if_exists == "postpone" or self.if_running is not None

    def find_time(self, now: datetime, maximum: timedelta) -> datetime | None:
        """Return the start of a new run; raises StartTooFar."""
        if self.at is None:
            return None
        start = now + self.at if isinstance(self.at, timedelta) else self.at
        if start - now > maximum:
            raise StartTooFar(start, maximum)
        return start if self.at_latest is None else min(start, now + self.at_latest)


def parse_start(
    instance_id: str | None,
    run_at: datetime | Duration | None,
    at_latest: Duration | None,
    if_exists: IfExists,
    if_running: IfRunning | None,
    *,
    max_sleep: timedelta,
) -> Start:
    """Return what these options of `create` mean; raises ValueRefused for words and combinations without a meaning."""
    if if_exists not in ("error", "return", "postpone"):
        raise ValueRefused(f'if_exists={if_exists!r} is not known: use "error", "return" or "postpone".')
    if if_running not in (None, "skip", "queue"):
        raise ValueRefused(f'if_running={if_running!r} is not known: use "skip" or "queue".')
    if if_running is not None and if_exists == "postpone":
        raise ValueRefused(f'if_exists="postpone" and if_running="{if_running}" exclude each other: pass one of them.')
    if if_exists == "postpone" and run_at is None:
        raise ValueRefused('if_exists="postpone" needs run_at, such as run_at="30 seconds": it moves that start.')
    if at_latest is not None and if_exists != "postpone":
        raise ValueRefused(f'at_latest={at_latest!r} needs if_exists="postpone": nothing else moves the start.')
    start = Start(_parse_run_at(run_at, max_sleep), None, if_exists, if_running)
    if start.repeats and instance_id is None:
        option = "if_exists" if if_running is None else "if_running"
        raise ValueRefused(f'{option}="{if_running or if_exists}" needs an id: a random one never exists.')
    if at_latest is None:
        return start
    return replace(start, at_latest=values.parse_pause(at_latest, maximum=max_sleep))


def _parse_run_at(run_at: datetime | Duration | None, max_sleep: timedelta) -> datetime | timedelta | None:
    if run_at is None or isinstance(run_at, datetime):
        return None if run_at is None else values.to_utc(run_at, "run_at")
    if isinstance(run_at, (str, timedelta, int, float)):
        return values.parse_pause(run_at, maximum=max_sleep)
    raise InstantInvalid("run_at", run_at)


@dataclass(frozen=True, slots=True)
class Repeated:
    """What happened: a run was "created" or "restarted" (``ref``), or none was. ``due_runs`` are to be published."""

    outcome: Literal["created", "restarted", "unchanged"]
    ref: RunRef
    due_runs: list[DueRun]
    run_at: datetime | None = None

    def announce(self, context: OperationContext) -> None:
        """Emit the signal, and publish the run if it is due."""
        if self.outcome == "created":
            notify.send_workflow_created(self.ref, run_at=self.run_at)
        elif self.outcome == "restarted":
            notify.send_workflow_restarted(self.ref, reason=None)
        context.publish_runs(self.due_runs)


@dataclass(frozen=True)
class Repeat:
    """Creates the instance ``new``, the keywords of `instances.insert`, or has the existing one run again.

    It does so once for one ``commit_id``, which a message that comes twice has twice.
    """

    context: OperationContext
    new: dict[str, Any]
    start: Start

    def write(self, tx: Tx) -> Repeated:
        """Do it in a transaction; the lock of the row decides what there is to do."""
        new, ref = self.new, RunRef(self.new["workflow"], self.new["instance_id"], 1)
        now = instances.read_clock(tx)
        run_at = self.start.find_time(now, self.context.settings.max_sleep)
        if instances.insert_if_missing(tx, **new, run_at=run_at):
            return Repeated("created", ref, [DueRun(ref, new["queue"])] if run_at is None else [], run_at)
        try:
            row = self.context.lock_row(tx, ref.workflow, ref.instance_id)
        except InstanceNotFound:  # the id is taken outside the caller's scope
            raise InstanceAlreadyExists(ref.workflow, ref.instance_id) from None
        done = next_runs.find_request(tx, row, new["commit_id"])
        if done is not None:
            return Repeated("unchanged", row.ref, [DueRun(row.ref, row.queue)] if done == row.run_number else [])
        if row.status.is_terminal:
            return self._restart(tx, row, run_at, now)
        next_runs.note_request(tx, row, new["commit_id"])
        if self.start.if_running == "skip":
            return Repeated("unchanged", row.ref, [])
        run = NextRun(new["params"], new["commit_id"], to_us(now), None if run_at is None else to_us(run_at))
        postpones, at_latest = self.start.if_exists == "postpone", self.start.at_latest
        due = next_runs.request(tx, row, run, postpones=postpones, at_latest=at_latest, grace=new["grace"])
        return Repeated("unchanged", row.ref, [] if due is None else [due])

    def _restart(self, tx: Tx, row: InstanceRow, run_at: datetime | None, now: datetime) -> Repeated:
        new = self.new
        start = RunStart(new["params"], new["commit_id"], new["plan"])
        due_us = None if run_at is None or run_at <= now else to_us(run_at)
        due = lifecycle.start_run(tx, row.pk, row.ref, row.queue, start, grace=new["grace"], due_us=due_us)
        return Repeated("restarted", due.ref, [due] if due_us is None else [])
