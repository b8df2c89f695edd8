"""The internal parts of one `Durable`, and their start and stop with Celery's processes."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from billiard.exceptions import WorkerLostError
from celery import Celery, signals
from celery.utils.text import str_to_list

from celery_durable import tasks
from celery_durable.config import Settings, read_settings
from celery_durable.definitions import SHARED, Registry
from celery_durable.errors import DurableError, NotConfigured
from celery_durable.operations import OperationContext, Operations
from celery_durable.packages import Bindings
from celery_durable.redaction import Redact, Redaction
from celery_durable.runtime import Runtime, real_monotonic
from celery_durable.signals import listen
from celery_durable.store.engine import Store
from celery_durable.store.lost_tasks import SentTask
from celery_durable.tasks.answers import AnswerCommitter
from celery_durable.tasks.background_queue import BackgroundQueue
from celery_durable.tasks.dispatch_publisher import DispatchPublisher
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.heartbeats import ProcessHeartbeat, SweepTaskHeartbeat
from celery_durable.tasks.lost.message_broker import CeleryMessageBroker
from celery_durable.tasks.lost.search import LOSS_REASON, LostTaskSearch
from celery_durable.tasks.lost.worker_tracker import WorkerLossTracker
from celery_durable.tasks.outbox import Handler, OutboundDeliverer, Outbox
from celery_durable.tasks.process_stops import make_process_stop_check
from celery_durable.tasks.publishing import Publisher
from celery_durable.tasks.task_ends import TaskEndHandler
from celery_durable.tasks.worker import StopFlag

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

    from celery_durable.runner import Runner
    from celery_durable.runner.ticks import Ticker

logger = logging.getLogger("celery_durable")

_STOP_SECONDS = 3.0


class Internals:
    """The parts behind one `Durable`, for the other modules of this package and for its tests.

    Each part is made when it is first used. So a process that only creates instances opens no connection to the
    broker before its first message, and settings may change until then. A test may assign a part before its first use.
    """

    def __init__(
        self,
        *,
        engine: sa.Engine | None,
        session_factory: Callable[[], Session] | None,
        redact: Redact | None,
        runtime: Runtime | None,
    ) -> None:
        self._engine, self._session_factory = engine, session_factory
        self.redact = redact
        self.runtime = runtime or Runtime()
        self.registry = Registry(SHARED)
        self.bindings = Bindings(self.registry)
        self.handlers: dict[str, Handler] = {}
        """The handlers of outbound events, by the event's name."""
        self.celery_app: Celery | None = None
        """Set by `Durable.init_app`."""
        self.stop_flag = StopFlag()
        """Set while the worker of this process shuts down."""
        self.unsupported_pool: str | None = None
        """The worker's pool if workflows do not run on it, else None."""
        self.background_queue = BackgroundQueue()
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
        return read_settings(self.app.conf)

    @functools.cached_property
    def settings(self) -> Settings:
        """The ``durable_*`` settings; raises ConfigInvalid, also if workers would refuse internal messages."""
        tasks.check_accept_content(self.app.conf)
        return self.read_settings()

    @functools.cached_property
    def store(self) -> Store:
        """The database with the instances."""
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
            )
        )

    @functools.cached_property
    def runner(self) -> Runner:
        """Advances runs in this process."""
        from celery_durable.runner import Runner  # noqa: PLC0415  # see `import_for_passes`

        return Runner(
            self.store,
            self.settings,
            self.registry,
            self.runtime,
            self.dispatch_publisher.publish,
            send_messages=self.outbox.send_committed,
            # Eager tasks have no other worker to continue the run, so they ignore a stop flag left from a worker.
            should_stop=lambda: self.stop_flag.is_set() and not self.app.conf.task_always_eager,
            stops_process=self._stops_process,
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
        return Outbox(self.store, self.settings, self.publisher.send, self._stops_process)

    @functools.cached_property
    def deliveries(self) -> OutboundDeliverer:
        """Calls the handlers of outbound events."""
        return OutboundDeliverer(self.store, self.settings, self.runtime, self.handlers, self._stops_process)

    @functools.cached_property
    def answers(self) -> AnswerCommitter:
        """Delivers the results of Celery tasks to the steps that wait for them."""
        return AnswerCommitter(lambda: self.operations, self.settings, self.runtime)

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
        """The thread that sweeps, if this process hosts a dispatcher."""
        return Dispatcher(
            self.sweeper,
            self.settings,
            self.heartbeat,
            self.lost_task_search,
            outages=self.publisher.outages,
            runtime=self.runtime,
        )

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
    def lost_task_search(self) -> LostTaskSearch:
        """Finds the tasks that were lost with a worker. The dispatcher runs it."""

        def report(lost: Sequence[SentTask]) -> int:
            return self.operations.answers.report_lost(
                [(each.reference, each.sent_us) for each in lost], why=LOSS_REASON
            )

        messages = CeleryMessageBroker(self.app, self.publisher, tasks.MARKER)
        return LostTaskSearch(self.store, self.runtime, messages, report, heartbeat_id=lambda: self.heartbeat.row_id)

    @functools.cached_property
    def worker_loss_tracker(self) -> WorkerLossTracker:
        """Answers, in a worker, which tasks that worker holds."""
        return WorkerLossTracker(
            lambda: self.store,
            self.runtime,
            self.background_queue,
            lambda: self.operations.answers,
            marker=tasks.MARKER,
            heartbeat_id=lambda: self.heartbeat.row_id,
        )

    def close(self) -> None:
        """Stop the threads of this process, and close the connections to the broker and the database."""
        self.processes.stop_threads()
        if "publisher" in vars(self):
            self.publisher.close()
        if "store" in vars(self):
            self.store.close()


def import_for_passes() -> None:
    """Import what only passes need. A worker does it before its pool forks; clients and commands never pay for it."""
    for module in ("celery_durable.runner", "sqlalchemy.orm"):
        import_module(module)


class CeleryProcesses:
    """Starts and stops the internal threads when Celery's beat and workers start and stop.

    Celery sends its signals to all apps of a process, so each receiver checks that the signal is about this app.
    """

    def __init__(self, internals: Internals) -> None:
        self._internals = internals
        self.named_queues: frozenset[str] = frozenset()
        """The queues that the worker's option ``-Q`` names."""

    def connect(self, app: Celery) -> None:
        """Connect the receivers of Celery's signals. Called once, by `Durable.init_app`."""
        app.on_after_configure.connect(self._configure, weak=False)  # sent again if the app's configuration is replaced
        if app.configured:  # type: ignore[attr-defined]  # celery-types lacks it
            self._configure()
        listen(signals.beat_init, self._start_beat)
        listen(signals.celeryd_init, self._read_worker_options)
        listen(signals.worker_init, self._prepare_worker)
        listen(signals.worker_shutting_down, self._set_stop_flag)
        listen(signals.task_failure, self._release_dead_claim)
        listen(signals.worker_shutdown, self._end_worker)
        self._internals.worker_loss_tracker.connect(self._is_own)
        self._internals.task_end_handler.connect()

    def _is_own(self, app: Any) -> bool:
        return app is self._internals.celery_app

    def _configure(self, **_: Any) -> None:
        # These settings are not kept: the application may still change them before their first use.
        settings = self._internals.read_settings()
        if settings.dispatcher != "none":
            tasks.add_beat_entry(self._internals.app.conf.beat_schedule, settings.queue)

    def _start_beat(self, sender: Any, **_: Any) -> None:
        if not self._is_own(sender.app):
            return
        parts = self._internals
        try:
            if parts.settings.dispatcher != "none":
                tasks.ensure_beat_entry(sender.scheduler, parts.settings.queue)
            if parts.settings.dispatcher in ("beat", "both"):
                parts.heartbeat.register("dispatcher", f"beat@{socket.gethostname()}")
                parts.dispatcher.start()
        except DurableError as exc:
            # Celery only logs an exception of a signal's receiver: beat would run without a dispatcher.
            logger.critical("celery beat does not start: %s", exc)
            raise SystemExit(1) from exc

    def _read_worker_options(self, instance: Any, options: Any, **_: Any) -> None:
        if self._is_own(instance.app):
            self.named_queues = frozenset(str_to_list(options.get("queues")) or ())

    def _prepare_worker(self, sender: Any, **_: Any) -> None:
        if self._is_own(sender.app):
            self._internals.stop_flag.clear()
            import_for_passes()

    def _set_stop_flag(self, **_: Any) -> None:
        self._internals.stop_flag.set()

    def start_worker(self, node: str, pool: str) -> None:
        """Start the heartbeat, and the dispatcher if settings want one here. The worker's bootstep calls it."""
        parts = self._internals
        parts.task_end_handler.set_main_loop_pid(os.getpid() if pool == "prefork" else None)
        parts.heartbeat.register("worker", node, pool=pool)
        if parts.settings.dispatcher in ("worker", "both") and parts.unsupported_pool is None:
            parts.dispatcher.start()  # the dispatcher's thread writes the heartbeat
        else:
            parts.heartbeat.start()

    def stop_worker(self) -> None:
        """Stop the threads. The worker's bootstep calls it before the pool stops, also if Celery sent no signal."""
        self._internals.stop_flag.set()
        self.stop_threads()

    def start_inventories(self, consumer: Callable[[], Any]) -> None:
        """Start to answer which tasks this worker holds.

        ``consumer`` returns the object that receives the worker's messages, or None.
        """
        self._internals.heartbeat.is_row_needed = True
        self._internals.worker_loss_tracker.inventories.start(consumer)

    def stop_inventories(self) -> None:
        """Stop to answer: the worker's pool has ended, or Celery is about to kill it."""
        self._internals.worker_loss_tracker.inventories.stop(_STOP_SECONDS)
        self._internals.heartbeat.is_row_needed = False
        self._internals.heartbeat.remove_row()

    def _end_worker(self, sender: Any, **_: Any) -> None:
        if self._is_own(sender.app):
            self.stop_inventories()

    def stop_threads(self) -> None:
        """End the threads of this process; waits `_STOP_SECONDS` at most, so that a slow database delays nothing."""
        end = real_monotonic() + _STOP_SECONDS
        made = vars(self._internals)
        threads = [made[name] for name in ("dispatcher", "heartbeat") if name in made]
        for thread in threads:
            thread.stop(wait=False)
        for thread in threads:
            thread.join(max(0.0, end - real_monotonic()))
        self._internals.background_queue.close(max(0.0, end - real_monotonic()))

    def _release_dead_claim(self, sender: Any, task_id: str, exception: Any, args: Any, **_: Any) -> None:
        """Release the claim of a pool process that died in `advance`, so that the run need not wait for the lease."""
        parts = self._internals
        if self._is_own(sender.app) and sender.name == tasks.ADVANCE and isinstance(exception, WorkerLostError):
            parts.background_queue.submit(
                lambda: tasks.release_dead_claim(
                    parts.store, parts.publisher.publish, task_id, args, grace=parts.settings.grace
                ),
                what=f"The claim of task {task_id}, whose process died,",
            )
