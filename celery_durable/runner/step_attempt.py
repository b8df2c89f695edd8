"""One attempt of a step's body: its call, its timeout, its log lines and its outcome.

The attempt returns an outcome, and the pass commits it. The pass abandons a body that runs past its timeout: the later
writes of that body are not committed.
"""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable.errors import StepInterrupted, Superseded
from celery_durable.model import LogLine
from celery_durable.runner.lease import Lease
from celery_durable.step import TxBuffer


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    pass


@dataclass(frozen=True, slots=True)
class PassOver:
    """The pass is over, because the process stops or the claim is lost. This is not a failure of the step."""

    error: BaseException


AttemptOutcome = Returned | Raised | TimedOut | PassOver

current_attempt: contextvars.ContextVar[StepAttempt | None] = contextvars.ContextVar(
    "celery_durable_body", default=None
)
"""The attempt whose body runs on this thread, if any."""


class StepAttempt:
    """One attempt of a step's body. ``number`` counts the attempts from 1; ``call`` calls the body."""

    def __init__(
        self,
        *,
        step_key: str,
        number: int,
        call: Callable[[], Any],
        buffer: TxBuffer,
        close_session: Callable[[TxBuffer], None],
        abandon_session: Callable[[TxBuffer], None],
        stops_process: Callable[[BaseException], bool],
        monotonic: Callable[[], float],
        lease: Lease,
    ) -> None:
        self.step_key, self.number, self.buffer = step_key, number, buffer
        self.logs: list[LogLine] = []
        self._call = call
        self._close_session, self._abandon_session = close_session, abandon_session
        self._stops_process = stops_process
        self._monotonic, self._lease = monotonic, lease
        self._lock = threading.Lock()
        self._is_over = self._is_abandoned = False
        self._started_at: float | None = None
        self._duration: timedelta | None = None

    @property
    def duration(self) -> timedelta:
        """How long the body ran, or has run so far."""
        if self._duration is not None:
            return self._duration
        return timedelta(0) if self._started_at is None else timedelta(seconds=self._monotonic() - self._started_at)

    def run(self) -> AttemptOutcome:
        """Call the body on this thread and return the outcome, which contains an exception that the body raised."""
        token = current_attempt.set(self)
        self._started_at = self._monotonic()
        self._lease.enter_user_code(self, step_key=self.step_key, attempt=self.number)
        if self._is_abandoned:  # `abandon` may have run before this thread started
            self._lease.exit_user_code(self)
        try:
            outcome: AttemptOutcome = Returned(self._call())
        except StepInterrupted:
            outcome = TimedOut()
        except Superseded as exc:
            outcome = PassOver(exc)
        except BaseException as exc:  # noqa: BLE001  # user code's error fails the step (LAW 9 of docs/design.md)
            outcome = PassOver(exc) if self._stops_process(exc) else Raised(exc)
        finally:
            self._duration = timedelta(seconds=self._monotonic() - self._started_at)
            self._lease.exit_user_code(self)
            current_attempt.reset(token)
        with self._lock:
            self._is_over = True
            if self._is_abandoned:
                self._close_session(self.buffer)
        return outcome

    def run_timed(self, timeout: timedelta | None) -> AttemptOutcome:
        """Like `run`, on the main thread, with an alarm signal that interrupts Python code and system calls."""
        if timeout is None:
            return self.run()
        has_timed_out, is_armed = False, True

        def on_alarm(*_: object) -> None:
            nonlocal has_timed_out
            if is_armed:
                has_timed_out = True
                raise StepInterrupted

        before = signal.signal(signal.SIGALRM, on_alarm)
        try:
            # The alarm repeats every second, so that a body that catches the first one cannot run forever.
            signal.setitimer(signal.ITIMER_REAL, timeout.total_seconds(), 1.0)
            try:
                outcome = self.run()
            finally:
                is_armed = False  # the alarm must not raise while it is being removed
        except StepInterrupted:  # the alarm went off after the body had ended, before it was disarmed
            outcome = TimedOut()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            # The alarm may have interrupted `run` in its `finally` block, so these lines repeat the end of `run`.
            self._is_over = True
            self._lease.exit_user_code(self)
            current_attempt.set(None)
        return TimedOut() if has_timed_out and not isinstance(outcome, PassOver) else outcome

    def check_not_abandoned(self) -> None:
        """Raise StepInterrupted if this attempt was abandoned. Bodies call it before they use the database."""
        with self._lock:
            if self._is_abandoned:
                self._abandon_session(self.buffer)
                raise StepInterrupted

    def abandon(self) -> None:
        """Give up this attempt without a commit. Its session is closed now, or when the body returns.

        The body may end at the same time. The lock makes sure that the later of the two closes the session.
        """
        self._lease.exit_user_code(self)  # the pass continues without the body, so it can count as stalled again
        with self._lock:
            self._is_abandoned = True
            if self._is_over:
                self._close_session(self.buffer)
            else:
                self._abandon_session(self.buffer)
