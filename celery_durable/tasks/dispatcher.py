"""The dispatcher: a loop that sleeps until the next poll time, sweeps the store and publishes messages for due work.

Any number may run. Each locks rows with SKIP LOCKED and postpones them before it publishes. A superfluous message
changes nothing (LAW 1).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal

from celery_durable import notify
from celery_durable.config import Settings
from celery_durable.housekeeping import Job, stop_jobs
from celery_durable.model import DueRun, Outage
from celery_durable.operations.topics import continue_abandoned_emission
from celery_durable.redispatch import SLACK, Redispatch
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import find_driver_error
from celery_durable.store.engine.time_limits import LOOP
from celery_durable.store.runs import schedule, sweeps
from celery_durable.store.runs.claims import RESUMING, STARTING
from celery_durable.store.runs.schedule import Agenda
from celery_durable.tasks.flow_control import RECHECK_SECONDS, FlowControl
from celery_durable.tasks.heartbeats import ProcessHeartbeat
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import BrokerOutage, PublishReport

logger = logging.getLogger("celery_durable.dispatcher")

_PAUSE_FACTOR, _MAX_PAUSE_SECONDS = 10, 1.0
"""While it is slow to find out what is due, a dispatcher spends a tenth of its time on that; timers are as late."""


class Sweeper:
    """Finds and publishes due work in rounds: a batch each of due runs, lost messages, the outbox and emissions."""

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
        self.full_queues, self.assume_local_queues = self._flow.full_queues, self._flow.assume_local_queues
        self._redispatch = Redispatch(
            timedelta(seconds=settings.redispatch_seconds), timedelta(seconds=settings.redispatch_max_seconds)
        )
        self._last_check_at, self._leases_expire_from = -math.inf, 0.0
        self.pause_seconds = 0.0
        """How long a dispatcher shall wait at least before it reads the agenda again, if nothing is due."""
        self._newest_claims: Mapping[str, datetime] = {}
        self._newest_claims_valid_until = -math.inf

    def seconds_to_next(self) -> float:
        """The seconds until known work is due; work of a full or refusing queue when that is checked again."""
        with self._record_check():
            agenda = self._read_agenda()
        self._flow.forget_full_queues(except_for=agenda.queues_with_work())
        times = [agenda.seconds_until(agenda.next_emission_at)]
        if self._outbox is not None and agenda.next_outbox_at is not None:
            times.append(max((agenda.next_outbox_at - agenda.now).total_seconds(), self._flow.broker_backoff))
        for name, queue in agenda.queues.items():
            blocked = max(self._flow.queue_backoff(name), self._flow.broker_backoff)
            times.append(_seconds_until_allowed(agenda.seconds_until(queue.next_at), blocked))
            if queue.oldest_sent_at is not None:
                check_due_in = (queue.oldest_sent_at + self._flow.unclaimed_check_delay - agenda.now).total_seconds()
                not_before_in = max(self._flow.seconds_to_lost_check(name), blocked)
                times.append(_seconds_until_allowed(check_due_in, not_before_in))
        return min(times)

    def seconds_since_check(self) -> float:
        """The seconds since the last check for due work; infinite if that check failed."""
        return self._runtime.monotonic() - self._last_check_at

    def sweep(self, *, max_rounds: int | None = None) -> int:
        """Publish all due work, resumed work before new work, in ``max_rounds``; returns the number of messages."""
        if not self._settings.is_execution_enabled:
            return 0
        began, published, rounds = self._runtime.monotonic(), 0, 0
        with self._record_check():
            is_behind = True
            while is_behind and rounds != max_rounds:
                count, is_behind = self._run_round()
                published, rounds = published + count, rounds + 1
        notify.send_sweep_done(published, timedelta(seconds=self._runtime.monotonic() - began))
        return published

    def sweep_as_only_sweeper(self) -> int:
        """Sweep for the command `celery durable sweep`, or for the task `sweep` while no dispatcher runs.

        An empty queue counts at once as proof that earlier dispatch messages are lost: this process cannot remember it
        until that is old enough. A worker that has just taken a message gets a superfluous copy.
        """
        self._flow.slack = timedelta(0)
        try:
            return self.sweep()
        finally:
            self._flow.slack = SLACK

    @contextlib.contextmanager
    def _record_check(self) -> Iterator[None]:
        """Record a check of the database. After the start, a failure or a gap, no lease expires for one lease time.

        The sweeper cannot know whether workers renewed their leases: the database may have been down.
        """
        now = self._runtime.monotonic()
        if now - self._last_check_at > self._settings.lease_seconds:
            self._leases_expire_from = now + self._settings.lease_seconds
        self._last_check_at = now
        try:
            yield
        except Exception:
            self._last_check_at = -math.inf
            raise

    def _read_agenda(self) -> Agenda:
        began = self._runtime.monotonic()
        agenda = self._store.read(schedule.read, timeouts=LOOP)
        self.pause_seconds = min(_PAUSE_FACTOR * (self._runtime.monotonic() - began), _MAX_PAUSE_SECONDS)
        return agenda

    # --- a round --------------------------------------------------------------------------------

    def _run_round(self) -> tuple[int, bool]:
        """Process one batch of each kind; returns the number of messages, and whether more work may be due now.

        No kind waits until another one is empty: 100,000 messages in the outbox delay a timer by one batch.
        """
        agenda = self._read_agenda()
        published, is_behind = 0, False
        if self._flow.broker_backoff == 0:
            for kind in (self._publish_due_runs, self._republish_lost, self._send_outbox):
                count, has_more = kind(agenda)
                published, is_behind = published + count, is_behind or has_more
            is_behind = is_behind and self._flow.broker_backoff == 0
        if agenda.next_emission_at is not None and agenda.next_emission_at <= agenda.now:
            is_behind = continue_abandoned_emission(self._store) or is_behind
        return published, is_behind

    def _publish_due_runs(self, agenda: Agenda) -> tuple[int, bool]:
        """Publish resumed runs first, then new runs in the rest of the batch; each queue gets an equal share."""
        due_runs: list[DueRun] = []
        remaining, has_more = self._flow.batch_limit, False
        for priority in (RESUMING, STARTING):
            shares = self._divide_batch(agenda, priority, remaining, due_runs)
            if shares:
                found = self._store.transact(functools.partial(self._sweep, agenda, priority, shares), timeouts=LOOP)
                due_runs += [due for due_here, _ in found for due in due_here]
                remaining -= sum(row_count for _, row_count in found)
                has_more = has_more or any(
                    row_count >= share for (_, row_count), (_, share) in zip(found, shares, strict=True)
                )
        return self._publish_and_record(due_runs), has_more

    def _divide_batch(
        self, agenda: Agenda, priority: int, limit: int, taken: Sequence[DueRun]
    ) -> list[tuple[str, int]]:
        """Divide the rest of a batch among the queues with due runs; returns each queue's name and limit."""
        if limit <= 0:
            return []
        taken_count = Counter(due.queue for due in taken)
        capacities: dict[str, float] = {}
        for name in agenda.queues_by_due_time(priority):
            if agenda.queues[name].due[priority] <= agenda.now:
                capacity = self._flow.read_capacity(name, agenda.now) - taken_count[name]
                if capacity > 0:
                    capacities[name] = capacity
        share = math.ceil(limit / max(len(capacities), 1))
        return [(name, int(min(share, capacity))) for name, capacity in capacities.items()]

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
                may_expire=self._runtime.monotonic() >= self._leases_expire_from,
                lease=self._settings.lease,
                progress=self._flow.build_queue_progress(name, agenda.now, self._newest_claims.get(name)),
                since=agenda.queues[name].due[priority],
            )
            for name, limit in shares
        ]

    def _republish_lost(self, agenda: Agenda) -> tuple[int, bool]:
        """Publish lost dispatch messages again (`redispatch`)."""
        published, has_more = 0, False
        for name, queue in agenda.queues.items():
            if queue.oldest_sent_at is None or agenda.now - queue.oldest_sent_at < self._flow.unclaimed_check_delay:
                continue
            if self._flow.seconds_to_lost_check(name) > 0:
                continue
            limit = int(min(self._flow.batch_limit, self._flow.read_capacity(name, agenda.now)))
            progress = self._flow.build_queue_progress(name, agenda.now, self._read_newest_claims().get(name))
            due_runs: list[DueRun] = []
            if limit > 0 and queue.oldest_sent_at < self._redispatch.lost_before(progress, agenda.now):
                due_runs = self._store.transact(
                    functools.partial(
                        sweeps.take_lost_runs,
                        queue=name,
                        limit=limit,
                        redispatch=self._redispatch,
                        progress=progress,
                        now=agenda.now,
                    ),
                    timeouts=LOOP,
                )
            is_over = limit <= 0 or len(due_runs) < limit
            self._flow.record_lost_check(name, is_over=is_over)
            published, has_more = published + self._publish_and_record(due_runs), has_more or not is_over
        return published, has_more

    def _read_newest_claims(self) -> Mapping[str, datetime]:
        """For each queue, the send time of the newest dispatch message that a worker has claimed; at most 1 s old."""
        now = self._runtime.monotonic()
        if now >= self._newest_claims_valid_until:
            self._newest_claims, self._newest_claims_valid_until = (
                self._store.read(schedule.read_claimed, timeouts=LOOP),
                now + RECHECK_SECONDS,
            )
        return self._newest_claims

    def _send_outbox(self, agenda: Agenda) -> tuple[int, bool]:
        if self._outbox is None or agenda.next_outbox_at is None or agenda.next_outbox_at > agenda.now:
            return 0, False
        batch = self._outbox.send_batch(self._flow.batch_limit)
        if batch.is_broker_down:
            self._flow.record_broker_outage()
        return batch.sent, batch.has_more

    def _publish_and_record(self, due_runs: Sequence[DueRun]) -> int:
        """Publish dispatch messages, and make the unsent runs due again; returns the number of sent messages."""
        if not due_runs:
            return 0
        unsent_by_delay = self._flow.record_report(due_runs, self._publish(due_runs))
        # A worker may claim such a run meanwhile: `undo_dispatch` skips claimed and locked rows.
        for delay, unsent in unsent_by_delay.items():
            self._store.transact(functools.partial(sweeps.undo_dispatch, due_runs=unsent, delay=delay), timeouts=LOOP)
        return len(due_runs) - sum(map(len, unsent_by_delay.values()))


def _seconds_until_allowed(due_in: float, not_before_in: float) -> float:
    """The seconds until work due in ``due_in`` may start, not before ``not_before_in``, if that is over 0."""
    return max(due_in, not_before_in) if not_before_in > 0 else due_in


class Dispatcher:
    """The job that runs a `Sweeper` and reports that to the heartbeat. ``beside``: jobs that start and stop with it."""

    def __init__(
        self,
        sweeper: Sweeper,
        settings: Settings,
        heartbeat: ProcessHeartbeat | None = None,
        *,
        beside: Sequence[Job] = (),
        outages: Callable[[], Mapping[str | None, BrokerOutage]] = dict,
        runtime: Runtime | None = None,
    ) -> None:
        self._sweeper, self._settings, self._heartbeat = sweeper, settings, heartbeat
        self._outages, self._wall_clock = outages, (runtime or Runtime()).wall_clock
        self._database_outage: Outage | None = None
        self._job = Job("durable-dispatcher", self._run, purpose="check for due work")
        self._jobs = [self._job, *beside]

    def is_running(self) -> bool:
        return self._job.is_started()

    def start(self) -> None:
        """Start the jobs, unless this process runs them already."""
        if not self.is_running():
            for job in self._jobs:
                job.start()
            logger.info("The durable dispatcher is running")

    def stop(self, timeout: float = 5.0) -> None:
        """End the jobs, and wait for at most ``timeout`` seconds until they have ended."""
        stop_jobs(self._jobs, timeout)

    def _run(self) -> float:
        try:
            left = self._check()
        except Exception as exc:
            self._record_database_outage(exc)
            raise
        return min(max(left, 0.005), self._settings.poll_seconds)

    def _check(self) -> float:
        left, published = self._sweeper.seconds_to_next(), 0
        if left <= 0:
            published = self._sweeper.sweep(max_rounds=1)  # one round, so that each is reported
            left = self._sweeper.seconds_to_next()
        self._database_outage = None
        if self._heartbeat is not None:
            self._heartbeat.record_check(seconds_ago=self._sweeper.seconds_since_check(), seconds_to_next=left)
            self._heartbeat.record_outages(self._list_outages())
        # Rows that stay due because their queues are full must not make this loop spin.
        if left <= 0:
            return left if published else self._settings.poll_seconds
        return max(left, self._sweeper.pause_seconds)

    def _list_outages(self) -> list[Outage]:
        """The outages that keep this dispatcher from its work: of the database, the broker, or single queues."""
        found = [] if self._database_outage is None else [self._database_outage]
        for queue, each in self._outages().items():
            what: Literal["broker", "queue"] = "broker" if queue is None else "queue"
            found.append(Outage(what, each.where, each.since, each.error, each.failures))
        error = f"QueueFull: {self._settings.queue_high_water} or more messages wait in it (durable_queue_high_water)"
        return [*found, *(Outage("full", *full, error, 0) for full in self._sweeper.full_queues().items())]

    def _record_database_outage(self, exc: Exception) -> None:
        """Record the failed check as an outage, and write it to the heartbeat if the database accepts that."""
        known = self._database_outage
        since, failures = (self._wall_clock(), 0) if known is None else (known.since, known.failures)
        found = find_driver_error(exc)
        error = f"{type(found).__name__}: {found}"
        self._database_outage = Outage("database", "database", since, error, failures + 1)
        if self._heartbeat is not None:
            self._heartbeat.record_outages(self._list_outages())
