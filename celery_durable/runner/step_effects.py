"""The instances, events and emissions that a step creates, written in the transaction that records the step.

Their values are encoded before that transaction: a model's validators and serializers are user code, which must not run
while the instance is locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from celery_durable import notify, values
from celery_durable.config import Settings
from celery_durable.errors import (
    DurableError,
    InstanceAlreadyExists,
    InstanceNotFound,
    InstanceTerminal,
    WorkflowParamsInvalid,
)
from celery_durable.model import Claim, DueRun, Parent, RunRef, WakeReason
from celery_durable.runtime import Runtime
from celery_durable.step import NewEmission, NewEvent, NewInstance
from celery_durable.store.engine import Tx
from celery_durable.store.events import emissions, run_events
from celery_durable.store.instances import instances, lifecycle


class StepEffectFailed(Exception):
    """An effect or a write of user code in a step's commit failed with ``error``. Nothing was committed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(values.get_error_text(error))


def find_event_targets(
    tx: Tx, events: Sequence[NewEvent], *, new_instances: Sequence[NewInstance]
) -> list[tuple[int, str, str]]:
    """Find the instances that receive events: (database id, workflow, instance id), by ascending database id.

    The caller locks them in this order. The result excludes ``new_instances``, which the same transaction creates: no
    other transaction can lock them. Raises StepEffectFailed if an instance does not exist.
    """
    created = {(each.definition.name, each.instance_id) for each in new_instances}
    found = set()
    for event in events:
        try:
            values.check_instance_id(event.instance_id, values.MAX_ID_LENGTH)
            values.check_text_name("Event id", event.event_id, values.MAX_ID_LENGTH)
        except DurableError as exc:
            raise StepEffectFailed(exc) from exc
        pk = instances.find_pk(tx, event.workflow, event.instance_id)
        if pk is not None:
            found.add((pk, event.workflow, event.instance_id))
        elif (event.workflow, event.instance_id) not in created:
            raise StepEffectFailed(InstanceNotFound(event.workflow, event.instance_id))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class EncodedEffects:
    """The effects of a step, each with the JSON text of its parameters or its payload."""

    instances: Sequence[tuple[NewInstance, str]] = ()
    events: Sequence[tuple[NewEvent, str]] = ()
    emissions: Sequence[tuple[NewEmission, str]] = ()


class StepEffects:
    """Writes the effects of a step under one claim. The methods that write raise StepEffectFailed."""

    def __init__(self, settings: Settings, runtime: Runtime, claim: Claim) -> None:
        self._settings, self._runtime, self._claim = settings, runtime, claim
        self._grace = timedelta(seconds=settings.grace_seconds)
        """How long a sweep leaves a new due run to this process, which publishes it after the commit."""

    def encode(
        self, instances: Sequence[NewInstance], events: Sequence[NewEvent], emissions: Sequence[NewEmission]
    ) -> EncodedEffects:
        """Check and encode the values of effects. Call it before the transaction: it calls user code.

        Raises what is wrong with a value, and whatever a validator or a serializer raises.
        """
        return EncodedEffects(
            [(each, self._encode_params(each)) for each in instances],
            [(each, self._encode_event(each)) for each in events],
            [(each, self._encode_emission(each)) for each in emissions],
        )

    def _encode_params(self, request: NewInstance) -> str:
        definition = request.definition
        try:
            checked = definition.params.check(request.params)
        except values.ValidationFailed as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems, item=request.instance_id) from exc
        values.check_instance_id(request.instance_id, self._settings.max_instance_id)
        what = f"Parameters of workflow {definition.name!r}"
        return definition.params.encode(checked, what=what, limits=self._settings.limits)

    def _encode_event(self, event: NewEvent) -> str:
        values.check_event_type(event.type, self._settings.max_event_type)
        return values.encode(event.payload, what=f"Payload of event {event.type!r}", limits=self._settings.limits)

    def _encode_emission(self, request: NewEmission) -> str:
        values.check_topic(request.topic)
        what = f"Payload for topic {request.topic!r}"
        return values.encode(request.payload, what=what, limits=self._settings.limits)

    def create(self, tx: Tx, requests: Sequence[tuple[NewInstance, str]], *, by_step: str) -> list[DueRun]:
        """Create instances, and return them as due runs: they start after the commit."""
        due_runs = []
        for request, params in requests:
            definition, instance_id = request.definition, request.instance_id
            queue = definition.queue or self._settings.queue
            is_new = instances.insert(
                tx,
                workflow=definition.name,
                instance_id=instance_id,
                params=params,
                queue=queue,
                grace=self._grace,
                plan=definition.plan(self._settings.step_policy),
                commit_id=self._runtime.new_token(),
                parent=Parent(self._claim.pk, self._claim.ref.run_number, by_step),
                retention=self._settings.retention_of(definition.retention),
                initial_labels=request.labels,
            )
            if not is_new:
                raise StepEffectFailed(InstanceAlreadyExists(definition.name, instance_id))
            due_runs.append(DueRun(RunRef(definition.name, instance_id, 1), queue))
        return due_runs

    def send(
        self, tx: Tx, events: Sequence[tuple[NewEvent, str]], received: list[notify.AcceptedEvent]
    ) -> list[DueRun]:
        """Insert events; returns the runs that they wake. Appends the accepted events to ``received``."""
        due_runs = []
        for event, payload in events:
            try:
                row = instances.lock(tx, event.workflow, event.instance_id)
            except InstanceNotFound as exc:  # deleted after it was found
                raise StepEffectFailed(exc) from exc
            if row.status.is_terminal:
                raise StepEffectFailed(
                    InstanceTerminal(event.workflow, event.instance_id, row.status, "send an event to")
                )
            sent = run_events.insert_event(tx, row, type_=event.type, payload=payload, event_id=event.event_id)
            if sent is None:
                continue
            received.append(notify.AcceptedEvent(row.ref, event.type, event.event_id))
            if run_events.is_awaited(tx, row, event.type):
                due_runs.append(lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=self._grace))
        return due_runs

    def emit(self, tx: Tx, requests: Sequence[tuple[NewEmission, str]]) -> None:
        """Insert emissions. The next sweep delivers them."""
        for request, payload in requests:
            topic, id_ = request.topic, request.emission_id
            emissions.begin(tx, emission_id=id_, topic=topic, payload=payload, lease=timedelta(0))
