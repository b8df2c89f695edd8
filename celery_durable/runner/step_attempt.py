"""Running one attempt of a step's body: its StepTx, its timer, its log lines and its outcome.

A body ends in an outcome, and the pass decides whether to commit it. A body that runs past its timeout is abandoned,
and its later writes are not committed.
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
class Interrupted:
    """The attempt ended for a reason that is not the step's failure: the process stops, or the claim is lost."""

    error: BaseException


AttemptOutcome = Returned | Raised | TimedOut | Interrupted

current_attempt: contextvars.ContextVar[StepAttempt | None] = contextvars.ContextVar(
    "celery_durable_body", default=None
)
"""The attempt whose body runs on this thread, if any."""


class StepAttempt:
    """One attempt of a step's body."""

    def __init__(
        self,
        *,
        step_key: str,
        attempt: int,
        call: Callable[[], Any],
        buffer: TxBuffer,
        close_session: Callable[[TxBuffer], None],
        abandon_session: Callable[[TxBuffer], None],
        stops_process: Callable[[BaseException], bool],
        monotonic: Callable[[], float],
        lease: Lease,
    ) -> None:
        self.step_key, self.attempt, self.buffer = step_key, attempt, buffer
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
        """Call the step's function on this thread and return the outcome, which holds what the function raised."""
        token = current_attempt.set(self)
        self._started_at = self._monotonic()
        self._lease.enter_user_code(self)
        if self._is_abandoned:  # `abandon` may have run before this thread started
            self._lease.exit_user_code(self)
        try:
            outcome: AttemptOutcome = Returned(self._call())
        except StepInterrupted:
            outcome = TimedOut()
        except Superseded as exc:
            outcome = Interrupted(exc)
        except BaseException as exc:  # noqa: BLE001  # whatever the author's code raises is the step's failure (LAW 9)
            outcome = Interrupted(exc) if self._stops_process(exc) else Raised(exc)
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
        """Like `run`, on the main thread, with a timer signal that interrupts Python code and system calls."""
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
        except StepInterrupted:  # the alarm went off after the body's end, before it was disarmed
            outcome = TimedOut()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            # The alarm may have interrupted the end of `run`, so its last lines are repeated here.
            self._is_over = True
            self._lease.exit_user_code(self)
            current_attempt.set(None)
        return TimedOut() if has_timed_out and not isinstance(outcome, Interrupted) else outcome

    def check_not_abandoned(self) -> None:
        """Raise StepInterrupted in an abandoned body that tries to use the database: its work is not committed."""
        with self._lock:
            if self._is_abandoned:
                self._abandon_session(self.buffer)
                raise StepInterrupted

    def abandon(self) -> None:
        """Give up this attempt without a commit. Its session is closed now, or when the body returns.

        The lock decides the race with `run`: whichever of the two comes second closes the session.
        """
        self._lease.exit_user_code(self)  # the pass continues without the body, and is watched for stalls again
        with self._lock:
            self._is_abandoned = True
            if self._is_over:
                self._close_session(self.buffer)
            else:
                self._abandon_session(self.buffer)
