"""What the definitions of all workflows have in common: name, queue, types, limits and hooks."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

from celery_durable.model import RunPlan, WorkflowKind
from celery_durable.values import UNSET, Codec, CompletionHooks, Duration, StepPolicy, parse_duration

_MIN_DURATION = timedelta(seconds=1)
_MAX_DURATION = timedelta(days=36_500)
"""A time of the database plus this is a datetime, and an integer of microseconds that every database stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition(abc.ABC):
    """A workflow that is registered under a name. ``queue``: None for the app's.

    ``retention``: how long an ended instance is kept, None for forever, UNSET for the app's. ``max_run_duration``,
    ``max_suspend_duration``: None for no limit. ``hooks``: the tasks to send when a run has ended.
    """

    name: str
    queue: str | None
    params: Codec
    output: Codec
    retention: timedelta | None = UNSET
    max_run_duration: timedelta | None = None
    max_suspend_duration: timedelta | None = None
    hooks: CompletionHooks = field(default_factory=CompletionHooks)
    kind: ClassVar[WorkflowKind]

    @property
    def is_limited(self) -> bool:
        return self.max_run_duration is not None or self.max_suspend_duration is not None

    @property
    @abc.abstractmethod
    def source_location(self) -> str:
        """Where the code is defined, for people. It also tells two workflows of the same name apart."""

    @abc.abstractmethod
    def plan(self, policy: StepPolicy) -> RunPlan:
        """The rows with which its runs start; ``policy``: the app's default policy of a step."""


def parse_optional_duration(duration: Duration | None) -> timedelta | None:
    """Parse a duration of a second to a hundred years; None stays None. Raises DurationInvalid."""
    return None if duration is None else parse_duration(duration, minimum=_MIN_DURATION, maximum=_MAX_DURATION)
