"""What authors of workflows hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

P_co = TypeVar("P_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

OnLost = Literal["resend", "fail", "wait"]
"""What becomes of a task that is lost with its worker or queue: sent again, ended as TaskLost, left to its timeout."""


@dataclass(frozen=True, slots=True)
class WorkflowEvent(Generic[P_co]):
    """What a workflow is called with.

    ``timestamp`` is when the instance was created: the same on every pass and in every run.
    """

    payload: P_co
    timestamp: datetime
    instance_id: str
    run_number: int


@dataclass(frozen=True, slots=True)
class ReceivedEvent(Generic[T_co]):
    """What `wait_for_event` returns; ``timestamp`` is when the event was accepted."""

    type: str
    payload: T_co
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class OutboundEvent:
    """What a handler of outbound events is called with.

    ``id`` is the same for every delivery of this event, ``attempt`` counts them from 1. ``workflow``, ``instance_id``
    and ``run_number`` say who sent it.
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
    """One item of `create_batch`."""

    id: str
    params: P_co | None = None
    labels: Mapping[str, str] | None = None
