"""The internal Celery tasks `advance`, `sweep`, `deliver` and those for answers, and their registration with an app."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from billiard.exceptions import WorkerLostError
from celery import Celery, states
from celery.exceptions import Reject
from celery.result import EagerResult

from celery_durable import values
from celery_durable.config import Settings
from celery_durable.errors import ConfigInvalid, NameInvalid, StoreUnavailable, WorkflowFailed
from celery_durable.housekeeping import CallQueue, Job
from celery_durable.model import RunRef
from celery_durable.store.engine import Store
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.engine.time_limits import LOOP
from celery_durable.store.runs import sweeps
from celery_durable.tasks.answers import MALFORMED, AnswerCommitter, parse_errback_arguments
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.heartbeats import SweepTaskHeartbeat
from celery_durable.tasks.options import INTERNAL_OPTIONS, send_past_routes
from celery_durable.tasks.outbox import OutboundDeliverer
from celery_durable.tasks.pools import get_node_name
from celery_durable.tasks.task_ends import TaskEndHandler
from celery_durable.upstream import until

if TYPE_CHECKING:
    from celery_durable.runner import Runner

logger = logging.getLogger("celery_durable.tasks")

ADVANCE = "celery_durable.advance"
SWEEP = "celery_durable.sweep"
DELIVER = "celery_durable.deliver"
TASK_DONE = "celery_durable.task_done"
TASK_FAILED = "celery_durable.task_failed"
_SWEEP_SECONDS = 5
_MAX_RUN_NUMBER = 2**31 - 1
_DONE_ARGUMENT_COUNT = 2  # the result, and the `TaskReference` of the waiting step
_JSON = frozenset({"json", "application/json"})


# An answer in a message is not in the database yet: the broker keeps the message until the answer is committed.
_ANSWERING = INTERNAL_OPTIONS | {"acks_late": True, "reject_on_worker_lost": True}


class TaskDependencies(Protocol):
    """The objects that the tasks use, created when the first task needs them."""

    @property
    def settings(self) -> Settings: ...
    @property
    def store(self) -> Store: ...
    @property
    def unsupported_pool(self) -> str | None: ...
    @property
    def runner(self) -> Runner: ...
    @property
    def sweeper(self) -> Sweeper: ...
    @property
    def upkeep(self) -> Sequence[Job]: ...
    @property
    def is_sweeping(self) -> bool: ...
    @property
    def sweep_task_heartbeat(self) -> SweepTaskHeartbeat: ...
    @property
    def deliveries(self) -> OutboundDeliverer: ...
    @property
    def answers(self) -> AnswerCommitter: ...
    @property
    def task_end_handler(self) -> TaskEndHandler: ...


@contextmanager
def _report_outage(store: Store, consequence: str) -> Iterator[None]:
    """Log an outage of the database in one line, and raise StoreUnavailable: Celery would log a traceback each time."""
    try:
        yield
    except Exception as exc:
        if not store.is_transient(exc):
            raise
        reason = describe_fault(exc)
        logger.warning("%s. The database: %s", consequence, reason)
        if isinstance(exc, StoreUnavailable):
            raise
        raise StoreUnavailable(reason) from exc


def install_tasks(app: Celery, dependencies: TaskDependencies) -> None:
    """Register the internal tasks with one app. Each option is explicit that settings could otherwise set."""

    # ``throws``: Celery logs an expected exception in one line, and error trackers leave it out.
    @app.task(name=ADVANCE, bind=True, throws=(WorkflowFailed, StoreUnavailable), **INTERNAL_OPTIONS)
    def advance(self: Any, workflow: Any, instance_id: Any, run_number: Any) -> str:
        """Advance one run of a durable workflow; a lost or repeated message does no harm (LAW 1)."""
        ref = _parse_run(workflow, instance_id, run_number)
        if ref is None:
            return MALFORMED
        consequence = f"A pass of {ref} ended early, and a sweep will find its run again"
        with _report_outage(dependencies.store, consequence):
            if dependencies.unsupported_pool is not None and not self.request.is_eager:
                return dependencies.runner.postpone_for_other_pools(ref, pool=dependencies.unsupported_pool)
            result = dependencies.runner.advance(ref, task_id=str(self.request.id), node=get_node_name(self.request))
        if (failure := result.failure) is not None and _fails_task(self, dependencies):
            error = (failure.error_name, failure.error_message)
            raise WorkflowFailed(ref.workflow, ref.instance_id, failure.status, *error)
        return result.summary

    def send_unless_superfluous(task: Any, *args: Any, **options: Any) -> Any:
        """An ``apply_async`` that sends nothing from a beat whose dispatcher sweeps, for schedulers that do not ask."""
        return None if task.is_superfluous() else send_past_routes(task, *args, **options)

    options = INTERNAL_OPTIONS | {
        "is_superfluous": staticmethod(lambda: dependencies.is_sweeping),
        "apply_async": send_unless_superfluous,
        "send_events": False,  # monitors would show little else
    }

    @app.task(name=SWEEP, bind=True, expires=2 * _SWEEP_SECONDS, throws=(StoreUnavailable,), **options)
    def sweep(self: Any) -> str:
        """Publish due work; beat sends this task every few seconds while its dispatcher does not sweep."""
        with _report_outage(dependencies.store, "A sweep ended early, and the next one will repeat it"):
            published = (
                dependencies.sweeper.sweep_as_only_sweeper()
                if dependencies.sweep_task_heartbeat.is_only_sweeper()
                else dependencies.sweeper.sweep()
            )
            for job in dependencies.upkeep:
                job.run()
        dependencies.sweep_task_heartbeat.write_if_due(get_node_name(self.request))
        return f"{published} published"

    @app.task(name=DELIVER, throws=(StoreUnavailable,), **INTERNAL_OPTIONS)
    def deliver(id_: Any) -> str:
        """Deliver an outbound event to its handler; a repeated message does no harm (LAW 1)."""
        if not _is_possible_id(id_):
            return MALFORMED
        consequence = f"The delivery of event {id_} ended early, and a sweep will repeat it"
        with _report_outage(dependencies.store, consequence):
            return dependencies.deliveries.deliver(id_)

    _install_answers(app, dependencies)


def _fails_task(task: Any, dependencies: TaskDependencies) -> bool:
    """Whether the task of a pass in which the run failed ends as failed. An eager one would raise to its caller."""
    return dependencies.settings.failed_runs_fail_tasks and not task.request.is_eager


def _install_answers(app: Celery, dependencies: TaskDependencies) -> None:
    def answer_or_send(task: Any, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        """The link's ``apply_async``, which Celery calls where a task has returned: commit the answer, or send it."""
        if args and len(args) == _DONE_ARGUMENT_COUNT and dependencies.task_end_handler.commit_result(*args):
            return EagerResult(task_id or "", None, states.SUCCESS, name=task.name)  # a group of links needs a result
        return send_past_routes(task, args, kwargs, task_id=task_id, **options)

    @app.task(name=TASK_DONE, bind=True, **{**_ANSWERING, "apply_async": answer_or_send})
    def task_done(self: Any, result: Any, reference: Any = None) -> str:
        """Deliver the result of a task to the step that sent the task."""
        return _commit_or_resend(
            self,
            dependencies.answers,
            (result, reference),
            lambda committer: committer.commit_result(result, reference),
        )

    @app.task(name=TASK_FAILED, **_ANSWERING)
    def task_failed(source: Any, *rest: Any) -> str:
        """Deliver the error of a task to its step: called in the process of the failed task, or by a message."""
        error, reference = (source, *rest) if isinstance(source, Mapping) else parse_errback_arguments(source, rest)
        if isinstance(source, (str, Mapping)):
            task = app.tasks[TASK_FAILED]
            return _commit_or_resend(
                task,
                dependencies.answers,
                (error, reference),
                lambda committer: committer.commit_error(error, reference),
            )
        if rest and isinstance(rest[0], (WorkerLostError, SystemExit)):
            return dependencies.task_end_handler.report_lost_task(error, reference)
        raised = rest[0] if rest else None
        return dependencies.task_end_handler.commit_or_send_error(error, reference, request=source, raised=raised)


def _commit_or_resend(
    task: Any, answers: AnswerCommitter, message: tuple[Any, Any], commit: Callable[[AnswerCommitter], str]
) -> str:
    """Commit an answer (``message``: the arguments of ``task``); if that fails, send it again after a second.

    The message is returned to the queue only if it cannot be sent either: a broker may count the returns of a message
    and drop it.
    """
    try:
        return commit(answers)
    except Exception as exc:
        if task.request.is_eager:
            raise
        logger.warning(
            "This worker cannot commit an answer and sends its message to the broker again: %s", describe_fault(exc)
        )
        answers.pause_before_resend()
        try:
            _send_answer(task, answers, message)
        except Exception:  # noqa: BLE001  # each transport raises errors of its own
            raise Reject(exc, requeue=True) from exc
        return "sent again"


def _send_answer(task: Any, answers: AnswerCommitter, message: tuple[Any, Any]) -> None:
    send_past_routes(task, message, queue=answers.find_queue(message[1]), ignore_result=True)


def make_task_end_handler(app: Celery, dependencies: TaskDependencies, background: CallQueue) -> TaskEndHandler:
    """Create the object that commits the completions of this app's tasks."""

    def send(what: Any, reference: Any, *, is_error: bool) -> None:
        _send_answer(app.tasks[TASK_FAILED if is_error else TASK_DONE], dependencies.answers, (what, reference))

    return TaskEndHandler(app, lambda: dependencies.answers, background, send)


def check_accept_content(conf: Any) -> None:
    """Raise ConfigInvalid if workers would discard internal messages; eager tasks send none and need no check."""
    accepted = conf.accept_content  # None: all types that kombu has not disabled, and it never disables JSON
    if accepted is not None and not _JSON & set(accepted) and not conf.task_always_eager:
        raise ConfigInvalid("accept_content", accepted, "add 'json', in which the messages of workflows are written")


def add_beat_entry(schedule: Any, queue: str) -> None:
    """Add `sweep` to beat's schedule."""
    schedule.setdefault(SWEEP, _beat_entry(queue))


def ensure_beat_entry(scheduler: Any, queue: str) -> None:
    """Add `sweep` when beat starts: the application may have replaced ``beat_schedule`` after `add_beat_entry`."""
    if SWEEP not in scheduler.schedule:
        scheduler.add(name=SWEEP, **_beat_entry(queue))


@until("celery", "5.7", "celery#7649")
def skip_superfluous_sweeps(scheduler: Any) -> None:
    """Have a scheduler of beat pass over the entry of `sweep` while the dispatcher of this process sweeps.

    If its schedule said that it is not due, Celery would wait for its first entry, and keep the others from their turn.
    """
    task, apply_entry = scheduler.app.tasks[SWEEP], scheduler.apply_entry

    def apply_needed_entry(entry: Any, *args: Any, **kwargs: Any) -> Any:
        if entry.task == SWEEP and task.is_superfluous():
            return None
        return apply_entry(entry, *args, **kwargs)

    scheduler.apply_entry = apply_needed_entry


def _parse_run(workflow: Any, instance_id: Any, run_number: Any) -> RunRef | None:
    """The run that a message names; None if no run can have that name, for which databases would raise."""
    try:
        values.check_identifier("Workflow name", workflow, values.MAX_ID_LENGTH)
        values.check_instance_id(instance_id, values.MAX_ID_LENGTH)
    except NameInvalid:
        return None
    is_number = type(run_number) is int and 1 <= run_number <= _MAX_RUN_NUMBER
    return RunRef(workflow, instance_id, run_number) if is_number else None


def _is_possible_id(id_: Any) -> TypeGuard[str]:
    return isinstance(id_, str) and len(id_) <= values.MAX_ID_LENGTH and values.sanitize_text(id_, len(id_)) == id_


def _beat_entry(queue: str) -> dict[str, Any]:
    # Whole seconds: some schedulers store no fractions.
    return {"task": SWEEP, "schedule": timedelta(seconds=_SWEEP_SECONDS), "options": {"queue": queue}}


def release_dead_claim(
    store: Store, publish: Callable[[list[Any]], object], task_id: str, args: Any, *, grace: timedelta, died: str
) -> None:
    """Release and publish the run of a pool process that died in `advance`, before its lease has ended."""
    workflow, instance_id, run_number = args
    ref = RunRef(workflow, instance_id, run_number)
    due = store.transact(
        lambda tx: sweeps.release_dead_claim(tx, ref, task_id=task_id, grace=grace, died=died), timeouts=LOOP
    )
    if due is not None:
        logger.warning("A pool process died while it advanced %s; another worker can claim the run now", ref)
        publish([due])
