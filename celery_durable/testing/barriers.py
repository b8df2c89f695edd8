"""Barriers: each holds the function of a step back, in its runner, until the test releases it."""

from __future__ import annotations

from celery_durable.testing.cooperative import CooperativeThread, current_cooperative_thread
from celery_durable.testing.errors import HeldOutside


class Barrier:
    """Holds the function of a step back before it begins. ``harness.faults.hold(step)`` makes one."""

    def __init__(self, step: str, workflow: str | None) -> None:
        self.step, self.workflow = step, workflow
        self.is_open = False
        self._held: list[CooperativeThread] = []

    def __repr__(self) -> str:
        return f"<Barrier before step {self.step!r}, {'open' if self.is_open else f'holding {self.holds}'}>"

    @property
    def holds(self) -> int:
        """The number of runners that wait here."""
        return sum(not thread.is_over for thread in self._held)

    def release(self) -> list[str]:
        """Open the barrier and let each held runner continue as far as it can.

        Returns:
            The result of each pass that ended, as from `DurableHarness.deliver`.
        """
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            if not thread.is_over:
                thread.takes_turns = False  # the threads that it took turns with have ended, or are held too
                thread.go()
        return [thread.result for thread in held if thread.result is not None]

    def abandon(self) -> None:
        """End the held threads without continuing their passes. The harness calls it when it closes."""
        self.is_open = True
        held, self._held = self._held, []
        for thread in held:
            thread.kill()

    def stop(self) -> None:
        """Wait here while the barrier is closed. The runtime calls it before it calls a step's function."""
        thread = current_cooperative_thread()
        if thread is None:
            raise HeldOutside(
                f"{self!r} would hold the test itself: have the harness deliver, with tick(), run_until_idle() or "
                "deliver()."
            )
        if not self.is_open:
            self._held.append(thread)
            thread.park(f"barrier {self.step}")
