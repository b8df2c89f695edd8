"""The ends of Celery tasks that do steps, committed in the process of the task (LAW 1).

Celery calls a link (`task_done`) or an errback (`task_failed`) there: after the body, before the result is stored and
before a late acknowledgement. They stay on the task, so its retries, replacements and chains have them too. Celery
sends a signal for an end without a callback. The answer is sent as a message if another database waits for it, or if
the database of this process fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

from celery import Celery, signals, states
from celery.app import trace
from celery.exceptions import Retry, SoftTimeLimitExceeded
from kombu import serialization
from kombu.exceptions import ContentDisallowed

from celery_durable.housekeeping import CallQueue
from celery_durable.model import REFERENCE_HEADER, TaskReference
from celery_durable.operations.answers import TaskException
from celery_durable.signals import listen
from celery_durable.tasks.answers import AnswerCommitter, encode_exception
from celery_durable.tasks.pools import get_node_name
from celery_durable.tasks.task_starts import TaskDropped

logger = logging.getLogger("celery_durable.tasks")

T = TypeVar("T")

_REPLACED = "Replaced by new task"  # the text of the Ignore that Celery's Task.replace raises
_SERIALIZER = "json"
_PROCESS_DIED = "the process that ran it died"


class SendAnswer(Protocol):
    """Sends an answer as a message: to `task_done` with a result, to `task_failed` with an error."""

    def __call__(self, what: Any, reference: Any, *, is_error: bool) -> None: ...


class TaskEndHandler:
    """Commits the ends of the tasks of one app, as results or errors of the waiting steps.

    ``raw_reference`` is a `TaskReference` in its JSON form, or whatever a forged message holds.
    """

    def __init__(
        self,
        app: Celery,
        answers: Callable[[], AnswerCommitter],
        background: CallQueue,
        send: SendAnswer,
    ) -> None:
        self._app, self._answers, self._background, self._send = app, answers, background, send
        self._main_loop_pid: int | None = None

    def set_main_loop_pid(self, pid: int | None) -> None:
        """Run no SQL in the process ``pid``: it is a worker's main loop and runs no tasks (LAW 8)."""
        self._main_loop_pid = pid

    # --- what Celery calls ----------------------------------------------------------------------

    def is_superfluous(self, reference: TaskReference, *, may_be_copy: bool) -> bool:
        """Whether a task that is about to start need not run; False if the database cannot be asked."""
        answers = self._answers()
        try:
            is_asked = answers.can_commit_directly(reference)
            return is_asked and answers.operations().is_superfluous(reference, may_be_copy=may_be_copy)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # noqa: BLE001  # no database, tables or settings here; the task may run
            answers.pause_direct_commits()
            logger.warning("Whether a step of %s still waits for a task is not known: %s", reference.ref, exc)
            return False

    def commit_result(self, result: Any, raw_reference: Any) -> bool:
        """Commit a task's result; returns False if the caller has to send the answer as a message.

        The result passes through kombu's JSON, as in a message, and EncodeError is raised, as by sending it.
        """
        reference = TaskReference.read(raw_reference)
        if reference is None or self._app.conf.task_always_eager:
            return False
        content_type, encoding, text = serialization.dumps(result, serializer=_SERIALIZER)
        plain = serialization.loads(text, content_type, encoding, accept={content_type})
        commit = self._make_commit(
            reference, lambda: self._answers().commit_result(plain, raw_reference, is_direct=True)
        )
        return _call_despite_soft_limit(commit, reference)

    def commit_or_send_error(
        self, error: Mapping[str, Any], raw_reference: Any, *, request: Any = None, raised: object = None
    ) -> str:
        """Commit or send a task's error; returns a short text for the log. Only a commit has the traceback.

        Raises nothing if the database fails: before 5.7, Celery would call the errback again (celery/celery#10195).
        """
        reference = TaskReference.read(raw_reference)
        if reference is None:
            return "noop: malformed reference"
        if self._main_loop_pid == os.getpid():
            what = f"The answer of a task of {reference.ref}"
            self._background.add(lambda: self._commit_or_send(error, reference), what=what)
            return "committed in the background"
        exception = None
        if isinstance(raised, BaseException) and raised.__traceback__ is not None:
            exception = TaskException(raised, get_node_name(request), os.getpid())
        return _call_despite_soft_limit(lambda: self._commit_or_send(error, reference, exception), reference)

    def report_lost_task(self, error: Mapping[str, Any], raw_reference: Any) -> str:
        """Report in the background that a task's process died, which is no failure. Returns a log text."""
        reference = TaskReference.read(raw_reference)
        if reference is None:
            return "noop: malformed reference"

        def report() -> None:
            if self._answers().is_awaited_here(reference):
                self._answers().operations().report_lost([(reference, None)], why=_PROCESS_DIED)
            else:  # the application whose database waits for the answer receives the error
                self._send(error, raw_reference, is_error=True)

        self._background.add(report, what=f"A task of {reference.ref} whose process died")
        return "lost"

    def _commit_or_send(
        self, error: Mapping[str, Any], reference: TaskReference, exception: TaskException | None = None
    ) -> str:
        raw_reference = reference.to_json()
        commit = self._make_commit(
            reference,
            lambda: self._answers().commit_error(error, raw_reference, is_direct=True, exception=exception),
        )
        if commit():
            return "committed"
        self._send(error, raw_reference, is_error=True)
        return "sent"

    def _make_commit(self, reference: TaskReference, take: Callable[[], str]) -> Callable[[], bool]:
        def commit() -> bool:
            try:
                answers = self._answers()
                if not answers.can_commit_directly(reference):
                    return False
                take()
            except SoftTimeLimitExceeded:
                raise
            except Exception as exc:  # noqa: BLE001  # no database, tables or settings here; another worker may have them
                self._answers().pause_direct_commits()
                logger.warning("The answer of a task of %s is sent as a message: %s", reference.ref, exc)
                return False
            return True

        return commit

    # --- ends for which Celery calls no callback ------------------------------------------------

    def connect(self) -> None:
        listen(signals.task_postrun, self._handle_postrun)
        listen(signals.task_retry, self._handle_retry)
        listen(signals.task_internal_error, self._handle_internal_error)
        listen(signals.task_revoked, self._handle_revoked)
        listen(signals.task_rejected, self._handle_rejected)

    def _handle_postrun(self, sender: Any, task: Any, state: Any, retval: Any, **_: Any) -> None:
        """Handle Ignore and Reject. If this process is being killed (state None), its parent reports that."""
        if sender.app is not self._app or state not in (states.IGNORED, states.REJECTED):
            return
        raw_reference = task.request.get(REFERENCE_HEADER)
        if raw_reference is None or isinstance(retval, TaskDropped):
            return
        if _is_requeued(task, state, retval):
            self._record_sent_again(raw_reference, 0.0)
        elif str(retval) == _REPLACED:
            self._record_sent_again(raw_reference, None)
        else:
            self.commit_or_send_error(encode_exception(retval), raw_reference)

    def _handle_retry(self, sender: Any, request: Any, reason: Any, **_: Any) -> None:
        if sender.app is self._app and (raw_reference := request.get(REFERENCE_HEADER)) is not None:
            when = getattr(reason, "when", None)  # of `Retry`; a task may raise another exception of this kind
            self._record_sent_again(raw_reference, 0.0 if when is None else when)

    def _record_sent_again(self, raw_reference: Any, when: datetime | float | None) -> None:
        """Record when the task sends itself again, so that no search takes it for lost; None: others do its work."""
        reference = TaskReference.read(raw_reference)
        if reference is None:
            return
        try:
            if self._answers().is_awaited_here(reference):
                self._answers().operations().record_sent_again(reference, when)
        except Exception as exc:  # noqa: BLE001  # at worst the search sends the task once more
            logger.warning(
                "The worker cannot record that a task of %s was retried, requeued or replaced: %s", reference.ref, exc
            )

    def _handle_internal_error(self, sender: Any, request: Any, exception: Any, **_: Any) -> None:
        """Handle an error of Celery itself: it calls no errback if the result backend cannot store a failure."""
        if sender.app is not self._app or (raw_reference := request.get(REFERENCE_HEADER)) is None:
            return
        error = _find_task_exception(exception)
        if not isinstance(error, Retry):  # Celery sends a retry's message before it stores the state
            self.commit_or_send_error(encode_exception(error), raw_reference, request=request, raised=error)

    def _handle_revoked(self, sender: Any, request: Any, terminated: bool, expired: bool, **_: Any) -> None:  # noqa: FBT001
        if sender.app is not self._app or (raw_reference := request.get(REFERENCE_HEADER)) is None:
            return
        why = "terminated" if terminated else "not run: it had expired" if expired else "revoked"
        text = f"Celery task {request.task!r} ({request.id}) was {why}"
        self._commit_or_send_in_background({"name": "TaskRevoked", "message": text}, raw_reference)

    def _handle_rejected(self, sender: Any, message: Any, exc: Any, **_: Any) -> None:
        """Handle a message that the worker has discarded because ``accept_content`` forbids its content type."""
        raw_reference = (message.headers or {}).get(REFERENCE_HEADER)
        if sender.app is self._app and raw_reference is not None and isinstance(exc, ContentDisallowed):
            self._commit_or_send_in_background(
                {"name": "ContentDisallowed", "message": str(exc), "final": True}, raw_reference
            )

    def _commit_or_send_in_background(self, error: Mapping[str, Any], raw_reference: Any) -> None:
        """Commit or send an error in the background: Celery's main loop calls this on every pool."""
        reference = TaskReference.read(raw_reference)
        if reference is not None:
            what = f"The answer for a task of {reference.ref}, which does not run,"
            self._background.add(lambda: self._commit_or_send(error, reference), what=what)


def _is_requeued(task: Any, state: Any, retval: Any) -> bool:
    """Whether a task that ended has returned its message to the queue (``Reject(requeue=True)``).

    False if the message was acknowledged before the task ran: then Celery rejects nothing, and the message is gone.
    """
    return bool(state == states.REJECTED and getattr(retval, "requeue", False) and task.acks_late)


def _find_task_exception(exception: BaseException) -> BaseException:
    """The task's own exception before that of the result backend: the oldest that reached the tracer."""
    found, each = exception, exception.__context__
    while each is not None:
        if each.__traceback__ is not None and each.__traceback__.tb_frame.f_code.co_filename == trace.__file__:
            found = each
        each = each.__context__
    return found


def _call_despite_soft_limit(commit: Callable[[], T], reference: TaskReference) -> T:
    """Call ``commit``, and again if the soft time limit fires meanwhile, which it does once; returns its result.

    The task is over and its answer is known, so the limit must not become a second, different answer.
    """
    try:
        return commit()
    except SoftTimeLimitExceeded:
        logger.warning("The soft time limit of a task of %s fired after its end and is ignored", reference.ref)
        return commit()
