"""Receivers of signals, as an application has them: what they are told has been committed."""

from __future__ import annotations

from typing import Any

from celery.utils.dispatch import Signal

from celery_durable import signals

_ENDS = {
    "complete": signals.workflow_completed,
    "errored": signals.workflow_failed,
    "terminated": signals.workflow_terminated,
}
_OVER = "SELECT 1 FROM author_over WHERE instance = ? AND run = ? AND status = ?"
_STEPS = """
    SELECT sum(s.status = 'completed') FROM workflow_instance i
    LEFT JOIN workflow_step s ON s.instance_pk = i.id AND s.run_number = ? AND s.name = ?
    WHERE i.instance_id = ? AND i.run_number >= ? GROUP BY i.id"""


class Listener:
    """Listens for as long as an act goes on."""

    def __init__(self, act: Any) -> None:
        self._raw, self._story = act.world.raw, act.story
        self._connected: list[tuple[Signal, Any]] = []

    def begin(self) -> None:
        """Connect one receiver to each of these signals."""
        for status, signal in _ENDS.items():
            self._connect(signal, lambda status=status, **told: self._ended(status, **told))
        self._connect(signals.step_completed, self._completed)

    def end(self) -> None:
        """Disconnect them."""
        for signal, receiver in self._connected:
            signal.disconnect(receiver)
        self._connected.clear()

    def _connect(self, signal: Signal, receiver: Any) -> None:
        signal.connect(receiver, weak=False)
        self._connected.append((signal, receiver))

    def _ended(self, status: str, *, instance_id: str, run_number: int, **_: Any) -> None:
        self._story.stats[f"heard of {status}"] += 1
        if not self._raw.execute(_OVER, (instance_id, run_number, status)).fetchone():
            self._story.wrongs.append(f"H2 {instance_id}#{run_number} is said to be {status}, and is not")

    def _completed(self, *, instance_id: str, run_number: int, step: str, **_: Any) -> None:
        self._story.stats["heard of steps"] += 1
        found = self._raw.execute(_STEPS, (run_number, step, instance_id, run_number)).fetchone()
        if found is not None and not found[0]:  # else it has been deleted meanwhile
            self._story.wrongs.append(f"H2 step {step} of {instance_id}#{run_number} is said to be done, and is not")
