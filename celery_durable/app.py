"""Durable(celery_app), where the parts meet, and what people hold: workflows and instances as handles."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar, overload

import sqlalchemy as sa
from billiard.exceptions import WorkerLostError
from celery import Celery, current_app, signals
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.orm import Session

from celery_durable import tasks, values
from celery_durable.config import Settings, read_settings
from celery_durable.definitions import SHARED, Registry, WorkflowDefinition, define
from celery_durable.errors import ConfigInvalid, DurableError, NotConfigured, ResultTimeout, WorkflowFailed
from celery_durable.explain import Diagnosis
from celery_durable.model import (
    CreateOptions,
    History,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Status,
    WorkflowEvent,
)
from celery_durable.operations import IfExists, Operations
from celery_durable.runner import Runner
from celery_durable.runner.ticks import Ticker
from celery_durable.runtime import Runtime
from celery_durable.step import Step
from celery_durable.store.engine import Store
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.publish import Publisher
from celery_durable.tasks.pulse import Heart, SweepTaskHeart
from celery_durable.tasks.worker import DurableStep, StopFlag
from celery_durable.values import StepConfig

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

logger = logging.getLogger("celery_durable")

_attached: weakref.WeakSet[Durable] = weakref.WeakSet()
_stand_ins: list[Durable] = []


class Durable:
    """Durable workflows for one Celery app.

    ``Durable(app)``, or ``Durable()`` and later ``init_app(app)``. Settings are read from ``app.conf.durable_*``
    when they are first needed. ``engine=`` and ``session_factory=`` share the application's own.
    """

    def __init__(
        self,
        app: Celery | None = None,
        *,
        engine: sa.Engine | None = None,
        session_factory: Callable[[], Session] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._engine, self._session_factory = engine, session_factory
        self.runtime = runtime or Runtime()
        self.registry = Registry(SHARED)
        self.workflows = Workflows(self)
        self.stop_flag = StopFlag()
        self._app: Celery | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Celery) -> None:
        """Attach to an app: its tasks, its queue, its beat entry, the dispatcher in its processes."""
        present = vars(app).get("durable")
        if present is self:
            return
        if present is not None:
            raise ConfigInvalid("app.durable", present, "the app has a Durable already; its tasks serve only one")
        self._app = app
        vars(app)["durable"] = self
        _attached.add(self)
        tasks.install_tasks(app, lambda: self.runner, lambda: self.sweeper, lambda: self.sweep_heart)
        app.steps["worker"].add(DurableStep)
        app.on_after_configure.connect(self._configure, weak=False)  # each time: an app may be configured anew
        if app.configured:  # type: ignore[attr-defined]  # celery-types lacks it
            self._configure()
        signals.beat_init.connect(self._beat_started, weak=False)
        signals.celeryd_init.connect(self._worker_made, weak=False)
        signals.worker_init.connect(self._worker_starting, weak=False)
        signals.worker_shutting_down.connect(self._worker_stopping, weak=False)
        signals.task_failure.connect(self._task_failed, weak=False)

    @property
    def app(self) -> Celery:
        """The Celery app; raises NotConfigured before `init_app`."""
        if self._app is None:
            raise NotConfigured("This Durable()")
        return self._app

    # --- parts ----------------------------------------------------------------------------------

    @functools.cached_property
    def settings(self) -> Settings:
        """The app's ``durable_*`` settings; raises ConfigInvalid."""
        return read_settings(self.app.conf)

    @functools.cached_property
    def store(self) -> Store:
        """The database that holds the workflows."""
        return Store(
            self.settings.database_url,
            engine=self._engine,
            session_factory=self._session_factory,
            schema=self.settings.database_schema,
            prefix=self.settings.table_prefix,
            prepared_statements=self.settings.prepared_statements,
            runtime=self.runtime,
        )

    @functools.cached_property
    def publisher(self) -> Publisher:
        """What tells workers of due work."""
        return Publisher(self.app, tasks.ADVANCE, self.runtime)

    @functools.cached_property
    def operations(self) -> Operations:
        """What may be done to instances from outside, by workflow name and id."""
        return Operations(self.store, self.settings, self.registry, self.runtime, self.publisher.wake)

    @functools.cached_property
    def runner(self) -> Runner:
        """What advances runs in this process."""
        return Runner(
            self.store,
            self.settings,
            self.registry,
            self.runtime,
            self.publisher.wake,
            # Run eagerly there is nobody to hand on to, whatever a worker of this process was told before.
            should_stop=lambda: self.stop_flag.is_set() and not self.app.conf.task_always_eager,
            interruptions=(SoftTimeLimitExceeded,),
        )

    @functools.cached_property
    def sweeper(self) -> Sweeper:
        """What finds due work and has it published."""
        return Sweeper(self.store, self.settings, self.runtime, self.publisher.publish, self.queue_length)

    @functools.cached_property
    def ticker(self) -> Ticker:
        """What advances due runs here, without Celery."""
        return Ticker(self.store, self.settings, self.runtime, self.runner)

    def tick(self, *, max_instances: int = 10, max_steps: int | None = None) -> int:
        """Advance what is due in this process, without Celery: for cron; answers with the number of passes.

        Up to ``max_instances`` passes, each of up to ``max_steps`` steps. Any number of ticks and workers at once.
        """
        return self.ticker.tick(max_instances=max_instances, max_steps=max_steps)

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """The thread that sweeps, where this process hosts one."""
        return Dispatcher(self.sweeper, self.settings, self.heart)

    @functools.cached_property
    def heart(self) -> Heart:
        """What says that this process lives, where it sweeps or works."""
        known = self.registry
        return Heart(lambda: self.store, self.runtime, queues=self._consumed_queues, workflows=lambda: sorted(known))

    @functools.cached_property
    def sweep_heart(self) -> SweepTaskHeart:
        """The same for the `sweep` task."""
        return SweepTaskHeart(self.store, self.runtime)

    # --- authors --------------------------------------------------------------------------------

    @overload
    def workflow(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
    @overload
    def workflow(
        self,
        /,
        *,
        name: str | None = ...,
        queue: str | None = ...,
        step_defaults: StepConfig | None = ...,
        max_steps: int | None = ...,
    ) -> WorkflowDecorator: ...
    def workflow(self, fn: Any = None, /, **options: Any) -> Any:
        """As `durable_workflow`, but for this app alone."""

        def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
            definition = define(fn, **options)
            self.registry.add(definition)
            return Workflow(definition, self)

        return decorate if fn is None else decorate(fn)

    # --- Celery's processes ---------------------------------------------------------------------

    def _configure(self, **_: Any) -> None:
        # Read, not kept: what is set later counts too, up to the first use.
        settings = read_settings(self.app.conf)
        tasks.add_queue(self.app, settings.queue)
        if settings.dispatcher != "none":
            tasks.add_beat_entry(self.app.conf.beat_schedule, settings.queue)

    def _beat_started(self, sender: Any, **_: Any) -> None:
        if sender.app is not self._app:
            return
        try:
            if self.settings.dispatcher != "none":
                tasks.ensure_beat_entry(sender.scheduler, self.settings.queue)
            if self.settings.dispatcher in ("beat", "both"):
                self.heart.begin("dispatcher", f"beat@{socket.gethostname()}")
                self.dispatcher.start()
        except DurableError as exc:
            # Celery only logs what a signal's receiver raises: beat would run on and look after nothing.
            logger.critical("celery beat does not start: %s", exc)
            raise SystemExit(1) from exc

    def _worker_made(self, instance: Any, **_: Any) -> None:
        """Before the worker looks at its queues."""
        if instance.app is self._app:
            tasks.add_queue(self.app, self.settings.queue)

    def _worker_starting(self, sender: Any, **_: Any) -> None:
        if sender.app is self._app:
            self.stop_flag.clear()

    def worker_started(self, node: str) -> None:
        """The worker's pool runs (see `DurableStep`)."""
        self.heart.begin("worker", node)
        if self.settings.dispatcher in ("worker", "both"):
            self.dispatcher.start()  # which has the heart beat
        else:
            self.heart.start()

    def worker_stopped(self) -> None:
        """The worker is about to stop its pool (see `DurableStep`), also where no signal told it to."""
        self.stop_flag.set()
        self._stop_threads()

    def _worker_stopping(self, **_: Any) -> None:
        self.stop_flag.set()

    def _stop_threads(self) -> None:
        if "dispatcher" in self.__dict__:
            self.dispatcher.stop()
        if "heart" in self.__dict__:
            self.heart.stop()

    def _consumed_queues(self) -> list[str]:
        return sorted(self.app.amqp.queues.consume_from)

    def _task_failed(self, sender: Any, task_id: str, exception: Any, args: Any, **_: Any) -> None:
        if sender.app is self._app and sender.name == tasks.ADVANCE and isinstance(exception, WorkerLostError):
            grace = self.settings.grace
            tasks.release_dead_claim(self.store, self.publisher.publish, task_id, args, grace=grace)

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in a queue; None where the broker cannot say."""
        try:
            with self.app.connection_or_acquire() as connection:
                connection.ensure_connection(max_retries=0)  # a pooled one may be closed, after an earlier answer below
                with connection.channel() as channel:
                    return int(channel.queue_declare(queue, passive=True).message_count)
        except Exception as exc:  # noqa: BLE001  # no queue yet, or no broker: publishing will tell
            logger.debug("The length of queue %r is unknown: %s", queue, exc)
            return None

    def close(self) -> None:
        """Stop the dispatcher of this process and close the store's connections."""
        self._stop_threads()
        if "store" in self.__dict__:
            self.store.close()


class Workflows(Mapping[str, "Workflow[Any, Any]"]):
    """The workflows that an app knows, by name: ``durable.workflows["order"]``."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def __getitem__(self, name: str) -> Workflow[Any, Any]:
        return Workflow(self._durable.registry.get(name), self._durable)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._durable.registry.find(name) is not None

    def get(self, name: str, default: Any = None, /) -> Any:
        """As a dict's: the handle, or ``default``."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get()

    def __iter__(self) -> Iterator[str]:
        return iter(self._durable.registry)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def current_durable(what: str) -> Durable:
    """The Durable of the current Celery app, else the only one of this process; raises NotConfigured."""
    if _stand_ins:
        return _stand_ins[-1]
    found = getattr(current_app, "durable", None)
    if isinstance(found, Durable):
        return found
    attached = list(_attached)
    if len(attached) == 1:
        return attached[0]
    raise NotConfigured(what)


@contextmanager
def standing_in(durable: Durable) -> Iterator[None]:
    """Have the handles of every module act on ``durable`` inside the block, whatever app they belong to: for tests."""
    _stand_ins.append(durable)
    try:
        yield
    finally:
        _stand_ins.remove(durable)


# --- workflows ----------------------------------------------------------------------------------


class WorkflowDecorator(Protocol):
    """What the decorators answer with when they got options."""

    def __call__(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]:
        """Make the function a workflow."""


@overload
def durable_workflow(fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
@overload
def durable_workflow(
    *,
    name: str | None = ...,
    queue: str | None = ...,
    step_defaults: StepConfig | None = ...,
    max_steps: int | None = ...,
) -> WorkflowDecorator: ...
def durable_workflow(fn: Any = None, /, **options: Any) -> Any:
    """Make a function a durable workflow, known to every app of the process, as `@shared_task` does for tasks.

    ``name``: defaults to the function's. ``queue``: other than ``durable_queue``. ``step_defaults``: a StepConfig
    under all its steps. ``max_steps``: other than ``durable_max_steps``.
    """

    def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
        definition = define(fn, **options)
        SHARED.add(definition)
        return Workflow(definition, None)

    return decorate if fn is None else decorate(fn)


class Workflow(Generic[P, R]):
    """A workflow that can be started. The function it was made of is called by workers, or by hand in tests."""

    def __init__(self, definition: WorkflowDefinition, durable: Durable | None) -> None:
        self.definition, self._durable = definition, durable
        functools.update_wrapper(self, definition.fn)

    def __call__(self, event: WorkflowEvent[P], step: Step) -> R:
        """Call the author's function itself."""
        result: R = self.definition.fn(event, step)
        return result

    def __repr__(self) -> str:
        return f"<Workflow {self.name!r}>"

    @property
    def name(self) -> str:
        """What it is registered as."""
        return self.definition.name

    @property
    def durable(self) -> Durable:
        """The Durable it runs under; raises NotConfigured."""
        if _stand_ins and self._durable not in _stand_ins:
            return _stand_ins[-1]
        return self._durable or current_durable(f"Workflow {self.name!r}")

    def create(
        self,
        params: P | None = None,
        *,
        id: str | None = None,  # the public name
        if_exists: IfExists = "error",
        run_at: datetime | None = None,
        session: Session | None = None,
    ) -> WorkflowInstance[R]:
        """Record a new instance and have it started; nothing is written if this raises.

        ``id``: yours, unique per workflow, or a random one. ``if_exists="return"``: the existing instance instead of
        InstanceAlreadyExists. ``run_at``: not before this time. ``session``: in the transaction of your SQLAlchemy
        session; workers are told after its commit.
        """
        operations = self.durable.operations
        made = operations.create(self.name, params, id=id, if_exists=if_exists, run_at=run_at, session=session)
        return WorkflowInstance(self, made)

    def delay(self, params: P | None = None) -> WorkflowInstance[R]:
        """`create`, for fingers that know Celery."""
        return self.create(params)

    def create_batch(self, batch: Sequence[CreateOptions[P]]) -> list[WorkflowInstance[R]]:
        """Record up to 100 instances at once; ids that exist are skipped and left out of the answer."""
        return [WorkflowInstance(self, made) for made in self.durable.operations.create_batch(self.name, batch)]

    def get(self, id: str) -> WorkflowInstance[R]:
        """The handle of an existing instance; raises InstanceNotFound."""
        self.durable.operations.get(self.name, id)
        return WorkflowInstance(self, id)

    def list(
        self, *, status: Status | str | None = None, cursor: str | None = None, limit: int = 25
    ) -> Page[InstanceSummary]:
        """Instances, newest first, a page at a time."""
        wanted = None if status is None else Status(status)
        return self.durable.operations.list(self.name, status=wanted, cursor=cursor, limit=limit)

    async def acreate(self, params: P | None = None, **options: Any) -> WorkflowInstance[R]:
        """`create` for async code."""
        return await asyncio.to_thread(lambda: self.create(params, **options))

    async def aget(self, id: str) -> WorkflowInstance[R]:
        """`get` for async code."""
        return await asyncio.to_thread(self.get, id)


class WorkflowInstance(Generic[R_co]):
    """An instance, by workflow and id; every call reads or changes the store."""

    def __init__(self, workflow: Workflow[Any, R_co], id: str) -> None:
        self.workflow, self.id = workflow, id

    def __repr__(self) -> str:
        return f"<WorkflowInstance {self.workflow.name}/{self.id}>"

    @property
    def _operations(self) -> Operations:
        return self.workflow.durable.operations

    def status(self) -> InstanceStatus:
        """Where it stands: status, and error or output once it has ended."""
        return self._operations.get(self.workflow.name, self.id).status

    def result(self, timeout: values.Duration | None = None) -> R_co:
        """Wait for the end and return the output; None waits without end.

        Raises WorkflowFailed when it ended errored or terminated, ResultTimeout. No result backend is needed:
        the database is asked, at first often, then twice a second.
        """
        runtime = self.workflow.durable.runtime
        limit = None if timeout is None else values.duration(timeout)
        deadline = None if limit is None else runtime.monotonic() + limit.total_seconds()
        pause = 0.01
        while True:
            status = self.status()
            if status.status.is_terminal:
                return self._output(status)
            if deadline is not None and limit is not None and runtime.monotonic() >= deadline:
                raise ResultTimeout(self.workflow.name, self.id, status.status, limit.total_seconds())
            runtime.sleep(pause if deadline is None else min(pause, max(0.0, deadline - runtime.monotonic())))
            pause = min(pause * 1.5, 0.5)

    def _output(self, status: InstanceStatus) -> R_co:
        if status.status is not Status.COMPLETE:
            error = status.error
            raise WorkflowFailed(
                self.workflow.name,
                self.id,
                status.status,
                None if error is None else error.name,
                None if error is None else error.message,
            )
        output: R_co = self.workflow.definition.output.decode(json.dumps(status.output))
        return output

    def pause(self) -> None:
        """Stop at the next step boundary. Timers and deadlines go on counting."""
        self._operations.pause(self.workflow.name, self.id)

    def resume(self) -> None:
        """Go on after a pause; otherwise nothing."""
        self._operations.resume(self.workflow.name, self.id)

    def terminate(self, reason: str | None = None) -> None:
        """End it without a result; raises InstanceTerminal where it has ended."""
        self._operations.terminate(self.workflow.name, self.id, reason=reason)

    def restart(self, *, reason: str | None = None) -> int:
        """Begin a new run with the same parameters; answers with its number. Prior runs stay readable."""
        return self._operations.restart(self.workflow.name, self.id, reason=reason)

    def send_event(
        self,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
    ) -> bool:
        """Send an event; it waits until the workflow asks for its type. ``id`` makes a repetition harmless: False."""
        return self._operations.send_event(self.workflow.name, self.id, event_type, payload, id=id, session=session)

    def explain(self) -> Diagnosis:
        """Why it stands where it stands, as a sentence for people, and what to do about it."""
        return self._operations.explain(self.workflow.name, self.id)

    def history(self, run: int | None = None) -> History:
        """Steps and events of a run, by default the current one."""
        return self._operations.history(self.workflow.name, self.id, run=run)

    def logs(
        self,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """Log lines of a run in order; ``after_id`` continues where an earlier call ended."""
        return self._operations.logs(
            self.workflow.name, self.id, run=run, after_id=after_id, limit=limit, levels=levels, category=category
        )

    async def astatus(self) -> InstanceStatus:
        """`status` for async code."""
        return await asyncio.to_thread(self.status)

    async def aexplain(self) -> Diagnosis:
        """`explain` for async code."""
        return await asyncio.to_thread(self.explain)

    async def aresult(self, timeout: values.Duration | None = None) -> R_co:  # noqa: ASYNC109  # as result()
        """`result` for async code; waits on a thread of the event loop's executor."""
        return await asyncio.to_thread(self.result, timeout)

    async def asend_event(self, event_type: str, payload: Any = None, *, id: str | None = None) -> bool:
        """`send_event` for async code."""
        return await asyncio.to_thread(lambda: self.send_event(event_type, payload, id=id))
