"""Celery's side: the tasks `advance`, `sweep`, `deliver` and of answers, and how an app is made to carry them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from celery import Celery
from celery.exceptions import Reject
from kombu import Exchange, Queue

from celery_durable.model import Ref
from celery_durable.runner import Runner
from celery_durable.store import sweeps
from celery_durable.store.engine import Store
from celery_durable.tasks.answers import MALFORMED, Answers, error_of, revoked
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Deliveries
from celery_durable.tasks.pulse import SweepTaskHeart

logger = logging.getLogger("celery_durable.tasks")

ADVANCE = "celery_durable.advance"
SWEEP = "celery_durable.sweep"
DELIVER = "celery_durable.deliver"
TASK_DONE = "celery_durable.task_done"
TASK_FAILED = "celery_durable.task_failed"
_SWEEP_SECONDS = 5
_ONE_DAY = 86_400

# An early acknowledgement (the lease recovers, not the broker), no retries, no result, time limits far beyond
# any pass. Never None: that is where Celery puts the global setting.
_OPTIONS: dict[str, Any] = {
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
    "annotate": classmethod(lambda _: None),  # what Celery calls to apply task_annotations
}

# An answer is in no database yet: its message is kept until it is.
_ANSWERING = _OPTIONS | {"acks_late": True, "reject_on_worker_lost": True}


class Parts(Protocol):
    """What the tasks work with, made when the first of them runs."""

    @property
    def runner(self) -> Runner: ...
    @property
    def sweeper(self) -> Sweeper: ...
    @property
    def sweep_heart(self) -> SweepTaskHeart: ...
    @property
    def deliveries(self) -> Deliveries: ...
    @property
    def answers(self) -> Answers: ...


def install_tasks(app: Celery, parts: Parts) -> None:
    """Register our tasks with one app (shared=False: not with every app of the process).

    What global settings, annotations for ``*`` or the app's own task class would otherwise fill in is explicit.
    """

    @app.task(name=ADVANCE, bind=True, **_OPTIONS)
    def advance(self: Any, workflow: Any, instance_id: Any, run_number: Any) -> str:
        """Advance one run of a durable workflow; the message is only a hint (LAW 1)."""
        if not (isinstance(workflow, str) and isinstance(instance_id, str) and isinstance(run_number, int)):
            return MALFORMED
        ref = Ref(workflow, instance_id, run_number)
        return parts.runner.advance(ref, claimed_by=claimant(self.request.id, self.request.hostname))

    @app.task(name=SWEEP, bind=True, expires=2 * _SWEEP_SECONDS, **_OPTIONS)
    def sweep(self: Any) -> str:
        """Publish due work: the fallback for beats that host no dispatcher thread."""
        published = parts.sweeper.sweep()
        parts.sweeper.tidy()
        parts.sweep_heart.beat(str(self.request.hostname))
        return f"{published} published"

    @app.task(name=DELIVER, **_OPTIONS)
    def deliver(id_: Any) -> str:
        """Hand an outbound event to its handler; the message is only a hint."""
        return parts.deliveries.deliver(id_) if isinstance(id_, str) else MALFORMED

    @app.task(name=TASK_DONE, bind=True, **_ANSWERING)
    def task_done(self: Any, result: Any, *asked: Any) -> str:
        """Hand the result of a task to the step that had it sent."""
        return _kept(self, parts.answers, (result, *asked), lambda taking: taking.done(result, asked))

    @app.task(name=TASK_FAILED, **_ANSWERING)
    def task_failed(source: Any, *rest: Any) -> str:
        """Hand the error of a task to the step that had it sent.

        Called by Celery where the task failed, with its request: then it sends itself as a message, with the error.
        """
        task = app.tasks[TASK_FAILED]
        error, asked = (source, rest) if isinstance(source, Mapping) else error_of(source, rest)
        if isinstance(source, (str, Mapping)):
            return _kept(task, parts.answers, (error, *asked), lambda taking: taking.failed(error, asked))
        _send(task, parts.answers, (error, *asked))
        return "sent"


def _kept(task: Any, answers: Answers, message: tuple[Any, ...], take: Callable[[Answers], str]) -> str:
    """Take an answer; while that cannot be done its message is sent anew.

    It does not just go back: a broker may count how often a message does, and drop it then.
    """
    try:
        return take(answers)
    except Exception as exc:
        if task.request.is_eager:
            raise
        logger.warning("An answer could not be taken, its message goes back to the broker: %s", exc)
        answers.rest()
        try:
            _send(task, answers, message)
        except Exception:  # noqa: BLE001  # each transport has its own errors
            raise Reject(exc, requeue=True) from exc
        return "sent anew"


def _send(task: Any, answers: Answers, message: tuple[Any, ...]) -> None:
    task.apply_async(message, queue=answers.queue(message[1:]), ignore_result=True)


def answer_for_revoked(app: Celery, answers: Callable[[], Answers], request: Any, *, why: str) -> None:
    """A worker drops a task: tell the step that had it sent, if one did."""
    for error, asked in revoked(request, errback=TASK_FAILED, why=why):
        _send(app.tasks[TASK_FAILED], answers(), (error, *asked))


def claimant(task_id: str | None, node: str | None) -> str:
    """Who holds a claim: the Celery task, by which its death is told, and its node, for people."""
    return f"{task_id} {node}"[:500]


def add_queue(app: Celery, name: str) -> None:
    """Have a plain ``celery worker`` consume our queue beside its own; ``-Q`` still chooses."""
    conf: Any = app.conf
    kind = {"x-queue-type": "quorum"} if conf.get("task_default_queue_type") == "quorum" else None
    queues = conf.task_queues
    if not queues:
        # What Celery would have made of no task_queues: the default queue, declared as it would declare it.
        default = conf.task_default_queue
        exchange = Exchange(conf.task_default_exchange or default, conf.task_default_exchange_type)
        routing_key = conf.task_default_routing_key or default
        queues = [Queue(default, exchange, routing_key=routing_key, queue_arguments=kind)]
    if isinstance(queues, dict):
        ours = {"exchange": name, "routing_key": name, "queue_arguments": kind}
        conf.task_queues = {name: ours, **queues}
    elif name not in {queue.name for queue in queues}:
        conf.task_queues = [*queues, Queue(name, Exchange(name), routing_key=name, queue_arguments=kind)]
    if "amqp" in vars(app):
        vars(app.amqp).pop("queues", None)  # made of task_queues when the app first published


def add_beat_entry(schedule: Any, queue: str) -> None:
    """Have beat send `sweep`."""
    schedule.setdefault(SWEEP, _beat_entry(queue))


def ensure_beat_entry(scheduler: Any, queue: str) -> None:
    """As `add_beat_entry`, in a beat that starts: an application may have assigned ``beat_schedule`` anew since."""
    if SWEEP not in scheduler.schedule:
        scheduler.add(name=SWEEP, **_beat_entry(queue))


def _beat_entry(queue: str) -> dict[str, Any]:
    # Whole seconds: some schedulers keep nothing finer.
    return {"task": SWEEP, "schedule": timedelta(seconds=_SWEEP_SECONDS), "options": {"queue": queue}}


def release_dead_claim(
    store: Store, publish: Callable[[list[Any]], object], task_id: str, args: Any, *, grace: timedelta
) -> None:
    """A pool child died in `advance`: hand its run on at once instead of waiting for the lease to end."""
    workflow, instance_id, run_number = args
    ref = Ref(workflow, instance_id, run_number)
    due = store.transact(lambda tx: sweeps.release_dead(tx, ref, task_id=task_id, grace=grace))
    if due is not None:
        logger.warning("A worker process died while it advanced %s; the run is handed on", ref)
        publish([due])
