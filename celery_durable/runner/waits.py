"""Sleeps and events: steps that end by the time or by what somebody sends, not by a body."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from celery_durable import values
from celery_durable.ledger import Finish, Open, Replay, Wait
from celery_durable.model import StepRow, StepStatus, topic_type
from celery_durable.runner.boundary import Boundary, Committed
from celery_durable.runner.branches import Branch
from celery_durable.runner.progress import Progress
from celery_durable.runtime import Purpose
from celery_durable.step import SleepCall, WaitCall
from celery_durable.store import journal
from celery_durable.store.claims import Guarded, OpenWait
from celery_durable.store.journal import Arrived, StepWrite
from celery_durable.values import Codec, Misfit

_FOREVER = datetime.max.replace(tzinfo=UTC)


Settle = functools.partial[StepWrite]
"""`Progress.write` for one branch, with all that every end of a wait has in common."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a step waits for, and what is recorded when it has come (``arrived``) or when its time is over (``late``).

    ``is_recorded``: the row waits for this very type. ``topic``: where its events are not sent but emitted.
    ``recall``: the letter that asks for it, which need not leave any more when its time is over.
    """

    event_type: str
    timeout: timedelta
    arrived: Callable[[Arrived, Settle], StepWrite]
    late: Callable[[Settle], StepWrite]
    is_recorded: bool = True
    topic: str | None = None
    recall: str | None = None


class Waits:
    """Brings sleeps and waits of a pass as far as they go: settled, or with a time to wait for."""

    def __init__(self, at: Progress) -> None:
        self._at = at

    def sleep(self, branch: Branch, call: SleepCall, *, sole: bool) -> None:
        match self._at.ledger.decide_timer(branch.entry.row, now=self._at.now):
            case Replay(row):
                branch.row = row
            case Wait(until):
                branch.wait = OpenWait(until)
            case Finish(row):
                self._at.commit(branch, self._at.write(branch, StepStatus.COMPLETED, wake_at=row.wake_at))
            case Open():
                self._begin_sleep(branch, call, sole=sole)

    def _begin_sleep(self, branch: Branch, call: SleepCall, *, sole: bool) -> None:
        """Fix the wake time, now and for every replay; what has passed already ends at once."""
        wake_at = None if call.until is None else values.aware(call.until, "sleep_until")
        wake_in = self.span(branch, values.duration(call.span), "sleep") if wake_at is None else None
        left = wake_in if wake_at is None else self.span(branch, max(wake_at - self._at.now, timedelta(0)), "sleep")
        status = StepStatus.WAITING if left else StepStatus.COMPLETED
        write = self._at.write(branch, status, wake_at=wake_at, wake_in=wake_in)
        if left and sole:
            self._at.defer(Boundary([write], self._at.take_logs(), sleep=until_wake))
        else:
            self._at.commit(branch, write)

    def event(self, branch: Branch, call: WaitCall, *, sole: bool) -> None:
        row, schema = branch.entry.row, Codec(call.schema)
        # On a topic each wait gets events of its own, which nobody else consumes.
        event_type = topic_type(call.event_type, branch.entry.seq) if call.is_topic else call.event_type

        def late(settle: Settle) -> StepWrite:
            text = f"{_nothing(call)} within {values.duration(call.timeout)}"
            return settle(StepStatus.ERRORED, error=("EventTimeout", text), attempts=1)

        awaited = Awaited(
            event_type,
            self.span(branch, values.duration(call.timeout), "event"),
            arrived=lambda event, settle: _received(settle, branch.name, call, event, schema),
            late=late,
            # A deploy may have changed the type: send_event finds the wait by the type that is recorded.
            is_recorded=row is not None and row.wait_event_type == event_type,
            topic=call.event_type if call.is_topic else None,
        )
        self.look(branch, awaited, sole=sole)

    def look(self, branch: Branch, awaited: Awaited, *, sole: bool) -> None:
        """Record what follows from an event that has come, or from the time; else wait on."""
        row, commit_id, event_type = branch.entry.row, self._at.env.runtime.new_token(), awaited.event_type

        def deadline(guarded: Guarded) -> datetime:
            return row.wake_at if row is not None and row.wake_at is not None else guarded.now + awaited.timeout

        def write(guarded: Guarded, event: Arrived | None) -> list[StepWrite]:
            until = deadline(guarded)
            settle = functools.partial(
                self._at.write, branch, wake_at=until, event_type=event_type, commit_id=commit_id
            )
            if event is None and until > guarded.now:
                return [] if awaited.is_recorded else [settle(StepStatus.WAITING)]
            made = awaited.late(settle) if event is None else awaited.arrived(event, settle)
            return [made, *(self._at.race_writes(branch, commit_id) if made.is_final else ())]

        def commit(*, sleeps: bool) -> Committed:
            return self._at.committer.commit_wait(
                event_type=event_type,
                topic=awaited.topic,
                deadline=deadline,
                write=write,
                logs=self._at.take_logs(),
                key=branch.key,
                commit_id=commit_id,
                sleeps=sleeps,
                recall=awaited.recall,
            )

        wake_at = None if row is None else row.wake_at
        if (wake_at is None or wake_at > self._at.now) and not self._has_event(event_type):
            if sole:
                self._at.deferred = lambda: commit(sleeps=True)
                return
            if awaited.is_recorded and wake_at is not None:  # the suspension looks once more, under the lock
                branch.wait = OpenWait(wake_at, event_type)
                return
        committed = self._at.guarded(lambda: commit(sleeps=False))
        if not committed.rows:
            assert committed.until is not None
            branch.wait = OpenWait(committed.until, event_type)
        self._at.committed(branch, committed)

    def span(self, branch: Branch, length: timedelta, purpose: Purpose) -> timedelta:
        """How long a step of this branch waits."""
        workflow = self._at.lease.claim.ref.workflow
        return self._at.env.runtime.span(length, purpose=purpose, workflow=workflow, step=branch.name)

    def _has_event(self, event_type: str) -> bool:
        """A glance without the lock: whether it is worth looking now, or only when the instance is let go."""
        claim = self._at.lease.claim
        look = self._at.env.store.transact
        found = self._at.guarded(
            lambda: look(lambda tx: journal.oldest_event(tx, claim, event_type, deadline=_FOREVER), single=True)
        )
        return found is not None


def _nothing(call: WaitCall) -> str:
    if call.is_topic:
        return f"Nothing was emitted to topic {call.event_type!r}"
    return f"No event {call.event_type!r} came"


def _received(settle: Settle, name: str, call: WaitCall, event: Arrived, schema: Codec) -> StepWrite:
    try:
        schema.decode(event.payload)
    except Misfit as exc:
        problems = "; ".join(f"{where}: {what}" for where, what in exc.problems[:5])
        source = "topic" if call.is_topic else "event"
        text = f"The payload of {source} {call.event_type!r} does not fit the schema of wait {name!r}: {problems}"
        return settle(StepStatus.ERRORED, error=("EventPayloadInvalid", text), attempts=1)
    return settle(StepStatus.COMPLETED, result=event.as_result)


def until_wake(rows: list[StepRow]) -> list[OpenWait]:
    """What rows that were recorded as waiting wait for."""
    return [OpenWait(row.wake_at, row.wait_event_type) for row in rows if row.wake_at is not None]
