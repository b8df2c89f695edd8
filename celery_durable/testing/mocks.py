"""Test doubles at the border of a step: what stands in for its body, shortens its wait, or holds it back.

They never touch what is recorded. A mocked result is encoded, checked, committed and replayed as if the body had
returned it; a forced timeout is a failed attempt with its retries; an event that is mocked is really sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from celery_durable.errors import StepInterrupted
from celery_durable.runtime import Purpose
from celery_durable.testing.cooperative import CooperativeThread, current_cooperative_thread
from celery_durable.testing.errors import HarnessMisuse, HeldOutside

_BEFORE_EVERY_EVENT = timedelta(days=-3650)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a step's body, its own or a double's. ``number`` counts from 1."""

    workflow: str
    instance_id: str
    step: str
    number: int


class Double:
    """Something that stands in for a step. ``calls`` tells how often it did: 0 is a name that no step has."""

    def __init__(self, step: str, *, times: int | None, workflow: str | None, act: Callable[..., Any]) -> None:
        if times is not None and times < 1:
            raise HarnessMisuse(f"times={times} for step {step!r}: use a number from 1, or None for always.")
        self.step, self.times, self.workflow = step, times, workflow
        self.calls = 0
        self._act = act

    def __repr__(self) -> str:
        return f"<Double of step {self.step!r}, used {self.calls} times>"

    def serves(self, workflow: str, step: str) -> bool:
        """Whether it stands in for this step now."""
        return (
            self.step == step and self.workflow in (None, workflow) and (self.times is None or self.calls < self.times)
        )

    def use(self, *given: Any, **more: Any) -> Any:
        """Count the call and act."""
        self.calls += 1
        return self._act(*given, **more)


class Barrier:
    """Holds the bodies of a step back before they begin, until it is released."""

    def __init__(self, step: str, workflow: str | None) -> None:
        self.step, self.workflow = step, workflow
        self.is_open = False
        self._held: list[CooperativeThread] = []

    def __repr__(self) -> str:
        return f"<Gate before step {self.step!r}, {'open' if self.is_open else f'holding {self.holds}'}>"

    @property
    def holds(self) -> int:
        """How many bodies stand before it."""
        return sum(not thread.is_over for thread in self._held)

    def release(self) -> list[str]:
        """Open it, and let each held runner go on as far as it goes; answers with what came of them."""
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            if not thread.is_over:
                thread.takes_turns = False  # whom it ran beside has ended, or is held as well
                thread.go()
        return [thread.result for thread in held if thread.result is not None]

    def abandon(self) -> None:
        """Let none of those that it holds come back."""
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            thread.kill()

    def stop(self) -> None:
        """To be called before a body: wait here while the gate is closed."""
        thread = current_cooperative_thread()
        if thread is None:
            raise HeldOutside(
                f"{self!r} would hold the test itself: have the harness deliver, with tick(), run_until_idle() or "
                "deliver()."
            )
        if not self.is_open:
            self._held.append(thread)
            thread.park(f"gate {self.step}")


class Doubles:
    """The doubles of a harness. Of several for one step the oldest serves first, until its ``times`` are used up."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        """Every attempt at a body so far, in order."""
        self.gates: list[Barrier] = []
        self.events: list[Double] = []
        self.topics: list[Double] = []
        self._bodies: list[Double] = []
        self._tasks: list[Double] = []
        self._spans: list[tuple[Purpose, frozenset[str] | None, timedelta, str | None]] = []
        self._met: set[str] = set()
        """Names of steps that the workflows have come to."""

    # --- bodies ---------------------------------------------------------------------------------

    def mock_step_result(
        self, step: str, value: Any, *, times: int | None = None, workflow: str | None = None
    ) -> Double:
        """Have a step's body return ``value`` without being called; None, 0 and "" are values like all others.

        Of a step that Celery tasks do: have each answer so. A task whose step has no double never answers.

        ``step``: its name; of steps with ``repeat=True`` all occurrences. ``times``: for so many attempts only.
        """
        return self._add(Double(step, times=times, workflow=workflow, act=lambda *_: value))

    def mock_task(
        self, step: str, fn: Callable[..., Any], *, times: int | None = None, workflow: str | None = None
    ) -> Double:
        """Have ``fn`` do the Celery task of a step, or of each item of a map: it gets the task's own arguments.

        What it raises is the task's error. The task itself will do where its app has made it (``task.run``).
        """
        double = Double(step, times=times, workflow=workflow, act=fn)
        self._tasks.append(double)
        return double

    def mock_step_error(
        self,
        step: str,
        error: BaseException | type[BaseException],
        *,
        times: int | None = None,
        workflow: str | None = None,
    ) -> Double:
        """Have attempts of a step raise ``error``; with ``times`` its retries then come through."""

        def act(*_: object) -> Any:
            raise error

        return self._add(Double(step, times=times, workflow=workflow, act=act))

    def force_step_timeout(self, step: str, *, times: int | None = None, workflow: str | None = None) -> Double:
        """Have attempts of a step time out at once, before the body is called, or the Celery task does anything."""
        return self.mock_step_error(step, StepInterrupted, times=times, workflow=workflow)

    def crash_in_step(
        self,
        step: str,
        *,
        when: Literal["before", "after"] = "after",
        times: int | None = 1,
        workflow: str | None = None,
    ) -> Double:
        """Kill the runner in a step: before its body begins, or when it has done all and nothing is recorded yet.

        Another runner takes over when the lease of the dead one has run out (``durable_lease_seconds``, 30 s).
        """

        def act(body: Callable[[], Any], die: Callable[[], None]) -> Any:
            if when == "after":
                body()
            die()

        return self._add(Double(step, times=times, workflow=workflow, act=act))

    def hold(self, step: str, *, workflow: str | None = None) -> Barrier:
        """Hold the bodies of a step back until the gate is released; the test goes on meanwhile."""
        gate = Barrier(step, workflow)
        self.gates.append(gate)
        return gate

    def _add(self, double: Double) -> Double:
        self._bodies.append(double)
        return double

    # --- waits ----------------------------------------------------------------------------------

    def disable_sleeps(self, steps: Iterable[str] | None = None, *, workflow: str | None = None) -> None:
        """Let sleeps that begin from now on end at once: those of these names, or all."""
        self._shorten("sleep", steps, timedelta(0), workflow)

    def disable_retry_delays(self, steps: Iterable[str] | None = None, *, workflow: str | None = None) -> None:
        """Let retries follow at once: those of these steps, or all."""
        self._shorten("retry", steps, timedelta(0), workflow)

    def force_event_timeout(self, step: str, *, workflow: str | None = None) -> None:
        """Let a wait that begins from now on time out at once, also where the event has come before."""
        self._shorten("event", [step], _BEFORE_EVERY_EVENT, workflow)

    def mock_event(
        self, type: str, payload: Any = None, *, times: int | None = None, workflow: str | None = None
    ) -> Double:
        """Send an event of this type to each instance that comes to wait for it, once for every wait."""
        double = Double(type, times=times, workflow=workflow, act=lambda: payload)
        self.events.append(double)
        return double

    def mock_topic(self, topic: str, payload: Any = None, *, times: int | None = None) -> Double:
        """Emit to this topic whenever somebody waits on it: to all who do."""
        double = Double(topic, times=times, workflow=None, act=lambda: payload)
        self.topics.append(double)
        return double

    def check_doubles(self) -> None:
        """Raise HarnessMisuse for doubles of steps that no workflow has come to."""
        if text := self.misnamed():
            raise HarnessMisuse(f"{text} Correct the name, or allow it: DurableHarness(unused_doubles=True).")

    def misnamed(self) -> str | None:
        """Which steps are named by doubles, and no workflow has come to them, in a sentence."""
        named = {each.step for each in (*self._bodies, *self._tasks)} | {gate.step for gate in self.gates}
        for _, steps, _, _ in self._spans:
            named |= steps or set()
        unmet = ", ".join(f"step {each!r}" for each in sorted(named - self._met))
        known = ", ".join(map(repr, sorted(self._met))) or "none"
        return f"Doubles name {unmet}, to which no workflow came. Steps that were met: {known}." if unmet else None

    def _shorten(self, purpose: Purpose, steps: Iterable[str] | None, to: timedelta, workflow: str | None) -> None:
        if isinstance(steps, str):
            raise HarnessMisuse(f"Step names come in a list: [{steps!r}].")
        self._spans.append((purpose, None if steps is None else frozenset(steps), to, workflow))

    # --- as the runtime sees them ---------------------------------------------------------------

    def wait_duration(self, length: timedelta, purpose: Purpose, workflow: str, step: str) -> timedelta:
        """How long a step waits here."""
        self._met.add(step)
        for kind, steps, to, of in self._spans:
            if kind == purpose and (steps is None or step in steps) and of in (None, workflow):
                return to
        return length

    def attempt(self, body: Callable[[], Any], attempt: Attempt, *, die: Callable[[], None]) -> Any:
        """Pass the gates, then call the body or what stands in for it."""
        self.attempts.append(attempt)
        for gate in self.gates:
            if gate.step == attempt.step and gate.workflow in (None, attempt.workflow) and not gate.is_open:
                gate.stop()
        double = self.of_step(attempt.workflow, attempt.step)
        return body() if double is None else double.use(body, die)

    def of_task(self, workflow: str, step: str) -> Double | None:
        """What does the task of a step now."""
        self._met.add(step)
        return next((double for double in self._tasks if double.serves(workflow, step)), None)

    def of_step(self, workflow: str, step: str) -> Double | None:
        """What stands in for a step now."""
        self._met.add(step)
        return next((double for double in self._bodies if double.serves(workflow, step)), None)
