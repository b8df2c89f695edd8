"""The execution of one step call, and the tools for concurrent calls: races, the session lock, call fingerprints.

A branch is a step call that was submitted with `Step.submit`. Each branch is a `StepExecution`, like every other call.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_durable.definitions import StepFunction
from celery_durable.errors import Interruption, StepResultInvalid
from celery_durable.model import OpenWait, StepRow
from celery_durable.replay_state import StepEntry
from celery_durable.step import BodyCall, StepCall, TxBuffer
from celery_durable.values import Codec, StepPolicy, ValidationFailed

logger = logging.getLogger("celery_durable.runner")


class StepExecution:
    """One step call in this pass.

    ``finished_row``: the step's row, once the step has finished. ``wait``: what the step waits for, unless the pass
    has set `ExecutionContext.pending_suspension` for it. ``cause``: the exception that the body raised in this pass.
    """

    def __init__(self, call: StepCall, entry: StepEntry, policy: StepPolicy, fn: StepFunction | None) -> None:
        self.call, self.entry, self.policy, self.fn = call, entry, policy, fn
        self.finished_row: StepRow | None = entry.row if entry.row is not None and entry.row.is_finished else None
        self.cause: BaseException | None = None
        self.wait: OpenWait | None = None

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def name(self) -> str:
        return self.entry.name


class PassInterrupted(Interruption):
    """``error`` interrupted the pass or a body, and fails no step.

    The process is stopping (SystemExit, for example), or a body found that the claim is lost (Superseded).
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(repr(error))


class RaceWon(Interruption):
    """Stops the other branches of a race. It never leaves the pass."""


@dataclass(frozen=True, slots=True)
class Race:
    """A call of `Step.first` that has no winner yet. ``entry``: the step that records the winner's key."""

    entry: StepEntry
    branches: list[StepExecution]


class SessionLock:
    """Serializes the sessions of concurrent bodies on SQLite, where one session at a time holds the write lock.

    A body on its own thread acquires this lock before it opens its session, and holds it until the session is closed.
    The outcome of a body that ends meanwhile is recorded later, so that the pass's thread does not block. A body on
    the pass's own thread skips `acquire`: no other body runs then, or the thread holds the lock already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass_thread = threading.get_ident()
        self._holder: TxBuffer | None = None
        self._deferred: list[Callable[[], None]] = []

    def acquire(self, buffer: TxBuffer) -> None:
        if threading.get_ident() != self._pass_thread:
            self._lock.acquire()
            self._holder = buffer

    def release(self, buffer: TxBuffer) -> None:
        """Release the lock after the session of ``buffer`` is closed. Does nothing if ``buffer`` does not hold it."""
        if self._holder is buffer:
            self._holder = None
            self._lock.release()

    def run_or_defer(self, buffer: TxBuffer, record: Callable[[], None]) -> None:
        """Call ``record``, which commits the outcome of a body, now or after the open session is closed."""
        # Blocking here would deadlock: only this thread closes the open session, by recording the body that holds it.
        if self._holder is not buffer and not self._lock.acquire(blocking=False):
            self._deferred.append(record)
            return
        self._holder = None  # the pass holds the lock now: no other session opens while it commits
        self._deferred.insert(0, record)
        self._run_all_deferred()

    def run_deferred(self) -> None:
        """Record the outcomes that are still deferred. An abandoned body may have held the lock until now."""
        if self._deferred:
            self._lock.acquire()
            self._run_all_deferred()

    def _run_all_deferred(self) -> None:
        try:
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._deferred.clear()  # after an error, or after a race was won, nothing else is recorded
            self._lock.release()


@dataclass(frozen=True, slots=True, eq=False)
class CallFingerprint:
    """The work of a `step.do` call: its code, the values captured with it, and its arguments.

    Two calls with one name in one pass must have equal fingerprints.
    """

    code: Any
    captured_values: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, call: BodyCall) -> CallFingerprint:
        fn: Any = call.fn
        args, kwargs = call.args, call.kwargs
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        cells = tuple(_read_cell(cell) for cell in getattr(fn, "__closure__", None) or ())
        # `lambda n=n: ...` in a loop, and a method of several objects, have the same code but do different work.
        bound_values = (
            getattr(fn, "__self__", None),
            getattr(fn, "__defaults__", None),
            getattr(fn, "__kwdefaults__", None),
        )
        return cls(getattr(fn, "__code__", fn), (cells, *bound_values), args, kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallFingerprint):
            return NotImplemented
        try:
            return bool(
                self.code == other.code
                and self.captured_values == other.captured_values
                and self.args == other.args
                and self.kwargs == other.kwargs
            )
        except Exception:  # noqa: BLE001  # arrays and similar types cannot be compared as a whole
            logger.warning("Arguments of a step cannot be compared with those of an earlier call of its name")
            return True

    __hash__ = None  # type: ignore[assignment]  # a fingerprint is compared, and never used as a key


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def decode_result(step: str, codec: Codec, text: str) -> Any:
    """Decode the recorded JSON as the type that the code declares; raises StepResultInvalid."""
    try:
        return codec.decode(text)
    except ValidationFailed as exc:
        raise StepResultInvalid(step, exc.problems) from exc
