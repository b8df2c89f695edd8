"""The internal parts of one `Durable`, each made at its first use."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from celery import Celery

from celery_durable import tasks
from celery_durable.all_operations import Operations
from celery_durable.config import Settings, name_as_written, read_settings
from celery_durable.definitions import SHARED, Registry
from celery_durable.errors import ConfigInvalid, NotConfigured
from celery_durable.handles.host import refuse_using
from celery_durable.housekeeping import CallQueue, Job
from celery_durable.model import OutboundEvent
from celery_durable.operations.context import OperationContext
from celery_durable.packages import Bindings
from celery_durable.redaction import Redact, Redaction
from celery_durable.runtime import CallAsync, Runtime
from celery_durable.store.engine import Store
from celery_durable.store.instances.families import END_CHILDREN
from celery_durable.store.runs import outbox
from celery_durable.tasks.answers import AnswerCommitter
from celery_durable.tasks.dispatch_publisher import DispatchPublisher
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.heartbeats import ProcessHeartbeat, SweepTaskHeartbeat
from celery_durable.tasks.lost.reporter import HeldTaskReporter
from celery_durable.tasks.lost.search import LostTaskSearch, find_destination
from celery_durable.tasks.outbox import Handler, OutboundDeliverer, Outbox
from celery_durable.tasks.process_stops import StopFlag, make_process_stop_check
from celery_durable.tasks.processes import CeleryProcesses
from celery_durable.tasks.publishing import Publisher
from celery_durable.tasks.task_ends import TaskEndHandler
from celery_durable.values import Retries

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

    from celery_durable.runner import Runner
    from celery_durable.runner.ticks import Ticker

logger = logging.getLogger("celery_durable")

_MAX_BACKGROUND_CALLS = 1000
_SWEEPING_SECONDS = 15.0  # a dispatcher whose last successful check is older does not sweep


class Internals:
    """The parts behind one `Durable`, for the other modules of this package and for its tests.

    A process that only creates instances opens no connection to the broker before its first message, and settings may
    change until then. Tests may assign a part before.
    """

    def __init__(
        self,
        *,
        engine: sa.Engine | None,
        session_factory: Callable[[], Session] | None,
        redact: Redact | None,
        runtime: Runtime | None,
    ) -> None:
        self.make_store: Callable[[Settings, Runtime], Store] | None = None
        """Makes the store on the database of a web framework. Set by its integration in ``contrib``."""
        self.call_async: CallAsync = asyncio.to_thread
        """Calls a function for async code, on a thread. The integration of a web framework chooses the thread."""
        self.setting_names: Mapping[str, str] = {}
        """How the user wrote the settings that the integration of a web framework copied to Celery's, for errors."""
        self.check_using: Callable[[str], None] = refuse_using
        """Checks the option ``using`` of handles. The integration of Django compares the aliases."""
        self._engine, self._session_factory, self.redact = engine, session_factory, redact
        self.has_own_engine = engine is not None or session_factory is not None
        """Whether the application passed an engine or a session factory to its `Durable`."""
        self.runtime = runtime or Runtime()
        self.registry = Registry(SHARED)
        self.bindings = Bindings(self.registry)
        self.handlers = {END_CHILDREN: Handler.of(self._end_children, Retries(limit=None))}
        """The handlers of outbound events, by the event's name."""
        self.celery_app: Celery | None = None
        """Set by `Durable.init_app`."""
        self.stop_flag = StopFlag()
        """Set while the worker of this process shuts down."""
        self.unsupported_pool: str | None = None
        """The worker's pool if workflows do not run on it, else None."""
        self.has_threads_pool = False
        """Whether this process is a worker whose pool runs several passes at the same time."""
        self.background_queue = CallQueue("durable-background", _MAX_BACKGROUND_CALLS)
        self.processes = CeleryProcesses(self)
        self._stops_process = make_process_stop_check(self.stop_flag.is_set)

    @property
    def app(self) -> Celery:
        """The Celery app; raises NotConfigured before `Durable.init_app`."""
        if self.celery_app is None:
            raise NotConfigured("This Durable()")
        return self.celery_app

    def read_settings(self) -> Settings:
        """Read the ``durable_*`` settings as they are now; raises ConfigInvalid."""
        return read_settings(self.app.conf, names=self.setting_names)

    @functools.cached_property
    def settings(self) -> Settings:
        """The ``durable_*`` settings; raises ConfigInvalid, also if workers would refuse internal messages."""
        tasks.check_accept_content(self.app.conf)
        return self.read_settings()

    @functools.cached_property
    def store(self) -> Store:
        """The database with the instances."""
        settings = self.settings
        with self._naming_settings():
            if self.make_store is not None:
                return self.make_store(settings, self.runtime)
            return open_store(settings, self.runtime, engine=self._engine, session_factory=self._session_factory)

    @functools.cached_property
    def read_store(self) -> Store:
        """The database for lists and counts."""
        settings, store = self.settings, self.store
        with self._naming_settings():
            return open_read_store(settings, self.runtime, store)

    @contextmanager
    def _naming_settings(self) -> Iterator[None]:
        """Let a ConfigInvalid name its setting as the user wrote it. A harness has settings without an app."""
        try:
            yield
        except ConfigInvalid as error:
            if self.celery_app is None:
                raise
            raise name_as_written(error, self.celery_app.conf, self.setting_names) from None

    @functools.cached_property
    def operations(self) -> Operations:
        """Creates, reads and changes instances by workflow name and id. Handles, HTTP API and commands call it."""
        return Operations(
            OperationContext(
                self.store,
                self.settings,
                self.registry,
                self.runtime,
                self.dispatch_publisher.publish,
                send_messages=self.outbox.send_committed,
                find_task_queue=self._find_task_queue,
                read_store=self.read_store,
                make_redaction=self.redaction,
            )
        )

    def _find_task_queue(self, body: str) -> str | None:
        found = find_destination(self.app, body)
        return None if found is None else found[0]

    @functools.cached_property
    def runner(self) -> Runner:
        """Advances runs in this process."""
        from celery_durable.all_kinds import KINDS  # noqa: PLC0415  # see `import_for_passes`
        from celery_durable.runner import Runner  # noqa: PLC0415

        return Runner(
            self.store,
            self.settings,
            self.registry,
            self.runtime,
            self.dispatch_publisher.publish,
            send_messages=self.outbox.send_committed,
            should_stop=functools.partial(self.stop_flag.stops_passes, self.app.conf),
            stops_process=self._stops_process,
            groups_commits=self.has_threads_pool,
            make_redaction=self.redaction,
            kinds=KINDS,
        )

    @functools.cached_property
    def ticker(self) -> Ticker:
        """Advances due runs in this process without Celery, for `Durable.tick`."""
        from celery_durable.runner.ticks import Ticker  # noqa: PLC0415

        return Ticker(self.store, self.settings, self.runtime, self.runner.advance)

    def redaction(self, workflow: str, instance_id: str) -> Redaction:
        """Return what applies the ``redact`` function to the records of one instance."""
        return Redaction(self.redact, workflow, instance_id)

    # --- messages -------------------------------------------------------------------------------

    @functools.cached_property
    def publisher(self) -> Publisher:
        """Sends messages to the broker."""
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
        """Publishes dispatch messages for the runs that a commit made due."""
        return DispatchPublisher(self.store, self.publisher.publish)

    @functools.cached_property
    def outbox(self) -> Outbox:
        """Sends the tasks and outbound events of steps."""
        return Outbox(
            self.store,
            self.settings,
            self.publisher.send,
            self._stops_process,
            fail_task=self.answers.commit_refusal,
        )

    @functools.cached_property
    def deliveries(self) -> OutboundDeliverer:
        """Calls the handlers of outbound events."""
        return OutboundDeliverer(self.store, self.settings, self.runtime, self.handlers, self._stops_process)

    def _end_children(self, event: OutboundEvent) -> None:
        self.operations.lifecycle.end_children(event.payload)

    def end_children(self) -> None:
        """End the children of terminated runs, for `Durable.tick`: there may be no worker to do it."""
        for id_ in self.store.read(lambda tx: outbox.find_due_events(tx, END_CHILDREN)):
            self.deliveries.deliver(id_)

    @functools.cached_property
    def answers(self) -> AnswerCommitter:
        """Delivers the results of Celery tasks to the steps that wait for them."""
        return AnswerCommitter(lambda: self.operations.answers, self.settings, self.runtime)

    @functools.cached_property
    def task_end_handler(self) -> TaskEndHandler:
        """Commits the result of a step's task in the process that ran the task."""
        return tasks.make_task_end_handler(self.app, self, self.background_queue)

    # --- sweep and heartbeats -------------------------------------------------------------------

    @functools.cached_property
    def sweeper(self) -> Sweeper:
        """Finds due work and publishes messages for it."""
        return Sweeper(
            self.store,
            self.settings,
            self.runtime,
            self.publisher.publish,
            self.publisher.queue_length,
            outbox=self.outbox,
        )

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """The job that sweeps, and those beside it, if this process hosts a dispatcher."""
        return Dispatcher(
            self.sweeper,
            self.settings,
            self.heartbeat,
            beside=self.upkeep,
            outages=self.publisher.outages,
            runtime=self.runtime,
        )

    @functools.cached_property
    def upkeep(self) -> Sequence[Job]:
        """The jobs beside the sweeps. They start with a dispatcher, and the task `sweep` runs each once."""
        jobs = [
            Job("durable-retention", self.operations.retention.run_job, purpose="delete old instances"),
            Job("durable-limits", self.operations.limits.queue.run_job, purpose="serve limits"),
        ]
        if self.celery_app is not None:  # a harness has no workers
            search = LostTaskSearch(
                self.store,
                self.settings,
                self.runtime,
                self.operations.answers.report_lost,
                find_destination=functools.partial(find_destination, self.app),
                queue_length=self.publisher.queue_length,
            )
            jobs.append(Job("durable-lost-tasks", search.check, purpose="search for lost tasks"))
        return jobs

    @property
    def is_sweeping(self) -> bool:
        """Whether the dispatcher of this process sweeps."""
        made = vars(self).get("dispatcher")
        return made is not None and made.is_running() and self.sweeper.seconds_since_check() < _SWEEPING_SECONDS

    @functools.cached_property
    def heartbeat(self) -> ProcessHeartbeat:
        """Writes the heartbeat of this process, if it is a worker or hosts a dispatcher."""
        return ProcessHeartbeat(
            lambda: self.store,
            self.runtime,
            queues=lambda: sorted(self.app.amqp.queues.consume_from),
            workflows=lambda: sorted(self.registry),
        )

    @functools.cached_property
    def sweep_task_heartbeat(self) -> SweepTaskHeartbeat:
        """Writes the heartbeat of the task that sweeps for a beat without a dispatcher."""
        return SweepTaskHeartbeat(self.store, self.runtime)

    @functools.cached_property
    def held_task_reporter(self) -> HeldTaskReporter:
        """Reports, in a worker, which tasks that worker holds."""
        return HeldTaskReporter(lambda: self.store, self.runtime, heartbeat_id=lambda: self.heartbeat.row_id)

    def queue_lengths(self) -> dict[str, int | None]:
        """Return the lengths of the queues of known workflows and of steps' tasks; None if the broker cannot say."""
        known = (self.registry.get(name).queue for name in self.registry)
        names = sorted(
            {self.settings.queue, *(queue for queue in known if queue), *self.operations.stats.task_queues()}
        )
        return {name: self.publisher.queue_length(name) for name in names}

    def close(self) -> None:
        """Stop the jobs of this process, and close the connections to the broker and the database."""
        self.processes.stop_jobs()
        if "publisher" in vars(self):
            self.publisher.close()
        for store in {vars(self)[name] for name in ("read_store", "store") if name in vars(self)}:
            store.close()


def open_store(settings: Settings, runtime: Runtime, **given: Any) -> Store:
    """Return the database with the instances. ``given``: the engine and the session factory of the application."""
    return _open(settings.database_url, settings, runtime, **given)


def open_read_store(settings: Settings, runtime: Runtime, store: Store) -> Store:
    """Return the database for lists and counts: the replica if the settings name one, else ``store``."""
    if settings.read_database_url is None:
        return store
    try:
        return _open(settings.read_database_url, settings, runtime)
    except ConfigInvalid as exc:  # it names the setting of the other database
        raise ConfigInvalid("durable_read_database_url", exc.value, exc.remedy) from None


def _open(url: str | None, settings: Settings, runtime: Runtime, **given: Any) -> Store:
    return Store(
        url,
        schema=settings.database_schema,
        prefix=settings.table_prefix,
        prepared_statements=settings.prepared_statements,
        runtime=runtime,
        **given,
    )
