"""`DurableHarness.mocks`: what replaces the function of a step, shortens its wait, or sends its event.

A mocked result is encoded, checked, committed and replayed as if the function had returned it. A forced timeout is a
failed attempt with its retries. A mocked event is really sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable.app import Durable
from celery_durable.errors import StepInterrupted
from celery_durable.model import InstanceSummary, Status, StepRecord
from celery_durable.runtime import Purpose
from celery_durable.testing.cooperative import Barrier
from celery_durable.testing.errors import HarnessMisuse

_BEFORE_EVERY_EVENT = timedelta(days=-3650)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a step, with its own function or a mock. ``number`` counts from 1."""

    workflow: str
    instance_id: str
    step: str
    number: int


class Mock:
    """Replaces something of a step. ``calls`` counts how often it was used: 0 if no step has the name."""

    def __init__(self, step: str, *, times: int | None, workflow: str | None, act: Callable[..., Any]) -> None:
        if times is not None and times < 1:
            raise HarnessMisuse(f"times={times} for step {step!r}: use a number from 1, or None for always.")
        self.step, self.times, self.workflow = step, times, workflow
        self.calls = 0
        self._act = act

    def __repr__(self) -> str:
        return f"<Mock of step {self.step!r}, used {self.calls} times>"

    def serves(self, workflow: str, step: str) -> bool:
        """Whether it replaces this step now."""
        return (
            self.step == step and self.workflow in (None, workflow) and (self.times is None or self.calls < self.times)
        )

    def use(self, *given: Any, **more: Any) -> Any:
        """Count the call and act."""
        self.calls += 1
        return self._act(*given, **more)


class Mocks:
    """The mocks of a harness. Of several for one step, the oldest serves first, until its ``times`` are used up.

    In all methods ``step`` is a step's name, for all its occurrences if it has ``repeat=True``. ``times`` is the number
    of attempts to serve, None for all. ``workflow`` limits the mock to one workflow.
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        """Every attempt so far, in order."""
        self.barriers: list[Barrier] = []
        self.events: list[Mock] = []
        self.topics: list[Mock] = []
        self._functions: list[Mock] = []
        self._tasks: list[Mock] = []
        self._waits: list[tuple[Purpose, frozenset[str] | None, timedelta, str | None]] = []
        self._reached: set[str] = set()

    # --- functions and tasks of steps -----------------------------------------------------------

    def mock_step_result(self, step: str, value: Any, *, times: int | None = None, workflow: str | None = None) -> Mock:
        """Make a step return ``value`` without calling its function; None, 0 and "" are values like all others.

        If Celery tasks do the step, each task answers with ``value``. A task whose step has no mock never answers.
        """
        return self.add(Mock(step, times=times, workflow=workflow, act=lambda *_: value))

    def mock_task(
        self, step: str, fn: Callable[..., Any], *, times: int | None = None, workflow: str | None = None
    ) -> Mock:
        """Call ``fn`` in place of the Celery task of a step, or of each item of a map, with the task's arguments.

        What ``fn`` raises is the task's error. The task's own function is ``task.run``.
        """
        mock = Mock(step, times=times, workflow=workflow, act=fn)
        self._tasks.append(mock)
        return mock

    def mock_step_error(
        self,
        step: str,
        error: BaseException | type[BaseException],
        *,
        times: int | None = None,
        workflow: str | None = None,
    ) -> Mock:
        """Make attempts of a step raise ``error``. With ``times``, later attempts succeed."""

        def act(*_: object) -> Any:
            raise error

        return self.add(Mock(step, times=times, workflow=workflow, act=act))

    def force_step_timeout(self, step: str, *, times: int | None = None, workflow: str | None = None) -> Mock:
        """Make attempts of a step time out at once, before its function or its Celery task begins."""
        return self.mock_step_error(step, StepInterrupted, times=times, workflow=workflow)

    def add(self, mock: Mock) -> Mock:
        """Add a mock of a step's function."""
        self._functions.append(mock)
        return mock

    # --- waits ----------------------------------------------------------------------------------

    def disable_sleeps(self, steps: Iterable[str] | None = None, *, workflow: str | None = None) -> None:
        """End sleeps at once that begin from now on: those named in ``steps``, or all."""
        self._shorten("sleep", steps, timedelta(0), workflow)

    def disable_retry_delays(self, steps: Iterable[str] | None = None, *, workflow: str | None = None) -> None:
        """Retry at once: the steps named in ``steps``, or all."""
        self._shorten("retry", steps, timedelta(0), workflow)

    def force_event_timeout(self, step: str, *, workflow: str | None = None) -> None:
        """Make a wait that begins from now on time out at once, even if its event was sent before."""
        self._shorten("event", [step], _BEFORE_EVERY_EVENT, workflow)

    def mock_event(
        self, type: str, payload: Any = None, *, times: int | None = None, workflow: str | None = None
    ) -> Mock:
        """Send an event of this type to each instance that waits for it, once for every wait."""
        mock = Mock(type, times=times, workflow=workflow, act=lambda: payload)
        self.events.append(mock)
        return mock

    def mock_topic(self, topic: str, payload: Any = None, *, times: int | None = None) -> Mock:
        """Emit to this topic whenever an instance waits on it."""
        mock = Mock(topic, times=times, workflow=None, act=lambda: payload)
        self.topics.append(mock)
        return mock

    def check_unused(self) -> None:
        """Raise HarnessMisuse for mocks of steps that no workflow has reached."""
        if text := self.describe_unused():
            raise HarnessMisuse(f"{text} Correct the name, or allow it: DurableHarness(unused_mocks=True).")

    def describe_unused(self) -> str | None:
        """Return a sentence that names the mocked steps that no workflow has reached; None if there are none."""
        named = {each.step for each in (*self._functions, *self._tasks)} | {each.step for each in self.barriers}
        for _, steps, _, _ in self._waits:
            named |= steps or set()
        unmet = ", ".join(f"step {each!r}" for each in sorted(named - self._reached))
        known = ", ".join(map(repr, sorted(self._reached))) or "none"
        return f"Mocks name {unmet}, to which no workflow came. Steps that were met: {known}." if unmet else None

    def _shorten(self, purpose: Purpose, steps: Iterable[str] | None, to: timedelta, workflow: str | None) -> None:
        if isinstance(steps, str):
            raise HarnessMisuse(f"Step names come in a list: [{steps!r}].")
        self._waits.append((purpose, None if steps is None else frozenset(steps), to, workflow))

    # --- called by the runtime ------------------------------------------------------------------

    def wait_duration(self, length: timedelta, purpose: Purpose, workflow: str, step: str) -> timedelta:
        """Return how long a step waits: ``length`` unless a mock shortens it."""
        self._reached.add(step)
        for kind, steps, to, of in self._waits:
            if kind == purpose and (steps is None or step in steps) and of in (None, workflow):
                return to
        return length

    def run_attempt(self, call_function: Callable[[], Any], attempt: Attempt, *, die: Callable[[], None]) -> Any:
        """Wait at the closed barriers of a step, then call its function or the mock that replaces it."""
        self.attempts.append(attempt)
        for barrier in self.barriers:
            is_of_step = barrier.step == attempt.step and barrier.workflow in (None, attempt.workflow)
            if is_of_step and not barrier.is_open:
                barrier.stop()
        mock = self.of_step(attempt.workflow, attempt.step)
        return call_function() if mock is None else mock.use(call_function, die)

    def of_task(self, workflow: str, step: str) -> Mock | None:
        """Return the mock of a step's task; None if it has none now."""
        self._reached.add(step)
        return next((mock for mock in self._tasks if mock.serves(workflow, step)), None)

    def of_step(self, workflow: str, step: str) -> Mock | None:
        """Return the mock of a step's function; None if it has none now."""
        self._reached.add(step)
        return next((mock for mock in self._functions if mock.serves(workflow, step)), None)


# The mocked events and topics of a harness: sends each when an instance waits for it.


class MockedWaits:
    """Answers the waits of instances with mocks, each once: an event makes its instance due."""

    def __init__(self, durable: Durable, mocks: Mocks) -> None:
        self._durable, self._mocks = durable, mocks

    def answer(self) -> None:
        """Send the mocked events, and emit to the mocked topics, for the instances that wait."""
        self._emit()
        if not self._mocks.events:
            return
        queries = self._durable.internals.operations.queries
        for summary in reversed(queries.list(status=Status.WAITING, limit=1000).items):  # the list is newest first
            history = self._durable.internals.operations.history.read(summary.workflow, summary.id)
            for step in history.steps:
                self._send(summary, step)

    def _emit(self) -> None:
        for topic in dict.fromkeys(mock.step for mock in self._mocks.topics):
            mock = next((each for each in self._mocks.topics if each.serves("", topic)), None)
            if mock is not None and self._durable.waiters(topic, limit=1).items:
                self._durable.emit(topic, mock.use())

    def _send(self, summary: InstanceSummary, step: StepRecord) -> None:
        if not step.is_waiting or step.wait_event_type is None:
            return
        wanted = summary.workflow, step.wait_event_type
        mock = next((each for each in self._mocks.events if each.serves(*wanted)), None)
        if mock is not None:
            send = self._durable.internals.operations.events.send
            send(summary.workflow, summary.id, step.wait_event_type, mock.use())
