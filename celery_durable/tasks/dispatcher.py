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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from celery_durable import notify
from celery_durable.config import Settings
from celery_durable.model import DueRun, Outage
from celery_durable.operations.topics import go_on_emitting
from celery_durable.redispatch import SLACK, Redispatch
from celery_durable.runtime import Runtime
from celery_durable.store import queues, retention, schedule, sweeps
from celery_durable.store.engine import Store, Tx
from celery_durable.store.instances import RESUMING, STARTING
from celery_durable.store.schedule import Agenda
from celery_durable.store.watchdog import LOOP
from celery_durable.tasks.flow_control import QUEUE_LENGTH_TTL_SECONDS, FlowControl
from celery_durable.tasks.fork_safety import ForkSafeThread
from celery_durable.tasks.heartbeats import HeartbeatThread
from celery_durable.tasks.lost.search import LostTasks
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import Outage as BrokerOutage
from celery_durable.tasks.publishing import PublishReport

logger = logging.getLogger("celery_durable.dispatcher")

_REST_SECONDS = 1.0
_ASKED_AFTER = timedelta(seconds=1.5)
"""A hint that nobody has claimed for so long has its queue asked for its length."""
_TIDY_SECONDS = 60.0
_TIDY_BATCH, _TIDY_BATCHES = 25, 20
"""Instances whose retention is over: so many in a transaction, so many transactions in a row."""


class Sweeper:
    """Finds due work and has it published, in turns of one batch each: instances, lost hints, the outbox, emissions."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        runtime: Runtime,
        publish: Callable[[Sequence[DueRun]], PublishReport],
        queue_length: Callable[[str], int | None],
        *,
        outbox: Outbox | None = None,
    ) -> None:
        self._store, self._settings, self._runtime = store, settings, runtime
        self._publish, self._outbox = publish, outbox
        self._flow = FlowControl(settings, runtime, queue_length)
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )
        self._looked_at, self._expires_from = -math.inf, 0.0
        self._tidy_at = -math.inf
        self._claimed: Mapping[str, datetime] = {}
        self._claimed_until = -math.inf

    def seconds_to_next(self) -> float:
        """How long there is nothing to do, as far as is known now; 0 or less when something is due.

        What waits for a queue that is full or refuses is not due before that queue is asked again.
        """
        with self._looking():
            agenda = self._store.read(schedule.read, bound=LOOP)
        times = [math.inf if agenda.emitting is None else (agenda.emitting - agenda.now).total_seconds()]
        if self._outbox is not None and agenda.outgoing is not None:
            times.append(max((agenda.outgoing - agenda.now).total_seconds(), self._flow.broker_backoff))
        for name, queue in agenda.queues.items():
            blocked = max(self._flow.queue_backoff(name), self._flow.broker_backoff)
            if queue.first is not None:
                times.append(_later((queue.first - agenda.now).total_seconds(), blocked))
            if queue.oldest_sent is not None:
                ripe = (queue.oldest_sent + _ASKED_AFTER - agenda.now).total_seconds()
                times.append(_later(_later(ripe, self._flow.lost_check_in(name)), blocked))
        return min(times)

    def looked_ago(self) -> float:
        """How many seconds ago it last looked for due work; infinite where that failed."""
        return self._runtime.monotonic() - self._looked_at

    def sweep(self, *, most_turns: int | None = None) -> int:
        """Look after all whose time has come, resumed work before new; returns how much was published.

        ``most_turns``: return after so many, even if there is more to do.
        """
        began, published, turns = self._runtime.monotonic(), 0, 0
        with self._looking():
            is_behind = True
            while is_behind and turns != most_turns:
                count, is_behind = self._turn()
                published, turns = published + count, turns + 1
        notify.sweep_done(published, timedelta(seconds=self._runtime.monotonic() - began))
        return published

    def sweep_alone(self) -> int:
        """As `sweep`, for a process that looks once, or seldom: that a queue is empty counts at once.

        Nobody would come back with what was seen. A worker that holds a hint in these seconds gets a superfluous copy.
        """
        self._flow.slack = timedelta(0)
        try:
            return self.sweep()
        finally:
            self._flow.slack = SLACK

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

    # --- a turn ---------------------------------------------------------------------------------

    def _turn(self) -> tuple[int, bool]:
        """One batch of each kind; returns how much was published, and whether there may be more to do now.

        None waits for another to be done: a hundred thousand messages in the outbox delay a timer by one batch.
        """
        agenda = self._store.read(schedule.read, bound=LOOP)
        published, is_behind = 0, False
        if self._flow.broker_backoff == 0:
            for kind in (self._instances, self._lost_hints, self._messages):
                count, has_more = kind(agenda)
                published, is_behind = published + count, is_behind or has_more
            is_behind = is_behind and self._flow.broker_backoff == 0
        if agenda.emitting is not None and agenda.emitting <= agenda.now:
            is_behind = go_on_emitting(self._store) or is_behind
        return published, is_behind

    def _instances(self, agenda: Agenda) -> tuple[int, bool]:
        """The resumed first, the rest of the batch for those that start; a queue gets no more than its share."""
        due_runs: list[DueRun] = []
        left, has_more = self._flow.batch_limit, False
        for priority in (RESUMING, STARTING):
            shares = self._shares(agenda, priority, left, due_runs)
            if shares:
                found = self._store.transact(functools.partial(self._sweep, agenda, priority, shares), bound=LOOP)
                due_runs += [due for due_here, _ in found for due in due_here]
                left -= sum(seen for _, seen in found)
                has_more = has_more or any(seen >= shares[at][1] for at, (_, seen) in enumerate(found))
        return self._send(due_runs), has_more

    def _shares(self, agenda: Agenda, priority: int, left: int, taken: Sequence[DueRun]) -> list[tuple[str, int]]:
        if left <= 0:
            return []
        used = Counter(due.queue for due in taken)
        rooms: dict[str, float] = {}
        for name in agenda.in_order(priority):
            if agenda.queues[name].due[priority] <= agenda.now:
                room = self._flow.capacity(name, agenda.now) - used[name]
                if room > 0:
                    rooms[name] = room
        share = math.ceil(left / max(len(rooms), 1))
        return [(name, int(min(share, room))) for name, room in rooms.items()]

    def _sweep(
        self, agenda: Agenda, priority: int, shares: Sequence[tuple[str, int]], tx: Tx
    ) -> list[tuple[list[DueRun], int]]:
        return [
            sweeps.sweep(
                tx,
                queue=name,
                priority=priority,
                limit=limit,
                redispatch=self._redispatch,
                may_expire=self._runtime.monotonic() >= self._expires_from,
                lease=self._settings.lease,
                progress=self._flow.progress(name, agenda.now, self._claimed.get(name)),
            )
            for name, limit in shares
        ]

    def _lost_hints(self, agenda: Agenda) -> tuple[int, bool]:
        """Hints that, by what is known of their queues, no worker will ever see."""
        published, has_more = 0, False
        for name, queue in agenda.queues.items():
            if queue.oldest_sent is None or agenda.now - queue.oldest_sent < _ASKED_AFTER:
                continue
            if self._flow.lost_check_in(name) > 0:
                continue
            limit = int(min(self._flow.batch_limit, self._flow.capacity(name, agenda.now)))
            progress = self._flow.progress(name, agenda.now, self._newest_claimed().get(name))
            due_runs: list[DueRun] = []
            if limit > 0 and queue.oldest_sent < self._redispatch.lost_before(progress, agenda.now):
                due_runs = self._store.transact(
                    functools.partial(
                        sweeps.take_lost,
                        queue=name,
                        limit=limit,
                        redispatch=self._redispatch,
                        progress=progress,
                        now=agenda.now,
                    ),
                    bound=LOOP,
                )
            is_over = limit <= 0 or len(due_runs) < limit
            self._flow.lost_check_done(name, is_over=is_over)
            published, has_more = published + self._send(due_runs), has_more or not is_over
        return published, has_more

    def _newest_claimed(self) -> Mapping[str, datetime]:
        """How far workers have come in each queue, by their own word; not older than a second."""
        now = self._runtime.monotonic()
        if now >= self._claimed_until:
            self._claimed, self._claimed_until = (
                self._store.read(queues.claimed, bound=LOOP),
                now + QUEUE_LENGTH_TTL_SECONDS,
            )
        return self._claimed

    def _messages(self, agenda: Agenda) -> tuple[int, bool]:
        """What transactions left in the outbox."""
        if self._outbox is None or agenda.outgoing is None or agenda.outgoing > agenda.now:
            return 0, False
        turn = self._outbox.turn(self._flow.batch_limit)
        if turn.is_away:
            self._flow.broker_unavailable()
        return turn.sent, turn.has_more

    def _send(self, due_runs: Sequence[DueRun]) -> int:
        """Publish, and give back what did not leave; returns how much did."""
        if not due_runs:
            return 0
        again = self._flow.record(due_runs, self._publish(due_runs))
        for delay, kept in again.items():
            self._store.transact(functools.partial(sweeps.unsend, due_runs=kept, delay=delay), bound=LOOP)
        return len(due_runs) - sum(map(len, again.values()))


def _later(seconds: float, blocked: float) -> float:
    """When to look at what is due in ``seconds``, if nothing can be done for a while."""
    return max(seconds, blocked) if blocked > 0 else seconds


class Dispatcher(ForkSafeThread):
    """Runs a Sweeper on a daemon thread of this process; ``heart`` beats there too, ``lost`` looks for lost tasks."""

    def __init__(
        self,
        sweeper: Sweeper,
        settings: Settings,
        heartbeat: HeartbeatThread | None = None,
        lost: LostTasks | None = None,
        *,
        outages: Callable[[], Mapping[str | None, BrokerOutage]] = dict,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        self._sweeper, self._settings, self._heart, self._lost = sweeper, settings, heartbeat, lost
        self._outages, self._wall_clock = outages, (runtime or Runtime()).wall_clock
        self._blind: Outage | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start, unless this process's dispatcher runs already."""
        if self._thread is not None and self._thread.is_alive() and self._pid == os.getpid():
            return
        self._pid, self._stop = os.getpid(), threading.Event()
        self.reset_fork_lock()
        self._thread = threading.Thread(target=self._loop, name="durable-dispatcher", daemon=True)
        self._thread.start()
        logger.info("The durable dispatcher is running")

    def stop(self, *, wait: bool = True) -> None:
        """End the thread; ``wait``: for at most five seconds, until it has ended."""
        self._stop.set()
        if wait:
            self.join(5)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def _loop(self) -> None:
        stop, delay, is_blind = self._stop, 0.0, False
        while not stop.wait(delay):
            try:
                with self.fork_lock:
                    left = self._look()
            except Exception as exc:  # noqa: BLE001  # an outage must not end the dispatcher
                if not is_blind:
                    logger.warning("The dispatcher cannot look after due work, trying on: %s", exc)
                with self.fork_lock:
                    self._cannot_look(exc)
                is_blind, delay = True, _REST_SECONDS
                continue
            if is_blind:
                logger.info("The dispatcher looks after due work again")
            is_blind, delay = False, min(max(left, 0.005), self._settings.poll_seconds)
        if self._heart is not None:
            with self.fork_lock:
                self._heart.end()

    def _look(self) -> float:
        left = self._sweeper.seconds_to_next()
        published = 0
        if left <= 0:
            published = self._sweeper.sweep(most_turns=1)  # between two turns the heart beats
            left = self._sweeper.seconds_to_next()
        self._sweeper.tidy()
        self._blind = None
        if self._heart is not None:
            self._heart.beat(looked_ago=self._sweeper.looked_ago(), wakes_in=left, outages=self._told())
        if self._lost is not None:
            self._lost.look()
        # What full queues leave due must not make us spin.
        return left if left > 0 or published else self._settings.poll_seconds

    def _told(self) -> list[Outage]:
        """What keeps this dispatcher from its work: the database, the broker, or queues that refuse."""
        found = [] if self._blind is None else [self._blind]
        for queue, outage in self._outages().items():
            what: Literal["broker", "queue"] = "broker" if queue is None else "queue"
            found.append(Outage(what, outage.where, outage.since, outage.error, outage.failures))
        return found

    def _cannot_look(self, exc: Exception) -> None:
        """Say that due work is not looked after, where the database takes at least that."""
        known = self._blind
        since, failures = (self._wall_clock(), 0) if known is None else (known.since, known.failures)
        error = f"{type(exc).__name__}: {getattr(exc, 'orig', None) or exc}"
        self._blind = Outage("database", "database", since, error, failures + 1)
        if self._heart is not None:
            self._heart.beat(outages=self._told())
