"""The parts of a commit: what it does besides writing the rows of its steps. A new effect is a new part.

A commit may be tried several times. So what a try has done is in its `OpenCommit`. Values are encoded before the
transaction: a model's validators are user code, which must not run while the instance is locked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from celery_durable import notify, values
from celery_durable.config import Settings
from celery_durable.definitions import Definition
from celery_durable.errors import (
    DurableError,
    InstanceAlreadyExists,
    InstanceNotFound,
    InstanceTerminal,
    Superseded,
    TooManyLabels,
    WorkflowParamsInvalid,
)
from celery_durable.model import (
    Claim,
    DueRun,
    OutboxMessage,
    Parent,
    RunRef,
    StepRow,
    StepType,
    StepWrite,
    WakeReason,
)
from celery_durable.runner.environment import Environment
from celery_durable.runner.failed_attempts import FailedAttempt
from celery_durable.step import NewEmission, NewEvent, NewInstance
from celery_durable.store.engine import Tx
from celery_durable.store.engine.sessions import StepTransaction, UserWrite
from celery_durable.store.events import emissions, run_events
from celery_durable.store.instances import families, instances, lifecycle
from celery_durable.store.runs import attempts, holds, outbox
from celery_durable.store.runs.claims import GuardResult
from celery_durable.store.runs.limits import Served


class StepEffectFailed(Exception):
    """An effect or a write of user code in a step's commit failed with ``error``. Nothing was committed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(values.get_error_text(error))


class LockTarget(NamedTuple):
    """An instance whose row a commit locks. All row locks are taken by ascending ``pk``."""

    pk: int
    workflow: str
    instance_id: str

    def lock(self, tx: Tx) -> None:
        with suppress(InstanceNotFound):  # deleted after it was found; what writes to it finds that, too
            instances.lock(tx, self.workflow, self.instance_id)


@dataclass(slots=True)
class OpenCommit:
    """One try of a commit, after the guard. ``later_targets``: the instances to lock after the run's own."""

    tx: Tx
    env: Environment
    claim: Claim
    guard_result: GuardResult
    writes: Sequence[StepWrite] = ()
    later_targets: Sequence[LockTarget] = ()
    due_runs: list[DueRun] = field(default_factory=list)
    messages: list[OutboxMessage] = field(default_factory=list)
    failures: list[FailedAttempt] = field(default_factory=list)
    announcements: list[Callable[[], object]] = field(default_factory=list)

    @property
    def step_key(self) -> str | None:
        return self.writes[0].key if self.writes else None

    @property
    def grace(self) -> timedelta:
        """How long a sweep leaves new due runs and messages to this process, which publishes them after the commit."""
        return timedelta(seconds=self.env.settings.grace_seconds)

    def add_new_runs(self, new_runs: Sequence[DueRun]) -> None:
        """Add instances that this try has created, to publish them after the commit."""
        self.due_runs += new_runs
        self.announcements += [functools.partial(notify.send_workflow_created, due.ref) for due in new_runs]

    def send_messages(self, messages: Sequence[OutboxMessage], *, step_key: str | None) -> None:
        if not messages:
            return
        claim = self.claim
        pk, run_number = claim.pk, claim.ref.run_number
        outbox.insert(self.tx, messages, pk=pk, run_number=run_number, step_key=step_key, grace=self.grace)
        self.messages += messages


class RowKind:
    """What the rows of a kind of step mean for the commits of a run."""

    type: StepType
    has_own_rows = False
    """Whether its steps have rows in another table, which end with the run."""

    writes_beside = False
    """Whether `prepare_write` does anything. Then no lane writes its rows."""

    def prepare_write(self, commit: OpenCommit, write: StepWrite) -> None:
        """Write what depends on a row, before the row itself."""

    def end_with_run(self, commit: OpenCommit) -> None:
        """End the rows in another table of a run that ends."""

    def is_satisfied(self, tx: Tx, claim: Claim, row: StepRow) -> bool:
        """Whether what an open step waits for is there: an event, unless the kind has rows of its own for it."""
        assert row.wait_event_type is not None
        assert row.wake_at is not None
        event_type, key, deadline = row.wait_event_type, row.step_key, row.wake_at
        return run_events.find_oldest_event(tx, claim, event_type, key=key, deadline=deadline) is not None


class RowKinds(Protocol):
    """The kinds of steps, by the type of their rows."""

    def of_row(self, type_: StepType) -> RowKind:
        """Return what the rows of a type mean. A row of a type that is not known here is only a row."""
        ...


class CommitPart:
    """A part of a commit. The methods are called in this order; each raises StepEffectFailed if user code is wrong."""

    runs_user_code = False
    """Whether the part calls user code in the transaction, which may take any length of time."""

    def encode(self, settings: Settings) -> None:
        """Check and encode values, before the transaction. Raises whatever user code raises."""

    def write_user_rows(self, tx: Tx, env: Environment) -> None:
        """Write rows of the application, before any instance is locked."""

    def find_lock_targets(self, tx: Tx) -> Collection[LockTarget]:
        """Find the instances that the part changes besides the run's own."""
        del tx
        return ()

    def write(self, commit: OpenCommit) -> None:
        """Write, after the guard and the rows of the steps."""


@dataclass(eq=False)
class RunUserWrites(CommitPart):
    """Calls the functions of `tx.mutate`, in the transaction of the body if it has opened one."""

    writes: Sequence[UserWrite]
    transaction: StepTransaction | None = None
    runs_user_code = True

    def write_user_rows(self, tx: Tx, env: Environment) -> None:
        store = env.store
        try:
            if self.transaction is not None:
                self.transaction.run_writes(self.writes)
            else:
                store.step_transactions.run_writes(tx.conn, self.writes)
        except BaseException as exc:
            if store.is_transient(exc) or isinstance(exc, Superseded) or env.stops_process(exc):
                raise
            raise StepEffectFailed(exc) from exc


@dataclass(eq=False)
class FailedAttempts(CommitPart):
    failures: Sequence[FailedAttempt]

    def write(self, commit: OpenCommit) -> None:
        if not self.failures:
            return
        claim, writes = commit.claim, [failed.write for failed in self.failures]
        attempts.insert(commit.tx, claim.pk, claim.ref.run_number, writes, now=commit.guard_result.now)
        commit.failures += self.failures


@dataclass(eq=False)
class ChangeLabels(CommitPart):
    labels: Mapping[str, str | None]

    def write(self, commit: OpenCommit) -> None:
        try:
            instances.merge_labels(commit.tx, commit.claim.pk, self.labels)
        except TooManyLabels as exc:
            raise StepEffectFailed(exc) from exc


@dataclass(eq=False)
class SendMessages(CommitPart):
    """Sends tasks and outbound events, through the outbox."""

    messages: Sequence[OutboxMessage]

    def write(self, commit: OpenCommit) -> None:
        commit.send_messages(self.messages, step_key=commit.step_key)


@dataclass(eq=False)
class CreateInstances(CommitPart):
    """Creates instances, which start after the commit."""

    requests: Sequence[NewInstance]
    _params: Sequence[str] = ()

    def encode(self, settings: Settings) -> None:
        for each in self.requests:
            values.check_instance_id(each.instance_id, settings.max_instance_id)
        self._params = [
            encode_params(each.definition, each.params, settings, of=each.instance_id) for each in self.requests
        ]

    def write(self, commit: OpenCommit) -> None:
        settings, claim = commit.env.settings, commit.claim
        for request, params in zip(self.requests, self._params, strict=True):
            definition, instance_id = request.definition, request.instance_id
            queue = definition.queue or settings.queue
            is_new = instances.insert(
                commit.tx,
                workflow=definition.name,
                instance_id=instance_id,
                params=params,
                queue=queue,
                grace=commit.grace,
                plan=definition.plan(settings.step_policy),
                commit_id=commit.env.runtime.new_token(),
                parent=Parent(claim.pk, claim.ref.run_number, commit.step_key or ""),
                retention=settings.retention_of(definition.retention),
                initial_labels=request.labels,
            )
            if not is_new:
                raise StepEffectFailed(InstanceAlreadyExists(definition.name, instance_id))
            commit.add_new_runs([DueRun(RunRef(definition.name, instance_id, 1), queue)])


def encode_params(definition: Definition, params: Any, settings: Settings, *, of: str) -> str:
    """Check the parameters of a new instance and return them as JSON text. ``of``: names the instance in errors."""
    try:
        checked = definition.params.check(params)
    except values.ValidationFailed as exc:
        raise WorkflowParamsInvalid(definition.name, exc.problems, item=of) from exc
    return definition.params.encode(checked, what=f"Parameters of workflow {definition.name!r}", limits=settings.limits)


@dataclass(eq=False)
class EndChildren(CommitPart):
    """Ends the open children of the run by ``action``, after the commit: "terminate" or "cancel"."""

    action: str
    reason: str | None

    def write(self, commit: OpenCommit) -> None:
        claim, new_id = commit.claim, commit.env.runtime.new_id
        commit.messages += families.end_children(
            commit.tx, claim.pk, claim.ref, self.action, reason=self.reason, new_id=new_id, grace=commit.grace
        )


@dataclass(eq=False)
class SendEvents(CommitPart):
    """Sends events. Those to ``new_instances``, which the same commit creates, need no lock."""

    events: Sequence[NewEvent]
    new_instances: Sequence[NewInstance] = ()
    _payloads: Sequence[str] = ()

    def encode(self, settings: Settings) -> None:
        self._payloads = [self._encode_payload(each, settings) for each in self.events]

    @staticmethod
    def _encode_payload(event: NewEvent, settings: Settings) -> str:
        values.check_event_type(event.type, settings.max_event_type)
        return values.encode(event.payload, what=f"Payload of event {event.type!r}", limits=settings.limits)

    def find_lock_targets(self, tx: Tx) -> Collection[LockTarget]:
        """Find the instances that receive events; raises StepEffectFailed if one does not exist."""
        created = {(each.definition.name, each.instance_id) for each in self.new_instances}
        found = set()
        for event in self.events:
            try:
                values.check_instance_id(event.instance_id, values.MAX_ID_LENGTH)
                values.check_event_id(event.event_id)
            except DurableError as exc:
                raise StepEffectFailed(exc) from exc
            pk = instances.find_pk(tx, event.workflow, event.instance_id)
            if pk is not None:
                found.add(LockTarget(pk, event.workflow, event.instance_id))
            elif (event.workflow, event.instance_id) not in created:
                raise StepEffectFailed(InstanceNotFound(event.workflow, event.instance_id))
        return found

    def write(self, commit: OpenCommit) -> None:
        for target in commit.later_targets:  # only now, so that other instances are locked for a short time
            target.lock(commit.tx)
        for event, payload in zip(self.events, self._payloads, strict=True):
            self._send(commit, event, payload)

    @staticmethod
    def _send(commit: OpenCommit, event: NewEvent, payload: str) -> None:
        tx = commit.tx
        try:
            row = instances.lock(tx, event.workflow, event.instance_id)
        except InstanceNotFound as exc:  # deleted after it was found
            raise StepEffectFailed(exc) from exc
        if row.status.is_terminal:
            raise StepEffectFailed(InstanceTerminal(event.workflow, event.instance_id, row.status, "send an event to"))
        sent = run_events.insert_event(tx, row, type_=event.type, payload=payload, event_id=event.event_id)
        if sent is None:
            return
        accepted = notify.AcceptedEvent(row.ref, event.type, event.event_id)
        commit.announcements.append(functools.partial(notify.send_event_received, accepted))
        if run_events.is_awaited(tx, row, event.type):
            commit.due_runs.append(lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=commit.grace))


@dataclass(eq=False)
class EmitToTopics(CommitPart):
    """Emits to topics. The next sweep delivers the emissions."""

    requests: Sequence[NewEmission]
    _payloads: Sequence[str] = ()

    def encode(self, settings: Settings) -> None:
        self._payloads = [self._encode_payload(each, settings) for each in self.requests]

    @staticmethod
    def _encode_payload(request: NewEmission, settings: Settings) -> str:
        values.check_topic(request.topic)
        return values.encode(request.payload, what=f"Payload for topic {request.topic!r}", limits=settings.limits)

    def write(self, commit: OpenCommit) -> None:
        for request, payload in zip(self.requests, self._payloads, strict=True):
            topic, id_ = request.topic, request.emission_id
            emissions.begin(commit.tx, emission_id=id_, topic=topic, payload=payload, lease=timedelta(0))


@dataclass(eq=False)
class ServeLimits(CommitPart):
    """Serves, after the commit, the limits that it has freed, and wakes those that it has granted something."""

    served: Served

    def write(self, commit: OpenCommit) -> None:
        if self.served.granted or self.served.unfinished:
            commit.announcements.append(lambda: commit.env.limit_queue.serve_after_commit(self.served))


@dataclass(eq=False)
class ReleaseLimits(CommitPart):
    """Gives back the limits of steps, and their places in queues. ``step_keys`` None: of the run, which ends."""

    step_keys: Sequence[str] | None = None

    def write(self, commit: OpenCommit) -> None:
        pk, run_number = commit.claim.pk, commit.claim.ref.run_number
        owners = [(pk,)] if self.step_keys is None else [(pk, run_number, key) for key in self.step_keys]
        freed = {key for owner in owners for key in holds.release(commit.tx, *owner)}
        ServeLimits(Served(unfinished=freed)).write(commit)
