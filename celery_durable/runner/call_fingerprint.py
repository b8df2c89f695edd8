"""The fingerprint of a `step.do` call, by which two calls with one name in one pass are compared."""

from __future__ import annotations

import functools
import logging
from typing import Any

from celery_durable.model import hot_dataclass
from celery_durable.step import BodyCall

logger = logging.getLogger("celery_durable.runner")


@hot_dataclass(eq=False)
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
        cells = tuple(map(_read_cell, getattr(fn, "__closure__", None) or ()))
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
            logger.warning("Arguments of a step cannot be compared with those of an earlier call: they count as others")
            return False  # one refused repetition is better than work that is silently left out

    __hash__ = None  # type: ignore[assignment]  # a fingerprint is compared, and never used as a key


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
