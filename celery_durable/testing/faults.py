"""`DurableHarness.faults`: runners that crash and runners that are held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from celery_durable.testing.cooperative import Barrier
from celery_durable.testing.errors import HarnessMisuse
from celery_durable.testing.mocks import Mock, Mocks
from celery_durable.testing.processes import RunnerProcess
from celery_durable.testing.runtime import CHECKPOINTS

_When = Literal["before", "after"]


class Faults:
    """Makes the runners of a harness fail. To lose or repeat messages, use `DurableHarness` and its ``messages``."""

    def __init__(self, mocks: Mocks, current_runner: Callable[[], RunnerProcess]) -> None:
        self._mocks, self._current_runner = mocks, current_runner

    def crash_at(self, where: str | int, *, runner: RunnerProcess | None = None) -> None:
        """Kill a runner at a checkpoint. Another runner continues when the lease has ended.

        To die in a step of your choice, use `crash_in_step`.

        Args:
            where: A name in `CHECKPOINTS`: the next checkpoint of this name. Or a number: the checkpoint of this
                number, counted from 0 in that process.
            runner: The runner to kill. None: the current one.

        Raises:
            HarnessMisuse: There is no checkpoint of this name.
        """
        if isinstance(where, str) and where not in CHECKPOINTS:
            raise HarnessMisuse(f"There is no checkpoint {where!r}. There are: {', '.join(CHECKPOINTS)}.")
        (runner or self._current_runner()).runtime.crash_at = where

    def crash_in_step(
        self,
        step: str,
        *,
        when: _When = "after",
        times: int | None = 1,
        workflow: str | None = None,
    ) -> Mock:
        """Kill the runner in a step. Another runner continues when the lease has ended (``durable_lease_seconds``).

        Args:
            step: The name of the step.
            when: Before the step's function begins, or after it has returned and before its result is stored.
            times: The number of attempts that crash. None: all.
            workflow: Only steps of this workflow.

        Returns:
            The mock that kills, whose ``calls`` count.

        Raises:
            HarnessMisuse: ``when`` is neither "before" nor "after".
        """
        if when not in get_args(_When):
            raise HarnessMisuse(f"when={when!r} for step {step!r}: use 'before' or 'after'.")

        def act(call_function: Callable[[], Any], die: Callable[[], None]) -> Any:
            if when == "after":
                call_function()
            die()

        return self._mocks.add(Mock(step, times=times, workflow=workflow, act=act))

    def hold(self, step: str, *, workflow: str | None = None) -> Barrier:
        """Hold the function of a step back in its runner until the barrier is released. The test continues meanwhile.

        Args:
            step: The name of the step.
            workflow: Only steps of this workflow.
        """
        barrier = Barrier(step, workflow)
        self._mocks.barriers.append(barrier)
        return barrier
