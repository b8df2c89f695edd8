"""What happened, told: Celery signals, each sent after the commit that made it true.

At most once, by the process that did it: a crash between the commit and the signal loses it, and what was superseded
or rolled back is never told. ``sender`` is the workflow's name: ``workflow_failed.connect(alert, sender="order")``.
What a receiver raises is logged and breaks nothing. Where nobody listens nothing is made up to be told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from celery.utils.dispatch import Signal

__all__ = [
    "Around",
    "answer_refused",
    "around_pass",
    "around_step",
    "event_received",
    "step_completed",
    "step_failed",
    "step_intervened",
    "step_retrying",
    "step_started",
    "sweep_done",
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
_STEP = (*_RUN, "step", "type", "attempt")
_ERROR = ("error_name", "error_message")


def listen(signal: Signal, receiver: Callable[..., object]) -> None:
    """Connect a method for good, or until `ignore`.

    Before 5.7 Celery takes the same method of two objects for one receiver, and leaves the second out.
    """
    signal.connect(receiver, weak=False, dispatch_uid=_uid(receiver))


def ignore(signal: Signal, receiver: Callable[..., object]) -> None:
    """Undo `listen`."""
    signal.disconnect(receiver, dispatch_uid=_uid(receiver))


def _uid(receiver: Callable[..., object]) -> str:
    return f"{id(getattr(receiver, '__self__', None))}:{getattr(receiver, '__qualname__', '')}"


def _signal(name: str, *arguments: str) -> Signal:
    return Signal(providing_args=list(arguments), name=name)


workflow_created = _signal("workflow_created", *_RUN, "run_at")
"""An instance was recorded. ``run_at``: when it is to start, None for at once."""
workflow_started = _signal("workflow_started", *_RUN, "latency")
"""A worker began a run. ``latency``: how long it had been due."""
workflow_suspended = _signal("workflow_suspended", *_RUN, "status", "until")
"""A run was let go. ``status``: "waiting", "paused", or "active": due again; ``until``: None where that is unknown."""
workflow_resumed = _signal("workflow_resumed", *_RUN, "latency", "crash_count")
"""A worker goes on with a run. ``latency``: how long it had been due; ``crash_count``: workers that died at it."""
workflow_completed = _signal("workflow_completed", *_RUN, "duration")
"""A run returned. ``duration``: since it was recorded."""
workflow_failed = _signal("workflow_failed", *_RUN, "duration", *_ERROR)
"""A run ended by an error."""
workflow_terminated = _signal("workflow_terminated", *_RUN, "reason")
"""Somebody ended a run."""
workflow_restarted = _signal("workflow_restarted", *_RUN, "reason")
"""A new run was begun. ``run_number``: its number."""
step_started = _signal("step_started", *_STEP)
"""An attempt at a step's body begins, a task is to be sent, a child was created, or a sleep or a wait was recorded.

``type``: "do", "sleep", "waitForEvent", "task", "child", "linear".
"""
step_completed = _signal("step_completed", *_STEP, "duration")
"""A step has its result. ``duration``: how long the body ran, None where there is none."""
step_retrying = _signal("step_retrying", *_STEP, "duration", "delay", *_ERROR)
"""An attempt failed, and there will be another one ``delay`` later."""
step_failed = _signal("step_failed", *_STEP, "duration", *_ERROR)
"""A step failed for good."""
step_intervened = _signal("step_intervened", *_STEP, "action", "by", "reason")
"""Somebody settled a step by hand. ``action``: "set_result" or "skip"; ``attempt``: the last that there was."""
event_received = _signal("event_received", *_RUN, "event_type", "event_id")
"""An event was accepted for a run, whether it waits for one or not."""
answer_refused = _signal("answer_refused", *_RUN)
"""The answer of a Celery task came with a token that is not its attempt's: it is forged, and changed nothing."""
sweep_done = _signal("sweep_done", "published", "duration")
"""A dispatcher has swept; ``sender`` is None. ``published``: the messages that it sent."""


# --- what goes around ---------------------------------------------------------------------------

Manager = Callable[..., AbstractContextManager[Any]]
M = TypeVar("M", bound=Manager)


class Around:
    """Something that takes its time. Who is connected is asked for a context manager, which is entered around it.

    What the managers raise is logged, and what passes through them they cannot hold up.
    """

    def __init__(self, name: str, *arguments: str) -> None:
        self.name, self.providing_args = name, frozenset(arguments)
        self.managers: list[Manager] = []

    def __repr__(self) -> str:
        return f"<Around {self.name} providing_args={sorted(self.providing_args)}>"

    def connect(self, make: M) -> M:
        """Ask ``make(**arguments)`` for a context manager each time, until it is disconnected; also as a decorator."""
        if make not in self.managers:
            self.managers.append(make)
        return make

    def disconnect(self, make: Manager) -> None:
        """Ask it no more."""
        if make in self.managers:
            self.managers.remove(make)

    def around(self, **arguments: Any) -> AbstractContextManager[None]:
        """Ask for the managers now; they are entered with what this answers with, perhaps on another thread."""
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
        except Exception:
            logger.exception("A context manager of %s failed and is left out", self.name)
            return None


def _enter(manager: AbstractContextManager[Any]) -> bool:
    manager.__enter__()
    return True


around_pass = Around("around_pass", *_RUN, "latency")
"""Around what a worker does for one run, from its claim to its letting go."""
around_step = Around("around_step", *_RUN, "step", "attempt")
"""Around one call of a step's body, on the body's thread; its manager is asked for on that of the pass."""
