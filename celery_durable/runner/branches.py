"""A step call on its way to being settled, and what several of them at once need: races, turns, comparison."""

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
    """One step call on its way to being settled, or to being waited for."""

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
    """A body was stopped by something that is no verdict on its step, such as SystemExit: ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(repr(error))


class RaceWon(Interruption):
    """Stops the other branches of a race; never leaves the pass."""


@dataclass(frozen=True, slots=True)
class Race:
    """A call of `first` that is being decided."""

    entry: StepEntry
    branches: list[StepExecution]


class SessionLock:
    """On SQLite one session at a time may hold the file's write lock, and the pass must not wait for it itself.

    A body on a thread of its own takes the gate before it opens its session, and has it until the session is
    closed. A sibling that ends meanwhile is recorded after it. The pass's own thread needs no gate: when it runs
    a body it runs no other, or holds the gate already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass = threading.get_ident()
        self._holder: TxBuffer | None = None
        self._deferred: list[Callable[[], None]] = []

    def acquire(self, buffer: TxBuffer) -> None:
        if threading.get_ident() != self._pass:
            self._lock.acquire()
            self._holder = buffer

    def release(self, buffer: TxBuffer) -> None:
        """The session of ``buffer`` is closed."""
        if self._holder is buffer:
            self._holder = None
            self._lock.release()

    def run_or_defer(self, buffer: TxBuffer, run_or_defer: Callable[[], None]) -> None:
        """Record the body of ``buffer`` now, or when the session that is open is done."""
        if self._holder is not buffer and not self._lock.acquire(blocking=False):
            self._deferred.append(run_or_defer)
            return
        self._holder = None  # the pass has the gate: no other session opens while it commits
        self._deferred.insert(0, run_or_defer)
        self._run_all_deferred()

    def run_deferred(self) -> None:
        """Record what is left: a body that was given up may have had the gate for a moment."""
        if self._deferred:
            self._lock.acquire()
            self._run_all_deferred()

    def _run_all_deferred(self) -> None:
        try:
            while self._deferred:
                self._deferred.pop(0)()
        finally:
            self._deferred.clear()  # whose race is lost has nothing to record
            self._lock.release()


@dataclass(frozen=True, slots=True, eq=False)
class CallFingerprint:
    """What a body call does, comparable: the code, the values it was made with, and its arguments."""

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
        cells = tuple(_cell(cell) for cell in getattr(fn, "__closure__", None) or ())
        # `lambda n=n: ...` in a loop, or the same method of several objects, is the same code for different work.
        given = (getattr(fn, "__self__", None), getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None))
        return cls(getattr(fn, "__code__", fn), (cells, *given), args, kwargs)

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
        except Exception:  # noqa: BLE001  # arrays and the like refuse to be compared as a whole
            logger.warning("Arguments of a step cannot be compared with those of an earlier call of its name")
            return True

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def decode_result(step: str, codec: Codec, text: str) -> Any:
    """The recorded JSON as the type that the code declares; raises StepResultInvalid."""
    try:
        return codec.decode(text)
    except ValidationFailed as exc:
        raise StepResultInvalid(step, exc.problems) from exc
