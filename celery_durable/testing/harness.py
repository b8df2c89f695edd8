"""DurableHarness: a whole installation in one test, with its own clock and no broker.

The replay state, runner, store, operations and sweep are those of production. Time is a `Clock` that the test moves,
random values come from a seed, messages are captured, and functions of steps run one at a time. So a test does exactly
the same every time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import values
from celery_durable.all_operations import Operations
from celery_durable.app import Durable, override_durable
from celery_durable.config import Settings, read_settings
from celery_durable.handles import Workflow
from celery_durable.model import DueRun, OutboundEvent, OutboxKind, OutboxMessage, PassResult, RunRef, Status
from celery_durable.operations.context import OperationContext
from celery_durable.runner.ticks import Ticker
from celery_durable.store.runs import outbox
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox, Send
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing import databases
from celery_durable.testing.clock import START, Clock
from celery_durable.testing.code import Code, Codes, Deployed, definition_of
from celery_durable.testing.cooperative import CooperativeThread
from celery_durable.testing.databases import MakeStore
from celery_durable.testing.errors import HarnessBusy, HarnessMisuse, NothingDue, StoreNotEmpty
from celery_durable.testing.faults import Faults
from celery_durable.testing.instance import HarnessInstance
from celery_durable.testing.mocks import MockedWaits, Mocks
from celery_durable.testing.processes import Process, Processes, RunnerProcess
from celery_durable.testing.tasks import Messages, SentTasks
from celery_durable.values import Duration, Retries

P = TypeVar("P")
R = TypeVar("R")


class DurableHarness:
    """Workflows under test. Use it in a ``with`` block, or close it.

    Inside a ``with`` block the handles of your own modules (``order.create(...)``) act on the harness too.

    Args:
        workflows: Handles or functions. None: all that `@durable_workflow` has registered.
        store_url: The URL of an empty database of yours, which the harness migrates if needed. None: SQLite in memory.
        seed: Decides ids, tokens, and the order of parallel branches and of concurrent runners.
        start: The time at which the clock begins.
        settings: As in ``app.conf``, for example ``{"durable_lease_seconds": 10}``; or an ``app.conf`` itself, whose
            database is not touched.
        make_store: Makes the stores instead, as the fixture ``durable_harness`` of ``celery_durable.contrib.django``
            does for the database of Django's tests.
        wipe: Delete all instances in the database first.
        unused_mocks: Allow mocks of steps that no workflow has reached. By default the end of a ``with`` block raises
            HarnessMisuse for them, because the name is usually a typing mistake.

    Raises:
        HarnessMisuse: A setting's name does not begin with ``durable_``.
        StoreNotEmpty: The database has instances, and ``wipe`` is False.
    """

    def __init__(
        self,
        workflows: Codes | None = None,
        *,
        store_url: str | None = None,
        make_store: MakeStore | None = None,
        seed: int = 0,
        start: datetime = START,
        settings: Mapping[str, Any] | None = None,
        wipe: bool = False,
        unused_mocks: bool = False,
    ) -> None:
        self.unused_mocks = unused_mocks
        self.seed, self.clock = seed, Clock(start)
        self.mocks = Mocks()
        """What replaces the functions, tasks, waits and events of steps."""
        self.faults = Faults(self.mocks, lambda: self.runner)
        """Runners that crash or are held."""
        self.attempts = self.mocks.attempts
        """Every attempt of a step so far, in order."""
        self.settings = _settings(settings or {}, has_schemas=store_url is not None or make_store is not None)
        self._chance = random.Random(f"{seed}/harness")  # noqa: S311  # reproducible on purpose
        self.messages = Messages(self._chance)
        """The dispatch messages that have not been delivered yet, oldest first."""
        self.journal: list[str] = []
        """A line for each delivery, with its result."""
        self.outbox: list[OutboxMessage] = []
        """The tasks and outbound events that steps have sent, oldest first. The harness runs none of the tasks."""
        self._undelivered: list[str] = []
        self.tasks = SentTasks(lambda: self.durable.internals.operations, self.mocks, self.settings.limits)
        """The Celery tasks that steps wait for."""
        self._code = Deployed(workflows)
        self._processes = Processes(
            make_store or store_url,
            self.settings,
            self.clock,
            seed=seed,
            mocks=self.mocks,
            code=self._code,
            messages=self.messages,
            send=self._send,
            wait=self._wait_for_work,
        )
        self._store = self._processes.web.store
        self._active = ExitStack()
        self.durable = _build_durable(
            self._processes.web, self.settings, self._code, self.messages, send=self._send, advance=self._advance
        )
        """The Durable that handles act on, without a Celery app."""
        self._mocked_waits = MockedWaits(self.durable, self.mocks)
        self._sweeper = _build_sweeper(self.durable, self.messages)
        self._processes.database.migrate()
        self._refuse_others(wipe=wipe)

    def _advance(self, ref: RunRef, **how: Any) -> PassResult:
        """Advance a run for `Durable.tick`, with the current runner."""
        result = self.runner.run_pass(ref, **how)
        self._tell(self.runner, ref, result.summary)
        return result

    def _refuse_others(self, *, wipe: bool) -> None:
        if wipe:
            databases.wipe(self._store)
        elif not self._processes.database.is_own and self.durable.internals.operations.queries.list(limit=1).items:
            url = self._store.engine.url.render_as_string()
            self.close()
            raise StoreNotEmpty(url)

    def __repr__(self) -> str:
        return f"<DurableHarness at {self.clock.now:%Y-%m-%d %H:%M:%S}, {len(self.messages)} messages>"

    def __enter__(self) -> Self:
        self._active.enter_context(override_durable(self.durable))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self.unused_mocks:
                self.mocks.check_unused()
        finally:
            self.close()

    def close(self) -> None:
        """End all processes and remove the database that the harness made."""
        self._active.close()
        self._processes.close()

    # --- workflows and instances ----------------------------------------------------------------

    @overload
    def create(
        self, workflow: Workflow[P, R], params: P | None = None, *, id: str | None = None, **options: Any
    ) -> HarnessInstance[R]: ...
    @overload
    def create(
        self, workflow: str | Callable[..., Any], params: Any = None, *, id: str | None = None, **options: Any
    ) -> HarnessInstance[Any]: ...
    def create(self, workflow: Any, params: Any = None, *, id: str | None = None, **options: Any) -> Any:
        """Create an instance. Nothing runs yet.

        Args:
            workflow: A handle, a function or a name.
            params: As for `Workflow.create`.
            id: As for `Workflow.create`.
            options: The other options of `Workflow.create`.

        Raises:
            WorkflowNotFound: The harness does not know the workflow.
        """
        handle = self.workflow(workflow)
        return HarnessInstance(handle, handle.create(params, id=id, **options).id)

    def instance(self, workflow: str | Code, id: str) -> HarnessInstance[Any]:
        """Return an existing instance, for example one that a workflow created. Raises InstanceNotFound."""
        handle = self.workflow(workflow)
        return HarnessInstance(handle, handle.get(id).id)

    def workflow(self, workflow: str | Code) -> Workflow[Any, Any]:
        """Return the handle of a workflow that acts on this harness. Raises WorkflowNotFound."""
        name = workflow if isinstance(workflow, str) else definition_of(workflow).name
        return self.durable.workflows[name]

    def deploy(self, *workflows: Code) -> None:
        """Replace the code of workflows with new code of the same names, from the next pass on."""
        for workflow in workflows:
            self._code.replace(definition_of(workflow))

    def emit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:
        """Emit to all instances that wait on a topic, as `Durable.emit` does. Nothing runs yet."""
        return self.durable.emit(topic, payload, id=id)

    # --- time and deliveries --------------------------------------------------------------------

    def tick(self) -> str | None:
        """Do the next thing: deliver the oldest message, or sweep once if there is none.

        A lost message takes two sweeps, more than five seconds apart: the first one finds the queue empty.

        Returns:
            The result, or None if there was nothing to do.
        """
        if self._undelivered:
            return self.durable.internals.deliveries.deliver(self._undelivered.pop(0))
        if not self.messages:
            self._mocked_waits.answer()
        if not self.messages and self.tasks.answer() and not self.messages:
            return "a task has answered"
        if self.messages:
            return self.deliver(self.messages.pop(0))
        published = self._sweeper.sweep()
        for job in self.durable.internals.upkeep:
            job.run()
        return f"swept: {published} due" if published else None

    def run_until_idle(self, max_ticks: int = 1000) -> int:
        """Tick until there is nothing to do at this time. Returns the number of ticks.

        Raises:
            HarnessBusy: There is still work after ``max_ticks``.
        """
        for ticks in range(max_ticks):
            if self.tick() is None:
                return ticks
        if self.tick() is None:
            return max_ticks
        raise HarnessBusy(max_ticks, sorted({str(due.ref) for due in self.messages} | set(self._live())))

    def advance(self, by: Duration) -> None:
        """Let time pass: "3 days", a timedelta or a number of seconds. Work runs when it is due."""
        self.advance_to(self.clock.now + values.parse_duration(by))

    def advance_to(self, instant: datetime) -> None:
        """Let time pass as `advance` does, until an aware datetime."""
        values.to_utc(instant, "advance_to")
        self.run_until_idle()
        while (due_at := self.next_due()) is not None and self.clock.now < due_at <= instant:
            self.clock.set_to(due_at)
            self.run_until_idle()
        self.clock.set_to(instant)
        self.run_until_idle()

    def next_due(self) -> datetime | None:
        """Return when the next work is due. None: never, unless the test does something."""
        left = self._sweeper.seconds_to_next()
        return None if math.isinf(left) else self.clock.now + timedelta(seconds=left)

    def _wait_for_work(self, pause: float, left: float) -> None:
        """Work for code that waits for a result. If there is nothing to do, let time pass until something is due."""
        if self.run_until_idle() > 0:
            return
        due_at = self.next_due()
        if due_at is None:
            raise NothingDue
        seconds = max(pause, (due_at - self.clock.now).total_seconds())
        # The clock has microseconds. It must move, or the caller would wait for ever.
        self.advance_to(self.clock.now + max(timedelta(seconds=min(seconds, left)), timedelta(microseconds=1)))

    def deliver(self, what: DueRun | RunRef | HarnessInstance[Any], *, to: RunnerProcess | None = None) -> str:
        """Deliver a dispatch message of an instance to a runner.

        Args:
            what: The instance, its run, or a message.
            to: The runner. None: the current one.

        Returns:
            The result of the pass, "crashed" if the runner died, or "held at ..." if it is held.
        """
        ref = what.ref if isinstance(what, (DueRun, HarnessInstance)) else what
        runner = to or self.runner
        if all(barrier.is_open for barrier in self.mocks.barriers):
            said = runner.advance(ref)
        else:
            thread = CooperativeThread(functools.partial(runner.advance, ref), name=runner.name)
            thread.go()
            said = thread.result or f"held at {thread.parked_at}"
        return self._tell(runner, ref, said)

    def run_concurrently(self, runners: int = 2) -> list[str]:
        """Deliver each message to several runners at the same time. Returns the result of each delivery.

        At every checkpoint the seed decides which runner continues.
        """
        crew = [self.runner, *(self.second_runner() for _ in range(runners - 1))]
        due, self.messages[:] = list(self.messages), []
        threads = [
            (
                CooperativeThread(functools.partial(runner.advance, each.ref), name=runner.name, takes_turns=True),
                runner,
                each.ref,
            )
            for each in due
            for runner in crew
        ]
        while going := [thread for thread, _, _ in threads if not (thread.is_over or thread.is_held)]:
            self._chance.choice(going).go()
        return [
            self._tell(runner, ref, thread.result or f"held at {thread.parked_at}") for thread, runner, ref in threads
        ]

    def _tell(self, runner: RunnerProcess, ref: RunRef, said: str) -> str:
        self.journal.append(f"{self.clock.now:%Y-%m-%d %H:%M:%S} {runner.name} {ref}: {said}")
        return said

    def _live(self) -> Iterator[str]:
        for summary in self.durable.internals.operations.queries.list(status=Status.ACTIVE, limit=100).items:
            yield str(RunRef(summary.workflow, summary.id, summary.run_number))

    # --- what steps send ------------------------------------------------------------------------

    def outbound(
        self, name: str, *, retries: Retries | int | None = None
    ) -> Callable[[Callable[[OutboundEvent], R]], Callable[[OutboundEvent], R]]:
        """Register the handler of outbound events of this name, as `Durable.outbound` does. A tick calls it.

        An event without a handler is captured like a task, for `drain_outbox`, and counts as delivered.
        """
        return self.durable.outbound(name, retries=retries)

    def drain_outbox(self) -> list[OutboxMessage]:
        """Return what steps have sent since the last call. Each has an ``id``, ``kind``, ``name`` and ``content``."""
        sent, self.outbox[:] = list(self.outbox), []
        return sent

    def _send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        errors: dict[int, Exception] = {}
        for index, message in enumerate(messages):
            refusal = self.tasks.sent(message) if message.kind is OutboxKind.TASK else None
            if refusal is None:
                self.outbox.append(message)
            elif "reference" not in message.content:  # else `SentTasks` answers the step
                errors[index] = refusal
        events = [message for message in messages if message.kind is OutboxKind.EVENT]
        self._undelivered += [message.id for message in events if message.name in self.durable.internals.handlers]
        if others := [message.id for message in events if message.name not in self.durable.internals.handlers]:
            self._store.transact(lambda tx: outbox.delete(tx, others))
        states = [SendState.UNSENDABLE if index in errors else SendState.SENT for index in range(len(messages))]
        return PublishReport(states, errors)

    # --- runners --------------------------------------------------------------------------------

    @property
    def runner(self) -> RunnerProcess:
        """The runner that gets the messages. If the last one has died, a new one."""
        return self._processes.runner

    def restart_runner(self) -> RunnerProcess:
        """Replace the runner with a new process, as a deploy does. A runner that is held in a step dies there."""
        return self._processes.restart_runner()

    def second_runner(self, *, without: Iterable[Code | str] = ()) -> RunnerProcess:
        """Start another runner. It gets only what is delivered ``to`` it.

        Args:
            without: Workflows that it does not know, by name or code. Then it keeps the present code, whatever is
                deployed later, as an old worker does during a rolling deploy.

        Raises:
            WorkflowNotFound: The harness does not know a workflow of ``without``.
        """
        runner = self._processes.start_runner(self._code.without(without) if (without := list(without)) else None)
        runner.is_second = True
        return runner

    # --- the database ---------------------------------------------------------------------------

    @property
    def engine(self) -> sa.Engine:
        """The SQLAlchemy engine of the database. Your tables may be in it too."""
        return self._store.engine

    def create_tables(self, metadata: sa.MetaData) -> None:
        """Create your own tables, for steps that write with ``tx.session`` or ``tx.mutate``."""
        metadata.create_all(self.engine)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session on the database, to prepare data or to check it."""
        with Session(self.engine) as session:
            yield session


def _settings(given: Mapping[str, Any], *, has_schemas: bool) -> Settings:
    for name in given:
        if isinstance(given, dict) and not name.startswith("durable_"):
            raise HarnessMisuse(f"Setting {name!r}: write it as in app.conf, beginning with durable_.")
    settings = read_settings(given)
    return settings if has_schemas else dataclasses.replace(settings, database_schema=None)


# The parts of production that a harness wires together: a `Durable` without a Celery app, and its sweeper.


def _build_durable(
    web: Process,
    settings: Settings,
    code: Deployed,
    messages: Messages,
    *,
    send: Send,
    advance: Callable[..., PassResult],
) -> Durable:
    """Return a Durable over the store of ``web``. Its dispatch messages go into ``messages``."""
    durable = Durable(runtime=web.runtime)
    parts = durable.internals
    parts.settings, parts.store, parts.registry = settings, web.store, code
    parts.outbox = Outbox(web.store, settings, send)
    parts.operations = Operations(
        OperationContext(
            web.store,
            settings,
            code,
            web.runtime,
            messages.extend,
            send_messages=parts.outbox.send_committed,
        )
    )
    parts.ticker = Ticker(web.store, settings, web.runtime, advance)
    return durable


def _build_sweeper(durable: Durable, messages: Messages) -> Sweeper:
    """Return the sweeper of a Durable. It finds the captured messages still in their queues."""
    parts = durable.internals

    def publish(due_runs: Sequence[DueRun]) -> PublishReport:
        messages.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def queue_length(queue: str) -> int:
        return sum(due.queue == queue for due in messages)

    return Sweeper(parts.store, parts.settings, parts.runtime, publish, queue_length, outbox=parts.outbox)
