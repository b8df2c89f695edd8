"""The queue of an application's workflows, beside the queues that the application has.

It is added where Celery makes its table of queues from the configuration, and the configuration stays as it is (LAW 8):
a process may set ``task_queues`` or ``task_default_queue`` at any time up to its first use.
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
    """What an application's AMQP gets in addition."""

    app: Celery

    def Queues(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  # Celery's name
        """As Celery's, with our queue, which a plain ``celery worker`` consumes; ``-Q`` and ``-X`` still choose."""
        made = super().Queues(*args, **kwargs)  # type: ignore[misc]
        _consume(self.app, made)
        return made


class DurableAMQP(_WithDurableQueue, AMQP):
    """Celery's own AMQP with our queue; a class with a name, since a process that is spawned imports it."""


def install_queue(app: Celery) -> None:
    """Have the app know our queue, now or when it first asks for its queues."""
    base: Any = app.amqp_cls
    if base == Celery.amqp_cls:
        app.amqp_cls = f"{__name__}:{DurableAMQP.__name__}"
    else:
        own = symbol_by_name(base)
        vars(app)["amqp_cls"] = type(own.__name__, (_WithDurableQueue, own), {})
    made = vars(app).get("amqp")
    if made is not None:  # the app has published before it got its Durable
        made.__class__ = type(type(made).__name__, (_WithDurableQueue, type(made)), {})
        if "queues" in vars(made):
            _consume(app, made.queues)


def ensure_queue(app: Celery, name: str) -> None:
    """Declare our queue to this process, unless it knows it; for whoever publishes, at each use.

    Without it ``task_create_missing_queues=False`` refuses the queue of an app whose table of queues was replaced.
    """
    queues: Any = app.amqp.queues
    if name not in queues:
        queues.add(_queue(app, name))


def is_own_queue(app: Celery, name: str) -> bool:
    """Whether only workflows use this queue; False where the application's tasks go there by default."""
    conf: Any = app.conf
    return bool(name != conf.task_default_queue)


def _consume(app: Celery, queues: Any) -> None:
    try:
        name = read_settings(app.conf).queue
    except DurableError:
        return  # said when the first of our parts is used, and not while the application publishes its own tasks
    if name in queues or name in getattr(queues, "aliases", ()):
        return  # the application declares it itself
    queues.select_add(_queue(app, name))


def _queue(app: Celery, name: str) -> Queue:
    conf: Any = app.conf
    kind = {"x-queue-type": "quorum"} if conf.get("task_default_queue_type") == "quorum" else None
    return Queue(name, Exchange(name), routing_key=name, queue_arguments=kind)
