"""The options of internal tasks, explicit wherever global settings or the app's task class could set them otherwise."""

from __future__ import annotations

from typing import Any

from celery.app.routes import Router
from celery.app.task import Task

_ONE_DAY = 86_400


def send_past_routes(task: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """An ``apply_async`` for internal tasks that ignores the application's routes and its own task class.

    An explicit queue wins over a route's, but a catch-all route also sets an exchange, a routing key or a priority.
    """
    app = task.app
    if not app.conf.task_always_eager:
        options |= {"router": Router(queues=app.amqp.queues, app=app), "priority": 0}
    return Task.apply_async(task, args, kwargs, **options)


# Early acknowledgement (the lease recovers a run, not the broker), no retries, no result, and time limits longer than
# any pass. No value is None: Celery replaces None with the global setting.
INTERNAL_OPTIONS: dict[str, Any] = {
    "shared": False,
    "ignore_result": True,
    "store_errors_even_if_ignored": False,
    "store_eager_result": False,
    "acks_late": False,
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "autoretry_for": (),
    "max_retries": 0,
    "serializer": "json",
    "rate_limit": 0,
    "time_limit": _ONE_DAY,
    "soft_time_limit": _ONE_DAY,
    "track_started": False,
    "annotate": classmethod(lambda _: None),  # Celery calls this to apply task_annotations
    "apply_async": send_past_routes,
}
