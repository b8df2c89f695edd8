"""The workflow queue, added when Celery builds the application's table of queues from the configuration.

The configuration does not change (LAW 8): a process may set ``task_queues`` at any time before the first use.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from celery.utils.imports import symbol_by_name
from kombu import Exchange, Queue

from celery_durable.config import read_settings
from celery_durable.errors import DurableError


class _WithDurableQueue:
    app: Celery

    def Queues(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  # Celery's name
        """Celery's queues with the workflow queue; ``celery worker`` consumes it unless ``-Q`` or ``-X`` exclude it."""
        queues = super().Queues(*args, **kwargs)  # type: ignore[misc]
        _add_queue(self.app, queues)
        return queues


class DurableAMQP(_WithDurableQueue, AMQP):
    """Celery's own AMQP with the workflow queue; a module-level class, since a spawned process imports it by name."""


def install_queue(app: Celery) -> None:
    """Add the workflow queue to the app's table of queues, now or when Celery builds the table."""
    amqp_class: Any = app.amqp_cls
    if amqp_class == Celery.amqp_cls:
        app.amqp_cls = f"{__name__}:{DurableAMQP.__name__}"
    else:
        app_class = symbol_by_name(amqp_class)
        vars(app)["amqp_cls"] = type(app_class.__name__, (_WithDurableQueue, app_class), {})
    amqp = vars(app).get("amqp")
    if amqp is not None:  # the app has published a message before `Durable` was attached to it
        amqp.__class__ = type(type(amqp).__name__, (_WithDurableQueue, type(amqp)), {})
        if "queues" in vars(amqp):
            _add_queue(app, amqp.queues)


def ensure_queue(app: Celery, name: str) -> None:
    """Add a missing workflow queue before a publish: without ``task_create_missing_queues`` the app would refuse it."""
    queues: Any = app.amqp.queues
    if name not in queues:
        queues.add(_make_queue(app, name))


def is_dedicated_queue(app: Celery, name: str) -> bool:
    """Whether only workflows use this queue; False if it is the application's default queue."""
    conf: Any = app.conf
    return bool(name != conf.task_default_queue)


def _add_queue(app: Celery, queues: Any) -> None:
    try:
        name = read_settings(app.conf).queue
    except DurableError:
        return  # raised at the first use of a workflow, and not while the application publishes its own tasks
    if name in queues or name in getattr(queues, "aliases", ()):
        return  # the application declares the queue itself
    queues.select_add(_make_queue(app, name))


def _make_queue(app: Celery, name: str) -> Queue:
    conf: Any = app.conf
    arguments = {"x-queue-type": "quorum"} if conf.get("task_default_queue_type") == "quorum" else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=arguments)
