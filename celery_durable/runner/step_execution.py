"""A step call while it is executed, and what concurrent calls need: races, the session lock, fingerprints."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_durable.definitions import StepFunction
from celery_durable.errors import Interruption, StepResultInvalid
from celery_durable.model import StepRow
from celery_durable.replay_state import StepEntry
from celery_durable.step import BodyCall, StepCall, TxBuffer
from celery_durable.store.claims import OpenWait
from celery_durable.values import Codec, StepPolicy, ValidationFailed

logger = logging.getLogger("celery_durable.runner")


class StepExecution:
    """One step call until it has a finished row, or a wait."""

    def __init__(self, call: StepCall, entry: StepEntry, policy: StepPolicy, fn: StepFunction | None) -> None:
        self.call, self.entry, self.policy, self.fn = call, entry, policy, fn
        self.row: StepRow | None = entry.row if entry.row is not None and entry.row.is_finished else None
        self.cause: BaseException | None = None
        self.wait: OpenWait | None = None

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def name(self) -> str:
        return self.entry.name


class ProcessStopping(Interruption):
    """The process is stopping: ``error``, such as SystemExit, ended the pass or a body, and is no failure of a step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(repr(error))


class RaceWon(Interruption):
    """Stops the other branches of a race. It never leaves the pass."""


@dataclass(frozen=True, slots=True)
class Race:
    """A call of `first` that is being decided."""

    entry: StepEntry
    branches: list[StepExecution]


class SessionLock:
    """Serializes the sessions of concurrent bodies on SQLite, where one session at a time holds the write lock.

    A body on its own thread acquires this lock before it opens its session, and holds it until the session is closed.
    A branch that ends meanwhile is recorded after it, so that the pass does not block. The pass's own thread does not
    acquire it: when it runs a body, no other body runs, or it holds the lock already.
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
        """Record the body of ``buffer`` now, or after the session that is open is closed."""
        # To block here would deadlock: this thread closes the open session, when it records the body that holds it.
        if self._holder is not buffer and not self._lock.acquire(blocking=False):
            self._deferred.append(record)
            return
        self._holder = None  # the pass holds the lock now: no other session opens while it commits
        self._deferred.insert(0, record)
        self._run_all_deferred()

    def run_deferred(self) -> None:
        """Record the branches that are still deferred: an abandoned body may have held the lock for a moment."""
        if self._deferred:
            self._lock.acquire()
            self._run_all_deferred()

    def _run_all_deferred(self) -> None:
        try:
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._deferred.clear()  # branches that lost a race have nothing to record
            self._lock.release()


@dataclass(frozen=True, slots=True, eq=False)
class CallFingerprint:
    """What a body call does, for comparison: its code, the values captured with it, and its arguments."""

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

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


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
