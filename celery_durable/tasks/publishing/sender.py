"""The sender: one thread per process that sends on a connection of its own (LAW 8), while callers wait with a timeout.

So the timeout holds even if a name resolver hangs or a client library has no timeouts.

Two switches between threads take as long as the message itself. So a caller with a single message sends it itself, on
the same connection, while that is open, unused and quick. Then the timeouts of the socket limit how long it waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_durable.housekeeping import delay_forks, reset_in_child
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing.batches import DestinationBatch, merge_batches
from celery_durable.tasks.publishing.circuit_breakers import CircuitBreakers
from celery_durable.tasks.publishing.report import SendState
from celery_durable.tasks.publishing.transports import Transport

logger = logging.getLogger("celery_durable.tasks")

IDLE_SECONDS = 60.0
_STUCK_SECONDS = 6.0
"""A thread that is busy with one batch for longer is abandoned: it gets no more jobs, and ends after that batch."""
_RETRY_WITHIN_SECONDS = 0.5
_QUICK_SECONDS = 0.1
"""If the last jobs took longer, the next one is the thread's: each answer may take nearly as long as its timeout."""
_MAX_MESSAGES = 2000
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.SelectSelector)
"""A selector without a file of its own. That of `select` is the last resort: it takes no descriptor above 1,023."""


@dataclass(slots=True, eq=False)
class Job:
    """A caller's request: send messages, or store what ``request`` returns for the transport in ``response``."""

    batches: Sequence[DestinationBatch] = ()
    request: Callable[[Transport], Any] | None = None
    response: Any = None
    may_run_on_caller: bool = False
    is_started: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Starts the thread when there are jobs, and gives all waiting jobs to the transport as one batch.

    The sender's thread or a caller has the connection. A fork waits while the thread creates a connection object: that
    imports modules, and a child would inherit the locked import lock.
    """

    def __init__(
        self, make_transport: Callable[[int], Transport], circuit_breakers: CircuitBreakers, runtime: Runtime
    ) -> None:
        self._make_transport, self._circuit_breakers, self._runtime = make_transport, circuit_breakers, runtime
        self._failures = 0
        self._inherited: list[Transport] = []
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []
        self._transport: Transport | None = None
        self._busy_since: float | None = None
        self._idle_transport: Transport | None = None
        """The open connection while no thread has it and the broker is quick: a caller may borrow it."""
        self._borrowed: Transport | None = None
        self._used_at = 0.0

    # --- callers --------------------------------------------------------------------------------

    def run(self, job: Job, seconds: float) -> bool:
        """Run a job and wait for it. Returns False if it is late; then it was removed, unless it had started."""
        if job.may_run_on_caller and self._run_on_caller(job):
            return True
        if not self.submit(job):
            return False
        if job.done.wait(seconds):
            return True
        # The race with the thread, which takes jobs under the same lock: the job is removed here or runs to its end.
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
        return False

    def submit(self, job: Job) -> bool:
        """Queue a job and return at once; returns False if two threads hang already."""
        with self._changed:
            if not self._ensure_thread():
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def _run_on_caller(self, job: Job) -> bool:
        """Run a job on a borrowed connection; returns False if the thread has to run it.

        A connection with unread input was closed by the broker, or has an answer to nothing. To replace it takes long.
        """
        with self._changed:
            transport = self._idle_transport
            if transport is None or _have_input(transport.sockets()):
                return False
            self._idle_transport = None
            self._borrowed = transport
            self._busy_since = began = time.monotonic()
        is_usable = False
        try:
            self._run_on(transport, [job], job.batches)
            is_usable = True
        except transport.errors as exc:  # not what a signal handler raises here, such as a soft time limit
            if time.monotonic() - began <= _RETRY_WITHIN_SECONDS:  # as in `_run_jobs`
                return False
            self._record_broker_failure(exc)
        finally:
            self._return(transport, began, is_usable=is_usable)
        if is_usable:
            self._record_broker_success(job.batches)
        self._record_queue_states(job.batches)
        return True

    def _return(self, transport: Transport, began: float, *, is_usable: bool) -> None:
        """Return a borrowed connection. One that failed, or was interrupted between question and answer, is closed."""
        if not is_usable:
            self._discard(transport)
        with self._changed:
            if self._borrowed is not transport:  # the caller took so long that another thread has replaced it
                transport.close()
                return
            self._borrowed = self._busy_since = None
            if is_usable:
                self._keep(transport, began)
            if self._jobs or self._thread is None:  # else the thread has nothing to do, and to wake it takes time
                self._changed.notify_all()

    def _keep(self, transport: Transport | None, began: float) -> None:
        """Offer a connection to callers, if the jobs that began then were quick. Needs the lock."""
        self._used_at = time.monotonic()
        is_offered = transport is self._transport and self._used_at - began < _QUICK_SECONDS
        self._idle_transport = transport if is_offered else None

    def _ensure_thread(self) -> bool:
        self._abandoned = [each for each in self._abandoned if each.is_alive()]
        since = self._busy_since
        if self._thread is not None and since is not None and time.monotonic() - since > _STUCK_SECONDS:
            if self._abandoned:
                return False
            # The abandoned thread finds in `_take_jobs` that `_thread` is another one, and ends.
            self._abandoned.append(self._thread)
            self._thread = self._transport = self._borrowed = self._idle_transport = self._busy_since = None
        if self._thread is None or not self._thread.is_alive():
            self._busy_since = None
            self._thread = threading.Thread(target=self._run_thread, name="durable-publisher", daemon=True)
            self._thread.start()
        return True

    def close(self) -> None:
        """Tell the thread to close its connection and end; waits for at most three seconds."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._transport = self._idle_transport = None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STUCK_SECONDS / 2)

    def reset_in_child(self) -> None:
        """In a forked child, close the inherited sockets without sending anything: the parent owns the connection."""
        transport = self._transport
        self._reset()
        if transport is not None:
            self._inherited.append(transport)  # keeps a reference: a destructor would send to the broker
            with contextlib.suppress(Exception):  # the connection may be half open, and its library may raise any error
                for sock in transport.sockets():
                    os.close(sock.detach())  # close() would shut the parent's connection down

    # --- the thread -----------------------------------------------------------------------------

    def _run_thread(self) -> None:
        this_thread = threading.current_thread()
        transport: Transport | None = None
        while (taken := self._take_jobs(this_thread)) is not None:
            jobs, transport = taken
            began = time.monotonic()
            transport = self._run_jobs(jobs, transport, this_thread)
            with self._changed:
                if self._thread is this_thread:
                    self._busy_since = None
                    self._keep(transport, began)
            for job in jobs:
                job.done.set()
        if transport is not None:
            transport.close()

    def _take_jobs(self, this_thread: threading.Thread) -> tuple[list[Job], Transport | None] | None:
        """Wait for jobs; returns them and the open connection, or None if the thread was closed, abandoned or idle."""
        with self._changed:
            while self._thread is this_thread and (self._borrowed is not None or not self._jobs):
                left = self._used_at + IDLE_SECONDS - time.monotonic()
                if left <= 0 and self._borrowed is None:
                    break
                self._changed.wait(max(left, _QUICK_SECONDS))
            if self._thread is not this_thread:
                self._changed.wait_for(lambda: self._borrowed is None, _STUCK_SECONDS / 2)
                return None
            self._idle_transport = None
            if not self._jobs:
                self._thread = self._transport = None
                return None
            count = taken = 0
            while taken < len(self._jobs) and (taken == 0 or count < _MAX_MESSAGES):
                count += sum(len(batch.items) for batch in self._jobs[taken].batches)
                taken += 1
            jobs, self._jobs = self._jobs[:taken], self._jobs[taken:]
            for job in jobs:
                job.is_started = True
            self._busy_since = time.monotonic()
            return jobs, self._transport

    def _run_jobs(
        self, jobs: Sequence[Job], transport: Transport | None, this_thread: threading.Thread
    ) -> Transport | None:
        """Run the jobs; returns the connection if it can be used again, else None."""
        batches = merge_batches(batch for job in jobs for batch in job.batches)
        began, may_try_again = time.monotonic(), transport is not None
        while True:
            try:
                transport = transport or self._open_transport(this_thread)
                self._run_on(transport, jobs, batches)
            except Exception as exc:  # noqa: BLE001  # each transport raises errors of its own
                if transport is not None:
                    self._discard(transport)
                    transport = None
                if may_try_again and time.monotonic() - began <= _RETRY_WITHIN_SECONDS:
                    # The connection may have been lost while it was idle: try once more over a new one.
                    may_try_again = False
                    logger.debug("The sender tries once more over a new connection: %r", exc)
                    continue
                self._record_broker_failure(exc, is_current=this_thread not in self._abandoned)
            else:
                self._record_broker_success(batches)
            self._record_queue_states(batches)
            return transport

    def _open_transport(self, this_thread: threading.Thread) -> Transport:
        with delay_forks():
            transport = self._make_transport(self._failures)
        with self._changed:
            if self._thread is this_thread:
                self._transport = transport  # before it opens, so that a forked child finds its sockets
        try:
            transport.open()
        except BaseException:
            self._discard(transport)
            raise
        return transport

    def _discard(self, transport: Transport) -> None:
        transport.close()
        with self._changed:
            if self._transport is transport:
                self._transport = None

    @staticmethod
    def _run_on(transport: Transport, jobs: Sequence[Job], batches: Sequence[DestinationBatch]) -> None:
        for batch in batches:
            batch.error = ""
        if batches:
            transport.send(batches)
        for job in jobs:
            if job.request is not None:
                job.response = job.request(transport)

    def _record_broker_success(self, batches: Sequence[DestinationBatch]) -> None:
        if batches:
            self._circuit_breakers.record_success(None)

    def _record_broker_failure(self, exc: Exception, *, is_current: bool = True) -> None:
        """Record a failure. ``is_current``: this thread was not abandoned meanwhile; else the failure is an old one."""
        self._failures += 1
        if is_current:
            self._circuit_breakers.record_failure(None, f"{type(exc).__name__}: {exc}")

    def _record_queue_states(self, batches: Sequence[DestinationBatch]) -> None:
        for batch in batches:
            if batch.queue is None:
                continue
            if batch.error:
                self._circuit_breakers.record_failure(batch.queue, batch.error)
            elif all(item.state is SendState.SENT for item in batch.items):
                self._circuit_breakers.record_success(batch.queue)


def _have_input(sockets: Sequence[Any]) -> bool:
    """Whether one of these sockets has input, an error or the end of the connection."""
    with _Selector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))
