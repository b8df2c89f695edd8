"""Celery signals about workflows, each sent after the commit that it reports.

The process that commits sends the signal, at most once. A crash between the commit and the signal loses the signal.
Superseded and rolled-back work sends none. ``sender`` is the workflow's name:
``workflow_failed.connect(alert, sender="order")``. An exception of a receiver is logged and has no other effect. If no
receiver is connected, no signal data is built.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from celery.utils.dispatch import Signal

from celery_durable.housekeeping import CallQueue
from celery_durable.upstream import until

__all__ = [
    "Around",
    "answer_refused",
    "around_pass",
    "around_step",
    "connections_cut",
    "consuming_resumed",
    "event_received",
    "pass_stalled",
    "step_completed",
    "step_failed",
    "step_intervened",
    "step_retrying",
    "step_started",
    "sweep_done",
    "task_lost",
    "workflow_completed",
    "workflow_created",
    "workflow_failed",
    "workflow_restarted",
    "workflow_resumed",
    "workflow_started",
    "workflow_suspended",
    "workflow_terminated",
]

logger = logging.getLogger("celery_durable.signals")

_RUN = ("workflow", "instance_id", "run_number")
_STEP = (*_RUN, "step", "step_key", "type", "attempt")
_ERROR = ("error_name", "error_message", "exception")


def listen(signal: Signal, receiver: Callable[..., object]) -> None:
    """Connect a receiver, which may be a bound method, until `ignore` is called."""
    signal.connect(receiver, weak=False, dispatch_uid=_uid(receiver))


def ignore(signal: Signal, receiver: Callable[..., object]) -> None:
    """Disconnect a receiver that `listen` connected."""
    signal.disconnect(receiver, dispatch_uid=_uid(receiver))


@until("celery", "5.7", "takes the same method of two objects for two receivers")
def _uid(receiver: Callable[..., object]) -> str:
    """A ``dispatch_uid`` of its own for each receiver, without which Celery ignores the method of a second object."""
    return f"{id(getattr(receiver, '__self__', None))}:{getattr(receiver, '__qualname__', '')}"


def _signal(name: str, *arguments: str) -> Signal:
    return Signal(providing_args=list(arguments), name=name)


workflow_created = _signal("workflow_created", *_RUN, "run_at")
"""An instance was recorded. ``run_at``: when it is to start, None for at once."""
workflow_started = _signal("workflow_started", *_RUN, "latency")
"""A worker started a run. ``latency``: how long it had been due."""
workflow_suspended = _signal("workflow_suspended", *_RUN, "status", "until")
"""A run was released. ``status``: "waiting", "paused", or "active" if it is due again; ``until``: None if unknown."""
workflow_resumed = _signal("workflow_resumed", *_RUN, "latency", "crash_count")
"""A worker continues a run. ``latency``: how long it had been due; ``crash_count``: how many workers died during it."""
workflow_completed = _signal("workflow_completed", *_RUN, "duration")
"""A run returned. ``duration``: since it was created."""
workflow_failed = _signal("workflow_failed", *_RUN, "duration", *_ERROR)
"""A run ended with an error. ``duration``: since it was created; ``exception``: None if it is not in this process."""
workflow_terminated = _signal("workflow_terminated", *_RUN, "reason")
"""A run was terminated, by a client or because it exceeded a limit, or it has ended after a cancel."""
workflow_restarted = _signal("workflow_restarted", *_RUN, "reason")
"""An instance was restarted with a new run. ``run_number``: its number."""
step_started = _signal("step_started", *_STEP)
"""An attempt of a step's body starts, or a task, a map, a child, a sleep or a wait was recorded.

It is sent again for each further attempt of a body or of a task, but not if a later pass replays the step. If a worker
stops and interrupts a body, the body starts again with the same ``attempt``. ``type``: "do", "sleep", "waitForEvent",
"task", "map", "child", "linear".
"""
step_completed = _signal("step_completed", *_STEP, "duration")
"""A step has its result. ``duration``: how long the body ran, None if it has no body."""
step_retrying = _signal("step_retrying", *_STEP, "duration", "delay", *_ERROR)
"""An attempt failed. The next one is due after ``delay``. ``exception``: None if none was raised in this process."""
step_failed = _signal("step_failed", *_STEP, "duration", *_ERROR)
"""A step failed, and will not be retried. ``exception``: None if none was raised in this process."""
step_intervened = _signal("step_intervened", *_STEP, "action", "by", "reason")
"""A step was completed or skipped by hand. ``action``: "set_result" or "skip"; ``attempt``: its last attempt."""
event_received = _signal("event_received", *_RUN, "event_type", "event_id")
"""An event was accepted for a run, which need not wait for it yet."""
answer_refused = _signal("answer_refused", *_RUN)
"""The answer of a Celery task had a token that is not its attempt's. It was refused as forged, and changed nothing."""
task_lost = _signal("task_lost", *_RUN, "outcome")
"""A worker or a queue lost a Celery task of a step. ``outcome``: "resent", or "failed": the step gets `TaskLost`."""
sweep_done = _signal("sweep_done", "published", "duration")
"""A dispatcher finished a sweep; ``sender`` is None. ``published``: how many messages it sent."""

# These are sent with `send_from_monitor`.
pass_stalled = _signal("pass_stalled", *_RUN, "stalled")
"""A pass made no progress for ``stalled`` outside of the workflow's code, and its claim was revoked."""
connections_cut = _signal("connections_cut", "count")
"""The database did not answer in time, and its connections were cut; ``sender`` is None. ``count``: how many."""
consuming_resumed = _signal("consuming_resumed", "acknowledgements")
"""A worker had stopped consuming from Redis, and consumes again; ``sender`` is None. ``acknowledgements``: how many
Redis had not taken."""


def send(signal: Signal, *, sender: Any, **arguments: Any) -> None:
    """Send a signal. A receiver that raises SystemExit, for example, ends nothing, as one that raises an Exception."""
    try:
        signal.send(sender=sender, **arguments)
    except (SystemExit, GeneratorExit) as exc:
        if _is_raised_by_celery(exc):
            raise
        logger.exception("A receiver of %r failed", signal)


def _is_raised_by_celery(error: BaseException) -> bool:
    """Whether Celery or billiard stops this process: they raise SystemExit in handlers of the system's signals."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in ("celery", "billiard")


# --- signals of monitoring threads --------------------------------------------------------------

_MAX_WAITING_SIGNALS = 1000


_from_monitors = CallQueue("durable-signals", _MAX_WAITING_SIGNALS, delays_forks=False)


def send_from_monitor(signal: Signal, *, sender: Any, **arguments: Any) -> None:
    """Send a signal in a job of its own, and return at once.

    A receiver that hangs must not keep a watchdog from cutting connections, or the renewer from renewing leases (LAW
    7).
    """
    if signal.receivers:
        _from_monitors.add(functools.partial(send, signal, sender=sender, **arguments), what=repr(signal))


# --- context managers ---------------------------------------------------------------------------

Manager = Callable[..., AbstractContextManager[Any]]
M = TypeVar("M", bound=Manager)


class Around:
    """A hook around work that takes time. Each connected function makes a context manager, entered around the work.

    An exception of a manager is logged. A manager cannot suppress an exception of the work.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self.name, self.providing_args = name, frozenset(arguments)
        self.managers: list[Manager] = []

    def __repr__(self) -> str:
        return f"<Around {self.name} providing_args={sorted(self.providing_args)}>"

    def connect(self, make: M) -> M:
        """Call ``make(**arguments)`` for a context manager on every use, until `disconnect`. Works as a decorator."""
        if make not in self.managers:
            self.managers.append(make)
        return make

    def disconnect(self, make: Manager) -> None:
        """Stop calling ``make``."""
        if make in self.managers:
            self.managers.remove(make)

    def around(self, **arguments: Any) -> AbstractContextManager[None]:
        """Make the managers now; returns a context manager that enters them, which may happen on another thread."""
        made = [manager for make in list(self.managers) if (manager := self._try(make, **arguments)) is not None]
        return self._around(made)

    @contextmanager
    def _around(self, made: list[AbstractContextManager[Any]]) -> Iterator[None]:
        entered: list[AbstractContextManager[Any]] = []
        passing: BaseException | None = None
        try:
            entered.extend(manager for manager in made if self._try(_enter, manager))
            yield
        except BaseException as exc:
            passing = exc
            raise
        finally:
            kind, trace = type(passing) if passing else None, passing.__traceback__ if passing else None
            for manager in reversed(entered):
                self._try(manager.__exit__, kind, passing, trace)

    def _try(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return call(*args, **named)
        except (Exception, SystemExit, GeneratorExit) as exc:
            if isinstance(exc, SystemExit) and _is_raised_by_celery(exc):
                raise
            logger.exception("A context manager of %s failed and is left out", self.name)
            return None


def _enter(manager: AbstractContextManager[Any]) -> bool:
    manager.__enter__()
    return True


around_pass = Around("around_pass", *_RUN, "latency")
"""Around one pass: what a worker does for one run, from its claim to its release."""
around_step = Around("around_step", *_RUN, "step", "step_key", "attempt")
"""Around one call of a step's body, on the body's thread. Its manager is made on the thread of the pass."""
