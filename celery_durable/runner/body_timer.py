"""The timer that interrupts a body on the main thread: one alarm signal for all bodies of a pass.

A handler and an alarm for each body would cost 24 us per step. The alarm stays armed between bodies; if it goes off too
early, the handler arms it again.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from celery_durable.errors import StepInterrupted
from celery_durable.runtime import real_monotonic

_REPEAT_SECONDS = 1.0
"""The interval of the alarm after its first, so that a body that catches one StepInterrupted cannot run forever."""


class BodyLimit:
    """The time limit of one body. ``is_armed``: whether the alarm may raise now. ``has_expired``: whether it has."""

    __slots__ = ("expires_at", "has_expired", "is_armed", "outer")

    def __init__(self, expires_at: float, outer: BodyLimit | None) -> None:
        self.expires_at, self.outer = expires_at, outer
        self.is_armed = self.has_expired = False


class BodyTimer:
    """The alarm of this process. Only the main thread uses it."""

    def __init__(self) -> None:
        self._limit: BodyLimit | None = None
        """That of the body that runs now. Its ``outer`` is that of a body that runs this whole pass (an eager task)."""
        self._is_installed = False
        self._handler_before: Any = None

    def start(self, seconds: float) -> BodyLimit:
        """Start the time of a body: it is interrupted with StepInterrupted after ``seconds``, while its limit is armed.

        The caller arms the limit where it can handle the interruption, and calls `stop` in any case.
        """
        limit = self._limit = BodyLimit(real_monotonic() + seconds, self._limit)
        # The body before may have used the alarm for itself, so the system is asked whether one is armed.
        if not (self._is_installed and 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds):
            before = signal.signal(signal.SIGALRM, self._on_alarm)
            if not self._is_installed:
                self._handler_before, self._is_installed = before, True
            signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
        return limit

    @staticmethod
    def expire(limit: BodyLimit) -> None:
        """Let the time of a body be over now, and repeat the alarm. Another thread calls it, before `stop`."""
        limit.expires_at = 0.0
        # A signal that comes just before the body waits does not interrupt that wait, so one is not enough.
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS, _REPEAT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def stop(self, limit: BodyLimit) -> None:
        """End the limit of a body. The limit of the body around it, if any, applies again."""
        limit.is_armed = False
        self._limit = limit.outer
        if limit.outer is not None:
            self._arm_for(limit.outer)
        elif limit.has_expired or limit.expires_at == 0.0:  # the alarm repeats
            signal.setitimer(signal.ITIMER_REAL, 0)

    def release(self) -> None:
        """Leave the alarm and its handler as they were before the pass. Does nothing while a body runs."""
        is_used = self._limit is not None or threading.current_thread() is not threading.main_thread()
        if is_used or not self._is_installed:
            return
        self._is_installed = False
        if signal.getsignal(signal.SIGALRM) == self._on_alarm:  # otherwise it belongs to somebody else now
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler_before)

    def _on_alarm(self, *_: object) -> None:
        limit = self._limit
        if limit is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif not limit.is_armed or limit.expires_at > real_monotonic():
            self._arm_for(limit)
        else:
            limit.has_expired = True
            raise StepInterrupted

    @staticmethod
    def _arm_for(limit: BodyLimit) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, limit.expires_at - real_monotonic()), _REPEAT_SECONDS)


body_timer = BodyTimer()
