"""The environment of a pair: one database, two processes that run the pair, and a third that finishes the instance."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy import event

from celery_durable import Cancelled, Retries, Step, WorkflowEvent
from celery_durable.all_operations import Operations
from celery_durable.concurrency import ConcurrentBody
from celery_durable.model import Claim, DueRun, OutboxKind, OutboxMessage, RunRef
from celery_durable.operations.context import OperationContext
from celery_durable.step import StepTx
from celery_durable.store.runs import claims
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing import RunnerProcess
from tests.pairs.pausable_job import START, PausableJob, current_job, pass_gate
from tests.store.world import has_lock_wait
from tests.support.answers import answer
from tests.support.authors import ledger, names
from tests.support.groups import AlwaysInGroups
from tests.support.world import Instance, World, WorldRuntime

_SECONDS = 30.0
_PAUSE_SECONDS = 0.003
"""Between two questions whether a job waits for a lock. Without pauses they take the processor from the job."""
app = Celery("pairs", set_as_current=False)


@app.task(name="pairs.page", shared=False)
def page(number: int) -> None:
    """Is never executed here: the tests send its answers themselves."""


@app.task(name="pairs.ship", shared=False)
def ship() -> None:
    """Is never executed here: the tests send its answers themselves."""


class PairRuntime(WorldRuntime):
    """Counts repeated transactions, which show a deadlock, and keeps the lease renewal for the test to call."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.repeats = 0
        self.renew: Callable[[], bool] = lambda: False

    def checkpoint(self, name: str) -> None:
        job = current_job()
        if name == "before-commit" and job is not None:
            job.commits()

    def back_off(self, times: int) -> None:
        self.repeats += 1
        super().back_off(times)

    def start_periodic_job(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        self.renew = work

    def run_concurrently(self, branches: Sequence[ConcurrentBody]) -> None:
        """Run the bodies one after the other on this thread, in the order of the calls."""
        for branch in branches:
            branch.on_done(branch.run())


class PairProcess(RunnerProcess):
    """A process that runs one operation of a pair, on its own connections."""

    runtime: PairRuntime

    def __init__(self, environment: Environment, name: str) -> None:
        world = environment.world
        self.published: list[DueRun] = []
        self.sent: list[OutboxMessage] = []
        self.settings = world.settings
        super().__init__(
            name,
            world.url,
            PairRuntime(world, name),
            world.settings,
            registry=world.registry,
            publish_runs=self.published.extend,
        )
        self.operations = Operations(
            OperationContext(self.store, world.settings, world.registry, self.runtime, self.published.extend)
        )
        self.sweeper = Sweeper(self.store, world.settings, self.runtime, self._publish, lambda _: None)
        self.outbox = Outbox(self.store, world.settings, self._send)
        self.environment = environment
        self._stretch_statements()
        event.listen(self.store.engine, "begin", lambda _: (job := current_job()) and job.started())
        event.listen(self.store.engine, "after_cursor_execute", _executed)

    def _stretch_statements(self) -> None:
        """Run single statements in transactions too, so that a test can hold them open after the statement."""

        def run_statement(work: Callable[[Any], Any], **options: Any) -> Any:
            return self.store.transact(work, **options)

        self.store.run_statement = run_statement  # type: ignore[method-assign]

    def _publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        self.published.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def _send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        pass_gate("sent")
        self.sent.extend(messages)
        return PublishReport.of(len(messages), SendState.SENT)

    def groups_commits(self, is_on: bool) -> None:
        """Have the passes of this process commit in groups from now on, or not."""
        group_commit = AlwaysInGroups(self.store) if is_on else None
        self.runner.env = dataclasses.replace(self.runner.env, group_commit=group_commit)

    def renew(self) -> bool:
        """Renew the leases, as the renewer's thread does every third of a lease."""
        return self.runtime.renew()


def _executed(_: Any, cursor: Any, statement: str, *__: Any) -> None:
    if (job := current_job()) is not None:
        job.executed(statement, cursor.rowcount)


class Environment:
    """The database, its processes and the workflows of the pairs. It is made once; `clear` it before each pair."""

    def __init__(self, url: str, inspector: sa.Engine) -> None:
        self.url = url
        self.world = World(url)
        self.world.inspector = self._inspector = inspector
        self.threads = ThreadPoolExecutor(4)
        self.first, self.second = PairProcess(self, "first"), PairProcess(self, "second")
        self._register()

    def close(self) -> None:
        self.threads.shutdown()
        for process in (self.first, self.second):
            process.close()
        self.world.close()

    @property
    def processes(self) -> tuple[PairProcess, PairProcess]:
        return self.first, self.second

    def clear(self) -> None:
        """Delete all rows, except the database's id, and everything that the processes remember."""
        world = World.current = self.world
        tables = world.store.tables
        with world.store.engine.begin() as connection:
            for table in [*tables.metadata.sorted_tables, ledger, names]:
                if table is not tables.database:
                    connection.execute(sa.delete(table))
        for remembered in (world.messages, world.sent, world.accepted, world.accepted_events, world.bodies):
            remembered.clear()
        world.prior_runs.clear()
        world.exempt = {
            "I4": "branches end in any order",
            "I9": "a body whose claim was taken over runs again, and nothing of the first is recorded",
        }
        for process in self.processes:
            process.published.clear()
            process.sent.clear()
            process.runtime.repeats = 0
            process.sweeper.seconds_to_next()
        world.sweeper.seconds_to_next()

    # --- workflows ------------------------------------------------------------------------------

    def _register(self) -> None:
        world = self.world

        def charge() -> str:
            pass_gate("charge")
            return "charged"

        def gather(event: WorkflowEvent, step: Step) -> Any:
            def book(tx: StepTx) -> str:
                booked = world.book(tx, event.instance_id, event.run_number)
                pass_gate("book")
                return booked

            branches = [
                step.submit_map("pages", page.s(), range(3), max_concurrency=2, retries=Retries(limit=3, delay=0)),
                step.submit_task("ship", ship.s(), retries=Retries(limit=3, delay=0)),
                step.submit_wait_for_event("ok", "ok"),
                step.submit_sleep("nap", 100),
                step.submit("charge", charge),
                step.submit("book", book),
            ]
            try:
                return step.gather(*branches)
            except Cancelled:
                step.do("refund", lambda: "refunded")
                raise
            finally:
                pass_gate("unwound")

        for name in ("gather", "grouped"):
            world.workflow(gather, name=name)

        @world.workflow
        def nap(event: WorkflowEvent, step: Step) -> str:
            try:
                step.sleep("nap", 100)
            finally:
                pass_gate("unwound")
            return "awake"

        @world.workflow
        def race(event: WorkflowEvent, step: Step) -> Any:
            branches = [
                step.submit_map("pages", page.s(), range(3), max_concurrency=2, retries=Retries(limit=3, delay=0)),
                step.submit_task("ship", ship.s(), retries=Retries(limit=3, delay=0)),
                step.submit_wait_for_event("ok", "ok"),
                step.submit("charge", charge),
            ]
            won = step.first("sooner", *branches)
            pass_gate("end")
            return repr(won)

        @world.workflow
        def kid(event: WorkflowEvent[int], step: Step) -> str:
            if event.payload == event.run_number == 1:
                raise ValueError("no")
            return "kid"

        @world.workflow
        def family(event: WorkflowEvent, step: Step) -> Any:
            child = step.submit_child(
                "by hand", kid, event.run_number, id=f"{event.instance_id}-kid-{event.run_number}"
            )
            return step.gather(child, step.submit_map("kids", kid, [event.run_number]))

    # --- running --------------------------------------------------------------------------------

    def start(self, work: Callable[[], Any], *, gate: str = START) -> PausableJob:
        """Start ``work`` on a thread and wait until it stops at its gate."""
        job = PausableJob(self.threads, work, gate=gate)
        job.wait()
        return job

    def wait_until_blocked(self, job: PausableJob) -> bool:
        """Wait until a job waits for a lock (returns True) or stops (returns False)."""
        deadline = time.monotonic() + _SECONDS
        with self._inspector.connect() as connection:
            while not job.stops_within(_PAUSE_SECONDS):
                if has_lock_wait(connection):
                    return True
                assert time.monotonic() < deadline, "the second job neither waits for a lock nor ends"
        return False

    def advance(self, seconds: float) -> None:
        """Move the clock. The sweepers of all processes check the database meanwhile, as without an outage."""
        while seconds > 0:
            part = min(seconds, self.world.settings.lease_seconds)
            self.world.clock.advance(part)
            seconds -= part
            for sweeper in (self.world.sweeper, *(process.sweeper for process in self.processes)):
                sweeper.seconds_to_next()

    def messages(self) -> list[OutboxMessage]:
        """Return the messages in the outbox, by name and arguments."""
        o = self.world.store.tables.outbox.c
        rows = self.world.rows(sa.select(o.id, o.kind, o.name, o.payload))
        found = [OutboxMessage(row.id, OutboxKind(row.kind), row.name, row.payload) for row in rows]
        return sorted(found, key=lambda message: (message.name, message.content["args"]))

    def fail_family(self) -> None:
        """Run the parent and its children until they have failed. The children were retried alone, and are due."""
        self.world.run_until_idle()
        for ref in self.kids():
            self.world.operations.rewind.retry(ref.workflow, ref.instance_id)

    def kids(self) -> list[RunRef]:
        """Return the current runs of the children."""
        i = self.world.store.tables.instance.c
        query = sa.select(i.workflow, i.instance_id, i.run_number).where(i.workflow == "kid").order_by(i.id)
        return [RunRef(row.workflow, row.instance_id, row.run_number) for row in self.world.rows(query)]

    def answer(self, process: Any, message: OutboxMessage) -> bool:
        """Answer a message as a worker that ran its task."""
        return answer(process, message, f"{message.name} {message.content['args']}")

    def repeats(self) -> int:
        """Return how many transactions were repeated. Each is a deadlock that the database detected."""
        return sum(process.runtime.repeats for process in self.processes)

    def claim_of(self, instance: Instance) -> Claim | None:
        row = instance.row
        if row.claim_token is None:
            return None
        ref = RunRef(row.workflow, row.instance_id, row.run_number)
        return self.world.store.transact(
            lambda tx: claims.find_claim(tx, ref, token=row.claim_token, lease=self.world.settings.lease)
        )
