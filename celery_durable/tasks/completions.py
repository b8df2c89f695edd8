"""Ends: how a Celery task that does a step ended in this process, committed to the database there and then (LAW 1).

Nothing is stripped from the tasks: a retry, a replacement and a chain carry their callbacks on. Celery calls our link
and our errback in the process of the task, after its body and before its result is stored or its message acknowledged
late, and here these commit. Ends that call neither have a signal each. Where another database waits for the answer, or
ours does not take it, it goes as a message, as from a worker that does not know us.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from celery import Celery, signals, states
from celery.app import trace
from celery.exceptions import Retry, SoftTimeLimitExceeded
from kombu import serialization
from kombu.exceptions import ContentDisallowed

from celery_durable.model import TaskReference
from celery_durable.signals import listen
from celery_durable.tasks.answers import Answers, error_of_exception
from celery_durable.tasks.background_queue import BackgroundQueue
from celery_durable.tasks.lost.held import HEADER, is_requeued

logger = logging.getLogger("celery_durable.tasks")

T = TypeVar("T")

_REPLACED = "Replaced by new task"  # what Celery's Task.replace raises Ignore with
_PLAIN = "json"
_DIED = "the process that ran it died"


class SendAnswer(Protocol):
    """Sends an answer as a message: to `task_done` with a result, to `task_failed` with an error."""

    def __call__(self, what: Any, reference: Any, *, is_error: bool) -> None: ...


class LostTasks(Protocol):
    """What the search for lost tasks has to be told."""

    def died(self, reference: object, *, why: str) -> bool: ...
    def replaced(self, request: Any) -> None: ...


class TaskCompletions:
    """Commits the ends of tasks of one app.

    ``send``: what does it by message. ``lost``: what looks after tasks that are lost, and those that go on as others.
    """

    def __init__(
        self,
        app: Celery,
        answers: Callable[[], Answers],
        background: BackgroundQueue,
        send: SendAnswer,
        *,
        lost: LostTasks,
    ) -> None:
        self._app, self._answers, self._background, self._send = app, answers, background, send
        self._lost = lost
        self._loop_pid: int | None = None

    def in_main_loop_of(self, pid: int | None) -> None:
        """Tasks do not run in the process ``pid``, which is a worker's main loop: no SQL in it (LAW 8)."""
        self._loop_pid = pid

    # --- what Celery calls ----------------------------------------------------------------------

    def returned(self, result: Any, reference: Any) -> bool:
        """A task has returned; False: the answer has to be sent. Raises EncodeError as sending would.

        The result takes the same way through kombu's JSON as in a message: an integer key is text then, a tuple a list.
        """
        found = TaskReference.read(reference)
        if found is None or self._app.conf.task_always_eager:
            return False
        content_type, encoding, text = serialization.dumps(result, serializer=_PLAIN)
        plain = serialization.loads(text, content_type, encoding, accept={content_type})
        commit = self._committing(found, lambda: self._answers().done(plain, reference, is_direct=True))
        return _despite_limit(commit, found)

    def failed(self, error: Mapping[str, Any], reference: Any) -> str:
        """A task has failed. Raises nothing: Celery 5.5 would call the errback again."""
        found = TaskReference.read(reference)
        if found is None:
            return "noop: malformed reference"
        if self._loop_pid == os.getpid():
            what = f"The answer of a task of {found.ref}"
            self._background.submit(lambda: self._commit_or_send(error, found), what=what)
            return "taken in the background"
        return _despite_limit(lambda: self._commit_or_send(error, found), found)

    def died(self, error: Mapping[str, Any], reference: Any) -> str:
        """The process of a task died, or the task ended it: it is lost, and has not failed."""
        found = TaskReference.read(reference)
        if found is None:
            return "noop: malformed reference"

        def report() -> None:
            if self._answers().is_ours(found):
                self._lost.died(reference, why=_DIED)
            else:  # whose it is finds out with the error
                self._send(error, reference, is_error=True)

        self._background.submit(report, what=f"A task of {found.ref} whose process died")
        return "lost"

    def _commit_or_send(self, error: Mapping[str, Any], found: TaskReference) -> str:
        reference = found.to_json()
        commit = self._committing(found, lambda: self._answers().failed(error, reference, is_direct=True))
        if commit():
            return "committed"
        self._send(error, reference, is_error=True)
        return "sent"

    def _committing(self, reference: TaskReference, take: Callable[[], str]) -> Callable[[], bool]:
        def commit() -> bool:
            try:
                answers = self._answers()
                if not answers.takes_directly(reference):
                    return False
                take()
            except SoftTimeLimitExceeded:
                raise
            except Exception as exc:  # noqa: BLE001  # no database, no tables, no settings: a message finds one that has
                self._answers().rest_from_database()
                logger.warning("The answer of a task of %s goes as a message: %s", reference.ref, exc)
                return False
            return True

        return commit

    # --- ends that call nothing -----------------------------------------------------------------

    def connect(self) -> None:
        """Listen to Celery's signals."""
        listen(signals.task_postrun, self._ran)
        listen(signals.task_internal_error, self._broke)
        listen(signals.task_revoked, self._revoked)
        listen(signals.task_rejected, self._refused)

    def _ran(self, sender: Any, task: Any, state: Any, retval: Any, **_: Any) -> None:
        """Ignore and Reject. No state at all is a process that is being killed, of which its parent tells."""
        if sender.app is not self._app or state not in (states.IGNORED, states.REJECTED):
            return
        reference = task.request.get(HEADER)
        if reference is None or is_requeued(task, state, retval):
            return
        if str(retval) == _REPLACED:
            self._lost.replaced(task.request)
            return
        self.failed(error_of_exception(retval), reference)

    def _broke(self, sender: Any, request: Any, exception: Any, **_: Any) -> None:
        """Celery itself failed: where a failure could not be stored in the result backend, no errback was called."""
        if sender.app is not self._app or (reference := request.get(HEADER)) is None:
            return
        error = _raised_by_task(exception)
        if not isinstance(error, Retry):  # whose message was sent before it was stored
            self.failed(error_of_exception(error), reference)

    def _revoked(self, sender: Any, request: Any, terminated: bool, expired: bool, **_: Any) -> None:  # noqa: FBT001
        if sender.app is not self._app or (reference := request.get(HEADER)) is None:
            return
        why = "terminated" if terminated else "not run: it had expired" if expired else "revoked"
        text = f"Celery task {request.task!r} ({request.id}) was {why}"
        self._report({"name": "TaskRevoked", "message": text}, reference)

    def _refused(self, sender: Any, message: Any, exc: Any, **_: Any) -> None:
        """A message that this worker may not read, by ``accept_content``, and has thrown away."""
        reference = (message.headers or {}).get(HEADER)
        if sender.app is self._app and reference is not None and isinstance(exc, ContentDisallowed):
            self._report({"name": "ContentDisallowed", "message": str(exc), "final": True}, reference)

    def _report(self, error: Mapping[str, Any], reference: Any) -> None:
        """From Celery's main loop, on every pool."""
        if (found := TaskReference.read(reference)) is not None:
            what = f"The answer for a task of {found.ref}, which does not run,"
            self._background.submit(lambda: self._commit_or_send(error, found), what=what)


def _raised_by_task(exception: BaseException) -> BaseException:
    """What the task raised, of an exception that was raised while that was stored, and of what led to it.

    The oldest that came as far as Celery's tracer: what the backend caught did not, nor what the task caught.
    """
    found, each = exception, exception.__context__
    while each is not None:
        if each.__traceback__ is not None and each.__traceback__.tb_frame.f_code.co_filename == trace.__file__:
            found = each
        each = each.__context__
    return found


def _despite_limit(end: Callable[[], T], reference: TaskReference) -> T:
    """Answer for a task even if its soft time limit fires meanwhile: the task is over, and its answer known.

    Raised on, the limit would be a second, contrary answer. It fires once, so the second try is left alone.
    """
    try:
        return end()
    except SoftTimeLimitExceeded:
        logger.warning("The soft time limit of a task of %s fired after its end, and is ignored", reference.ref)
        return end()
