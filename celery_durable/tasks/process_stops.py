"""What stops a pass: the worker that shuts down, and exceptions that are no error of the user's code (LAW 9).

A flag in shared memory, made before the pool forks, tells the pool processes that the worker shuts down. They release
their runs at the next step boundary, as they do for the exceptions that stop the process. Every other exception is a
failed attempt, whatever its type is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from billiard import common
from billiard.pool import soft_timeout_sighandler
from celery.exceptions import SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate

from celery_durable.runtime import is_ctrl_c
from celery_durable.upstream import until


class StopFlag:
    """One byte that the parent process shares with its children."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def is_set(self) -> bool:
        return self._memory[0] != 0

    def stops_passes(self, conf: Any) -> bool:
        """Whether passes stop. Those of eager tasks do not: no other worker would continue their runs."""
        return self._memory[0] != 0 and not conf.task_always_eager

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0


def make_process_stop_check(is_stopping: Callable[[], bool]) -> Callable[[BaseException], bool]:
    """Return a function that tells an exception that stops the process from an error of the code."""

    def stops_process(error: BaseException) -> bool:
        if _has_been_terminated():  # this process ends, even if the code turned the SystemExit into another exception
            return True
        match error:
            case WorkerShutdown() | WorkerTerminate():
                return True  # on the solo pool, Celery's signal handlers raise them inside the bodies of tasks
            case SoftTimeLimitExceeded():
                return _is_raised_by_the_limit(error)
            case SystemExit() | KeyboardInterrupt():
                return is_stopping() or is_ctrl_c(error)
            case _:
                return False

    return stops_process


@until("celery", "5.7", "needs billiard 4.3.2, which has terminate_handler_fired")
def _has_been_terminated() -> bool:
    """Whether this pool process has received SIGTERM: from a cold shutdown, `revoke(terminate=True)` or the system."""
    if (has_fired := getattr(common, "terminate_handler_fired", None)) is not None:
        return bool(has_fired())
    return bool(vars(common)["_should_have_exited"][0])  # billiard 4.2


def _is_raised_by_the_limit(error: BaseException) -> bool:
    """Whether Celery's soft time limit raised the exception: then its signal handler is a frame of the traceback."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is soft_timeout_sighandler.__code__:
            return True
        trace = trace.tb_next
    return False
