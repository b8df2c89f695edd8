"""Linear workflows: a list of steps, each with a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery_durable.definitions.definition import Definition, parse_optional_duration
from celery_durable.definitions.steps import build_resolved_codec
from celery_durable.errors import DefinitionInvalid
from celery_durable.model import PlannedStep, RunPlan, WorkflowKind
from celery_durable.values import (
    UNSET,
    Backoff,
    Codec,
    CompletionHooks,
    DelayFunction,
    Duration,
    OnLostStep,
    Retries,
    StepConfig,
    StepPolicy,
    check_identifier,
    check_text_name,
)


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A step of a linear workflow. Its handler is found by ``name``.

    ``max_attempts``: in total; 1 for no retry, None for no limit. ``delay``, ``backoff``, ``max_delay`` and ``jitter``:
    how soon it is retried after an exception, as in `Retries`. ``timeout``: of each attempt, None for none.
    ``on_lost``: as in `StepConfig`. Values that you leave out come from the app's ``durable_step_defaults``.
    """

    name: str
    max_attempts: int | None = UNSET
    delay: Duration | DelayFunction = UNSET
    backoff: Backoff = UNSET
    max_delay: Duration | None = UNSET
    timeout: Duration | None = UNSET
    jitter: float = UNSET
    on_lost: OnLostStep = UNSET

    def __post_init__(self) -> None:
        check_text_name("Step name", self.name, 256)
        max_attempts: Any = self.max_attempts
        if (
            max_attempts is not UNSET
            and max_attempts is not None
            and (isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1)
        ):
            raise DefinitionInvalid(f"max_attempts={max_attempts!r} of step {self.name!r} must be at least 1, or None.")
        _ = self.config

    @property
    def config(self) -> StepConfig:
        """These values as a StepConfig."""
        max_attempts = self.max_attempts
        limit = max_attempts - 1 if isinstance(max_attempts, int) else max_attempts
        retries = Retries(limit, self.delay, self.backoff, self.max_delay, self.jitter)
        return StepConfig(retries=retries, timeout=self.timeout, on_lost=self.on_lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDefinition(Definition):
    """A workflow that is a list of steps, each with a handler. A run that has started follows only its own rows."""

    module: str
    version: int
    steps: tuple[LinearStep, ...]
    handlers: dict[str, Callable[..., Any]]
    kind = WorkflowKind.LINEAR

    @property
    def source_location(self) -> str:
        return f"{self.module}:{self.name}"

    def plan(self, policy: StepPolicy) -> RunPlan:
        policies = [policy.override_with(step.config) for step in self.steps]
        planned = (PlannedStep(s.name, p.max_attempts, p.timeout) for s, p in zip(self.steps, policies, strict=True))
        return RunPlan(WorkflowKind.LINEAR, tuple(planned), self.version)

    def policy_of(self, step: str, policy: StepPolicy) -> StepPolicy:
        """The policy of a step. A recorded step that is no longer in the list has the default, ``policy``."""
        return next((policy.override_with(each.config) for each in self.steps if each.name == step), policy)


def define_linear(
    name: str,
    *,
    module: str,
    version: int,
    steps: Sequence[LinearStep],
    queue: str | None = None,
    params: Any = None,
    retention: Duration | None = UNSET,
    on_complete: Any = None,
    on_failure: Any = None,
) -> LinearDefinition:
    """Check a linear workflow and return its definition, still without handlers; raises DefinitionInvalid."""
    check_identifier("Workflow name", name, 255)
    number: Any = version
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**31:
        raise DefinitionInvalid(f"version={version!r} of linear workflow {name!r} must be a whole number from 1.")
    if not steps:
        raise DefinitionInvalid(
            f"Linear workflow {name!r} has no steps: nothing would ever happen. Give it at least one."
        )
    names = [step.name for step in steps]
    if duplicates := [each for each in dict.fromkeys(names) if names.count(each) > 1]:
        raise DefinitionInvalid(
            f"Linear workflow {name!r} has step {duplicates[0]!r} twice. A step's name finds its handler and its "
            "result: give the second another name; two names may have the same handler."
        )
    return LinearDefinition(
        name=name,
        module=module,
        version=version,
        steps=tuple(steps),
        handlers={},
        queue=None if queue is None else check_text_name("Queue", queue, 255),
        params=build_resolved_codec(params, f"The parameter type of linear workflow {name!r}"),
        output=Codec(),
        retention=retention if retention is UNSET else parse_optional_duration(retention),
        hooks=CompletionHooks.read(f"linear workflow {name!r}", on_complete=on_complete, on_failure=on_failure),
    )
