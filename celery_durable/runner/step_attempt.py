"""One attempt of a step's body: its call, its transaction, its timeout, its log lines and its outcome.

The pass commits the outcome. It abandons a body that runs past its timeout, and commits none of its later writes.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_durable import notify
from celery_durable.errors import Cancelled, StepInterrupted, StepTxMisuse, Superseded
from celery_durable.event_loop import LoopTask, event_loop
from celery_durable.model import LogLine, RunRef
from celery_durable.runner.body_timer import body_timer
from celery_durable.runner.environment import Environment
from celery_durable.runner.lease import Lease
from celery_durable.runner.session_lock import SessionLock
from celery_durable.step import TxBuffer, running_attempt
from celery_durable.store.engine.sessions import StepTransaction


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The body took longer than its timeout. ``interruption``: the exception that interrupted it, if one did."""

    interruption: BaseException | None = None


@dataclass(frozen=True, slots=True)
class PassOver:
    """The pass is over, because the process stops or the claim is lost. This is not a failure of the step."""

    error: BaseException


BodyOutcome = Returned | Raised | TimedOut | PassOver

current_attempt: contextvars.ContextVar[StepAttempt | None] = running_attempt
"""The attempt whose body runs on this thread, if any."""
current_run: contextvars.ContextVar[RunRef | None] = contextvars.ContextVar("celery_durable_run", default=None)
"""The run whose pass runs on this thread, if any."""
_FOREVER = timedelta(days=365)
"""The time of a body without a timeout that a cancel may interrupt: the alarm needs one."""


class StepAttempt:
    """One attempt of a step's body. ``session_lock``: serializes concurrent sessions where the database needs it."""

    def __init__(
        self,
        env: Environment,
        lease: Lease,
        step_key: str,
        number: int,
        session_lock: SessionLock | None = None,
        *,
        step: str = "",
    ) -> None:
        self.step_key, self.number, self.name, self.ref = step_key, number, step, lease.claim.ref
        self.buffer = TxBuffer()
        self.logs: list[LogLine] = []
        self.call: Callable[[], Any] = _call_nothing
        """Calls the body. It is set once, before the attempt runs."""
        self.call_async: Callable[[], Awaitable[Any]] | None = None
        """Calls the body of an async step, which `start` runs as a task of the event loop."""
        self.duration = timedelta(0)
        """How long the body ran. For a body that was abandoned: until then."""
        self._env, self._lease, self._session_lock = env, lease, session_lock
        self._monotonic = env.runtime.monotonic
        self._lock = threading.Lock()
        self._is_over = self._is_abandoned = self._is_transaction_closed = False
        self._task: LoopTask | None = None
        self.opening_error: BaseException | None = None
        self._started_at: float | None = None

    def set_body(self, body: Callable[[], Any], *, is_async: bool) -> None:
        """Set what the attempt calls: the body, inside the connected context managers (`around_step`)."""
        ref, around = self.ref, notify.around_body(self._lease.claim, self.name, self.step_key, self.number)
        if is_async:
            self.call_async = body if around is None else functools.partial(_await_inside, around, body)
            body = functools.partial(event_loop.run, body, name=self._describe())
        call: Callable[[], Any] = functools.partial(
            self._env.runtime.run_attempt,
            body,
            workflow=ref.workflow,
            instance_id=ref.instance_id,
            step=self.name,
            number=self.number,
        )
        self.call = call if around is None else functools.partial(_call_inside, around, call)

    def run(self) -> BodyOutcome:
        """Call the body on this thread and return the outcome, which contains an exception that the body raised."""
        token = current_attempt.set(self)
        self._begin()
        try:
            outcome: BodyOutcome = Returned(self.call())
        except BaseException as exc:  # noqa: BLE001  # see `_classify`
            outcome = self._classify(exc)
        finally:
            self._end()
            current_attempt.reset(token)
        self._close_if_abandoned()
        return outcome

    def start(self, report: Callable[[BodyOutcome], None]) -> Callable[[], None]:
        """Start the body of an async step, which reports its outcome; returns what cancels it."""
        self._task = event_loop.start(self._run_async, report, name=self._describe())
        return self._task.cancel

    async def _run_async(self) -> BodyOutcome:
        """Like `run`, as a task of the event loop, with a copy of the context variables of the pass."""
        assert self.call_async is not None
        current_attempt.set(self)
        self._begin()
        try:
            outcome: BodyOutcome = Returned(await event_loop.call(self.call_async))
        except BaseException as exc:  # noqa: BLE001  # see `_classify`
            outcome = self._classify(exc)
        finally:
            self._end()
        self._close_if_abandoned()
        if self._task is not None and self._task.was_cancelled and not isinstance(outcome, PassOver):
            return TimedOut(outcome.error if isinstance(outcome, Raised) else None)
        return outcome

    def _begin(self) -> None:
        self._started_at = self._monotonic()
        self._lease.enter_user_code(self, (self.step_key, self.number, self._started_at))
        if self._is_abandoned:  # `abandon` may have run before this thread started
            self._lease.exit_user_code(self)

    def _classify(self, error: BaseException) -> BodyOutcome:
        if isinstance(error, StepInterrupted):
            return TimedOut(error)
        if isinstance(error, Superseded) or self._env.stops_process(error):
            return PassOver(error)
        return Raised(error)  # user code's error fails the step (LAW 9 of docs/design.md)

    def _end(self) -> None:
        if not self._is_abandoned and self._started_at is not None:
            self.duration = timedelta(seconds=self._monotonic() - self._started_at)
        self._lease.exit_user_code(self)

    def _close_if_abandoned(self) -> None:
        with self._lock:
            self._is_over = True
            if self._is_abandoned:
                self.close_transaction()

    def _describe(self) -> str:
        return f"Step {self.name!r} of {self.ref}"

    # --- cancellation ---------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether the result is no longer wanted (`CurrentStep`)."""
        return self._lease.is_cancelled or self._lease.is_lost

    def check(self) -> None:
        """Raise Cancelled if `is_cancelled` (`CurrentStep`)."""
        if self.is_cancelled:
            raise Cancelled

    # --- its call, on the main thread -----------------------------------------------------------

    def run_timed(self, timeout: timedelta | None, *, ends_with_cancel: bool = False) -> BodyOutcome:
        """Like `run`, on the main thread, with an alarm signal that interrupts Python code and system calls.

        It goes off after ``timeout``, and if the body ``ends_with_cancel``, when the renewer notices a cancel.
        """
        if timeout is None and not ends_with_cancel:
            return self.run()
        limit = body_timer.start((timeout or _FOREVER).total_seconds())
        try:
            try:
                limit.is_armed = True
                if ends_with_cancel:
                    self._lease.call_if_cancelled(self, functools.partial(body_timer.expire, limit))
                outcome = self.run()
            finally:
                limit.is_armed = False  # the alarm must not raise while the attempt is being ended
                self._lease.call_if_cancelled(self, None)  # no signal may come after the pass has left the alarm
        except StepInterrupted:  # the alarm went off after the body had ended, before it was disarmed
            outcome = TimedOut()
        finally:
            body_timer.stop(limit)
            if limit.has_expired:
                # The alarm may have interrupted `run` in its `finally` block, so these lines repeat the end of `run`.
                self._is_over = True
                self._lease.exit_user_code(self)
                current_attempt.set(None)
        return TimedOut() if limit.has_expired and not isinstance(outcome, (PassOver, TimedOut)) else outcome

    # --- its transaction ------------------------------------------------------------------------

    def run_in_transaction(self, step: str, body: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call of the body inside the step's transaction, or ``body`` if the store does not want that."""
        if not self._env.store.step_transactions.opens_before_body:
            return body

        def run() -> Any:
            self.open_transaction(step)
            return body()

        return run

    def open_transaction(self, step: str) -> StepTransaction:
        """Open the transaction of a step, named ``step``; raises StepInterrupted if the attempt was abandoned."""
        if self.call_async is not None:
            raise StepTxMisuse(
                f"tx.session in step {step!r}, an async function: it would block the event loop, and hold its locks "
                "during every await. Write with tx.mutate(fn), which calls fn(session) when the step commits; read in "
                "a step of its own, a plain function."
            )
        lock = self._session_lock
        if lock is not None:
            lock.acquire(self)
        try:
            transaction = self.buffer.transaction = self._env.store.step_transactions.begin(step)
            self.check_not_abandoned()
        except BaseException as error:
            self.opening_error = error
            if lock is not None:
                lock.release(self)
            raise
        return transaction

    def close_transaction(self) -> None:
        """Close the transaction, which rolls back what is not committed. Does nothing without one."""
        transaction = self.buffer.transaction
        if transaction is not None and not self._is_transaction_closed:
            self._is_transaction_closed = True
            transaction.close()
            if self._session_lock is not None:
                self._session_lock.release(self)

    def _abandon_transaction(self) -> None:
        if self.buffer.transaction is not None:
            self.buffer.transaction.abandon()

    # --- after its timeout ----------------------------------------------------------------------

    def check_not_abandoned(self) -> None:
        """Raise StepInterrupted if this attempt was abandoned. Bodies call it before they use the database."""
        with self._lock:
            if self._is_abandoned:
                self._abandon_transaction()
                raise StepInterrupted

    def abandon(self) -> None:
        """Give up this attempt without a commit. Its transaction is closed now, or when the body returns.

        The body may end at the same time. The lock makes sure that the later of the two closes the transaction.
        """
        with self._lock:
            self._is_abandoned = True
            if not self.duration and self._started_at is not None:
                self.duration = timedelta(seconds=self._monotonic() - self._started_at)
            if self._is_over:
                self.close_transaction()
            else:
                self._abandon_transaction()
        # After the flag, which the body's thread reads when it has entered user code. The pass continues without the
        # body, so it can count as stalled again.
        self._lease.exit_user_code(self)


def _call_nothing() -> None:
    raise AssertionError("an attempt without a call was run")


def _call_inside(around: AbstractContextManager[None], call: Callable[[], Any]) -> Any:
    with around:
        return call()


async def _await_inside(around: AbstractContextManager[None], call: Callable[[], Awaitable[Any]]) -> Any:
    with around:
        return await call()
