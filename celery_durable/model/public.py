"""The data types that application code uses: workflow events, received events, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

P_co = TypeVar("P_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

OnLost = Literal["resend", "fail", "wait"]
"""What to do if a task is lost with its worker or queue: send it again, fail with TaskLost, or wait for its timeout."""
OnParentEnd = Literal["terminate", "continue"]
"""What becomes of a child if its parent is terminated: the child is terminated too, or continues."""
IfExists = Literal["error", "return", "postpone"]
"""What to do if an instance with the id exists: raise an error, return it, or postpone its start."""
IfRunning = Literal["skip", "queue"]
"""What to do if the last run of the instance with the id has not ended: nothing, or run it once more when it ends."""


@dataclass(frozen=True, slots=True)
class WorkflowEvent(Generic[P_co]):
    """The first parameter of a workflow's function.

    Attributes:
        payload: The parameters, converted to the type that the workflow declares.
        timestamp: When the instance was created; the same on every pass and in every run.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
    """

    payload: P_co
    timestamp: datetime
    instance_id: str
    run_number: int


@dataclass(frozen=True, slots=True)
class ReceivedEvent(Generic[T_co]):
    """What `Step.wait_for_event` and `Step.wait_for_topic` return.

    Attributes:
        type: The event's type, or the topic.
        payload: The payload, converted to the schema of the wait.
        timestamp: When the event was accepted.
        by: The name of the person who answered; None if the event is no answer.
    """

    type: str
    payload: T_co
    timestamp: datetime
    by: str | None = None


@dataclass(frozen=True, slots=True)
class OutboundEvent:
    """The argument of a handler for outbound events.

    Attributes:
        name: The event's name.
        payload: JSON data.
        id: The same in every delivery of this event.
        workflow: The name of the workflow that sent it.
        instance_id: The id of the instance that sent it.
        run_number: The number of the run that sent it, from 1.
        attempt: The number of the delivery, from 1.
    """

    name: str
    payload: Any
    id: str
    workflow: str
    instance_id: str
    run_number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CreateOptions(Generic[P_co]):
    """An item of `Workflow.create_batch`.

    Attributes:
        id: As in `Workflow.create`; None means a random id.
        params: As in `Workflow.create`.
        labels: As in `Workflow.create`.
    """

    id: str | None = None
    params: P_co | None = None
    labels: Mapping[str, str] | None = None
