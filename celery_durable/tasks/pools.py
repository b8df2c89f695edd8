"""The pools of Celery's workers, and which of them run workflows.

On the others leases are not kept: cooperative threads starve the thread that renews them, and a pool of somebody else's
may do anything. A worker on such a pool does the application's tasks as ever; it does not take our queue (LAW 8).
"""

from __future__ import annotations

import logging
from typing import Any

from celery.exceptions import ImproperlyConfigured

from celery_durable.model import SUPPORTED_POOLS
from celery_durable.tasks.queues import is_own_queue

logger = logging.getLogger("celery_durable.tasks")

_CELERYS = "celery.concurrency."
REMEDY = "Run workflows on a worker with -P prefork, threads or solo"


def pool_name(pool: Any) -> str:
    """A pool class's name as ``-P`` takes it, or its full name where it is none of Celery's."""
    module, name = getattr(pool, "__module__", ""), getattr(pool, "__qualname__", str(pool))
    if not module.startswith(_CELERYS):
        return f"{module}.{name}"
    short: str = module.removeprefix(_CELERYS)
    return "threads" if short == "thread" else short


def runs_workflows(pool: str) -> bool:
    """Whether leases, timers and commits are tested to hold on the pool of this name."""
    return pool in SUPPORTED_POOLS


def leave_queue(app: Any, queue: str, pool: str, *, named: bool) -> None:
    """Have this worker, whose pool runs no workflows, not consume their queue.

    A queue that the application's own tasks go to by default stays: what comes there for us is left to other workers.

    Raises:
        ImproperlyConfigured: The worker was told to consume it (``named``, by ``-Q``).
    """
    queues = app.amqp.queues
    if queue not in queues.consume_from or not is_own_queue(app, queue):
        return
    if named:
        raise ImproperlyConfigured(
            f"This worker was told to consume queue {queue!r}, but celery_durable does not run workflows on the "
            f"{pool!r} pool, where leases are not kept. {REMEDY}, or leave {queue!r} out of -Q."
        )
    queues.deselect([queue])
    logger.info("This worker's pool, %r, runs no workflows: it does not consume queue %r. %s.", pool, queue, REMEDY)
