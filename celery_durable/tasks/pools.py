"""The pools of Celery's workers, and which of them run workflows.

On the others leases are not renewed reliably: cooperative threads starve the thread that renews them. A worker on such
a pool runs the application's tasks, but does not consume the workflow queue (LAW 8).
"""

from __future__ import annotations

import logging
import socket
from importlib import import_module
from typing import Any

from celery.exceptions import ImproperlyConfigured

from celery_durable.model import SUPPORTED_POOLS
from celery_durable.tasks.queues import is_dedicated_queue

logger = logging.getLogger("celery_durable.tasks")

_CELERY_PREFIX = "celery.concurrency."
REMEDY = "Run workflows on a worker with -P prefork, threads or solo"


def pool_name(pool: Any) -> str:
    """A pool class's name as ``-P`` takes it, or its full name if it is not one of Celery's pools."""
    module, name = getattr(pool, "__module__", ""), getattr(pool, "__qualname__", str(pool))
    if not module.startswith(_CELERY_PREFIX):
        return f"{module}.{name}"
    short: str = module.removeprefix(_CELERY_PREFIX)
    return "threads" if short == "thread" else short


def runs_workflows(pool: str) -> bool:
    """Whether leases, timers and commits are tested to hold on the pool of this name."""
    return pool in SUPPORTED_POOLS


def stop_consuming(app: Any, queue: str, pool: str, *, is_named_by_user: bool) -> None:
    """Stop this worker, whose pool runs no workflows, from consuming a queue that only workflows use."""
    queues = app.amqp.queues
    if queue not in queues.consume_from or not is_dedicated_queue(app, queue):
        return
    if is_named_by_user:
        raise ImproperlyConfigured(
            f"This worker was told to consume queue {queue!r}, but celery_durable does not run workflows on the "
            f"{pool!r} pool, where leases are not kept. {REMEDY}, or leave {queue!r} out of -Q."
        )
    queues.deselect([queue])
    logger.info("This worker's pool, %r, runs no workflows: it does not consume queue %r. %s.", pool, queue, REMEDY)


def import_for_passes() -> None:
    """Import what only passes need. A worker does it before its pool forks; clients and commands never pay for it."""
    for module in ("celery_durable.all_kinds", "celery_durable.runner", "sqlalchemy.orm"):
        import_module(module)


def get_node_name(request: Any) -> str:
    """Return the node of a task's request: this machine, if no worker runs it and Celery sets no hostname."""
    return str(getattr(request, "hostname", None) or socket.gethostname())
