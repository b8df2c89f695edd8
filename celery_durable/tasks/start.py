"""The task `celery_durable.start`, which creates an instance: for chains, chords, beat, and other languages.

A message may come twice, so the instance's id comes from it, and an id that exists is returned (LAW 1). A countdown
becomes a start time in the database, where no visibility timeout can lose or double it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol

from celery import Celery
from celery.app.routes import Router
from celery.app.task import Task
from celery.canvas import Signature
from celery.exceptions import Reject
from celery.utils.time import maybe_make_aware

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.errors import (
    DurationInvalid,
    InstantInvalid,
    NameInvalid,
    SchemaOutdated,
    ValueRefused,
    WorkflowNotFound,
)
from celery_durable.operations.create import CreateOperations, parse_max_run
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.tasks.beat_schedules import current_occurrence, fill_in_template
from celery_durable.tasks.options import INTERNAL_OPTIONS

START = "celery_durable.start"
# Unlike internal tasks it has a result, which a chord needs. The settings for results and tracking are the app's.
_OPTIONS = {
    name: value
    for name, value in INTERNAL_OPTIONS.items()
    if name not in ("ignore_result", "store_errors_even_if_ignored", "store_eager_result", "track_started")
} | {"acks_late": True, "reject_on_worker_lost": True, "max_retries": None}
_NAMESPACE = uuid.UUID("1b3b6d4e-52b8-5c55-9f0c-0d3f1b8d4b57")
_MAX_RETRY_SECONDS = 60
_MAX_UNKNOWN_RETRIES = 10
"""A workflow that the worker does not know is looked for during five minutes, which a deploy may take."""


class CreatingOperations(Protocol):
    """The operations that the task uses."""

    @property
    def create(self) -> CreateOperations: ...


class StartDependencies(Protocol):
    """The objects that the task uses, created when it first needs them."""

    @property
    def operations(self) -> CreatingOperations: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def store(self) -> Store: ...


def install_start_task(app: Celery, dependencies: StartDependencies) -> None:
    """Register the task with one app."""

    def send(task: Any, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        """The task's ``apply_async``: what the message lacks is filled in by the process that sends it."""
        if not options.get("retries"):  # a retry keeps its arguments, its countdown and its queue
            kwargs = _complete(app, dependencies.runtime.wall_clock(), kwargs or {}, options)
            if not options.keys() & {"queue", "exchange", "routing_key"}:
                options["queue"] = _find_queue(dependencies, str(kwargs.get("workflow")))
        if not app.conf.task_always_eager:  # past the application's routes, as internal tasks
            options = {"router": Router(queues=app.amqp.queues, app=app)} | options
        return Task.apply_async(task, args, kwargs, task_id=task_id, **options)

    @app.task(name=START, bind=True, **_OPTIONS | {"apply_async": send})
    def start(
        self: Any,
        *params: Any,
        workflow: Any,
        id: Any = None,
        if_exists: Any = "return",
        if_running: Any = None,
        labels: Any = None,
        max_run: Any = None,
        run_at: Any = None,
        at_latest: Any = None,
        request_id: Any = None,
    ) -> str:
        """Create an instance of a workflow and return its id."""
        task_id, repeats = str(self.request.id), if_exists == "postpone" or if_running is not None
        try:
            return dependencies.operations.create.instance(
                workflow,
                _take_only(params, workflow),
                id=_derive_id(dependencies.settings, task_id) if id is None and not repeats else id,
                if_exists=if_exists,
                if_running=if_running,
                labels=labels,
                max_run=max_run,
                run_at=_parse_start(run_at),
                at_latest=at_latest,
                request_id=str(uuid.uuid5(_NAMESPACE, str(request_id or task_id))),
            )
        except Exception as exc:
            _retry_if_transient(self, dependencies.store, exc)
            raise


def make_start_signature(
    app: Celery,
    dependencies: StartDependencies,
    workflow: str,
    params: Any,
    options: Mapping[str, Any],
    *,
    is_immutable: bool,
) -> Signature[Any]:
    """Make the signature that starts an instance; raises what `create` raises for the parameters.

    ``params`` None: they come from the task before, in a chain. ``options``: arguments of the task, if not None.
    """
    args: tuple[Any, ...] = ()
    if params is not None or is_immutable:
        args = (json.loads(dependencies.operations.create.encode_params(workflow, params)),)
    kwargs = {"workflow": workflow} | {name: value for name, value in options.items() if value is not None}
    if "max_run" in kwargs:
        kwargs["max_run"] = parse_max_run(kwargs["max_run"]).total_seconds()
    if "at_latest" in kwargs:
        kwargs["at_latest"] = values.parse_duration(kwargs["at_latest"]).total_seconds()
    # Named here, because a worker that has no Durable may send the message, as the next of a chain.
    message = {"queue": _find_queue(dependencies, workflow), "serializer": "json"}
    return app.signature(START, args=args, kwargs=kwargs, options=message, immutable=is_immutable)


# --- in the process that sends the message ------------------------------------------------------


def _complete(app: Celery, now: datetime, kwargs: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the task's arguments with the start time that the options ask for, and the id that beat asks for."""
    completed = dict(kwargs)
    countdown, eta = options.pop("countdown", None), options.pop("eta", None)
    if countdown is not None:
        eta = now + timedelta(seconds=countdown)
    if isinstance(eta, datetime):
        eta = maybe_make_aware(eta, app.timezone).isoformat()
    if eta is not None:
        completed["run_at"] = eta
    for name in ("max_run", "run_at", "at_latest"):
        if isinstance(completed.get(name), timedelta):  # of an entry of beat; a message has no such type
            completed[name] = completed[name].total_seconds()
    occurrence = current_occurrence.get()
    slot = None
    if occurrence is not None and occurrence.at is not None:
        slot = str(uuid.uuid5(_NAMESPACE, f"{occurrence.entry} {occurrence.at.timestamp()}"))
    if isinstance(completed.get("id"), str):
        completed["id"] = fill_in_template(completed["id"], occurrence, now.astimezone(app.timezone))
    if slot is not None and completed.get("if_running") is not None:
        completed.setdefault("request_id", slot)
    elif slot is not None and completed.get("id") is None:
        completed["id"] = slot
    return completed


def _find_queue(dependencies: StartDependencies, workflow: str) -> str:
    definition = dependencies.registry.find(workflow)
    return (definition.queue if definition is not None else None) or dependencies.settings.queue


# --- in the worker ------------------------------------------------------------------------------


def _take_only(params: tuple[Any, ...], workflow: str) -> Any:
    if len(params) > 1:
        raise ValueRefused(
            f"Workflow {workflow!r} got parameters and the result of the task before it. Write .si(params) to start it "
            "with the parameters, or .s() to start it with the result."
        )
    return params[0] if params else None


def _derive_id(settings: Settings, task_id: str) -> str:
    """Return the task's id, or one made of it that an instance may have."""
    try:
        return values.check_instance_id(task_id, settings.max_instance_id)
    except NameInvalid:
        return str(uuid.uuid5(_NAMESPACE, task_id))


def _parse_start(run_at: Any) -> datetime | values.Duration | None:
    """Return the start time or the delay until it; raises InstantInvalid."""
    if run_at is None:
        return None
    try:
        return datetime.fromisoformat(run_at)
    except (TypeError, ValueError):
        pass
    try:
        return values.parse_duration(run_at)
    except DurationInvalid:
        raise InstantInvalid("run_at", run_at) from None


def _retry_if_transient(task: Any, store: Store, error: Exception) -> None:
    """Raise what makes Celery send the message again, if another attempt may succeed and a worker would get it."""
    retries = task.request.retries
    is_unknown = isinstance(error, WorkflowNotFound) and retries < _MAX_UNKNOWN_RETRIES
    may_succeed = is_unknown or isinstance(error, SchemaOutdated) or store.is_transient(error)
    if not may_succeed or task.request.is_eager or task.request.called_directly:
        return
    try:
        task.retry(exc=error, countdown=min(2**retries, _MAX_RETRY_SECONDS))
    except Reject as exc:  # the broker does not take it, so it has to keep the one that it has
        raise Reject(error, requeue=True) from exc
