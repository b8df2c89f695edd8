"""One attempt of a step's body: its call, its session, its timeout, its log lines and its outcome.

The attempt returns an outcome, and the pass commits it. The pass abandons a body that runs past its timeout: the later
writes of that body are not committed.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_durable.errors import StepInterrupted, Superseded
from celery_durable.model import LogLine
from celery_durable.runner.body_timer import body_timer
from celery_durable.runner.environment import Environment
from celery_durable.runner.lease import Lease
from celery_durable.runner.session_lock import SessionLock
from celery_durable.step import TxBuffer, restore_transaction_control

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


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
    """One attempt of a step's body. ``number`` counts the attempts from 1.

    ``session_lock``: serializes the sessions of bodies that run concurrently, where the database needs it.
    """

    def __init__(
        self, env: Environment, lease: Lease, step_key: str, number: int, session_lock: SessionLock | None = None
    ) -> None:
        self.step_key, self.number = step_key, number
        self.buffer = TxBuffer()
        self.logs: list[LogLine] = []
        self.call: Callable[[], Any] = _call_nothing
        """Calls the body. It is set once, before the attempt runs."""
        self.duration = timedelta(0)
        """How long the body ran. For a body that was abandoned: until then."""
        self._env, self._lease, self._session_lock = env, lease, session_lock
        self._monotonic = env.runtime.monotonic
        self._lock = threading.Lock()
        self._is_over = self._is_abandoned = self._is_session_closed = False
        self._started_at: float | None = None

    def run(self) -> AttemptOutcome:
        """Call the body on this thread and return the outcome, which contains an exception that the body raised."""
        token = current_attempt.set(self)
        self._started_at = started_at = self._monotonic()
        self._lease.enter_user_code(self, (self.step_key, self.number, started_at))
        if self._is_abandoned:  # `abandon` may have run before this thread started
            self._lease.exit_user_code(self)
        try:
            outcome: AttemptOutcome = Returned(self.call())
        except StepInterrupted:
            outcome = TimedOut()
        except Superseded as exc:
            outcome = PassOver(exc)
        except BaseException as exc:  # noqa: BLE001  # user code's error fails the step (LAW 9 of docs/design.md)
            outcome = PassOver(exc) if self._env.stops_process(exc) else Raised(exc)
        finally:
            if not self._is_abandoned:
                self.duration = timedelta(seconds=self._monotonic() - started_at)
            self._lease.exit_user_code(self)
            current_attempt.reset(token)
        with self._lock:
            self._is_over = True
            if self._is_abandoned:
                self.close_session()
        return outcome

    def run_timed(self, timeout: timedelta | None) -> AttemptOutcome:
        """Like `run`, on the main thread, with an alarm signal that interrupts Python code and system calls."""
        if timeout is None:
            return self.run()
        limit = body_timer.start(timeout.total_seconds())
        try:
            try:
                limit.is_armed = True
                outcome = self.run()
            finally:
                limit.is_armed = False  # the alarm must not raise while the attempt is being ended
        except StepInterrupted:  # the alarm went off after the body had ended, before it was disarmed
            outcome = TimedOut()
        finally:
            body_timer.stop(limit)
            if limit.has_expired:
                # The alarm may have interrupted `run` in its `finally` block, so these lines repeat the end of `run`.
                self._is_over = True
                self._lease.exit_user_code(self)
                current_attempt.set(None)
        return TimedOut() if limit.has_expired and not isinstance(outcome, PassOver) else outcome

    # --- its session ----------------------------------------------------------------------------

    @property
    def has_session(self) -> bool:
        """Whether the body has opened the session of its step."""
        return self.buffer.session is not None

    def open_session(self) -> Session:
        """Open the session of the step; raises StepInterrupted if the attempt was abandoned."""
        lock = self._session_lock
        if lock is not None:
            lock.acquire(self)
        try:
            session = self.buffer.session = self._env.store.sessions.open()
            self.check_not_abandoned()
        except BaseException:
            if lock is not None:
                lock.release(self)
            raise
        return session

    def close_session(self) -> None:
        """Close the session, which rolls back what is not committed. Does nothing without one."""
        session = self.buffer.session
        if session is not None and not self._is_session_closed:
            self._is_session_closed = True
            self._env.store.sessions.close(session)
            restore_transaction_control(session)  # a shared factory may return the same session to the application
            if self._session_lock is not None:
                self._session_lock.release(self)

    def _abandon_session(self) -> None:
        if self.buffer.session is not None:
            self._env.store.sessions.abandon(self.buffer.session)

    # --- after its timeout ----------------------------------------------------------------------

    def check_not_abandoned(self) -> None:
        """Raise StepInterrupted if this attempt was abandoned. Bodies call it before they use the database."""
        with self._lock:
            if self._is_abandoned:
                self._abandon_session()
                raise StepInterrupted

    def abandon(self) -> None:
        """Give up this attempt without a commit. Its session is closed now, or when the body returns.

        The body may end at the same time. The lock makes sure that the later of the two closes the session.
        """
        with self._lock:
            self._is_abandoned = True
            if not self.duration and self._started_at is not None:
                self.duration = timedelta(seconds=self._monotonic() - self._started_at)
            if self._is_over:
                self.close_session()
            else:
                self._abandon_session()
        # After the flag, which the body's thread reads when it has entered user code. The pass continues without the
        # body, so it can count as stalled again.
        self._lease.exit_user_code(self)


def _call_nothing() -> None:
    raise AssertionError("an attempt without a call was run")
