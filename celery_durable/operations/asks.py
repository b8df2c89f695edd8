"""Questions to people: reading an open one, and answering it. The first answer wins.

An answer is an event whose id names the wait, so a run accepts one for each wait, and no other wait consumes it. It is
checked before the instance is locked, because that may call user code, and stored only if the wait is still the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from celery_durable import ancestry, notify, values
from celery_durable.config import KEY_REMEDY
from celery_durable.errors import (
    AnswerLinkInvalid,
    AnswerTooLate,
    AnswerUnchecked,
    ConfigInvalid,
    EventRefused,
    StepNotFound,
    ValueRefused,
)
from celery_durable.model import (
    DueRun,
    EventWait,
    InstanceRow,
    RunRef,
    StepRow,
    StepStatus,
    StoredEvent,
    WakeReason,
    from_us,
    make_answer_id,
    to_us,
)
from celery_durable.operations.context import OperationContext, Versions
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances, interventions, lifecycle
from celery_durable.store.runs import runs, step_rows


class AskOperations:
    """The operations on waits that ask a person."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self, workflow: str, instance_id: str, step: str, *, run: int | None = None) -> EventWait:
        """Return an open question; raises StepNotFound, AnswerTooLate, ValueRefused. ``run``: only of this run."""

        def work(tx: Tx) -> EventWait:
            row = self._context.read_row(tx, workflow, instance_id)
            found, end, given = _find_question(tx, row, step, run)
            _check_open(self._context, row, found, end, given)
            assert found.wait_event_type is not None
            since = found.started_at or found.created_at  # as in lists
            assert since is not None
            return EventWait(
                workflow=workflow,
                instance_id=instance_id,
                run_number=row.run_number,
                status=row.status,
                wait_event_type=found.wait_event_type,
                step_name=found.name,
                step_key=found.step_key,
                since=since,
                wake_at=found.wake_at,
                **values.read_ask(found.ask),
            )

        return self._context.store.read(work)

    def answer(
        self,
        workflow: str,
        instance_id: str,
        step: str,
        payload: Any,
        *,
        by: str,
        run: int | None = None,
        if_version: Versions = None,
    ) -> bool:
        """Store the answer of the person ``by``. Returns False if it repeats the stored one; else raises as `read`.

        Raises EventRefused for a payload that does not fit the schema, and AnswerUnchecked if that is not known here.
        """
        answer = _Answer(
            context=self._context,
            workflow=workflow,
            instance_id=instance_id,
            step=values.require_text("Step", step),
            payload=values.encode(payload, what=f"Answer to step {step!r}", limits=self._context.settings.limits),
            actor=self._context.check_actor(by),
            run=run,
            if_version=if_version,
        )
        return answer.store()

    def sign(self, workflow: str, instance_id: str, step: str, *, run: int, by: str, valid_for: values.Duration) -> str:
        """Return a text by which the person ``by`` may answer this question, until the time is over."""
        expires_at = self._context.store.read(instances.read_clock) + values.parse_duration(valid_for)
        data = (workflow, instance_id, run, step, self._context.check_actor(by), to_us(expires_at))
        return values.sign(self._find_key(), data)

    def read_signed(self, signed: str) -> EventWait:
        """Return the open question of a signed text; raises AnswerLinkInvalid, and as `read`."""
        workflow, instance_id, run, step, _ = self._check_signed(signed)
        return self.read(workflow, instance_id, step, run=run)

    def answer_signed(self, signed: str, payload: Any) -> bool:
        """Store the answer of the person to whom a signed text belongs; raises AnswerLinkInvalid, and as `answer`."""
        workflow, instance_id, run, step, by = self._check_signed(signed)
        return self.answer(workflow, instance_id, step, payload, by=by, run=run)

    def _check_signed(self, signed: str) -> tuple[str, str, int, str, str]:
        data = values.read_signed(self._find_key(), values.require_text("Signed text", signed))
        if data is None:
            raise AnswerLinkInvalid("it was changed, or signed with another key")
        *question, expires_us = data
        if from_us(expires_us) <= self._context.store.read(instances.read_clock):
            raise AnswerLinkInvalid(f"it was valid until {from_us(expires_us):%Y-%m-%d %H:%M:%S} UTC")
        workflow, instance_id, run, step, by = question
        return workflow, instance_id, run, step, by

    def _find_key(self) -> str:
        if self._context.settings.answer_key is None:
            raise ConfigInvalid("durable_answer_key", None, KEY_REMEDY)
        return self._context.settings.answer_key


def _find_question(
    tx: Tx, row: InstanceRow, key: str, run: int | None
) -> tuple[StepRow, str | None, StoredEvent | None]:
    """Return the row of a wait that asks a person, why it takes no answer any more, and the answer that it has."""
    if run is not None and run != row.run_number:
        ref = RunRef(row.workflow, row.instance_id, run)
        raise _too_late(ref, key, f"is of an earlier run: the current one is {row.run_number}")
    step = step_rows.find_row(tx, row, key)
    if step is None and row.status.is_terminal:
        raise _too_late(row.ref, key, f"is of an instance that is {row.status}")
    if step is None:
        near = ancestry.find_closest_names(key, step_rows.read_names(tx, row))
        raise StepNotFound(row.workflow, row.instance_id, row.run_number, key, near)
    if step.ask is None:
        raise ValueRefused(f"Step {key!r} asks nobody: it is no wait with ask=. Send an event instead.")
    end = _find_end(tx, row, step)
    return step, end, run_events.find_answer(tx, row, key=step.step_key)  # last: it may be what has ended the wait


def _check_open(
    context: OperationContext, row: InstanceRow, step: StepRow, end: str | None, given: StoredEvent | None
) -> None:
    """Raise AnswerTooLate unless the wait would consume an answer that is given now."""
    if given is not None:
        by = context.make_redaction(row.workflow, row.instance_id).redact_value(given.by, "by", step.name)
        end = f"was answered by {by!r} at {given.created_at:%Y-%m-%d %H:%M:%S} UTC"
    if end is not None:
        raise _too_late(row.ref, step.name, end, given=given)


def _find_end(tx: Tx, row: InstanceRow, step: StepRow) -> str | None:
    """Return why a wait without an answer takes none any more, or None if it does."""
    if step.status not in (StepStatus.WAITING, StepStatus.LINEAR_WAITING):
        return f"is {step.status}"
    if row.status.is_terminal:
        return f"is of an instance that is {row.status}"
    assert step.wait_event_type is not None
    assert step.wake_at is not None
    if step.wake_at <= instances.read_clock(tx):
        return _describe_deadline(step)
    of_run = tx, row.pk, row.run_number
    if runs.is_cancel_requested(*of_run) and runs.find_raised_cancellation(*of_run) is None:
        return "is being cancelled"
    if run_events.find_oldest_event(tx, row, step.wait_event_type, key=step.step_key, deadline=step.wake_at):
        return f"has an event {step.wait_event_type!r}, which came first"
    return None


def _describe_deadline(step: StepRow) -> str:
    return f"waited until {step.wake_at:%Y-%m-%d %H:%M:%S} UTC"


def _too_late(ref: RunRef, key: str, why: str, *, given: StoredEvent | None = None) -> AnswerTooLate:
    by, at = (None, None) if given is None else (given.by, given.created_at)
    return AnswerTooLate(ref.workflow, ref.instance_id, ref.run_number, key, why, by=by, at=at)


@dataclass(slots=True, kw_only=True, repr=False)  # the name of a hostile request must not get into the log
class _Answer:
    """One answer on its way, with the ``payload`` as JSON text. ``event`` is ``inserted`` by the last try."""

    context: OperationContext
    workflow: str
    instance_id: str
    step: str
    payload: str
    actor: str
    run: int | None
    if_version: Versions
    event: notify.AcceptedEvent | None = None
    inserted: run_events.InsertedEvent | None = None

    def store(self) -> bool:
        """Check the answer and store it. Returns False if it repeats the stored one."""
        store = self.context.store
        while (wait := store.read(self._find_wait)) is not None:
            self._check_payload(wait)
            insert = functools.partial(self._insert, checked=wait)
            if (due_runs := store.transact(insert, find_committed=self._find_committed)) is not None:
                self.context.after_commit(functools.partial(self._announce, due_runs))
                return True
        return False

    def _find_wait(self, tx: Tx) -> StepRow | None:
        return self._find_unanswered(tx, self.context.read_row(tx, self.workflow, self.instance_id))

    def _find_unanswered(self, tx: Tx, row: InstanceRow) -> StepRow | None:
        """Return the open wait, or None if it has this answer: a client that missed the response repeats itself."""
        wait, end, given = _find_question(tx, row, self.step, self.run)
        if given is not None and (given.by, given.payload) == (self.actor, self.payload):
            return None
        _check_open(self.context, row, wait, end, given)
        return wait

    def _check_payload(self, wait: StepRow) -> None:
        expected = None if wait.payload_type is None else values.find_class(wait.payload_type)
        schema = values.read_ask(wait.ask)["schema"]
        try:
            if expected is not None:
                values.Codec(expected).decode(self.payload)
            elif schema is not None:
                values.check_json_schema(schema, self.payload)
        except values.ValidationFailed as exc:
            raise EventRefused(self.workflow, self.instance_id, wait.wait_event_type or "", exc.problems) from None
        except values.SchemaUnusable as exc:
            raise AnswerUnchecked(self.step, wait.payload_type, str(exc)) from exc

    def _insert(self, tx: Tx, checked: StepRow) -> list[DueRun] | None:
        """Store the answer. Returns None if the wait has changed since it was checked, or has this answer now."""
        row = self.context.lock_row(tx, self.workflow, self.instance_id, self.if_version)
        wait = self._find_unanswered(tx, row)
        if wait is None or wait.commit_id != checked.commit_id:
            return None
        assert wait.wait_event_type is not None
        assert wait.wake_at is not None
        self.event = notify.AcceptedEvent(row.ref, wait.wait_event_type, make_answer_id(wait.step_key))
        event = {"type_": self.event.event_type, "payload": self.payload, "event_id": self.event.event_id}
        self.inserted = run_events.insert_event(tx, row, **event, actor=self.actor)
        assert self.inserted is not None  # there was none, under the lock
        if self.inserted.created_at > wait.wake_at:
            raise _too_late(row.ref, self.step, _describe_deadline(wait))
        commit_id = self.context.runtime.new_token()
        interventions.insert_audit_record(
            tx, row, wait, action="answer", actor=self.actor, reason=None, commit_id=commit_id
        )
        if not run_events.is_awaited(tx, row, wait.wait_event_type):
            return []
        return [lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=self.context.grace)]

    def _find_committed(self, tx: Tx) -> list[DueRun] | None:
        """Return the result of `_insert` if its commit in doubt was applied."""
        row = self.context.lock_row(tx, self.workflow, self.instance_id)
        sent, event = self.inserted, self.event
        if sent is None or event is None or not run_events.is_event_committed(tx, row, sent, event_id=event.event_id):
            return None
        return [DueRun(row.ref, row.queue)]

    def _announce(self, due_runs: list[DueRun]) -> None:
        assert self.event is not None
        notify.send_event_received(self.event)
        self.context.publish_runs(due_runs)
