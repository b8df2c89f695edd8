"""The end of a run: its last row, the message to its `on_complete` or `on_failure` task, the answer to its parent."""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_durable import notify, values
from celery_durable.config import Settings
from celery_durable.errors import Cancelled, Superseded
from celery_durable.model import OutboxMessage, RunOutcome, RunRef, Status
from celery_durable.runner.commit_parts import CommitPart, EndChildren, LockTarget, OpenCommit, RowKind, ServeLimits
from celery_durable.runner.environment import ClaimedRun
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.instances import instances, lifecycle, next_runs
from celery_durable.store.instances.item_senders import ChildSender
from celery_durable.store.instances.next_runs import NextRun
from celery_durable.store.runs import releases
from celery_durable.store.runs.limits import Served

logger = logging.getLogger("celery_durable.runner")

_NAMESPACE = uuid.UUID("0d9a0f0e-52a5-5d0b-8c36-7f0c1f2c6b1e")


@dataclass(eq=False)
class RunEnd(CommitPart):
    """Ends a run with ``outcome``. ``kinds``: the kinds of steps whose own rows may have to end with it."""

    run: ClaimedRun
    outcome: RunOutcome
    kinds: Collection[RowKind]
    _messages: Sequence[OutboxMessage] = ()

    def encode(self, settings: Settings) -> None:
        self._messages = self._build_messages(settings)

    def find_lock_targets(self, tx: Tx) -> Collection[LockTarget]:
        claim = self.run.lease.claim
        child = claim.ref.workflow, claim.ref.instance_id
        targets = [LockTarget(*found) for found in answers.find_waiting_parent(tx, claim.parent, child)]
        if self.outcome.status is Status.TERMINATED:
            # InnoDB locks the index entry by which a statement finds a row, then the row. Other transactions find
            # this row by its instance id, and the guard finds it by its primary key. Locking the id's entry after
            # the guard would deadlock with a transaction that holds the entry and waits for the row.
            targets.append(LockTarget(claim.pk, claim.ref.workflow, claim.ref.instance_id))
        return targets

    def write(self, commit: OpenCommit) -> None:
        tx, claim = commit.tx, commit.claim
        next_run = None
        if self.outcome.status is Status.TERMINATED:
            row = instances.lock(tx, claim.ref.workflow, claim.ref.instance_id)
            next_run = next_runs.take(tx, claim.pk)
            freed = lifecycle.terminate(tx, row, reason=self.outcome.reason)
            ServeLimits(Served(unfinished=freed)).write(commit)
            if not isinstance(self.outcome.exception, Cancelled):  # then its children were cancelled when it was
                EndChildren("terminate", self.outcome.reason).write(commit)
        else:
            if not releases.end_run(tx, claim, self.outcome):
                next_run = next_runs.take(tx, claim.pk)
                if not releases.end_run(tx, claim, self.outcome):
                    raise Superseded(str(claim.ref))
            for kind in self.kinds:
                kind.end_with_run(commit)
        commit.send_messages(self._messages, step_key=None)
        if claim.parent is not None:
            payload, event_id = values.encode_child_answer(claim.ref, self.outcome), commit.env.runtime.new_id()
            sender = ChildSender.of(self.run.definition, commit.env.settings)
            answer = answers.answer_parent(
                tx, claim.parent, claim.ref, payload=payload, event_id=event_id, grace=commit.grace, sender=sender
            )
            commit.due_runs += answer.due_runs
            commit.add_new_runs(answer.work.children)
        if next_run is not None:
            self._start(next_run, commit)

    def _start(self, next_run: NextRun, commit: OpenCommit) -> None:
        """Start the run that follows this one."""
        now, plan = commit.guard_result.now, self.run.definition.plan(commit.env.settings.step_policy)
        due = next_run.start(commit.tx, commit.claim, plan, now=now, grace=commit.grace)
        commit.due_runs += [] if due is None else [due]
        ref = replace(commit.claim.ref, run_number=commit.claim.ref.run_number + 1)
        commit.announcements.append(functools.partial(notify.send_workflow_restarted, ref, reason=None))

    # --- the message to a task of the workflow --------------------------------------------------

    def _build_messages(self, settings: Settings) -> list[OutboxMessage]:
        """Build the messages of the outcome: one if the workflow has a task for it. Its id is the same in each try."""
        ref = self.run.lease.claim.ref
        task = self.run.definition.hooks.of(is_complete=self.outcome.status is Status.COMPLETE)
        if task is None:
            return []
        try:
            name = task.name
        except Exception:  # Celery creates a lazy task here, which may fail; the run must end nevertheless
            logger.exception("Nothing is sent at the end of %s: its task has no name", ref)
            return []
        payload = _describe_end(ref, self.outcome)
        return [values.build_completion_message(name, payload, id_=self._message_id, limits=settings.limits)]

    @property
    def _message_id(self) -> str:
        # Includes the database id, since an instance may be created again under the id of a deleted one.
        claim = self.run.lease.claim
        ref = claim.ref
        return str(uuid.uuid5(_NAMESPACE, f"{ref.workflow}/{ref.instance_id}/{ref.run_number}/{claim.pk}"))


def _describe_end(ref: RunRef, run_outcome: RunOutcome) -> dict[str, Any]:
    error = None
    if run_outcome.error_name is not None:
        error = {"name": run_outcome.error_name, "message": run_outcome.error_message}
    return {
        "workflow": ref.workflow,
        "instanceId": ref.instance_id,
        "runNumber": ref.run_number,
        "status": run_outcome.status.value,
        "output": None if run_outcome.output is None else json.loads(run_outcome.output),
        "error": error,
        "reason": run_outcome.reason,
    }
