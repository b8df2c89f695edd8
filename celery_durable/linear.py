"""What the handlers of linear workflows receive and return: a context and an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from celery_durable.model import ReceivedEvent
from celery_durable.step import StepLog, StepTx
from celery_durable.values import Duration


class TaskType(StrEnum):
    """Why a handler is called."""

    RUN = "RUN"  # the step runs for the first time, or again after a failed attempt
    EVENT = "EVENT"  # the event that the step waited for has arrived
    WAITING_TIMEOUT = "WAITING_TIMEOUT"  # no event arrived in time


@dataclass(frozen=True, slots=True)
class LinearContext:
    """The argument of a handler.

    Attributes:
        task_type: Why the handler is called.
        step: The name of the step.
        seq: The position of the step in the workflow.
        attempt: The number of the attempt, from 1. An event does not reset it.
        params: The parameters of the run.
        results: The results of the earlier steps, by name.
        event: The event that arrived, if ``task_type`` is EVENT; otherwise None.
        version: The workflow's version when the run started.
        tx: Its writes, tasks and events are committed with Completed and Waiting, and dropped with Retry and Dead.
            Writes of `StepTx.on_terminal_error` are committed with Dead.
        log: The durable log of the run, a `StepLog`.
        publish: ``publish(key, value)`` publishes a value, like `Step.publish`.
    """

    task_type: TaskType
    step: str
    seq: int
    attempt: int
    params: Any
    results: Mapping[str, Any]
    event: ReceivedEvent[Any] | None
    workflow: str
    instance_id: str
    run_number: int
    version: int
    tx: StepTx
    log: StepLog
    publish: Callable[[str, Any], None]


# --- outcomes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completed:
    """The step is done, and the next one runs. After the last step, the instance completes with ``result``."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Call the handler again when an event of this type arrives, or after ``timeout``, which is at least 1 second.

    ``outbound_events``: (name, payload) pairs for the handlers of `Durable.outbound`, sent after the commit.

    ``ask``, ``to`` and ``schema``: as in `Step.wait_for_event`. A step can get one answer in a run. The payload of its
    event is plain JSON data.
    """

    event_type: str
    timeout: Duration = "24 hours"
    outbound_events: Sequence[tuple[str, Any]] = ()
    ask: str | Mapping[str, Any] | None = None
    to: str | None = None
    schema: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """Call the handler again after ``backoff``, as another attempt. If no attempt is left, the instance fails.

    ``backoff``: None is the delay of the step's retry policy.
    """

    backoff: Duration | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Dead:
    """The step cannot succeed: the instance fails with ``error``."""

    error: str = ""


Outcome = Completed | Waiting | Retry | Dead
