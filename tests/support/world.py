"""A world for engine tests: the clock, runtime and processes of `celery_durable.testing`, on every database.

Unlike the harness it has production's threads and timers, tables of its own that invariants look at, and
remembers what was promised to callers. There is no broker: what would be published lies in `World.messages`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
import sqlalchemy as sa
import sqlalchemy.orm

from celery_durable.all_operations import Operations
from celery_durable.concurrency import ConcurrentBody
from celery_durable.config import Settings
from celery_durable.definitions import Registry, define
from celery_durable.model import DueRun, OutboxMessage, RunRef
from celery_durable.operations.context import OperationContext
from celery_durable.redispatch import SLACK
from celery_durable.runtime import Runtime
from celery_durable.step import StepTx
from celery_durable.store.runs import schedule
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing import Clock, HarnessRuntime, Process, RunnerProcess
from celery_durable.testing.code import Deployed
from tests.support import open_connections
from tests.support.authors import empty_tables, ledger, names
from tests.support.instances import FlowControl, Instance

P = TypeVar("P", bound=Process)
on_one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For permutations of what no database ever sees."""
_MOST_TICKS = 100


class SerializationFailure(Exception):
    """What a driver raises for SQLSTATE 40001."""

    sqlstate = "40001"


class WorldRuntime(HarnessRuntime):
    """The harness's time, chance and crash points, with production's threads and timers: these are under test here."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock, name=name)
        self.clock = _current_time
        self.thread: int | None = None
        """The thread of the pass: what the lease keeper does on its own passes no checkpoint."""
        self.has_ended = threading.Event()

    def checkpoint(self, name: str) -> None:
        if self.thread in (None, threading.get_ident()):
            super().checkpoint(name)

    sleep = Runtime.sleep
    can_interrupt = Runtime.can_interrupt

    def start_periodic_job(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        """Call ``work`` on a thread, as production does, but at most until the world is closed.

        A thread that slept on would keep its world in memory.
        """

        def loop() -> None:
            while not self.has_ended.wait(seconds) and work():
                pass

        threading.Thread(target=loop, name=name, daemon=True).start()

    def run_concurrently(self, branches: Sequence[ConcurrentBody]) -> None:
        """Run each body on a thread of its own, as production does.

        If the process dies meanwhile, wait for the bodies that still run: they end at their next statement. sqlite3
        crashes if a connection is closed while another thread executes on it.
        """
        ended = [threading.Event() for _ in branches]
        for branch, event in zip(branches, ended, strict=True):
            if branch.start is not None:  # a task, which has no connection
                event.set()
        try:
            Runtime.run_concurrently(
                self,
                [
                    replace(branch, run=partial(_run_and_set, branch.run, event))
                    for branch, event in zip(branches, ended, strict=True)
                ],
            )
        finally:
            if self.is_dead:
                assert all(event.wait(60) for event in ended), "a body of a dead process still runs"


def _run_and_set(run: Callable[[], Any], ended: threading.Event) -> Any:
    try:
        return run()
    finally:
        ended.set()


def _current_time() -> int:
    assert World.current is not None
    return World.current.now_us


class Worker(RunnerProcess):
    """A worker process of this world."""

    def __init__(
        self, world: World, name: str, registry: Registry, interruptions: tuple[type[BaseException], ...]
    ) -> None:
        super().__init__(
            name,
            world.url,
            WorldRuntime(world, name),
            world.settings,
            registry=registry,
            publish_runs=world.messages.extend,
            interruptions=interruptions,
            send=world.take,
        )

    def advance(self, ref: RunRef) -> str:
        """Deliver a message; a crash kills this worker, and the world goes on."""
        self.runtime.thread = threading.get_ident()
        return super().advance(ref)

    def renew_leases(self) -> None:
        """Do what the renewer does every third of a lease."""
        self.runner._renewer._renew_all()


class Producer(Process):
    """A process of the application that creates instances and sends events."""

    def __init__(self, world: World, name: str) -> None:
        self.settings = world.settings
        super().__init__(name, world.url, WorldRuntime(world, name), world.settings)
        self.operations = Operations(
            OperationContext(self.store, world.settings, world.registry, self.runtime, world.messages.extend)
        )


class Beat(Process):
    """A process with a sweeper."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name, world.url, WorldRuntime(world, name), world.settings)
        self.sweeper = Sweeper(
            self.store,
            world.settings,
            self.runtime,
            world.publish,
            world.queue_length,
            outbox=Outbox(self.store, world.settings, world.take),
        )


class World:
    """One database, one web process with a sweeper, any number of workers."""

    current: ClassVar[World | None] = None
    """The world whose clock statements read."""

    def __init__(self, url: str, **settings: Any) -> None:
        World.current = self
        self.url, self.clock = url, Clock()
        self.settings = Settings(**settings)
        self.messages: list[DueRun] = []
        self.sent: list[OutboxMessage] = []
        self.offered: list[str] = []
        self.refused: set[str] = set()
        """Names of what the broker, or the app, would not take."""
        self.is_broker_away = False
        self.accepted: list[tuple[str, str]] = []
        self.accepted_events: list[str] = []
        self.bodies: list[tuple[str, int, str, int]] = []
        self.prior_runs: dict[tuple[str, str, int], Any] = {}
        self.exempt: dict[str, str] = {}
        self.inspector: sa.Engine | None = None
        """What the invariants are asked on, if that outlives this world."""
        self.registry = Deployed([])
        self._processes: list[Process] = []
        self._workers: list[Worker] = []
        self._web = self._started(Process("web", url, WorldRuntime(self, "web"), self.settings))
        self.store = self._web.store
        self.operations = Operations(
            OperationContext(self.store, self.settings, self.registry, self._web.runtime, self.messages.extend)
        )
        self.sweeper = Sweeper(
            self.store,
            self.settings,
            self._web.runtime,
            self.publish,
            self.queue_length,
            outbox=Outbox(self.store, self.settings, self.take),
        )
        with self.store.engine.begin() as connection:
            for statement in empty_tables(connection.dialect.name):
                connection.exec_driver_sql(statement)

    def close(self) -> None:
        for process in self._processes:
            if process.is_dead:
                process.close()
            else:
                open_connections.close(process.store)
            process.runtime.has_ended.set()

    # --- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return self.clock.now

    @property
    def now_us(self) -> int:
        return self.clock.read()

    def advance(self, span: float | timedelta) -> None:
        """Move the clock; nothing runs by itself, but the web process has seen database and queues all the while."""
        span = span if isinstance(span, timedelta) else timedelta(seconds=span)
        if span > self.settings.lease:
            self.clock.advance(span - self.settings.lease)
            self.sweeper.seconds_to_next()
            span = self.settings.lease
        if span > SLACK:
            self.clock.advance(span - SLACK)
            agenda = self.store.read(schedule.read)
            for queue in agenda.queues:
                self.sweeper._flow.read_capacity(queue, agenda.now)
            span = SLACK
        self.clock.advance(span)

    # --- code and workers -----------------------------------------------------------------------

    def workflow(self, fn: Any = None, /, **options: Any) -> Any:
        """Register a workflow for the code of all workers."""

        def register(fn: Callable[..., Any]) -> FlowControl:
            definition = define(fn, **options)
            self.registry.replace(definition)
            return FlowControl(self, definition)

        return register if fn is None else register(fn)

    @property
    def worker(self) -> Worker:
        """The worker that gets the messages: the newest one that lives."""
        living = [worker for worker in self._workers if not worker.runtime.is_dead]
        return living[-1] if living else self.new_worker()

    def new_worker(
        self, *, registry: Registry | None = None, interruptions: tuple[type[BaseException], ...] = ()
    ) -> Worker:
        name = f"worker-{len(self._workers) + 1}"
        self._workers.append(self._started(Worker(self, name, registry or self.registry, interruptions)))
        return self._workers[-1]

    def new_producer(self) -> Producer:
        return self._started(Producer(self, "producer"))

    def new_beat(self) -> Beat:
        return self._started(Beat(self, "beat"))

    def _started(self, process: P) -> P:
        open_connections.use_again(process.store)
        self._processes.insert(0, process)  # the web process is closed last
        return process

    # --- driving --------------------------------------------------------------------------------

    def queue_length(self, queue: str) -> int:
        return sum(due.queue == queue for due in self.messages)

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        """A broker that takes everything."""
        self.messages.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def take(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        """The same for what was in the outbox; a broker that is away takes nothing, and never what is `refused`."""
        if self.is_broker_away:
            return PublishReport.of(len(messages), SendState.UNSENT)
        refused = [each for each in messages if each.name in self.refused]
        self.offered.extend(each.name for each in messages)
        self.sent.extend(each for each in messages if each not in refused)
        return PublishReport([SendState.REFUSED if each in refused else SendState.SENT for each in messages])

    def tick(self) -> list[str]:
        """Sweep once and deliver the messages that are there, each once; answers with what came of them."""
        self.sweeper.sweep()
        due, self.messages[:] = list(self.messages), []
        return [self.worker.advance(each.ref) for each in due]

    def run_until_idle(self) -> None:
        """Deliver until there is no message and nothing that a sweep would publish now."""
        for _ in range(_MOST_TICKS):
            if not self.tick() and not self.messages:
                return
        raise AssertionError(f"still busy after {_MOST_TICKS} ticks: a hot loop?")

    def delete_expired(self) -> int:
        """Delete what a process with a dispatcher would delete, now."""
        return self.operations.retention.delete_expired()

    def instance(self, workflow: str, id: str) -> Instance:
        return Instance(self, workflow, id)

    def run_after(self, span: float | timedelta) -> None:
        self.advance(span)
        self.run_until_idle()

    # --- the author's side ----------------------------------------------------------------------

    def book(self, tx: StepTx, instance: str, run: int) -> str:
        """A body that writes one row in the step's own transaction. Name its step "book..."."""
        self.bodies.append((instance, run, tx.name, tx.attempt))
        tx.session.execute(sa.insert(ledger).values(instance=instance, run=run, step=tx.name, attempt=tx.attempt))
        return f"booked {tx.name}"

    def booked(self) -> list[str]:
        """The steps that have written to the ledger."""
        return [row.step for row in self.rows(sa.select(ledger.c.step).order_by(ledger.c.id))]

    def names(self) -> list[str]:
        return [row.name for row in self.rows(sa.select(names.c.name).order_by(names.c.name))]

    def rows(self, query: Any) -> list[Any]:
        return self.store.read(lambda tx: list(tx.execute(query)))

    # --- outside --------------------------------------------------------------------------------

    def restart(self, instance: Instance) -> int:
        """Restart, and remember the run that ends, which must never change again (I11)."""
        before = instance.row.run_number
        number = self.operations.rewind.restart(instance.workflow, instance.id)
        self.prior_runs[instance.workflow, instance.id, before] = self.recorded(instance, before)
        return number

    def recorded(self, instance: Instance, run: int) -> dict[str, list[Any]]:
        """Everything that is recorded of a run."""
        t, pk = self.store.tables, instance.row.id
        return {
            table.name: self.rows(
                sa.select(table)
                .where(table.c.instance_pk == pk, table.c.run_number == run)
                .order_by(*table.primary_key)
            )
            for table in (t.run, t.step, t.event, t.log, t.published, t.item, t.attempt)
        }

    @contextmanager
    def session(self) -> Any:
        """A session of the application's own, on an engine of its own."""
        engine = sa.create_engine(self.url)
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "connect", _no_implicit_begin)
            sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        try:
            with sa.orm.Session(engine) as session:
                yield session
        finally:
            engine.dispose()


def _no_implicit_begin(connection: Any, _: object) -> None:
    connection.isolation_level = None


def insert_name(name: str) -> Callable[[sa.orm.Session], object]:
    """A write for `StepTx.mutate` that violates a unique key the second time."""
    return lambda session: session.execute(sa.insert(names).values(name=name))
