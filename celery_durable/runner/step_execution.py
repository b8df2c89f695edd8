"""The execution of one step call, or branch (`Step.submit`), and races of several."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from celery_durable.definitions import StepFunction
from celery_durable.errors import (
    EventPayloadInvalid,
    EventTimeout,
    Interruption,
    StepFailed,
    StepLost,
    StepMaxAttemptsExceeded,
    StepResultInvalid,
    StepTimeout,
)
from celery_durable.model import OUTCOME_UNKNOWN, OpenWait, StepRow
from celery_durable.replay_state import StepEntry
from celery_durable.values import Codec, StepPolicy, ValidationFailed


class StepExecution:
    """One step call in this pass, of a ``kind``.

    ``finished_row``: the step's row, once the step has finished. ``wait``: what it waits for, unless the pass has a
    `pending_suspension` for it. ``cause``: the exception of the body. ``decoded``: a tuple of the result until the
    workflow function receives it; often empty.
    """

    __slots__ = ("call", "cause", "decoded", "entry", "finished_row", "fn", "key", "kind", "name", "policy", "wait")

    def __init__(self, kind: Any, call: Any, entry: StepEntry, policy: StepPolicy, fn: StepFunction | None) -> None:
        self.kind, self.call, self.entry, self.policy, self.fn = kind, call, entry, policy, fn
        self.key, self.name = entry.key, entry.name
        row = entry.row
        self.finished_row: StepRow | None = row if row is not None and row.is_finished else None
        self.cause: BaseException | None = None
        self.decoded: tuple[Any, ...] = ()
        self.wait: OpenWait | None = None


class OtherSteps(enum.Enum):
    """What the other steps do that the workflow function waits for at the same time."""

    NONE = enum.auto()
    """There are none. So the commit that records a wait or a retry may also suspend the instance."""
    FINISHED = enum.auto()
    """They have finished. So a crash was caused by this step."""
    OPEN = enum.auto()


class PassInterrupted(Interruption):
    """The process is stopping, because of ``error`` (SystemExit, for example), which fails no step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(repr(error))


class RaceWon(Interruption):
    """Stops the other branches of a race. It never leaves the pass."""


@dataclass(frozen=True, slots=True)
class Race:
    """A call of `Step.first` that has no winner yet. ``entry``: the step that records the winner's key."""

    entry: StepEntry
    branches: list[StepExecution]


def decode_result(step: str, codec: Codec, text: str) -> Any:
    """Decode the recorded JSON as the type that the code declares; raises StepResultInvalid."""
    try:
        return codec.decode(text)
    except ValidationFailed as exc:
        raise StepResultInvalid(step, exc.problems) from exc


_FAILURES: dict[str, type[StepFailed]] = {
    error_class.__name__: error_class
    for error_class in (StepTimeout, StepMaxAttemptsExceeded, EventTimeout, EventPayloadInvalid)
} | {OUTCOME_UNKNOWN: StepLost}


def build_failure(step: str, error_name: str | None, error_message: str | None, attempts: int) -> StepFailed:
    """Build the exception of a failed step, of the class that its recorded error names."""
    error_class = _FAILURES.get(error_name or "", StepFailed)
    return error_class(step, error_name or "", error_message or "", attempts)
