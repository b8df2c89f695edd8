"""How the items of a map are sent: as Celery tasks through the outbox, or as new child instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Definition
from celery_durable.errors import InstanceAlreadyExists
from celery_durable.model import (
    AttemptOutcome,
    AttemptWrite,
    DueRun,
    FailedItem,
    OutboxMessage,
    Parent,
    RetryDecision,
    RunPlan,
    RunRef,
    TaskSendingStep,
)
from celery_durable.store.engine import Tx
from celery_durable.store.instances import batches, instances
from celery_durable.store.instances.batches import NewInstance
from celery_durable.store.runs import attempts, items, outbox
from celery_durable.store.runs.items import SentItem


@dataclass(frozen=True, slots=True)
class SentWork:
    """What was sent. After the commit the caller sends the messages and publishes the children, which are due."""

    messages: Sequence[OutboxMessage] = ()
    children: Sequence[DueRun] = ()


NOTHING_SENT = SentWork()


class ItemSender(Protocol):
    """Sends items in the transaction that has marked them as sent."""

    def send(self, tx: Tx, step: TaskSendingStep, sent: Sequence[SentItem], *, grace: timedelta) -> SentWork: ...


class TaskSender:
    """Sends each item as a Celery task."""

    def send(self, tx: Tx, step: TaskSendingStep, sent: Sequence[SentItem], *, grace: timedelta) -> SentWork:
        messages = [
            values.build_replying_task_message(each.body, id_=each.id, reference=each.reference) for each in sent
        ]
        outbox.insert(tx, messages, pk=step.pk, run_number=step.run_number, step_key=step.step_key, grace=grace)
        return SentWork(messages=messages)


TASKS = TaskSender()


@dataclass(frozen=True, slots=True)
class ChildSender:
    """Creates an instance of a workflow for each item."""

    workflow: str
    queue: str
    plan: RunPlan
    retention: timedelta | None

    @classmethod
    def of(cls, definition: Definition, settings: Settings) -> ChildSender:
        """Return the sender for a workflow as the code at hand defines it."""
        queue, plan = definition.queue or settings.queue, definition.plan(settings.step_policy)
        return cls(definition.name, queue, plan, settings.retention_of(definition.retention))

    def send(self, tx: Tx, step: TaskSendingStep, sent: Sequence[SentItem], *, grace: timedelta) -> SentWork:
        new = []
        for each in sent:
            parent = Parent(step.pk, step.run_number, step.step_key, each.item)
            new.append(NewInstance(each.id, values.read_map_child(each.body), parent=parent))
        created = batches.insert(
            tx,
            self.workflow,
            new,
            queue=self.queue,
            grace=grace,
            commit_id=tx.store.runtime.new_token(),
            plan=self.plan,
            retention=self.retention,
        )
        if len(created) < len(sent):
            self._fail(tx, step, [each for each in sent if each.id not in created])
        due_runs = [DueRun(RunRef(self.workflow, each.id, 1), self.queue) for each in sent if each.id in created]
        return SentWork(children=due_runs)

    def _fail(self, tx: Tx, step: TaskSendingStep, taken: Sequence[SentItem]) -> None:
        """Fail items whose id another instance has: ids are derived, so a caller may have guessed one."""
        for each in taken:
            item, error = each.item, values.describe_error(InstanceAlreadyExists(self.workflow, each.id))
            failed = FailedItem(item.position, item.attempt, None)
            items.apply_decisions(tx, step, [RetryDecision(failed, values.encode_error_answer(*error), None)])
            write = AttemptWrite(step.step_key, item.attempt, AttemptOutcome.FAILED, *error, item=item.position)
            attempts.insert(tx, step.pk, step.run_number, [write], now=instances.read_clock(tx))
