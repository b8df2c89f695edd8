"""The mocked events and topics of a harness: sends each when an instance waits for it."""

from __future__ import annotations

from datetime import datetime

from celery_durable.app import Durable
from celery_durable.model import RunRef, Status, StepRecord
from celery_durable.testing.mocks import Mocks


class MockedWaits:
    """Answers the waits of instances with mocks. It answers each wait once."""

    def __init__(self, durable: Durable, mocks: Mocks) -> None:
        self._durable, self._mocks = durable, mocks
        self._answered: set[tuple[RunRef, str, datetime | None]] = set()

    def answer(self) -> None:
        """Send the mocked events, and emit to the mocked topics, for the instances that wait."""
        self._emit()
        if not self._mocks.events:
            return
        queries = self._durable.internals.operations.queries
        for summary in reversed(queries.list(status=Status.WAITING, limit=1000).items):  # the list is newest first
            ref = RunRef(summary.workflow, summary.id, summary.run_number)
            history = self._durable.internals.operations.history.read(ref.workflow, ref.instance_id)
            for step in history.steps:
                self._send(ref, step)

    def _emit(self) -> None:
        for topic in dict.fromkeys(mock.step for mock in self._mocks.topics):
            mock = next((each for each in self._mocks.topics if each.serves("", topic)), None)
            if mock is not None and self._durable.waiters(topic, limit=1).items:
                self._durable.emit(topic, mock.use())

    def _send(self, ref: RunRef, step: StepRecord) -> None:
        wait = ref, step.step_key, step.wake_at
        if not step.is_waiting or step.wait_event_type is None or wait in self._answered:
            return
        wanted = ref.workflow, step.wait_event_type
        mock = next((each for each in self._mocks.events if each.serves(*wanted)), None)
        if mock is not None:
            self._answered.add(wait)
            send = self._durable.internals.operations.events.send
            send(ref.workflow, ref.instance_id, step.wait_event_type, mock.use())
