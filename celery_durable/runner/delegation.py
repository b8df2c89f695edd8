"""Steps that others do: a Celery task, or an instance of another workflow.

Whoever does one answers with an event that only this step waits for, so that its deadline, races, gathers and rewinds
are those of every wait. What it is asked to do leaves with the commit that records the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.ledger import Await, Replay, Run, Wait
from celery_durable.model import StepRow, StepStatus, child_of, child_type, task_id, task_of, task_type
from celery_durable.runner.boundary import Boundary
from celery_durable.runner.branches import Branch
from celery_durable.runner.makings import AuthorWriteFailed
from celery_durable.runner.progress import Progress
from celery_durable.runner.waits import Awaited, Settle, Waits, until_wake
from celery_durable.step import ChildCall, NewInstance, TaskCall
from celery_durable.store import items
from celery_durable.store.claims import Guarded, OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.items import Map
from celery_durable.store.journal import Arrived, StepWrite
from celery_durable.values import AnsweredError, StepPolicy, stored_task

TASK_POLICY = StepPolicy(limit=0)
"""Of task steps, where their author says nothing of retries: Celery has its own. A timeout every call has."""
_OWN_CHILD = "child:"


class Delegation:
    """Hands steps to others, and takes what they answer."""

    def __init__(self, at: Progress, waits: Waits) -> None:
        self._at, self._waits = at, waits

    # --- Celery tasks ---------------------------------------------------------------------------

    def task(self, branch: Branch, call: TaskCall, *, sole: bool) -> None:
        match self._at.ledger.decide_delegated(branch.entry.row, now=self._at.now):
            case Replay(row):
                branch.row = row
            case Wait(until):
                branch.wait = OpenWait(until)
            case Run(attempt):
                self._send(branch, call, attempt, sole=sole)
            case Await(row):
                self._waits.look(branch, self._answer_of_task(branch, row), sole=sole)

    def _send(self, branch: Branch, call: TaskCall, attempt: int, *, sole: bool) -> None:
        """Record that this attempt is out, and have it sent."""
        assert branch.policy.timeout is not None
        claim = self._at.lease.claim
        event_type = task_type(task_name(call.signature), claim.pk, branch.entry.seq, attempt)
        body = stored_task(call.signature, limits=self._at.env.settings.limits)
        timeout = self._waits.span(branch, branch.policy.timeout, "event")
        write = self._at.write(branch, StepStatus.WAITING, attempts=attempt, wake_in=timeout, event_type=event_type)
        where = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        step = Map(*where, branch.key, timeout, on_lost=call.on_lost or self._at.env.settings.task_on_lost)

        def send(tx: Tx, guarded: Guarded) -> list[StepWrite]:
            letter = items.send_task(tx, step, body, event_type=event_type, attempt=attempt, now=guarded.now)
            boundary.outgoing = [letter]
            return [write]

        boundary = Boundary([write], self._at.take_logs(), look=send, sleep=until_wake if sole else None)
        if sole:
            self._at.defer(boundary)
        else:
            self._at.committed(branch, self._at.guarded(lambda: self._at.committer.commit(boundary)))

    def _answer_of_task(self, branch: Branch, row: StepRow) -> Awaited:
        assert row.wait_event_type is not None

        def failed(settle: Settle, error: AnsweredError) -> StepWrite:
            """As with a body: tried again, or failed for good."""
            policy, told = branch.policy, (error.name, error.message)
            is_used_up = policy.max_attempts is not None and row.attempts >= policy.max_attempts
            if is_used_up or error.is_final:
                return settle(StepStatus.ERRORED, error=told, attempts=row.attempts)
            pause = self._waits.span(branch, policy.delay_after(row.attempts), "retry")
            # Nothing is out any more: what this attempt may yet answer is for nobody.
            return settle(
                StepStatus.WAITING, error=told, attempts=row.attempts, retry_in=pause, wake_at=None, event_type=None
            )

        def arrived(event: Arrived, settle: Settle) -> StepWrite:
            if (error := values.error_in(event.payload)) is not None:
                return failed(settle, error)
            return settle(StepStatus.COMPLETED, result=_output(event), attempts=row.attempts)

        def late(settle: Settle) -> StepWrite:
            name = task_of(row.wait_event_type)
            text = f"Celery task {name!r} did not answer within {branch.policy.timeout}"
            return failed(settle, AnsweredError("StepTimeout", text))

        claim = self._at.lease.claim
        letter = task_id(row.wait_event_type, claim.pk, claim.ref.run_number)
        return Awaited(row.wait_event_type, timedelta(0), arrived, late, recall=letter)

    # --- child workflows ------------------------------------------------------------------------

    def child(self, branch: Branch, call: ChildCall, *, sole: bool) -> None:
        match self._at.ledger.decide_delegated(branch.entry.row, now=self._at.now):
            case Replay(row):
                branch.row = row
            case Await(row):
                self._waits.look(branch, _answer_of_child(row), sole=sole)
            case Run() | Wait():
                self._create(branch, call)

    def _create(self, branch: Branch, call: ChildCall) -> None:
        """Record the step and create the instance, in one commit of its own: it tells whether the id is free."""
        claim, settings = self._at.lease.claim, self._at.env.settings
        instance_id = call.instance_id
        if instance_id is None:  # of this run alone: a retried step's earlier child, or a namesake's, is still there
            instance_id = task_id(f"{_OWN_CHILD}{branch.key}", claim.pk, claim.ref.run_number)
        timeout = settings.max_sleep if call.timeout is None else values.duration(call.timeout)
        write = self._at.write(
            branch,
            StepStatus.WAITING,
            attempts=1,
            wake_in=self._waits.span(branch, timeout, "event"),
            event_type=child_type(call.definition.name, instance_id, branch.entry.seq),
        )
        new = NewInstance(call.definition, instance_id, call.params, call.labels)
        said = list(self._at.logs)
        boundary = Boundary([write], self._at.take_logs(), instances=[new])
        try:
            committed = self._at.guarded(lambda: self._at.committer.commit(boundary))
        except AuthorWriteFailed as exc:
            self._at.logs[:0] = said
            error = values.storable_error(type(exc.error).__name__, str(exc.error))
            self._at.commit(branch, self._at.write(branch, StepStatus.ERRORED, error=error, attempts=1))
        else:
            self._at.committed(branch, committed)


def _answer_of_child(row: StepRow) -> Awaited:
    assert row.wait_event_type is not None

    def arrived(event: Arrived, settle: Settle) -> StepWrite:
        if (error := values.error_in(event.payload)) is not None:
            return settle(StepStatus.ERRORED, error=(error.name, error.message), attempts=1)
        return settle(StepStatus.COMPLETED, result=_output(event), attempts=1)

    def late(settle: Settle) -> StepWrite:
        workflow, instance_id = child_of(row.wait_event_type) or ("", "")
        text = f"Instance {instance_id!r} of workflow {workflow!r} did not end in time; it goes on"
        return settle(StepStatus.ERRORED, error=("StepTimeout", text), attempts=1)

    return Awaited(row.wait_event_type, timedelta(0), arrived, late)


def task_name(signature: Any) -> str:
    """What is sent, for people; whether it can be, `stored_task` says."""
    if isinstance(signature, Mapping):
        return str(signature.get("task"))
    return signature if isinstance(signature, str) else str(getattr(signature, "name", signature))


def _output(event: Arrived) -> str:
    """As it was checked when it was taken, or when the child ended."""
    return values.encode(values.output_in(event.payload), what="Answer", limits=values.CHECKED)
