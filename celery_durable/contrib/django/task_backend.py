"""`DurableBackend`: Django's tasks as instances of a workflow, created with the caller's transaction.

The workflow has one step, which sends a Celery task to the queue of the task and waits for its answer. The instance is
the task's result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

import django
from celery import Task as CeleryTask
from celery import shared_task
from django.utils import timezone
from django.utils.module_loading import import_string

from celery_durable import Step, WorkflowEvent, durable_workflow, values
from celery_durable.contrib.django import wiring
from celery_durable.errors import InstanceNotFound
from celery_durable.errors.base import name_error
from celery_durable.model import History, Status
from celery_durable.tasks.pools import get_node_name

_PACKAGE = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
_base, _exceptions, _signals = (import_module(f"{_PACKAGE}.{name}") for name in ("base", "exceptions", "signals"))
_BaseTaskBackend: Any = import_module(f"{_PACKAGE}.backends.base").BaseTaskBackend
_READY, _FAILED = _base.TaskResultStatus.READY, _base.TaskResultStatus.FAILED
_SUCCESSFUL, _RUNNING = _base.TaskResultStatus.SUCCESSFUL, _base.TaskResultStatus.RUNNING

WORKFLOW, RUN = "django_task", "celery_durable.run_django_task"
_DEFAULT_QUEUE = "default"
_HIGHEST_PRIORITY = 9
_TIMEOUT = "365 days"
"""A task waits in its queue until a worker takes it."""


class DurableBackend(_BaseTaskBackend):  # type: ignore[misc]  # its module depends on the version of Django
    """Enqueues tasks in the caller's transaction, and runs them on Celery's workers.

    The queue "default" is Celery's own default; another queue is the Celery queue of that name. ``OPTIONS``:

    * ``PRIORITIES``: True accepts priorities. They become the priorities of Celery messages, so the broker has to
      support them. Without it, tasks with a priority are refused.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.supports_priority = bool(self.options.get("PRIORITIES", False))

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Create an instance that runs the task; returns its result.

        Raises:
            InvalidTask: The backend does not support an option of the task.
            TypeError: An argument has no JSON form.
        """
        self.validate_task(task)
        internals = wiring.find_durable().internals
        result = _make_result(task, internals.operations.new_id(), args, kwargs, enqueued_at=timezone.now())
        call = {
            "task": task.module_path,
            "args": result.args,
            "kwargs": result.kwargs,
            "enqueued_at": result.enqueued_at.isoformat(),
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": task.priority,
            "run_after": None if task.run_after is None else task.run_after.isoformat(),
            "options": self._find_options(task),
        }
        run_at = task.run_after
        if run_at is not None and timezone.is_naive(run_at):  # USE_TZ = False
            run_at = timezone.make_aware(run_at)
        internals.operations.create.instance(
            WORKFLOW, call, id=result.id, run_at=run_at, labels={"task": task.module_path[:255]}
        )
        internals.store.after_commit(lambda: _signals.task_enqueued.send(type(self), task_result=result))
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the result of this id; raises TaskResultDoesNotExist."""
        try:
            history = wiring.find_durable().internals.operations.history.read(WORKFLOW, result_id)
        except InstanceNotFound:
            raise _exceptions.TaskResultDoesNotExist(result_id) from None
        return _read_result(history)

    def _find_options(self, task: Any) -> dict[str, Any]:
        options: dict[str, Any] = {} if task.queue_name == _DEFAULT_QUEUE else {"queue": task.queue_name}
        if self.supports_priority:
            level = round((task.priority - _base.TASK_MIN_PRIORITY) * _HIGHEST_PRIORITY / _PRIORITY_RANGE)
            # Redis serves the lowest number first, RabbitMQ the highest.
            is_reversed = wiring.find_app().connection_for_write().transport.driver_type == "redis"
            options["priority"] = _HIGHEST_PRIORITY - level if is_reversed else level
        return options


_PRIORITY_RANGE = _base.TASK_MAX_PRIORITY - _base.TASK_MIN_PRIORITY


# --- results ------------------------------------------------------------------------------------


def _make_result(
    task: Any, result_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, enqueued_at: datetime
) -> Any:
    return _base.TaskResult(
        task=task,
        id=result_id,
        status=_READY,
        enqueued_at=enqueued_at,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=list(args),
        kwargs=dict(kwargs),
        backend=task.backend,
        errors=[],
        worker_ids=[],
    )


def _load_result(result_id: str, call: Mapping[str, Any], *, enqueued_at: datetime) -> Any:
    """Return the result of a call before its start. `Task.using` would check options that may have changed."""
    run_after, task = call["run_after"], copy.copy(import_string(call["task"]))
    _set(
        task,
        priority=call["priority"],
        queue_name=call["queue_name"],
        backend=call["backend"],
        run_after=None if run_after is None else datetime.fromisoformat(run_after),
    )
    return _make_result(task, result_id, call["args"], call["kwargs"], enqueued_at=enqueued_at)


def _read_result(history: History) -> Any:
    result = _load_result(history.instance_id, history.params, enqueued_at=history.created_at)
    outcome = history.steps[0].result if history.steps else None
    _set(result, **_to_fields(outcome or {}))
    status = history.status
    if status.status is Status.COMPLETE:
        _set(result, status=_SUCCESSFUL, _return_value=status.output)
    elif status.status.is_terminal:
        _set(result, status=_FAILED, finished_at=result.finished_at or history.completed_at)
        if not result.errors:  # the task did not end, or was not started
            text = history.reason if status.error is None else name_error(status.error.name, status.error.message)
            result.errors.append(_base.TaskError(exception_class_path=_NO_ERROR, traceback=text or ""))
    return result


_NO_ERROR = "celery_durable.errors.WorkflowFailed"


def _to_fields(outcome: Mapping[str, Any]) -> dict[str, Any]:
    if not outcome:
        return {}
    started_at, error = datetime.fromisoformat(outcome["started_at"]), outcome["error"]
    errors = [] if error is None else [_base.TaskError(exception_class_path=error[0], traceback=error[1])]
    return {
        "started_at": started_at,
        "last_attempted_at": started_at,
        "finished_at": datetime.fromisoformat(outcome["finished_at"]),
        "worker_ids": [outcome["worker"]],
        "errors": errors,
    }


def _set(result: Any, **fields: Any) -> None:
    """Change a result in place: the class is frozen, and signals pass one object on."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


# --- running ------------------------------------------------------------------------------------


class DjangoTaskFailed(Exception):
    """The function of a task raised. The traceback is in the result of the step."""


@durable_workflow(name=WORKFLOW)
def django_task(event: WorkflowEvent[dict[str, Any]], step: Step) -> Any:
    """Run a task of Django by a Celery task, and return what it returned."""
    call = event.payload
    signature = run_django_task.s(event.instance_id, call).set(**call["options"])
    outcome = step.task("run", signature, timeout=_TIMEOUT)
    if outcome["error"] is not None:
        raise DjangoTaskFailed(outcome["error"][2])
    return outcome["return_value"]


@shared_task(name=RUN, bind=True)
def run_django_task(self: CeleryTask[Any, Any], result_id: str, call: dict[str, Any]) -> dict[str, Any]:
    """Call the function of a task; returns its outcome with the times, the worker and the error as text."""
    started_at, worker = timezone.now(), get_node_name(self.request)
    result = _load_result(result_id, call, enqueued_at=datetime.fromisoformat(call["enqueued_at"]))
    backend = type(result.task.get_backend())
    _set(result, status=_RUNNING, started_at=started_at, last_attempted_at=started_at, worker_ids=[worker])
    _signals.task_started.send(backend, task_result=result)
    value, error = None, None
    try:
        value = _base.normalize_json(_call(result))
        _set(result, status=_SUCCESSFUL, finished_at=timezone.now(), _return_value=value)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # whatever the function raises is the task's error
        error = _describe_error(result_id, raised)
        result.errors.append(_base.TaskError(exception_class_path=error[0], traceback=error[1]))
        _set(result, status=_FAILED, finished_at=timezone.now())
        _signals.task_finished.send(backend, task_result=result)  # inside the handler: Django logs the exception
    else:
        _signals.task_finished.send(backend, task_result=result)
    return {
        "started_at": started_at.isoformat(),
        "finished_at": result.finished_at.isoformat(),
        "worker": worker,
        "return_value": value,
        "error": error,
    }


def _describe_error(result_id: str, raised: BaseException) -> list[str]:
    """Return the path of an error's class, its traceback, and its class with its message, as they may be stored."""
    internals = wiring.find_durable().internals
    redaction = internals.redaction(WORKFLOW, result_id)
    _, message = redaction.clean_error(*values.describe_error(raised), None)
    summary = f"{type(raised).__name__}: {message}"
    trace = redaction.clean_trace(raised, internals.settings.tracebacks, None)
    return [f"{type(raised).__module__}.{type(raised).__qualname__}", trace.text or summary, summary]


def _call(result: Any) -> Any:
    task = result.task
    context = [_base.TaskContext(task_result=result)] if task.takes_context else []
    return task.call(*context, *result.args, **result.kwargs)
