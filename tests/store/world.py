"""`World`: the store's functions for tests, each in its own transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import sqlalchemy as sa

from celery_durable.errors import Superseded
from celery_durable.model import (
    Claim,
    DueRun,
    InstanceRow,
    OpenWait,
    ReleaseOutcome,
    RunOutcome,
    RunRef,
    StepRow,
    StepStatus,
    StepType,
    StepWrite,
    WakeReason,
    from_us,
)
from celery_durable.redispatch import QueueProgress, Redispatch
from celery_durable.store.engine import Store, Tx
from celery_durable.store.events import run_events
from celery_durable.store.instances import instances, lifecycle
from celery_durable.store.lanes import steps
from celery_durable.store.lanes.steps import WrittenStep
from celery_durable.store.runs import claims, releases, schedule, step_rows, sweeps
from celery_durable.store.runs.claims import ClaimRequest
from celery_durable.store.runs.step_rows import RunState

LEASE = timedelta(seconds=30)
GRACE = timedelta(seconds=2)
REDISPATCH = Redispatch(first=timedelta(seconds=15), longest=timedelta(minutes=10))

_tokens = count(1)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def step(key: str = "charge", status: StepStatus = StepStatus.COMPLETED, **given: Any) -> StepWrite:
    """Return the write of a step commit. By default the step is new and completed."""
    given = {"seq": 1, "type": StepType.DO, "replaces": None, "commit_id": f"commit-{key}"} | given
    return StepWrite(key=key, name=given.pop("name", key), status=status, **given)


class World:
    """One store, with a method for everything that can happen to an instance."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.threads = ThreadPoolExecutor(4)

    def close(self) -> None:
        self.threads.shutdown()

    # --- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return from_us(self.store.runtime.clock())

    def advance(self, by: float) -> None:
        self.store.runtime.advance(by)

    # --- instances ------------------------------------------------------------------------------

    def create(self, id: str = "o-1", *, workflow: str = "order", **given: Any) -> RunRef:
        given = {"params": "{}", "queue": "durable", "grace": GRACE, "commit_id": f"create-{id}"} | given
        is_new = self.store.transact(lambda tx: instances.insert(tx, workflow=workflow, instance_id=id, **given))
        assert is_new
        return RunRef(workflow, id, 1)

    def ref(self, instance_id: str) -> RunRef:
        return self.store.read(lambda tx: instances.read(tx, "order", instance_id)).ref

    def row(self, ref: RunRef) -> InstanceRow:
        return self.store.read(lambda tx: instances.read(tx, ref.workflow, ref.instance_id))

    def change(self, ref: RunRef, work: Callable[[Tx, InstanceRow], Any]) -> Any:
        """Lock the instance and call ``work`` with its row."""
        return self.store.transact(lambda tx: work(tx, instances.lock(tx, ref.workflow, ref.instance_id)))

    def pause(self, ref: RunRef) -> None:
        self.change(ref, lifecycle.pause)

    def resume(self, ref: RunRef) -> DueRun:
        return self.change(ref, lambda tx, row: lifecycle.make_due(tx, row, wake_reason=WakeReason.RESUME, grace=GRACE))

    def terminate(self, ref: RunRef, reason: str | None = None) -> None:
        self.change(ref, lambda tx, row: lifecycle.terminate(tx, row, reason=reason))

    def restart(self, ref: RunRef, reason: str | None = None) -> DueRun:
        commit_id = f"restart-{next(_tokens)}"
        return self.change(
            ref, lambda tx, row: lifecycle.restart(tx, row, grace=GRACE, commit_id=commit_id, reason=reason)
        )

    def send(self, ref: RunRef, type_: str = "approval", payload: str = "{}", id: str | None = None) -> bool:
        """Send an event. Returns whether it woke the instance."""
        return self.store.transact(lambda tx: send_in(tx, ref, type_, payload, id))

    # --- under a claim --------------------------------------------------------------------------

    def try_claim(self, ref: RunRef, *, by: str = "task-1 host-1", lease: timedelta = LEASE) -> Claim | None:
        task_id, node = by.split(maxsplit=1)[0], by.rsplit(maxsplit=1)[-1]
        request = ClaimRequest(ref, f"token-{next(_tokens)}", task_id, node, lease)
        claim = self.store.run_statement(lambda tx: claims.claim(tx, request))
        if isinstance(claim, claims.ClaimExpired):
            claim = self.store.transact(lambda tx: claims.take_over(tx, request))
        if claim is not None and claim.new_run is not None:  # what the claim read replaces what a load would read
            assert RunState.of_new_run(ref, claim.new_run) == self.load(claim)
        return claim

    def claim(self, ref: RunRef, *, by: str = "task-1 host-1", lease: timedelta = LEASE) -> Claim:
        claim = self.try_claim(ref, by=by, lease=lease)
        assert claim is not None
        return claim

    def load(self, claim: Claim) -> RunState:
        return self.store.run_statement(lambda tx: step_rows.load(tx, claim))

    def steps(self, claim: Claim) -> tuple[StepRow, ...]:
        return self.load(claim).steps

    def commit(self, claim: Claim, write: StepWrite, *, changes_instance: bool = True) -> WrittenStep:
        """Commit a step in the form that is fastest on this database."""
        return self.store.run_statement(lambda tx: commit_in(tx, claim, write, changes_instance=changes_instance))

    def write(self, claim: Claim, *writes: StepWrite) -> list[StepRow]:
        """Commit steps in a transaction of several statements."""
        return self.store.transact(lambda tx: write_in(tx, claim, *writes))

    def wait(
        self, claim: Claim, key: str = "approved", *, event: str | None = "approval", for_: float = 3600
    ) -> ReleaseOutcome:
        """Record a wait (a sleep if ``event`` is None) and suspend the instance."""
        kind = StepType.SLEEP if event is None else StepType.WAIT
        write = step(key, StepStatus.WAITING, type=kind, event_type=event, wake_in=seconds(for_))
        return self.store.transact(lambda tx: wait_in(tx, claim, write))

    def suspend(self, claim: Claim, *waits: OpenWait) -> ReleaseOutcome:
        def work(tx: Tx) -> ReleaseOutcome:
            guarded = claims.guard(tx, claim, lease=LEASE)
            return releases.suspend(tx, claim, guarded, waits, grace=GRACE)

        return self.store.transact(work)

    def release(self, claim: Claim) -> ReleaseOutcome:
        return self.store.transact(
            lambda tx: releases.release(tx, claim, claims.guard(tx, claim, lease=LEASE), grace=GRACE)
        )

    def end_run(self, claim: Claim, run_outcome: RunOutcome) -> None:
        if not self.store.run_statement(lambda tx: releases.end_run(tx, claim, run_outcome)):
            raise Superseded(str(claim.ref))

    # --- the sweep ------------------------------------------------------------------------------

    def sweep(
        self, *, priority: int = claims.STARTING, limit: int = 100, may_expire: bool = True, **given: Any
    ) -> list[DueRun]:
        return self.store.transact(
            lambda tx: sweep_in(tx, priority=priority, limit=limit, may_expire=may_expire, **given)
        )[0]

    def take_lost_runs(self, queue: str = "durable", *, limit: int = 100, **progress: Any) -> list[DueRun]:
        """Return the runs of a queue whose dispatch message is lost, given this progress of the queue."""
        return self.store.transact(
            lambda tx: sweeps.take_lost_runs(
                tx, queue=queue, limit=limit, redispatch=REDISPATCH, progress=QueueProgress(**progress), now=self.now
            )
        )

    def undo_dispatch(self, *refs: RunRef, delay: float = 0.0) -> None:
        """Undo the dispatch of these runs, as if the broker had not accepted their messages."""
        due_runs = [DueRun(ref, "durable") for ref in refs]
        self.store.transact(lambda tx: sweeps.undo_dispatch(tx, due_runs, delay=seconds(delay)))

    # --- reading --------------------------------------------------------------------------------

    def read_all_rows(self) -> dict[str, list[Any]]:
        """Return all rows of all tables."""
        with self.store.engine.connect() as connection:
            tables = self.store.tables.metadata.sorted_tables
            return {table.name: [*map(tuple, connection.execute(sa.select(table)))] for table in tables}

    # --- concurrency ----------------------------------------------------------------------------

    @contextmanager
    def hold_transaction(self) -> Iterator[Tx]:
        """Open a transaction on this thread. It holds its locks until the block ends, and then commits."""
        with self.store.engine.begin() as connection:
            yield Tx(connection, self.store)

    def start(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start ``work`` on another thread, so on another connection."""
        return self.threads.submit(work, *args)

    def start_blocked(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start ``work`` on another thread, and return when the server reports that it waits for a lock.

        SQLite does not report this. There the thread may not wait yet, and the outcome must be the same.
        """
        future = self.start(work, *args)
        if not self.store.database.has_one_writer:
            with self.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                while not has_lock_wait(connection):
                    assert not future.done(), future.result()
        return future


def has_lock_wait(connection: sa.Connection) -> bool:
    """Return whether a session of this database waits for a lock."""
    if connection.dialect.name == "postgresql":
        mine = "SELECT wait_event_type FROM pg_stat_activity WHERE datname = current_database()"
        return "Lock" in connection.exec_driver_sql(mine).scalars()
    # Not information_schema.innodb_trx: it is cached, and queries without pauses keep the cache from being renewed.
    mine = "SELECT id FROM information_schema.processlist WHERE db = database()"
    sessions = connection.exec_driver_sql(mine).scalars().all()
    transactions = connection.exec_driver_sql("SHOW ENGINE INNODB STATUS").one()[2].split("---TRANSACTION")
    waiting = [text for text in transactions if "LOCK WAIT" in text]
    return any(f"thread id {session}," in text for text in waiting for session in sessions)


def send_in(tx: Tx, ref: RunRef, type_: str = "approval", payload: str = "{}", id: str | None = None) -> bool:
    row = instances.lock(tx, ref.workflow, ref.instance_id)
    event_id = id or f"event-{next(_tokens)}"
    if not run_events.insert_event(tx, row, type_=type_, payload=payload, event_id=event_id):
        return False
    if not run_events.is_awaited(tx, row, type_):
        return False
    lifecycle.make_due(tx, row, wake_reason=WakeReason.EVENT, grace=GRACE)
    return True


def commit_in(tx: Tx, claim: Claim, write: StepWrite, *, changes_instance: bool = True) -> WrittenStep:
    """Write the guard and a step in one statement, where the database can do that."""
    if tx.store.combines_writes:
        return steps.guard_and_write_step(tx, claim, write, lease=LEASE, changes_instance=changes_instance)
    if changes_instance:
        held = claims.guard(tx, claim, lease=LEASE, resets_crash_count=write.resets_crash_count)
    else:
        held = claims.guard_without_change(tx, claim)
    with tx.store.conflict_as_superseded():
        return WrittenStep(step_rows.write_step(tx, claim, held, write), held.pause_requested)


def write_in(tx: Tx, claim: Claim, *writes: StepWrite) -> list[StepRow]:
    guarded = claims.guard(tx, claim, lease=LEASE)
    return [step_rows.write_step(tx, claim, guarded, write) for write in writes]


def wait_in(tx: Tx, claim: Claim, write: StepWrite) -> ReleaseOutcome:
    guarded = claims.guard(tx, claim, lease=LEASE)
    written = step_rows.write_step(tx, claim, guarded, write)
    assert written.wake_at is not None
    return releases.suspend(tx, claim, guarded, [OpenWait(written.wake_at, write.event_type)], grace=GRACE)


def sweep_in(tx: Tx, *, priority: int, limit: int, may_expire: bool = True, **given: Any) -> tuple[list[DueRun], int]:
    """Sweep all queues, or the given ``queue``. Returns the runs to publish, and the number of rows read."""
    given = {"redispatch": REDISPATCH, "lease": LEASE, "may_expire": may_expire} | given
    names = [given.pop("queue")] if "queue" in given else schedule.read(tx).queues_by_due_time(priority)
    due_runs: list[DueRun] = []
    seen = 0
    for name in names:
        found, looked_at = sweeps.sweep(tx, queue=name, priority=priority, limit=limit - seen, **given)
        due_runs, seen = due_runs + found, seen + looked_at
    return due_runs, seen
