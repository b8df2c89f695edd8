"""The starts of Celery tasks that do steps: a worker drops a superfluous task before it runs the body.

It drops a task whose run was terminated or replaced, or whose step a cancel has ended, and a copy of a task that has
been answered. Redis restores a message after its visibility timeout, and a dispatcher may send a task again that was
not lost after all.

Celery calls `Task.before_start` in the process of the task, on every pool, and takes an Ignore from it. A signal's
receiver cannot stop a task, and a revoke reaches only workers that run at that time.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Protocol

from celery import Celery
from celery.exceptions import Ignore

from celery_durable.model import REFERENCE_HEADER, TaskReference

logger = logging.getLogger("celery_durable.tasks")

_GUARD = "durable_guard"


class TaskDropped(Ignore):
    """Ends a task whose result no step will ever take."""


class IsSuperfluous(Protocol):
    """Whether no step will ever take the result of a task. ``may_be_copy``: its message may have come before."""

    def __call__(self, reference: TaskReference, *, may_be_copy: bool) -> bool: ...


def guard_starts(app: Celery, is_superfluous: IsSuperfluous) -> None:
    """Let the tasks of an app ask ``is_superfluous`` before they run a step. Called when a worker starts."""
    for task_class in {type(task) for task in app.tasks.values()}:
        if getattr(task_class.before_start, _GUARD, None) is not app:  # its base class may be a task too
            _guard(task_class, app, is_superfluous)


def _guard(task_class: Any, app: Celery, is_superfluous: IsSuperfluous) -> None:
    own = inspect.getattr_static(task_class, "before_start")

    @functools.wraps(task_class.before_start)
    def before_start(task: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        request = task.request
        reference = TaskReference.read(request.get(REFERENCE_HEADER))
        if reference is not None and task.app is app:
            may_be_copy = bool(reference.delivery or (request.delivery_info or {}).get("redelivered"))
            if is_superfluous(reference, may_be_copy=may_be_copy):
                logger.info("Task %s (%s) is dropped: no step of %s waits for it", task.name, task_id, reference.ref)
                raise TaskDropped
        return own.__get__(task, type(task))(task_id, args, kwargs)

    setattr(before_start, _GUARD, app)
    task_class.before_start = before_start
