"""The sender: one thread per process that sends on a connection of its own (LAW 8), while callers wait with a timeout.

So the timeout holds even if a name resolver hangs or a client library has no timeouts. The thread opens the connection
at first use, and closes it after a minute without messages. A forked child starts without a thread and a connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_durable.runtime import Runtime
from celery_durable.tasks.fork_safety import ForkSafeThread
from celery_durable.tasks.publishing.batches import DestinationBatch, merge_batches
from celery_durable.tasks.publishing.circuit_breakers import CircuitBreakers
from celery_durable.tasks.publishing.report import SendState
from celery_durable.tasks.publishing.transports import Transport

logger = logging.getLogger("celery_durable.tasks")

IDLE_SECONDS = 60.0
_STUCK_SECONDS = 6.0
"""A thread that is busy with one batch for longer is abandoned: it gets no more jobs, and ends after that batch."""
_RETRY_WITHIN_SECONDS = 0.5
_MAX_MESSAGES = 2000


@dataclass(slots=True, eq=False)
class Job:
    """A caller's request: send messages, or store what ``request`` returns for the transport in ``response``."""

    batches: Sequence[DestinationBatch] = ()
    request: Callable[[Transport], Any] | None = None
    response: Any = None
    is_started: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Sender(ForkSafeThread):
    """Starts the thread when there are jobs, and gives all waiting jobs to the transport as one batch.

    A fork waits while the thread creates a connection object. Creating it imports modules, and a child would inherit
    the locked import lock.
    """

    def __init__(
        self, make_transport: Callable[[int], Transport], circuit_breakers: CircuitBreakers, runtime: Runtime
    ) -> None:
        super().__init__()
        self._make_transport, self._circuit_breakers, self._runtime = make_transport, circuit_breakers, runtime
        self._failures = 0
        self._inherited: list[Transport] = []
        self._reset()
        _senders.add(self)

    def _reset(self) -> None:
        self.reset_fork_lock()
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []
        self._transport: Transport | None = None
        self._busy_since: float | None = None

    # --- callers --------------------------------------------------------------------------------

    def run(self, job: Job, seconds: float) -> bool:
        """Run a job and wait for it; returns False if the job is not done in time.

        Then the job was removed from the queue, unless the thread had started it. A started job continues.
        """
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

    def _ensure_thread(self) -> bool:
        self._abandoned = [each for each in self._abandoned if each.is_alive()]
        since = self._busy_since
        if self._thread is not None and since is not None and time.monotonic() - since > _STUCK_SECONDS:
            if self._abandoned:
                return False
            # The abandoned thread finds in `_next_jobs` that `_thread` is another one, and ends.
            self._abandoned.append(self._thread)
            self._thread = self._transport = self._busy_since = None
        if self._thread is None or not self._thread.is_alive():
            self._busy_since = None
            self._thread = threading.Thread(target=self._run_thread, name="durable-publisher", daemon=True)
            self._thread.start()
        return True

    def close(self) -> None:
        """Tell the thread to close its connection and end; waits for at most three seconds."""
        with self._changed:
            thread, self._thread = self._thread, None
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
        while jobs := self._next_jobs(this_thread):
            transport = self._run_jobs(jobs, transport, this_thread)
            with self._changed:
                if self._thread is this_thread:
                    self._busy_since = None
            for job in jobs:
                job.done.set()
        if transport is not None:
            transport.close()

    def _next_jobs(self, this_thread: threading.Thread) -> list[Job]:
        """Wait for jobs and return them; returns an empty list if the thread was closed or abandoned, or was idle."""
        end = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while self._thread is this_thread and not self._jobs and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._thread is not this_thread:
                return []
            if not self._jobs:
                self._thread = self._transport = None
                return []
            count = taken = 0
            while taken < len(self._jobs) and (taken == 0 or count < _MAX_MESSAGES):
                count += sum(len(batch.items) for batch in self._jobs[taken].batches)
                taken += 1
            jobs, self._jobs = self._jobs[:taken], self._jobs[taken:]
            for job in jobs:
                job.is_started = True
            self._busy_since = time.monotonic()
            return jobs

    def _run_jobs(
        self, jobs: Sequence[Job], transport: Transport | None, this_thread: threading.Thread
    ) -> Transport | None:
        """Run the jobs; returns the connection if it can be used again, else None."""
        batches = merge_batches(batch for job in jobs for batch in job.batches)
        was_open, began = transport is not None, time.monotonic()
        try:
            try:
                transport = self._open_transport(transport, this_thread)
                self._run_on(transport, jobs, batches)
            except Exception as exc:
                # The connection may have been lost while it was idle: try once more over a new one.
                if not was_open or time.monotonic() - began > _RETRY_WITHIN_SECONDS:
                    raise
                logger.debug("The sender tries once more over a new connection: %r", exc)
                self._discard(transport)
                transport = self._open_transport(None, this_thread)
                self._run_on(transport, jobs, batches)
        except Exception as exc:  # noqa: BLE001  # each transport raises errors of its own
            self._failures += 1
            self._discard(transport)
            transport = None
            if this_thread not in self._abandoned:
                self._circuit_breakers.record_failure(None, f"{type(exc).__name__}: {exc}")
        else:
            self._record_broker_success(batches)
        self._record_queue_states(batches)
        return transport

    def _open_transport(self, transport: Transport | None, this_thread: threading.Thread) -> Transport:
        if transport is None:
            with self.fork_lock:
                transport = self._make_transport(self._failures)
            with self._changed:
                if self._thread is this_thread:
                    self._transport = transport  # before it opens, so that a forked child finds its sockets
            transport.open()
        return transport

    def _discard(self, transport: Transport | None) -> None:
        found = transport or self._transport
        if found is not None:
            found.close()
        with self._changed:
            if self._transport is found:
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

    def _record_queue_states(self, batches: Sequence[DestinationBatch]) -> None:
        for batch in batches:
            if batch.queue is None:
                continue
            if batch.error:
                self._circuit_breakers.record_failure(batch.queue, batch.error)
            elif all(item.state is SendState.SENT for item in batch.items):
                self._circuit_breakers.record_success(batch.queue)


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _in_child() -> None:
    for sender in list(_senders):
        sender.reset_in_child()


os.register_at_fork(after_in_child=_in_child)
