"""`StepTx`: lets a step's function add writes and messages to the transaction that records the step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import ValueRefused
from celery_durable.model import OutboxMessage
from celery_durable.step.remote_calls import HasDefinition, require_definition
from celery_durable.store.engine.sessions import StepTransaction, UserWrite
from celery_durable.values import PayloadLimits, build_event_message, build_task_message, refuse_async

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True)
class NewInstance:
    """A call of `StepTx.create`. The instance is created in the transaction that records the step."""

    definition: Definition
    instance_id: str
    params: Any
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """A call of `StepTx.send_event`. The event is sent in the transaction that records the step."""

    workflow: str
    instance_id: str
    type: str
    payload: Any
    event_id: str


@dataclass(frozen=True, slots=True)
class NewEmission:
    """A call of `StepTx.emit`. The emission is stored in the transaction that records the step."""

    topic: str
    payload: Any
    emission_id: str


@dataclass(slots=True)
class TxBuffer:
    """The effects that a step's function requested. The commit that records the step applies them."""

    user_writes: list[UserWrite] = field(default_factory=list)
    on_terminal_error: list[UserWrite] = field(default_factory=list)
    instances: list[NewInstance] = field(default_factory=list)
    events: list[NewEvent] = field(default_factory=list)
    emissions: list[NewEmission] = field(default_factory=list)
    messages: list[OutboxMessage] = field(default_factory=list)
    labels: dict[str, str | None] = field(default_factory=dict)
    transaction: StepTransaction | None = None


class StepTx:
    """The transaction that records a step. Passed to a step's function whose first parameter is annotated with it.

    Requested effects happen if and when the step is recorded as completed. A failed attempt discards them.

    Attributes:
        name: The step's name.
        attempt: The number of this attempt, from 1.
        idempotency_key: A UUID as text, the same in every attempt of this step. Pass it to other systems.
    """

    __durable_tx__ = True

    def __init__(
        self,
        *,
        name: str,
        attempt: int,
        idempotency_key: str,
        buffer: TxBuffer,
        open_transaction: Callable[[str], StepTransaction],
        limits: PayloadLimits,
    ) -> None:
        self.name, self.attempt, self.idempotency_key = name, attempt, idempotency_key
        self._buffer, self._open_transaction, self._limits = buffer, open_transaction, limits

    @property
    def session(self) -> Session:
        """An SQLAlchemy session in the step's own transaction. Its writes are committed with the step, or not at all.

        The transaction begins on first access and its locks are held until the step ends, so access it late. commit,
        rollback and close raise StepTxMisuse; begin_nested is allowed.
        """
        transaction = self._buffer.transaction or self._open_transaction(self.name)
        return transaction.session

    def mutate(self, fn: Callable[[Session], object]) -> None:
        """Call a function with a session when the step commits.

        Args:
            fn: Called as ``fn(session)`` in the transaction that records the successful attempt. It may be called more
                than once, if the transaction is repeated; only one of them commits.

        Raises:
            ValueRefused: ``fn`` is no function.
            AsyncNotSupported: ``fn`` is a coroutine function.
        """
        self._buffer.user_writes.append(UserWrite(self.name, _require_function("mutate", fn)))

    def on_terminal_error(self, fn: Callable[[Session], object]) -> None:
        """Call a function with a session if the step fails for good.

        Args:
            fn: Called as ``fn(session)`` in the transaction that records the failure; it may be called more than once.

        Raises:
            ValueRefused: ``fn`` is no function.
            AsyncNotSupported: ``fn`` is a coroutine function.
        """
        self._buffer.on_terminal_error.append(UserWrite(self.name, _require_function("on_terminal_error", fn)))

    def create(
        self,
        workflow: HasDefinition,
        params: Any = None,
        *,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Create an instance of another workflow when the step commits.

        Args:
            workflow: The `Workflow`.
            params: As in `Workflow.create`.
            id: The new instance's id. None: one derived from this step, the same in every attempt.
            labels: As in `Workflow.create`.

        Returns:
            The id.

        Raises:
            DefinitionInvalid: ``workflow`` is not a workflow.
            InvalidLabel: A label breaks the rules.
            TooManyLabels: There are more than 16 labels.
        """
        definition = require_definition("tx.create()", workflow)
        instance_id = f"{self.idempotency_key}-{len(self._buffer.instances)}" if id is None else id
        self._buffer.instances.append(NewInstance(definition, instance_id, params, values.check_labels(labels)))
        return instance_id

    def set_labels(self, labels: Mapping[str, str | None]) -> None:
        """Change labels of this instance when the step commits. The step fails if the instance would have more than 16.

        Args:
            labels: The labels to set. None removes one; labels that are not named stay.

        Raises:
            InvalidLabel: A label breaks the rules.
        """
        self._buffer.labels.update(values.check_label_changes(labels))

    def send_event(
        self,
        workflow: HasDefinition,
        instance_id: str,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
    ) -> None:
        """Send an event to an instance when the step commits, exactly once.

        Args:
            workflow: The instance's `Workflow`.
            instance_id: The instance's id.
            event_type: As in `WorkflowInstance.send_event`.
            payload: As in `WorkflowInstance.send_event`.
            id: The event's id. None: one derived from this step, the same in every attempt.

        Raises:
            DefinitionInvalid: ``workflow`` is not a workflow.
        """
        definition = require_definition("tx.send_event()", workflow)
        event_id = f"{self.idempotency_key}-{len(self._buffer.events)}" if id is None else id
        self._buffer.events.append(NewEvent(definition.name, instance_id, event_type, payload, event_id))

    def emit(self, topic: str, payload: Any = None) -> None:
        """Emit to a topic when the step commits, exactly once. Every instance that waits for the topic then gets it.

        Args:
            topic: As in `Step.wait_for_topic`.
            payload: JSON data of up to 1 MiB.
        """
        emission_id = f"{self.idempotency_key}-{len(self._buffer.emissions)}"
        self._buffer.emissions.append(NewEmission(topic, payload, emission_id))

    def send_task(self, task: Any, /, *args: Any, **kwargs: Any) -> str:
        """Send a Celery task after the step has committed, at least once.

        Written as ``send_task(mail.s(7).set(queue="mails"))``, ``send_task(mail, 7)`` or ``send_task("shop.mail", 7)``.

        Args:
            task: A signature, a task, or a task's name.
            args: The task's positional arguments, if ``task`` is no signature. They are stored as JSON at once.
            kwargs: Its keyword arguments.

        Returns:
            The task's id: derived from this step, so the task can recognize a repetition.

        Raises:
            TaskRefused: The task or an option of it cannot be sent by a step, for instance a countdown.
            NotSerializable: An argument has no JSON form.
            PayloadTooLarge: The arguments are larger than ``durable_max_payload_bytes``.
        """
        return self._send(build_task_message(task, args, kwargs, id_=self._next_id(), limits=self._limits))

    def send_outbound(self, name: str, payload: Any = None) -> str:
        """Call the handler of an outbound event after the step has committed, at least once.

        Args:
            name: The name of the event, as in `Durable.outbound`.
            payload: JSON data of up to 1 MiB.

        Returns:
            The event's id: derived from this step, so the handler can recognize a repetition.

        Raises:
            NotSerializable: The payload has no JSON form.
            PayloadTooLarge: The payload is larger than ``durable_max_payload_bytes``.
        """
        return self._send(build_event_message(name, payload, id_=self._next_id(), limits=self._limits))

    def _next_id(self) -> str:
        return str(uuid.uuid5(uuid.UUID(self.idempotency_key), str(len(self._buffer.messages))))

    def _send(self, message: OutboxMessage) -> str:
        self._buffer.messages.append(message)
        return message.id


def _require_function(method: str, fn: Callable[[Session], object]) -> Callable[[Session], object]:
    if not callable(fn):
        raise ValueRefused(f"tx.{method}() needs a function, and got {fn!r}: pass one that takes a session.")
    refuse_async(f"The function of tx.{method}()", fn)
    return fn
