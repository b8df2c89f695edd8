"""Streams: a client follows a run over server-sent events, and receives what the run records and publishes.

Between two polls of the instance, a stream holds no thread and no connection. A reconnected client continues at its
position, the id of the last message. Each state of a step that a poll finds is sent at least once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from celery_durable.all_operations import Operations
from celery_durable.errors import InstanceNotFound
from celery_durable.http import timeouts
from celery_durable.http.followers import Followers
from celery_durable.model import FINISHED_STEPS, InstanceStatus, Published, Record, Status, StepRecord
from celery_durable.redaction import Redaction
from celery_durable.values import Cursors
from celery_durable.wire.encoding import to_json
from celery_durable.wire.responses import PublishedChange

_PAGE = 100
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 1.0
"""The pause between two polls. It is short after a change, then grows. A poll is one small read."""
_KEEP_ALIVE_SECONDS = 15.0
_MAX_STREAM_SECONDS = 3600.0
"""After this time the stream ends. The client reconnects, so its credentials are checked again."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A client's position in the stream of a run: its last log line, and the step up to which all have ended."""

    run: int
    log: int = 0
    seq: int = 0
    key: str = ""
    is_over: bool = False

    def write(self, cursors: Cursors) -> str:
        """Return the id for a message."""
        return cursors.write(self.run, self.log, self.seq, self.key, int(self.is_over))

    @classmethod
    def read(cls, cursors: Cursors, text: str) -> StreamPosition:
        """Parse the header Last-Event-ID. Raises CursorInvalid."""
        run, log, seq, key, is_over = cursors.read(text)
        return cls(cast("int", run), cast("int", log), cast("int", seq), cast("str", key), bool(is_over))


class Stream:
    """One client that follows one run."""

    def __init__(
        self,
        operations: Operations,
        followers: Followers,
        redaction: Redaction,
        workflow: str,
        instance_id: str,
        *,
        position: StreamPosition,
        cursors: Cursors,
    ) -> None:
        self._operations, self._followers, self._redaction = operations, followers, redaction
        self._workflow, self._instance_id = workflow, instance_id
        self._run, self._log, self._done_until = position.run, position.log, (position.seq, position.key)
        self._cursors = cursors
        self._tag: str | None = None
        self._status: Status | None = None
        self._sent_states: dict[str, tuple[object, ...]] = {}
        self._sent_published: dict[str, Published] = {}

    async def messages(self) -> AsyncIterator[str]:
        """Yield the messages until the run ends or a new run replaces it."""
        yield "retry: 2000\n\n"
        pause, quiet, left = _SHORTEST_SECONDS, 0.0, _MAX_STREAM_SECONDS
        while left > 0:
            try:
                found = await self._followers.read_shared(
                    self._operations, self._workflow, self._instance_id, within=pause / 2
                )
            except InstanceNotFound:
                return  # the instance was deleted
            row = found.instance
            if found.tag != self._tag:
                self._tag = found.tag  # read before the data, so the next poll finds later changes
                async for message in self._logs():
                    yield message
                async for message in self._steps():
                    yield message
                for change in await timeouts.run_read(self._next_published):
                    yield self._message("published", change)
                if row.status.is_terminal or row.run_number != self._run:
                    yield await self._end()
                    return
                if row.status is not self._status:
                    self._status = row.status
                    yield self._message("status", InstanceStatus(row.status))
                pause = _SHORTEST_SECONDS
            await timeouts.pause(pause)
            quiet, left = quiet + pause, left - pause
            if quiet >= _KEEP_ALIVE_SECONDS:
                yield ": still here\n\n"
                quiet = 0.0
            pause = min(pause * 1.5, _LONGEST_SECONDS)

    async def _logs(self) -> AsyncIterator[str]:
        while True:
            lines = await timeouts.run_read(self._next_logs)
            for id_, line in lines:
                self._log = id_
                yield self._message("log", line)
            if len(lines) < _PAGE:
                return

    def _next_logs(self) -> list[tuple[int, Record]]:
        # Redacted here, on a thread, because that calls the hook of the application.
        lines = self._operations.history.logs(
            self._workflow, self._instance_id, run=self._run, after_id=self._log, limit=_PAGE
        )
        return [(line.id, self._redaction.redact_log(line)) for line in lines]

    async def _steps(self) -> AsyncIterator[str]:
        after, is_complete = self._done_until, True
        while True:
            page = await timeouts.run_read(self._next_steps, after)
            for seq, step, shown in page:
                # A gap in ``seq`` may still be filled: a branch that started earlier may be recorded later.
                is_complete = is_complete and _has_ended(step) and seq <= self._done_until[0] + 1
                if is_complete:
                    self._done_until = (seq, step.step_key)
                state = _state(step)
                if self._sent_states.get(step.step_key) != state:
                    self._sent_states[step.step_key] = state
                    yield self._message("step", shown)
                if is_complete:
                    del self._sent_states[step.step_key]
                after = (seq, step.step_key)
            if len(page) < _PAGE:
                return

    def _next_steps(self, after: tuple[int, str]) -> list[tuple[int, StepRecord, Record]]:
        page = self._operations.history.steps(
            self._workflow, self._instance_id, run=self._run, after=after, limit=_PAGE
        )
        return [(seq, step, self._redaction.redact_step(step)) for seq, step in page]

    def _next_published(self) -> list[Record]:
        before = self._sent_published
        self._sent_published = self._operations.history.published(self._workflow, self._instance_id, run=self._run)
        new = {key: found for key, found in self._sent_published.items() if before.get(key) != found}
        shown = self._redaction.redact_published(new)
        return [PublishedChange(found.value, updated_at=found.updated_at, key=key) for key, found in shown.items()]

    async def _end(self) -> str:
        return self._message("end", await timeouts.run_read(self._outcome), is_over=True)

    def _outcome(self) -> Record:
        found = self._operations.history.outcome(self._workflow, self._instance_id, run=self._run)
        return self._redaction.redact_status(found)

    def _message(self, kind: str, answer: Record, *, is_over: bool = False) -> str:
        position = StreamPosition(self._run, self._log, *self._done_until, is_over=is_over)
        return f"id: {position.write(self._cursors)}\nevent: {kind}\ndata: {to_json(answer).decode()}\n\n"


def _has_ended(step: StepRecord) -> bool:
    return step.status in FINISHED_STEPS


def _state(step: StepRecord) -> tuple[object, ...]:
    return step.status, step.attempts, step.wake_at, step.next_retry_at
