"""What Celery or the operating system does to a process, told apart from what an author's code raises (LAW 9).

The first is no attempt: the run is handed on. The second is a failed attempt, whatever its type is.
"""

from __future__ import annotations

from collections.abc import Callable

from billiard import common
from billiard.pool import soft_timeout_sighandler
from celery.exceptions import SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate

from celery_durable.runtime import is_ctrl_c


def stopped_from_outside(is_stopping: Callable[[], bool]) -> Callable[[BaseException], bool]:
    """A rule that says whether an exception is no verdict on the code in which it came up.

    ``is_stopping``: whether this worker shuts down.
    """

    def is_from_outside(error: BaseException) -> bool:
        if _has_been_terminated():  # whatever the code made of the SystemExit: this process ends
            return True
        match error:
            case WorkerShutdown() | WorkerTerminate():  # raised by Celery's signal handlers where bodies run in them
                return True
            case SoftTimeLimitExceeded():
                return _is_raised_by_the_limit(error)
            case SystemExit() | KeyboardInterrupt():
                return is_stopping() or is_ctrl_c(error)
            case _:
                return False

    return is_from_outside


def _has_been_terminated() -> bool:
    """Whether this pool process has been sent TERM: by a cold shutdown, by `revoke(terminate=True)`, by the system."""
    if (has_fired := getattr(common, "terminate_handler_fired", None)) is not None:
        return bool(has_fired())
    return bool(vars(common)["_should_have_exited"][0])  # billiard 4.2


def _is_raised_by_the_limit(error: BaseException) -> bool:
    """Whether the signal of Celery's soft time limit raised it; its handler is a frame of the traceback then."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is soft_timeout_sighandler.__code__:
            return True
        trace = trace.tb_next
    return False
