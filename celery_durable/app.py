"""Durable(celery_app), where the parts meet, and the workflows that an app knows."""

from __future__ import annotations

import functools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload

import sqlalchemy as sa
from billiard.exceptions import WorkerLostError
from celery import Celery, current_app, signals
from celery.utils.text import str_to_list
from sqlalchemy.orm import Session

from celery_durable import tasks
from celery_durable.config import Settings, read_settings
from celery_durable.definitions import SHARED, Registry, WorkflowOptions, define
from celery_durable.errors import ConfigInvalid, DefinitionInvalid, DurableError, NotConfigured
from celery_durable.handles import Workflow, WorkflowDecorator
from celery_durable.model import OutboundEvent, Page, Waiter, WorkflowEvent
from celery_durable.operations import Operations
from celery_durable.operations.service import Service, WorkflowService
from celery_durable.packages import Bindings, RequiredWorkflows, from_entry_points, from_packages
from celery_durable.redaction import Redact, Redaction
from celery_durable.runner import Runner
from celery_durable.runner.ticks import Ticker
from celery_durable.runtime import Runtime, steady
from celery_durable.signals import listen
from celery_durable.step import Step
from celery_durable.store import migrate
from celery_durable.store.engine import Store
from celery_durable.store.lost_tasks import SentTask
from celery_durable.tasks.answers import AnswerCommitter
from celery_durable.tasks.background_queue import BackgroundQueue
from celery_durable.tasks.dispatch_publisher import DispatchPublisher
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.heartbeats import HeartbeatThread, SweepTaskHeartbeat
from celery_durable.tasks.lost.bootstep import InventoryStep
from celery_durable.tasks.lost.message_broker import CeleryMessageBroker
from celery_durable.tasks.lost.search import LOSS_REASON, LostTaskSearch
from celery_durable.tasks.lost.worker_tracker import WorkerLossTracker
from celery_durable.tasks.outbox import Handler, OutboundDeliverer, Outbox
from celery_durable.tasks.process_stops import make_process_stop_check
from celery_durable.tasks.publishing import Publisher
from celery_durable.tasks.queues import install_queue
from celery_durable.tasks.worker import DurableStep, StopFlag
from celery_durable.values import Retries, check_text_name

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

logger = logging.getLogger("celery_durable")

_STOP_SECONDS = 3.0

_attached: weakref.WeakSet[Durable] = weakref.WeakSet()
_stand_ins: list[Durable] = []


class Durable:
    """Durable workflows for one Celery app.

    ``Durable(app)``, or ``Durable()`` and later ``init_app(app)``. Settings are read from ``app.conf.durable_*``
    when they are first needed. ``engine=`` and ``session_factory=`` share the application's own. ``redact=`` decides
    what the HTTP API and the commands show of values, a function of a value and a `RedactionContext`.
    """

    def __init__(
        self,
        app: Celery | None = None,
        *,
        engine: sa.Engine | None = None,
        session_factory: Callable[[], Session] | None = None,
        redact: Redact | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        if not (redact is None or callable(redact)):
            raise ConfigInvalid("Durable(redact=)", redact, "give a function of a value and a Shown, or None")
        self.redact = redact
        self._engine, self._session_factory = engine, session_factory
        self.runtime = runtime or Runtime()
        self.registry = Registry(SHARED)
        self.bindings = Bindings(self.registry)
        self.workflows = Workflows(self)
        self.handlers: dict[str, Handler] = {}
        self.stop_flag = StopFlag()
        self._stops_process = make_process_stop_check(self.stop_flag.is_set)
        self.unsupported_pool: str | None = None
        """The pool of the worker that this is, where workflows do not run on it."""
        self.named_queues: frozenset[str] = frozenset()
        """What ``-Q`` told this worker to consume."""
        self.background = BackgroundQueue()
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
        tasks.install_tasks(app, self)
        install_queue(app)
        app.steps["worker"].update((DurableStep, InventoryStep))
        app.on_after_configure.connect(self._configure, weak=False)  # each time: an app may be configured anew
        if app.configured:  # type: ignore[attr-defined]  # celery-types lacks it
            self._configure()
        listen(signals.beat_init, self._beat_started)
        listen(signals.celeryd_init, self._worker_made)
        listen(signals.worker_init, self._worker_starting)
        listen(signals.worker_shutting_down, self._worker_stopping)
        listen(signals.task_failure, self._task_failed)
        listen(signals.worker_shutdown, self._worker_shut_down)
        self.lost_tasks_worker.connect(lambda of: of is self._app)
        self.task_end_handler = tasks.make_task_end_handler(app, self, self.background)
        self.task_end_handler.connect()

    @property
    def app(self) -> Celery:
        """The Celery app; raises NotConfigured before `init_app`."""
        if self._app is None:
            raise NotConfigured("This Durable()")
        return self._app

    def redaction(self, workflow: str, instance_id: str) -> Redaction:
        """What people may be shown of an instance."""
        return Redaction(self.redact, workflow, instance_id)

    # --- parts ----------------------------------------------------------------------------------

    @functools.cached_property
    def settings(self) -> Settings:
        """The app's ``durable_*`` settings; raises ConfigInvalid, also where workers would refuse our messages."""
        tasks.check_accept_content(self.app.conf)
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
        return Publisher(
            self.app,
            tasks.ADVANCE,
            self.runtime,
            deliver=tasks.DELIVER,
            answer_task_names=(tasks.TASK_DONE, tasks.TASK_FAILED),
            queue=lambda: self.settings.queue,
        )

    @functools.cached_property
    def dispatch_publisher(self) -> DispatchPublisher:
        """What tells workers of what a commit made due."""
        return DispatchPublisher(self.store, self.publisher.publish)

    @functools.cached_property
    def outbox(self) -> Outbox:
        """What sends the tasks and outbound events of steps."""
        return Outbox(self.store, self.settings, self.publisher.send, self._stops_process)

    @functools.cached_property
    def deliveries(self) -> OutboundDeliverer:
        """What hands outbound events to their handlers."""
        return OutboundDeliverer(self.store, self.settings, self.runtime, self.handlers, self._stops_process)

    @functools.cached_property
    def answers(self) -> AnswerCommitter:
        """What takes the answers of Celery tasks to steps."""
        return AnswerCommitter(lambda: self.operations, self.settings, self.runtime)

    @functools.cached_property
    def operations(self) -> Operations:
        """What may be done to instances from outside, by workflow name and id."""
        return Operations(
            self.store,
            self.settings,
            self.registry,
            self.runtime,
            self.dispatch_publisher.publish,
            post=self.outbox.send_committed,
        )

    @functools.cached_property
    def runner(self) -> Runner:
        """What advances runs in this process."""
        return Runner(
            self.store,
            self.settings,
            self.registry,
            self.runtime,
            self.dispatch_publisher.publish,
            post=self.outbox.send_committed,
            # Run eagerly there is nobody to hand on to, whatever a worker of this process was told before.
            should_stop=lambda: self.stop_flag.is_set() and not self.app.conf.task_always_eager,
            stops_process=self._stops_process,
        )

    @functools.cached_property
    def sweeper(self) -> Sweeper:
        """What finds due work and has it published."""
        return Sweeper(
            self.store, self.settings, self.runtime, self.publisher.publish, self.queue_length, outbox=self.outbox
        )

    @functools.cached_property
    def ticker(self) -> Ticker:
        """What advances due runs here, without Celery."""
        return Ticker(self.store, self.settings, self.runtime, self.runner.advance)

    def tick(self, *, max_instances: int = 10, max_steps: int | None = None) -> int:
        """Advance what is due in this process, without Celery: for cron; answers with the number of passes.

        Up to ``max_instances`` passes, each of up to ``max_steps`` steps. Any number of ticks and workers at once.
        """
        return self.ticker.tick(max_instances=max_instances, max_steps=max_steps)

    def emit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:
        """Hand a payload to all who wait on a topic now (`Step.wait_for_topic`); answers with how many waits that were.

        Nothing is kept for waits to come. ``id`` makes a repetition harmless.
        """
        return self.operations.emit(topic, payload, id=id)

    def waiters(self, topic: str, *, cursor: str | None = None, limit: int = 25) -> Page[Waiter]:
        """Who waits on a topic now, oldest instances first, a page at a time."""
        return self.operations.waiters(topic, cursor=cursor, limit=limit)

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """The thread that sweeps, where this process hosts one."""
        return Dispatcher(
            self.sweeper,
            self.settings,
            self.heartbeat,
            self.lost_tasks,
            outages=self.publisher.outages,
            runtime=self.runtime,
        )

    @functools.cached_property
    def lost_tasks(self) -> LostTaskSearch:
        """What finds tasks that were lost with a worker, where this process hosts a dispatcher."""

        def report(lost: Sequence[SentTask]) -> int:
            return self.operations.report_lost([(each.reference, each.sent_us) for each in lost], why=LOSS_REASON)

        messages = CeleryMessageBroker(self.app, self.publisher, tasks.MARKER)
        return LostTaskSearch(self.store, self.runtime, messages, report, heartbeat_id=lambda: self.heartbeat.row_id)

    @functools.cached_property
    def lost_tasks_worker(self) -> WorkerLossTracker:
        """A worker's part in that."""
        return WorkerLossTracker(
            lambda: self.store,
            self.runtime,
            self.background,
            lambda: self.operations,
            marker=tasks.MARKER,
            heartbeat_id=lambda: self.heartbeat.row_id,
        )

    @functools.cached_property
    def heartbeat(self) -> HeartbeatThread:
        """What says that this process lives, where it sweeps or works."""
        known = self.registry
        return HeartbeatThread(
            lambda: self.store, self.runtime, queues=self._consumed_queues, workflows=lambda: sorted(known)
        )

    @functools.cached_property
    def sweep_heartbeat(self) -> SweepTaskHeartbeat:
        """The same for the task that sweeps."""
        return SweepTaskHeartbeat(self.store, self.runtime)

    def migrate(self, connection: sa.Connection | None = None) -> tuple[str | None, str]:
        """Create the tables, or bring them up to date, as the command ``durable migrate`` does.

        Args:
            connection: Run inside the transaction of this connection, as ``op.get_bind()`` in a migration of your
                own. You commit. MariaDB commits at every statement that changes tables. None: in a transaction of its
                own.

        Returns:
            The revision before, None if there were no tables, and the revision after.

        Raises:
            ConfigInvalid: No database is configured.
            UnsupportedDatabase: The database is too old, or of another kind.
        """
        if connection is None:
            return migrate.upgrade(self.store)
        return migrate.upgrade_connection(connection, schema=self.store.schema, prefix=self.store.prefix)

    # --- authors --------------------------------------------------------------------------------

    @overload
    def workflow(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
    @overload
    def workflow(self, /, **options: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...
    def workflow(self, fn: Any = None, /, **options: Unpack[WorkflowOptions]) -> Any:
        """As `durable_workflow`, but for this app alone."""

        def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
            definition = define(fn, **options)
            self.registry.add(definition)
            return Workflow(definition, functools.partial(_acting, self))

        return decorate if fn is None else decorate(fn)

    def outbound(
        self, name: str, *, retries: Retries | int | None = None
    ) -> Callable[[Callable[[OutboundEvent], R]], Callable[[OutboundEvent], R]]:
        """Make a function the handler of outbound events of this name; a worker calls it, at least once for each.

        It is called again when it raised: 10 times after the first, from 10 s exponentially up to 10 minutes, or as
        ``retries`` says; then the event is kept in workflow_outbox. It should end within 5 minutes.
        """

        def register(fn: Callable[[OutboundEvent], R]) -> Callable[[OutboundEvent], R]:
            check_text_name("Outbound event", name, 255)
            new, taken = Handler.of(fn, retries), self.handlers.get(name)
            if taken is not None and taken.qualified_name != new.qualified_name:
                raise DefinitionInvalid(
                    f"Outbound event {name!r} has a handler already, {taken.qualified_name}: call "
                    f"{new.qualified_name} from it, or send another event."
                )
            self.handlers[name] = new
            return fn

        return register

    def register(self, required: RequiredWorkflows) -> None:
        """Register what a package brings, its ``required_workflows``: a dict of binding keys and workflows.

        ``durable.workflows.ORDER`` is then the workflow under key ``ORDER``. Raises WorkflowNameTaken and
        BindingKeyTaken, which name both places; nothing is registered then.
        """
        self.bindings.add(required, reserved=dir(Workflows))

    def autodiscover(
        self, packages: Iterable[str] = (), *, related_name: str = "workflows", with_entry_points: bool = True
    ) -> None:
        """Import ``<package>.workflows`` of these packages, and register the ``required_workflows`` in them.

        Also those that installed packages announce as entry points of the group ``celery_durable.workflows``.
        """
        for required in from_packages(packages, related_name):
            self.register(required)
        for required in from_entry_points() if with_entry_points else ():
            self.register(required)

    @property
    def service(self) -> WorkflowService:
        """What packages with workflows are given."""
        return Service(lambda: _acting(self).operations)

    # --- Celery's processes ---------------------------------------------------------------------

    def _configure(self, **_: Any) -> None:
        # Read, not kept: what is set later counts too, up to the first use.
        settings = read_settings(self.app.conf)
        if settings.dispatcher != "none":
            tasks.add_beat_entry(self.app.conf.beat_schedule, settings.queue)

    def _beat_started(self, sender: Any, **_: Any) -> None:
        if sender.app is not self._app:
            return
        try:
            if self.settings.dispatcher != "none":
                tasks.ensure_beat_entry(sender.scheduler, self.settings.queue)
            if self.settings.dispatcher in ("beat", "both"):
                self.heartbeat.register("dispatcher", f"beat@{socket.gethostname()}")
                self.dispatcher.start()
        except DurableError as exc:
            # Celery only logs what a signal's receiver raises: beat would run on and look after nothing.
            logger.critical("celery beat does not start: %s", exc)
            raise SystemExit(1) from exc

    def _worker_made(self, instance: Any, options: Any, **_: Any) -> None:
        if instance.app is self._app:
            self.named_queues = frozenset(str_to_list(options.get("queues")) or ())

    def _worker_starting(self, sender: Any, **_: Any) -> None:
        if sender.app is self._app:
            self.stop_flag.clear()

    def worker_started(self, node: str, pool: str) -> None:
        """Start the dispatcher and the heartbeat of a worker. Called by its bootstep once its pool runs."""
        self.task_end_handler.set_main_loop_pid(os.getpid() if pool == "prefork" else None)
        self.heartbeat.register("worker", node, pool=pool)
        if self.settings.dispatcher in ("worker", "both") and self.unsupported_pool is None:
            self.dispatcher.start()  # which has the heart beat
        else:
            self.heartbeat.start()

    def worker_stopped(self) -> None:
        """Stop them. Called by the worker's bootstep before its pool stops, also if no signal announced the stop."""
        self.stop_flag.set()
        self._stop_threads()

    def _worker_stopping(self, **_: Any) -> None:
        self.stop_flag.set()

    def start_inventories(self, consumer: Callable[[], Any]) -> None:
        """Start to answer which tasks this worker holds. ``consumer``: returns what receives its messages, or None."""
        self.heartbeat.is_row_needed = True
        self.lost_tasks_worker.inventories.start(consumer)

    def stop_inventories(self) -> None:
        """The worker's pool has ended, or is about to be killed: it holds no tasks any more."""
        self.lost_tasks_worker.inventories.stop(_STOP_SECONDS)
        self.heartbeat.is_row_needed = False
        self.heartbeat.remove_row()

    def _worker_shut_down(self, sender: Any, **_: Any) -> None:
        if sender.app is self._app:
            self.stop_inventories()

    def _stop_threads(self) -> None:
        """End our threads, within `_STOP_SECONDS`: Celery waits, and a database that hangs would have it wait."""
        end = steady() + _STOP_SECONDS
        hosts = [self.__dict__[name] for name in ("dispatcher", "heart") if name in self.__dict__]
        for host in hosts:
            host.stop(wait=False)
        for host in hosts:
            host.join(max(0.0, end - steady()))
        self.background.close(max(0.0, end - steady()))

    def _consumed_queues(self) -> list[str]:
        return sorted(self.app.amqp.queues.consume_from)

    def _task_failed(self, sender: Any, task_id: str, exception: Any, args: Any, **_: Any) -> None:
        if sender.app is self._app and sender.name == tasks.ADVANCE and isinstance(exception, WorkerLostError):
            self.background.submit(
                lambda: tasks.release_dead_claim(
                    self.store, self.publisher.publish, task_id, args, grace=self.settings.grace
                ),
                what=f"The claim of task {task_id}, whose process died,",
            )

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait in a queue; None where the broker cannot say."""
        return self.publisher.queue_length(queue)

    def close(self) -> None:
        """Stop the dispatcher of this process and close our connections to broker and database."""
        self._stop_threads()
        if "publisher" in self.__dict__:
            self.publisher.close()
        if "store" in self.__dict__:
            self.store.close()


class Workflows(Mapping[str, "Workflow[Any, Any]"]):
    """The workflows that an app knows, by name, ``durable.workflows["order"]``, and binding key: ``.ORDER``."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def __getitem__(self, name: str) -> Workflow[Any, Any]:
        return Workflow(self._durable.registry.get(name), functools.partial(_acting, self._durable))

    def __getattr__(self, key: str) -> Workflow[Any, Any]:
        if key.startswith("_") or (found := self._durable.bindings.find(key)) is None:
            keys = ", ".join(sorted(self._durable.bindings)) if not key.startswith("_") else ""
            raise AttributeError(f"No workflow is registered under binding key {key!r} (registered: {keys or 'none'}).")
        return self[found.name]

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


def _acting(durable: Durable) -> Durable:
    """Who acts for it: itself, but inside `standing_in` the one that stands in."""
    return _stand_ins[-1] if _stand_ins and durable not in _stand_ins else durable


@contextmanager
def standing_in(durable: Durable) -> Iterator[None]:
    """Have the handles of every module act on ``durable`` inside the block, whatever app they belong to: for tests."""
    _stand_ins.append(durable)
    try:
        yield
    finally:
        _stand_ins.remove(durable)
