"""The dispatcher: a loop that sleeps until the next poll time, sweeps the store and publishes what is due.

Any number may run, in beat and in workers: rows are locked with SKIP LOCKED and moved on before they
are published, and a superfluous message changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from celery_durable import teller
from celery_durable.config import Settings
from celery_durable.model import Due
from celery_durable.operations.emitting import go_on_emitting
from celery_durable.runtime import Runtime
from celery_durable.store import retention, sweeps
from celery_durable.store.engine import Store
from celery_durable.store.instances import RESUMING, STARTING
from celery_durable.store.sweeps import Redispatch
from celery_durable.tasks.forks import StillAtForks
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.pulse import Heart

logger = logging.getLogger("celery_durable.dispatcher")

_REST_SECONDS = 1.0
_REST = timedelta(seconds=_REST_SECONDS)
_TIDY_SECONDS = 60.0
_TIDY_BATCH, _TIDY_BATCHES = 25, 20
"""Instances whose retention is over: so many in a transaction, so many transactions in a row."""


class Sweeper:
    """Finds due work and has it published."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        publish: Callable[[Sequence[Due]], list[Due]],
        queue_length: Callable[[str], int | None],
        *,
        outbox: Outbox | None = None,
    ) -> None:
        self._store, self._settings, self._runtime = store, settings, runtime
        self._publish, self._queue_length, self._outbox = publish, queue_length, outbox
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )
        self._looked_at, self._expires_from = -math.inf, 0.0
        self._rooms = {settings.queue: _Room()}
        self._tidy_at = -math.inf

    def seconds_to_next(self) -> float:
        """How long there is nothing to do, as far as is known now; 0 or less when something is due."""
        with self._looking():
            due_at, now = self._store.read(sweeps.next_poll)
        return float("inf") if due_at is None else (due_at - now).total_seconds()

    def looked_ago(self) -> float:
        """How many seconds ago it last looked for due work; infinite where that failed."""
        return self._runtime.monotonic() - self._looked_at

    def sweep(self) -> int:
        """Look after all whose poll time has come, resumed work before new; answers with how much was published."""
        began = self._runtime.monotonic()
        with self._looking():
            published = 0 if self._outbox is None else self._outbox.sweep()
            published += self._sweep()
        teller.swept(published, timedelta(seconds=self._runtime.monotonic() - began))
        return published

    def tidy(self) -> int:
        """Delete instances whose retention is over, now and then and not too many; answers with how many."""
        now = self._runtime.monotonic()
        if now < self._tidy_at:
            return 0
        deleted = 0
        for _ in range(_TIDY_BATCHES):
            batch = self._store.transact(functools.partial(retention.delete_expired, limit=_TIDY_BATCH))
            deleted += batch
            if batch < _TIDY_BATCH:
                self._tidy_at = now + _TIDY_SECONDS
                break
        if deleted:
            logger.info("Deleted %s instances whose retention was over", deleted)
        return deleted

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Who has not seen the database for a while cannot know whether it was away, and with it every heartbeat.

        The first time, after a failure and after a gap, the workers get one lease's time to renew.
        """
        now = self._runtime.monotonic()
        if now - self._looked_at > self._settings.lease_seconds:
            self._expires_from = now + self._settings.lease_seconds
        self._looked_at = now
        try:
            yield
        except Exception:
            self._looked_at = -math.inf
            raise

    def _sweep(self) -> int:
        published = 0
        while True:
            is_emitting = go_on_emitting(self._store)
            full = [queue for queue in self._rooms if not self._has_room(queue)]
            dues, seen = self._turn(full)
            rooms = {due.queue: self._has_room(due.queue) for due in dues}  # also of queues not met before
            fitting = [due for due in dues if rooms[due.queue]]
            failed = self._publish(fitting) if fitting else []
            published += len(fitting) - len(failed)
            for due in fitting:
                self._rooms[due.queue].take()
            left = [due for due in dues if not rooms[due.queue]] + failed
            if left:
                self._store.transact(functools.partial(sweeps.unsend, dues=left, delay=_REST))
            if failed or (seen < self._settings.sweep_batch and not is_emitting):
                return published

    def _turn(self, full: Sequence[str]) -> tuple[list[Due], int]:
        """One batch: the resumed first, the rest of the batch for those that start."""
        dues: list[Due] = []
        seen = 0
        for priority in (RESUMING, STARTING):
            left = self._settings.sweep_batch - seen
            if left <= 0:
                break
            found, looked_at = self._store.transact(
                functools.partial(
                    sweeps.sweep,
                    priority=priority,
                    limit=left,
                    redispatch=self._redispatch,
                    may_expire=self._runtime.monotonic() >= self._expires_from,
                    lease=self._settings.lease,
                    without=full,
                )
            )
            dues += found
            seen += looked_at
        return dues, seen

    def _has_room(self, queue: str) -> bool:
        """Priority lives in SQL, not behind a long queue: while its workers lag behind, work waits where it is sorted.

        Asked when the last answer is a second old or used up: over Redis the question takes milliseconds.
        """
        now = self._runtime.monotonic()
        room = self._rooms.setdefault(queue, _Room())
        if now >= room.ask_at:
            length = self._queue_length(queue)
            room.left = math.inf if length is None else self._settings.queue_high_water - length
            room.ask_at = now + _REST_SECONDS
        return room.left > 0


@dataclass(slots=True)
class _Room:
    """How many messages a queue may still get, and when to ask again."""

    left: float = 0.0
    ask_at: float = -math.inf

    def take(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.ask_at = -math.inf


class Dispatcher(StillAtForks):
    """Runs a Sweeper on a daemon thread of this process; ``heart`` beats there too."""

    def __init__(self, sweeper: Sweeper, settings: Settings, heart: Heart | None = None) -> None:
        super().__init__()
        self._sweeper, self._settings, self._heart = sweeper, settings, heart
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start, unless this process's dispatcher runs already."""
        if self._thread is not None and self._thread.is_alive() and self._pid == os.getpid():
            return
        self._pid, self._stop = os.getpid(), threading.Event()
        self.begin_thread()
        self._thread = threading.Thread(target=self._loop, name="durable-dispatcher", daemon=True)
        self._thread.start()
        logger.info("The durable dispatcher is running")

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout=5)

    def _loop(self) -> None:
        stop, delay, is_blind = self._stop, 0.0, False
        while not stop.wait(delay):
            try:
                with self.may_work:
                    left = self._look()
            except Exception as exc:  # noqa: BLE001  # an outage must not end the dispatcher
                if not is_blind:
                    logger.warning("The dispatcher cannot look after due work, trying on: %s", exc)
                is_blind, delay = True, _REST_SECONDS
                continue
            if is_blind:
                logger.info("The dispatcher looks after due work again")
            is_blind, delay = False, min(max(left, 0.005), self._settings.poll_seconds)
        if self._heart is not None:
            with self.may_work:
                self._heart.end()

    def _look(self) -> float:
        left = self._sweeper.seconds_to_next()
        published = 0
        if left <= 0:
            published = self._sweeper.sweep()
            left = self._sweeper.seconds_to_next()
        self._sweeper.tidy()
        if self._heart is not None:
            self._heart.beat(looked_ago=self._sweeper.looked_ago(), wakes_in=left)
        # What full queues leave due must not make us spin.
        return left if left > 0 or published else self._settings.poll_seconds
