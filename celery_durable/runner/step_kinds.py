"""The kinds of steps: what a call of each kind means, and what its rows mean for a commit.

Bodies, sleeps and waits are the core; `Runner` takes the others. What a pass knows is in its `ExecutionContext`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, TypeVar

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import StepFunction
from celery_durable.errors import DefinitionInvalid
from celery_durable.model import Claim, StepRow, StepType
from celery_durable.runner.commit_parts import RowKind
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.step_execution import OtherSteps, StepExecution
from celery_durable.step import StepCall
from celery_durable.store.engine import Tx
from celery_durable.values import Duration, StepPolicy

CallT = TypeVar("CallT", bound=StepCall)
_SHORTEST_WAIT = timedelta(seconds=1)
_TOLERANCE = timedelta(seconds=1)
"""Tolerance for comparing a wait's length, which is computed from two times of its row."""


class CallIdentity(NamedTuple):
    """What a call asks for. Two calls of one name in one pass must have equal ``work``."""

    name: str
    work: Any
    policy: StepPolicy
    fn: StepFunction | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between the code and the recorded run, and what to do about it or what happens next."""

    sentence: str
    advice: str


class StepKind(RowKind, abc.ABC, Generic[CallT]):
    """A kind of step. ``call_type``: the class of its calls."""

    call_type: type[CallT]
    has_attempts = False
    """Whether its rows record the policy: how many attempts, and how long each may take."""
    has_bodies = False
    """Whether it runs code of the workflow's author. The steps that only wait are advanced before it."""

    @abc.abstractmethod
    def identify(self, call: CallT, settings: Settings, policy: StepPolicy) -> CallIdentity:
        """Check a call's arguments. ``policy``: that of the workflow's steps."""

    def check_new(self, identity: CallIdentity, settings: Settings, get_now: Callable[[], datetime]) -> None:
        """Check a call that has no row yet. ``get_now`` returns a time that is the same in every pass."""

    @abc.abstractmethod
    def advance(self, context: ExecutionContext, executions: Sequence[StepExecution], other_steps: OtherSteps) -> None:
        """Advance steps of this kind, until each has finished or waits."""

    @abc.abstractmethod
    def decode(self, context: ExecutionContext, execution: StepExecution, row: StepRow) -> Any:
        """Return what the workflow function receives from a completed step."""

    def find_changes(
        self, execution: StepExecution, row: StepRow, settings: Settings
    ) -> Iterable[tuple[str, str, str]]:
        """Find what the code would record otherwise than the row of an open step has it: was, is, advice.

        The replay continues with the recorded values. The developer who changed the code may not expect that.
        """
        del execution, row, settings
        return ()


class StepKinds:
    def __init__(self, kinds: Sequence[StepKind[Any]]) -> None:
        self._by_call = {kind.call_type: kind for kind in kinds}
        self._by_type: dict[StepType, RowKind] = {kind.type: kind for kind in kinds}

    def of_call(self, call: StepCall) -> StepKind[Any]:
        """Return the kind of a call; raises DefinitionInvalid."""
        kind = self._by_call.get(type(call))
        if kind is None:
            raise DefinitionInvalid(f"This process knows no kind of step for {call!r}: register it with its package.")
        return kind

    def of_row(self, type_: StepType) -> RowKind:
        return self._by_type.get(type_, _PLAIN_ROW)

    def is_satisfied(self, tx: Tx, claim: Claim, row: StepRow) -> bool:
        return self.of_row(row.type).is_satisfied(tx, claim, row)


_PLAIN_ROW = RowKind()


# --- for kinds that wait ------------------------------------------------------------------------


def parse_timeout(timeout: Duration, settings: Settings) -> timedelta:
    """Parse how long a step waits: a second to ``durable_max_sleep_seconds``."""
    return values.parse_pause(timeout, minimum=_SHORTEST_WAIT, maximum=settings.max_sleep)


def compare_duration(row: StepRow, what: str, now: timedelta) -> Iterator[tuple[str, str, str]]:
    """Yield the change of a duration that the row records as a deadline."""
    if row.wake_at is None or row.created_at is None:
        return
    was = row.wake_at - row.created_at
    if abs(was - now) > _TOLERANCE:
        was = timedelta(seconds=round(was.total_seconds()))
        yield f"{what} {was}", f"{what} {now}", "The open step keeps its deadline."


def compare_timeout(execution: StepExecution, row: StepRow) -> Iterator[tuple[str, str, str]]:
    """Yield the change of a timeout that applies to each attempt."""
    if row.timeout != execution.policy.timeout:
        yield f"timeout {row.timeout}", f"timeout {execution.policy.timeout}", "The next attempt has the new timeout."
