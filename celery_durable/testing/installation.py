"""The parts of production that a harness wires together: a `Durable` without a Celery app, and its sweeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.config import Settings
from celery_durable.model import DueRun, PassResult
from celery_durable.operations.context import OperationContext
from celery_durable.runner.ticks import Ticker
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox, Send
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing.code import Deployed
from celery_durable.testing.processes import Process
from celery_durable.testing.tasks import Messages


def build_durable(
    web: Process,
    settings: Settings,
    code: Deployed,
    messages: Messages,
    *,
    send: Send,
    advance: Callable[..., PassResult],
) -> Durable:
    """Return a Durable over the store of ``web``. Its dispatch messages go into ``messages``."""
    durable = Durable(runtime=web.runtime)
    parts = durable.internals
    parts.settings, parts.store, parts.registry = settings, web.store, code
    parts.outbox = Outbox(web.store, settings, send)
    parts.operations = Operations(
        OperationContext(
            web.store,
            settings,
            code,
            web.runtime,
            messages.extend,
            send_messages=parts.outbox.send_committed,
        )
    )
    parts.ticker = Ticker(web.store, settings, web.runtime, advance)
    return durable


def build_sweeper(durable: Durable, messages: Messages) -> Sweeper:
    """Return the sweeper of a Durable. It finds the captured messages still in their queues."""
    parts = durable.internals

    def publish(due_runs: Sequence[DueRun]) -> PublishReport:
        messages.extend(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def queue_length(queue: str) -> int:
        return sum(due.queue == queue for due in messages)

    return Sweeper(parts.store, parts.settings, parts.runtime, publish, queue_length, outbox=parts.outbox)
