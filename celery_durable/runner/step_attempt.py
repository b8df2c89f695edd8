"""Running one attempt of a step's body: its StepTx, its timer, its log lines, and what came of it.

A body has no say in whether it is recorded: it ends in an outcome, and the pass commits that or does
not. What outlives its timeout is left behind, and what it still does goes nowhere.
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
    """Something that is no verdict on the step: its process is told to end, or the claim is lost."""

    error: BaseException


Outcome = Returned | Raised | TimedOut | Interrupted

current_attempt: contextvars.ContextVar[StepAttempt | None] = contextvars.ContextVar(
    "celery_durable_body", default=None
)
"""The body that runs on this thread, if any."""


class StepAttempt:
    """One attempt."""

    def __init__(
        self,
        *,
        step_key: str,
        attempt: int,
        call: Callable[[], Any],
        buffer: TxBuffer,
        close_session: Callable[[TxBuffer], None],
        abandon_session: Callable[[TxBuffer], None],
        is_from_outside: Callable[[BaseException], bool],
        monotonic: Callable[[], float],
        lease: Lease,
    ) -> None:
        self.step_key, self.attempt, self.buffer = step_key, attempt, buffer
        self.logs: list[LogLine] = []
        self._call = call
        self._close_session, self._abandon_session = close_session, abandon_session
        self._is_from_outside = is_from_outside
        self._monotonic, self._lease = monotonic, lease
        self._lock = threading.Lock()
        self._is_over = self._is_abandoned = False
        self._began: float | None = None
        self._took: timedelta | None = None

    @property
    def duration(self) -> timedelta:
        """How long the body ran, up to now while it runs."""
        if self._took is not None:
            return self._took
        return timedelta(0) if self._began is None else timedelta(seconds=self._monotonic() - self._began)

    def run(self) -> Outcome:
        """Call the author's function on this thread; never raises."""
        token = current_attempt.set(self)
        self._began = self._monotonic()
        self._lease.enter_user_code(self)
        if self._is_abandoned:  # before its thread had begun
            self._lease.exit_user_code(self)
        try:
            outcome: Outcome = Returned(self._call())
        except StepInterrupted:
            outcome = TimedOut()
        except Superseded as exc:
            outcome = Interrupted(exc)
        except BaseException as exc:  # noqa: BLE001  # whatever the author's code raises is the step's failure (LAW 9)
            outcome = Interrupted(exc) if self._is_from_outside(exc) else Raised(exc)
        finally:
            self._took = timedelta(seconds=self._monotonic() - self._began)
            self._lease.exit_user_code(self)
            current_attempt.reset(token)
        with self._lock:
            self._is_over = True
            if self._is_abandoned:
                self._close_session(self.buffer)
        return outcome

    def run_timed(self, timeout: timedelta | None) -> Outcome:
        """As `run`, on the main thread, with a timer signal that interrupts Python code and system calls."""
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
            # Again each second: author code that catches everything must not run on without end.
            signal.setitimer(signal.ITIMER_REAL, timeout.total_seconds(), 1.0)
            try:
                outcome = self.run()
            finally:
                is_armed = False  # so that it cannot go off while it is being taken down
        except StepInterrupted:  # between the body's end and here
            outcome = TimedOut()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            # The alarm may have cut off even the lines that say so.
            self._is_over = True
            self._lease.exit_user_code(self)
            current_attempt.set(None)
        return TimedOut() if has_timed_out and not isinstance(outcome, Interrupted) else outcome

    def check_not_abandoned(self) -> None:
        """Stop a body that was left behind, where it would reach into the database: nobody commits what it does."""
        with self._lock:
            if self._is_abandoned:
                self._abandon_session(self.buffer)
                raise StepInterrupted

    def abandon(self) -> None:
        """Nobody will commit this attempt: end its session, now or when the body comes back."""
        self._lease.exit_user_code(self)  # the pass goes on without it, and is judged without it
        with self._lock:
            self._is_abandoned = True
            if self._is_over:
                self._close_session(self.buffer)
            else:
                self._abandon_session(self.buffer)
