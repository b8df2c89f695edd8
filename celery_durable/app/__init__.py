"""`Durable`, which adds durable workflows to a Celery app."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import sqlalchemy as sa
from celery import Celery, current_app

from celery_durable import tasks
from celery_durable.app.internals import Internals
from celery_durable.app.workflows import Workflows
from celery_durable.definitions import WorkflowOptions, define
from celery_durable.errors import AsyncNotSupported, ConfigInvalid, DefinitionInvalid, NotConfigured
from celery_durable.event_loop import event_loop
from celery_durable.handles import AsyncFunction, Limits, Workflow, WorkflowDecorator
from celery_durable.model import EventWait, OutboundEvent, Page, Waiter, WaitFilter, WorkflowEvent
from celery_durable.packages import RequiredWorkflows, load_from_entry_points, load_from_packages
from celery_durable.redaction import Redact
from celery_durable.runtime import Runtime
from celery_durable.service import Service, WorkflowService
from celery_durable.step import Step
from celery_durable.store.migrations import migrate
from celery_durable.tasks.outbox import Handler
from celery_durable.tasks.queues import install_queue
from celery_durable.tasks.start import install_start_task
from celery_durable.tasks.worker import DurableStep
from celery_durable.values import Duration, Retries, check_text_name, is_async_function, refuse_async_generator

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

P = TypeVar("P")
R = TypeVar("R")
LoopHook = TypeVar("LoopHook", bound=Callable[[], Coroutine[Any, Any, object]])

_attached: weakref.WeakSet[Durable] = weakref.WeakSet()
_overrides: list[Durable] = []


class Durable:
    """Durable workflows for one Celery app.

    Write ``Durable(app)``, or ``Durable()`` and later ``init_app(app)``. The settings ``app.conf.durable_*`` are read
    when they are first needed.

    Args:
        app: The Celery app. None: call `init_app` later.
        engine: The application's SQLAlchemy engine, to share its connections. None: the ``durable_database_url``
            setting decides.
        session_factory: The application's factory of sessions, for steps that write with a session. None: one for
            the engine.
        redact: Decides what the HTTP API and the commands show of values. A function of a value and a
            `RedactionContext` that returns what is shown.
        runtime: For tests of this package.

    Raises:
        ConfigInvalid: ``redact`` is not a function, or ``app`` is no Celery app or has a Durable already.
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
            raise ConfigInvalid(
                "Durable(redact=)", redact, "give a function of a value and a RedactionContext, or None"
            )
        self.internals = Internals(engine=engine, session_factory=session_factory, redact=redact, runtime=runtime)
        """The parts that do the work. Not for applications: they change without notice."""
        self.workflows = Workflows(self.internals, functools.partial(_overridden, self))
        """The workflows that the app knows: ``durable.workflows["order"]``."""
        self.limits = Limits(lambda: self.internals.operations)
        """The limits of the app's database: ``durable.limits["stripe"]``."""
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Celery) -> None:
        """Attach this Durable to a Celery app.

        The app gets the internal tasks, the queue for workflows and a beat entry. Its beat and its workers start the
        threads that workflows need.

        Args:
            app: The app. Attaching it a second time does nothing.

        Raises:
            ConfigInvalid: ``app`` is no Celery app, or has another Durable.
        """
        if not isinstance(app, Celery):
            raise ConfigInvalid("Durable(app)", app, "pass the Celery app")
        present = vars(app).get("durable")
        if present is self:
            return
        if present is not None:
            raise ConfigInvalid("app.durable", present, "the app has a Durable already; its tasks serve only one")
        self.internals.celery_app = app
        vars(app)["durable"] = self
        _attached.add(self)
        tasks.install_tasks(app, self.internals)
        install_start_task(app, self.internals)
        install_queue(app)
        app.steps["worker"].add(DurableStep)
        self.internals.processes.connect(app)

    @property
    def app(self) -> Celery:
        """The Celery app.

        Raises:
            NotConfigured: No app is attached yet.
        """
        return self.internals.app

    @property
    def engine(self) -> sa.Engine:
        """The SQLAlchemy engine of the database with the workflows.

        Raises:
            ConfigInvalid: No database is configured.
        """
        return self.internals.store.engine

    def close(self) -> None:
        """Stop the threads of this process, and close the connections to the broker and the database."""
        self.internals.close()

    def migrate(self, connection: sa.Connection | None = None) -> tuple[str | None, str]:
        """Create the tables or bring them up to date, as the command ``durable migrate`` does.

        Args:
            connection: Migrate in the transaction of this connection, for example ``op.get_bind()`` in a migration of
                the application. The caller commits. MariaDB commits at every statement that changes tables. None: in
                a transaction of its own.

        Returns:
            The revision before, None if there were no tables, and the revision after.

        Raises:
            ConfigInvalid: No database is configured.
            UnsupportedDatabase: The database is too old, or of another kind.
            StoreUnavailable: The database cannot do this now.
        """
        store = self.internals.store
        if connection is None:
            return migrate.upgrade(store)
        return migrate.upgrade_connection(connection, schema=store.schema, prefix=store.prefix)

    # --- definitions ----------------------------------------------------------------------------

    @overload
    def workflow(self, fn: AsyncFunction[P], /) -> AsyncNotSupported: ...  # type: ignore[overload-overlap]  # refused
    @overload
    def workflow(self, fn: Callable[[WorkflowEvent[P], Step], R], /) -> Workflow[P, R]: ...
    @overload
    def workflow(self, /, **options: Unpack[WorkflowOptions]) -> WorkflowDecorator: ...
    def workflow(self, fn: Any = None, /, **options: Unpack[WorkflowOptions]) -> Any:
        """Define a workflow of this app alone; otherwise as `durable_workflow`.

        Args:
            fn: The function, if the decorator is written without parentheses.
            options: As for `durable_workflow`.

        Returns:
            The handle of the workflow.

        Raises:
            DefinitionInvalid: The function or an option cannot be used.
            WorkflowNameTaken: Another workflow of this app has the name.
        """

        def decorate(fn: Callable[..., Any]) -> Workflow[Any, Any]:
            definition = define(fn, **options)
            self.internals.registry.add(definition)
            return Workflow(definition, functools.partial(_overridden, self))

        return decorate if fn is None else decorate(fn)

    def outbound(
        self, name: str, *, retries: Retries | int | None = None
    ) -> Callable[[Callable[[OutboundEvent], R]], Callable[[OutboundEvent], R]]:
        """Register a function as the handler of outbound events of this name.

        A worker calls it at least once for each event. It should end within 5 minutes. If it raises, the worker calls
        it again later. After the last retry the event stays in the outbox, and is not sent again without help.

        Args:
            name: The name that steps give to the event.
            retries: How often and when the handler is called again. None: 10 times, after 10 seconds at first, then
                exponentially later up to every 10 minutes.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            DefinitionInvalid: The name cannot be used, another function handles it, or it is an async generator.
        """

        def register(fn: Callable[[OutboundEvent], R]) -> Callable[[OutboundEvent], R]:
            check_text_name("Outbound event", name, 255)
            refuse_async_generator("Handler", fn)
            handlers = self.internals.handlers
            handler, present = Handler.of(fn, retries), handlers.get(name)
            if present is not None and present.qualified_name != handler.qualified_name:
                raise DefinitionInvalid(
                    f"Outbound event {name!r} has a handler already, {present.qualified_name}: call "
                    f"{handler.qualified_name} from it, or send another event."
                )
            handlers[name] = handler
            return fn

        return register

    def on_loop_start(self, fn: LoopHook, /) -> LoopHook:
        """Call an async function before the first async step of each process, on the event loop that they share.

        A decorator, for clients that belong to an event loop. If the function raises, the attempt of the step fails,
        and the next async step calls it again.

        Args:
            fn: An async function without parameters.

        Returns:
            The function, unchanged.

        Raises:
            DefinitionInvalid: ``fn`` is not an async function.
        """
        event_loop.add_start_hook(_require_async("on_loop_start", fn))
        return fn

    def on_loop_stop(self, fn: LoopHook, /) -> LoopHook:
        """Call an async function on the event loop of async steps before its process ends, unless that is killed.

        A decorator. The functions of a process are called in reverse order, if those of `on_loop_start` have succeeded,
        and have 5 seconds together.

        Args:
            fn: As in `on_loop_start`.

        Returns:
            The function, unchanged.

        Raises:
            DefinitionInvalid: ``fn`` is not an async function.
        """
        event_loop.stop_hooks.append(_require_async("on_loop_stop", fn))
        return fn

    def register(self, required: RequiredWorkflows) -> None:
        """Register the workflows of a package: all of them, or none if one cannot be registered.

        Args:
            required: The package's ``required_workflows``, a dict of binding keys and workflows. Under the key
                ``ORDER``, ``durable.workflows.ORDER`` is the workflow.

        Raises:
            WorkflowNameTaken: Another workflow has one of the names; the message says where.
            BindingKeyTaken: Another workflow has one of the keys; the message says where.
            DefinitionInvalid: A value is not a workflow, or a key is not an identifier.
        """
        self.internals.bindings.add(required, reserved=dir(Workflows))

    def autodiscover(
        self, packages: Iterable[str] = (), *, related_name: str = "workflows", with_entry_points: bool = True
    ) -> None:
        """Import modules with workflows, and register the ``required_workflows`` in them.

        Args:
            packages: The packages to look in, by import name.
            related_name: The module to import from each package, as in ``<package>.workflows``.
            with_entry_points: Also register what installed packages announce as entry points of the group
                ``celery_durable.workflows``.

        Raises:
            WorkflowNameTaken: As in `register`.
            BindingKeyTaken: As in `register`.
            DefinitionInvalid: As in `register`.
            ValueRefused: ``packages`` is a single name.
        """
        for required in load_from_packages(packages, related_name):
            self.register(required)
        for required in load_from_entry_points() if with_entry_points else ():
            self.register(required)

    @property
    def service(self) -> WorkflowService:
        """The interface to pass to packages that bring workflows."""
        return Service(lambda: _overridden(self).internals.operations)

    # --- topics, and work without Celery --------------------------------------------------------

    def emit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:
        """Send a payload to all instances that wait on a topic now, in `Step.wait_for_topic`.

        An instance that begins to wait later does not get it.

        Args:
            topic: The name of the topic.
            payload: JSON data.
            id: Makes it safe to repeat the call: no run gets two payloads with the same id.

        Returns:
            The number of waits that got the payload.

        Raises:
            InvalidTopic: The topic's name breaks the rules.
            NameInvalid: ``id`` breaks the rules.
            NotSerializable: ``payload`` is not JSON data.
            PayloadTooLarge: ``payload`` is too large.
            EmissionMismatch: An emission with this id has another topic or payload.
            StoreUnavailable: The database cannot do this now.
        """
        return self.internals.operations.topics.emit(topic, payload, id=id)

    def waiters(self, topic: str, *, cursor: str | None = None, limit: int = 25) -> Page[Waiter]:
        """List the waits on a topic, oldest instances first.

        Args:
            topic: The name of the topic.
            cursor: ``cursor`` of the page before. None: the first page.
            limit: The number of waits on a page.

        Returns:
            A page of waits. Its ``cursor`` is None on the last page.

        Raises:
            InvalidTopic: The topic's name breaks the rules.
            CursorInvalid: ``cursor`` is not of a page of this topic.
            ValueRefused: ``limit`` is not between 1 and 1000.
            StoreUnavailable: The database cannot do this now.
        """
        return self.internals.operations.topics.waiters(topic, cursor=cursor, limit=limit)

    def waits(
        self,
        *,
        workflow: str | None = None,
        event_type: str | None = None,
        to: str | None = None,
        is_asking: bool = False,
        cursor: str | None = None,
        limit: int = 25,
    ) -> Page[EventWait]:
        """List the steps that wait for an event, those of the newest instances first.

        Args:
            workflow: Only waits of this workflow, by name.
            event_type: Only waits for events of this type.
            to: Only waits that ask this person or team, as passed to `Step.wait_for_event`.
            is_asking: Only waits that ask a person.
            cursor: ``cursor`` of the page before. None: the first page.
            limit: The number of waits on a page.

        Returns:
            A page, of each wait the instance, the step, since when and until when it waits, and what it asks. The page
            may be short. Its ``cursor`` is None if it is the last one.

        Raises:
            CursorInvalid: The cursor is not from this list with this filter.
            ValueRefused: ``limit`` is not between 1 and 1000.
            StoreUnavailable: The database cannot do this now.
        """
        chosen = WaitFilter(workflow=workflow, event_type=event_type, to=to, is_asking=is_asking)
        return self.internals.operations.stats.waits(chosen, cursor=cursor, limit=limit)

    def sign_answer(
        self,
        workflow: Workflow[Any, Any],
        event: WorkflowEvent[Any],
        step: str,
        *,
        by: str,
        valid_for: Duration = "7 days",
    ) -> str:
        """Sign a text for a link in a mail. Whoever has the link can answer as this person: send it to nobody else.

        Call it in the function of a step, and put the text into the link to a page of yours. The page shows
        `open_question`, and its button calls `answer_signed`. A GET request must not answer: mail scanners open links.

        Args:
            workflow: The workflow that asks.
            event: The first argument of its function.
            step: The key of the wait: its name, unless it is repeated.
            by: The name of the person, stored with the answer.
            valid_for: How long the link is valid.

        Returns:
            Text for URLs, signed with ``durable_answer_key``.

        Raises:
            ConfigInvalid: ``durable_answer_key`` is not set.
            NameInvalid: ``by`` is empty, too long, or has control characters.
            DurationInvalid: ``valid_for`` cannot be read.
            StoreUnavailable: The database cannot do this now.
        """
        return self.internals.operations.asks.sign(
            workflow.name, event.instance_id, step, run=event.run_number, by=by, valid_for=valid_for
        )

    def open_question(self, signed: str) -> EventWait:
        """Return the question of a signed link, if it is still open.

        Args:
            signed: What `sign_answer` returned.

        Raises:
            AnswerLinkInvalid: The link was changed, or its time is over.
            AnswerTooLate: The question has been answered, or the wait has ended, or another run is current.
            StepNotFound: The wait has not begun.
            ConfigInvalid: ``durable_answer_key`` is not set.
            StoreUnavailable: The database cannot do this now.
        """
        return self.internals.operations.asks.read_signed(signed)

    def answer_signed(self, signed: str, payload: Any = None) -> bool:
        """Answer the question of a signed link, as the person for whom it was signed.

        Args:
            signed: What `sign_answer` returned.
            payload: As in `WorkflowInstance.answer`.

        Returns:
            False if this person had given this answer before.

        Raises:
            AnswerLinkInvalid: The link was changed, or its time is over.
            AnswerTooLate: As in `WorkflowInstance.answer`; so are EventRefused, AnswerUnchecked and StepNotFound.
            ConfigInvalid: ``durable_answer_key`` is not set.
            StoreUnavailable: The database cannot do this now.
        """
        return self.internals.operations.asks.answer_signed(signed, payload)

    async def aopen_question(self, signed: str) -> EventWait:
        """`open_question` for async code, on a thread."""
        return await self.internals.call_async(lambda: self.open_question(signed))

    async def aanswer_signed(self, signed: str, payload: Any = None) -> bool:
        """`answer_signed` for async code, on a thread."""
        return await self.internals.call_async(lambda: self.answer_signed(signed, payload))

    async def aemit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:
        """`emit` for async code, on a thread."""
        return await self.internals.call_async(lambda: self.emit(topic, payload, id=id))

    async def awaiters(self, topic: str, *, cursor: str | None = None, limit: int = 25) -> Page[Waiter]:
        """`waiters` for async code, on a thread."""
        return await self.internals.call_async(lambda: self.waiters(topic, cursor=cursor, limit=limit))

    async def awaits(
        self,
        *,
        workflow: str | None = None,
        event_type: str | None = None,
        to: str | None = None,
        is_asking: bool = False,
        cursor: str | None = None,
        limit: int = 25,
    ) -> Page[EventWait]:
        """`waits` for async code, on a thread."""
        chosen = {"workflow": workflow, "event_type": event_type, "to": to}
        return await self.internals.call_async(
            lambda: self.waits(**chosen, is_asking=is_asking, cursor=cursor, limit=limit)
        )

    async def client(self) -> Durable:
        """Return this Durable: a dependency for FastAPI, as in ``Depends(durable.client)``.

        In a test it returns the Durable of the harness.
        """
        return _overridden(self)

    def tick(self, *, max_instances: int = 10, max_steps: int | None = None) -> int:
        """Advance due runs in this process without Celery, for example from cron.

        Ticks and workers may run at the same time.

        Args:
            max_instances: The largest number of passes.
            max_steps: The largest number of steps in one pass. None: no limit.

        Returns:
            The number of passes.

        Raises:
            ConfigInvalid: No database is configured.
            StoreUnavailable: The database cannot do this now.
        """
        self.internals.end_children()
        return self.internals.ticker.tick(max_instances=max_instances, max_steps=max_steps)


def _require_async(method: str, fn: LoopHook) -> LoopHook:
    if not is_async_function(fn):
        raise DefinitionInvalid(f"durable.{method}() needs an async function without parameters, and got {fn!r}.")
    return fn


def current_durable(what: str) -> Durable:
    """Return the Durable of the current Celery app, else the only one of this process; NotConfigured names ``what``."""
    if _overrides:
        return _overrides[-1]
    found = getattr(current_app, "durable", None)
    if isinstance(found, Durable):
        return found
    attached = list(_attached)
    if len(attached) == 1:
        return attached[0]
    raise NotConfigured(what)


def _overridden(durable: Durable) -> Durable:
    """Return the Durable that `override_durable` put in place of this one, else this one."""
    return _overrides[-1] if _overrides and durable not in _overrides else durable


@contextmanager
def override_durable(durable: Durable) -> Iterator[None]:
    """Make the handles of all workflows act on ``durable`` inside the block, whatever app they belong to. For tests."""
    _overrides.append(durable)
    try:
        yield
    finally:
        _overrides.remove(durable)
