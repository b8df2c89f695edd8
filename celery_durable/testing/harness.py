"""DurableHarness: a whole installation in one test, with its own clock and no broker.

The replay state, runner, store, operations and sweep are those of production. The harness replaces what is around
them. Time is a `Clock` that the test moves, random values come from a seed, messages are captured, and functions of
steps run one at a time. So a test does exactly the same every time.
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
from celery_durable.app import Durable, override_durable
from celery_durable.config import Settings, read_settings
from celery_durable.handles import Workflow
from celery_durable.model import DueRun, OutboundEvent, OutboxKind, OutboxMessage, RunRef, Status
from celery_durable.operations import OperationContext, Operations
from celery_durable.runner.ticks import Ticker
from celery_durable.store import outbox
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing import databases
from celery_durable.testing.clock import START, Clock
from celery_durable.testing.code import Code, Codes, Deployed, definition_of
from celery_durable.testing.cooperative import CooperativeThread
from celery_durable.testing.errors import HarnessBusy, HarnessMisuse, NothingDue, StoreNotEmpty
from celery_durable.testing.faults import Faults
from celery_durable.testing.instance import HarnessInstance
from celery_durable.testing.messages import Messages
from celery_durable.testing.mocks import Mocks
from celery_durable.testing.process import Process, RunnerProcess
from celery_durable.testing.runtime import HarnessRuntime
from celery_durable.testing.tasks import SentTasks
from celery_durable.values import Duration, Retries

P = TypeVar("P")
R = TypeVar("R")
AnyProcess = TypeVar("AnyProcess", bound=Process)


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
        seed: int = 0,
        start: datetime = START,
        settings: Mapping[str, Any] | None = None,
        wipe: bool = False,
        unused_mocks: bool = False,
    ) -> None:
        self._unused_mocks = unused_mocks
        self.seed, self.clock = seed, Clock(start)
        self.mocks = Mocks()
        """What replaces the functions, tasks, waits and events of steps."""
        self.faults = Faults(self.mocks, lambda: self.runner)
        """Runners that crash or are held."""
        self.attempts = self.mocks.attempts
        """Every attempt of a step so far, in order."""
        self.settings = _settings(settings or {}, has_schemas=store_url is not None)
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
        self._runners: list[RunnerProcess] = []
        self._answered: set[tuple[RunRef, str, datetime | None]] = set()
        self._active = ExitStack()
        kind = self.settings.database_schema, self.settings.table_prefix
        self._compiled_statements = databases.compiled.setdefault(kind, {})
        self._database = databases.Database(store_url, schema=kind[0], prefix=kind[1])
        self._web = self._started(
            Process("web", self._database.url, _Web(self), self.settings, compiled_statements=self._compiled_statements)
        )
        self.durable = self._durable()
        """The Durable that handles act on, without a Celery app."""
        self._sweeper = Sweeper(
            self._web.store,
            self.settings,
            self._web.runtime,
            self._publish,
            self._queue_length,
            outbox=self.durable.internals.outbox,
        )
        self._database.migrate()
        self._refuse_others(wipe=wipe)

    def _durable(self) -> Durable:
        durable = Durable(runtime=self._web.runtime)
        parts = durable.internals
        parts.settings, parts.store, parts.registry = self.settings, self._web.store, self._code
        parts.outbox = Outbox(self._web.store, self.settings, self._send)
        parts.operations = Operations(
            OperationContext(
                self._web.store,
                self.settings,
                self._code,
                self._web.runtime,
                functools.partial(self._capture, None),
                send_messages=parts.outbox.send_committed,
            )
        )
        parts.ticker = Ticker(self._web.store, self.settings, self._web.runtime, self._advance)
        return durable

    def _advance(self, ref: RunRef, **how: Any) -> str:
        """Advance a run for `Durable.tick`, with the current runner."""
        return self._tell(self.runner, ref, self.runner.advance(ref, **how))

    def _refuse_others(self, *, wipe: bool) -> None:
        if wipe:
            databases.wipe(self._web.store)
        elif not self._database.is_own and self.durable.internals.operations.queries.list(limit=1).items:
            url = self._web.store.engine.url.render_as_string()
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
            if error is None and not self._unused_mocks:
                self.mocks.check_unused()
        finally:
            self.close()

    def close(self) -> None:
        """End all processes and remove the database that the harness made."""
        self._active.close()
        for runner in self._runners:
            runner.runtime.is_dead = True  # what is held must not write when it goes on to its end
        for barrier in self.mocks.barriers:
            barrier.abandon()
        self._learn()
        for process in (*self._runners, self._web):
            process.close()
        self._runners.clear()
        self._database.remove()

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

        A sweep finds a lost message five seconds after it was sent.

        Returns:
            The result, or None if there was nothing to do.
        """
        if self._undelivered:
            return self.durable.internals.deliveries.deliver(self._undelivered.pop(0))
        if not self.messages:
            self._answer_waits()
        if not self.messages and self.tasks.answer() and not self.messages:
            return "a task has answered"
        if self.messages:
            return self.deliver(self.messages.pop(0))
        published = self._sweeper.sweep()
        self._sweeper.delete_expired()
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

    def _answer_waits(self) -> None:
        """Send the mocked events, and emit to the mocked topics, for the instances that wait."""
        for topic in dict.fromkeys(mock.step for mock in self.mocks.topics):
            mock = next((each for each in self.mocks.topics if each.serves("", topic)), None)
            if mock is not None and self.durable.waiters(topic, limit=1).items:
                self.durable.emit(topic, mock.use())
        if not self.mocks.events:
            return
        waiting = self.durable.internals.operations.queries.list(
            status=Status.WAITING, limit=1000
        ).items  # newest first
        for summary in reversed(waiting):
            ref = RunRef(summary.workflow, summary.id, summary.run_number)
            for step in HarnessInstance(self.workflow(ref.workflow), ref.instance_id).steps():
                wait = ref, step.step_key, step.wake_at
                if not step.is_waiting or step.wait_event_type is None or wait in self._answered:
                    continue
                wanted = ref.workflow, step.wait_event_type
                mock = next((each for each in self.mocks.events if each.serves(*wanted)), None)
                if mock is not None:
                    self._answered.add(wait)
                    send = self.durable.internals.operations.events.send
                    send(ref.workflow, ref.instance_id, step.wait_event_type, mock.use())

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
        self.outbox.extend(messages)
        for message in messages:
            if message.kind is OutboxKind.TASK:
                self.tasks.sent(message)
        events = [message for message in messages if message.kind is OutboxKind.EVENT]
        self._undelivered += [message.id for message in events if message.name in self.durable.internals.handlers]
        if others := [message.id for message in events if message.name not in self.durable.internals.handlers]:
            self._web.store.transact(lambda tx: outbox.delete(tx, others))
        return PublishReport.of(len(messages), SendState.SENT)

    # --- runners --------------------------------------------------------------------------------

    @property
    def runner(self) -> RunnerProcess:
        """The runner that gets the messages. If the last one has died, a new one."""
        living = [runner for runner in self._runners if not runner.is_dead and not runner.is_second]
        return living[-1] if living else self._new_runner()

    def restart_runner(self) -> RunnerProcess:
        """Replace the runner with a new process, as a deploy does. A runner that is held in a step dies there."""
        for runner in [each for each in self._runners if not each.is_dead and not each.is_second]:
            runner.kill()
        return self._new_runner()

    def second_runner(self, *, without: Iterable[Code | str] = ()) -> RunnerProcess:
        """Start another runner. It gets only what is delivered ``to`` it.

        Args:
            without: Workflows that it does not know, by name or code. Then it keeps the present code, whatever is
                deployed later, as an old worker does during a rolling deploy.

        Raises:
            WorkflowNotFound: The harness does not know a workflow of ``without``.
        """
        runner = self._new_runner(self._code.without(without) if (without := list(without)) else None)
        runner.is_second = True
        return runner

    def _new_runner(self, code: Deployed | None = None) -> RunnerProcess:
        self._learn()
        name = f"runner-{len(self._runners) + 1}"
        runtime = HarnessRuntime(self.clock, name=name, seed=self.seed, mocks=self.mocks)
        runner = RunnerProcess(
            name,
            self._database.url,
            runtime,
            self.settings,
            registry=code or self._code,
            publish_runs=functools.partial(self._capture, runtime),
            compiled_statements=self._compiled_statements,
            send=self._send,
        )
        self._runners.append(self._started(runner))
        return runner

    def _learn(self) -> None:
        """Keep the compiled statements for later processes and harnesses."""
        for process in (*self._runners, self._web):
            self._compiled_statements.update(process.store.export_statements())

    def _started(self, process: AnyProcess) -> AnyProcess:
        if self._database.is_own:
            sa.event.listen(process.store.engine, "connect", _never_sync)
        return process

    def _capture(self, runtime: HarnessRuntime | None, due_runs: Sequence[DueRun]) -> None:
        if runtime is not None:
            runtime.checkpoint("before-publish")
        self.messages.extend(due_runs)
        if runtime is not None:
            runtime.checkpoint("after-publish")

    def _publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        self.messages.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def _queue_length(self, queue: str) -> int:
        return sum(due.queue == queue for due in self.messages)

    # --- the database ---------------------------------------------------------------------------

    @property
    def engine(self) -> sa.Engine:
        """The SQLAlchemy engine of the database. Your tables may be in it too."""
        return self._web.store.engine

    def create_tables(self, metadata: sa.MetaData) -> None:
        """Create your own tables, for steps that write with ``tx.session`` or ``tx.mutate``."""
        metadata.create_all(self.engine)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Open a session on the database, to prepare data or to check it."""
        with Session(self.engine) as session:
            yield session


class _Web(HarnessRuntime):
    """The runtime of the test's own process. Code that waits for a result moves the clock to the next work."""

    def __init__(self, harness: DurableHarness) -> None:
        super().__init__(harness.clock, name="web", seed=harness.seed)
        self._harness = harness

    def sleep(self, seconds: float) -> None:
        self._harness.run_until_idle()
        if self._harness.next_due() is None:
            raise NothingDue
        self._harness.advance(seconds)


def _settings(given: Mapping[str, Any], *, has_schemas: bool) -> Settings:
    for name in given:
        if isinstance(given, dict) and not name.startswith("durable_"):
            raise HarnessMisuse(f"Setting {name!r}: write it as in app.conf, beginning with durable_.")
    settings = read_settings(given)
    return settings if has_schemas else dataclasses.replace(settings, database_schema=None)


def _never_sync(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")
