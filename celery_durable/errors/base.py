"""The root of the tree, and how an error shows values."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar


class DurableError(Exception):
    """The base class of every error that celery_durable raises for its users.

    Catch it to handle all of them. Errors can be pickled and copied; attributes are kept.

    Attributes:
        code: A stable name for programs, such as ``INSTANCE_NOT_FOUND``.
        http_status: The status of the HTTP API's response to this error.
    """

    code: ClassVar[str] = "DURABLE_ERROR"
    http_status: ClassVar[int] = 500

    def __reduce__(self) -> tuple[Any, ...]:
        # The default pickling calls cls(*args) and breaks for every __init__ with more than one
        # argument; prefork workers pickle exceptions.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[DurableError], args: tuple[Any, ...], state: dict[str, Any]) -> DurableError:
    exc = cls.__new__(cls, *args)
    exc.args = args
    exc.__dict__.update(state)
    return exc


def quote(value: object) -> str:
    """Return the value's repr, cut to 120 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a repr that fails, as that of a very long integer does, must not hide the error
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def format_limit(length: timedelta) -> str:
    """Return a duration exactly, as text that can be given as a duration, too: ``365 d``, ``1 h 30.5 s``, ``50 ms``."""
    if length and abs(length) < timedelta(seconds=1):
        return f"{length / timedelta(milliseconds=1):g} ms"
    left, parts = abs(length), list[str]()
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        count, left = divmod(left, timedelta(seconds=size))
        parts += [f"{count} {unit}"] if count else []
    if left or not parts:
        parts.append(f"{left.total_seconds():.6f}".rstrip("0").rstrip(".") + " s")
    return ("-" if length < timedelta(0) else "") + " ".join(parts)


def name_error(name: str, message: str | None) -> str:
    """Return ``name: message``, or the name alone if the error has no message."""
    return f"{name}: {message}" if message else name


def join_problems(problems: Sequence[tuple[str, str]]) -> str:
    """Return the first five problems as one line, and how many more there are."""
    return "; ".join(f"{where}: {what}" for where, what in problems[:5]) + (
        f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    )


# The exceptions that end a pass. Workflow code neither catches nor raises these.


class Interruption(BaseException):
    """The base class of the exceptions that unwind workflow code.

    It is not an Exception, so that ``except Exception`` does not catch it.
    """


class Suspend(Interruption):
    """Ends a pass over the workflow's function, which a later pass calls again. Do not catch it.

    A workflow that catches it fails with `SuspensionSwallowed`.
    """


class Cancelled(Interruption):
    """Raised by the next step call of a workflow that was cancelled.

    Clean up in ``finally`` or in ``except Cancelled``, with steps if you like, and let the exception leave the
    workflow. A workflow that catches it and returns fails with `CancellationSwallowed`.

    Attributes:
        reason: Why, as passed to ``cancel``; None if no reason was given.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        super().__init__("cancelled" if reason is None else f"cancelled: {reason}")


class StepInterrupted(Interruption):
    """Ends the function of a step whose timeout is over.

    The attempt then fails with `StepTimeout`. Use ``finally`` to clean up.
    """


class Superseded(Interruption):
    """Ends a pass whose claim belongs to another worker now. The transaction is rolled back (LAW 2)."""


class PassStalled(DurableError):
    """A pass hung outside of workflow code for longer than ``durable_stall_seconds``. Logged, never raised.

    Another worker continues the instance. Restart the worker that hangs, if it does not recover.

    Attributes:
        ref: Workflow, instance and run.
        seconds: How long it has hung.
    """

    code = "PASS_STALLED"

    def __init__(self, ref: str, seconds: float) -> None:
        self.ref, self.seconds = ref, seconds
        super().__init__(
            f"The pass over {ref} has hung for {seconds:.0f} s outside of the workflow's code: it waits for something "
            "that does not answer. The worker's process still hangs; restart it if it does not recover by itself."
        )


class PassBroken(Interruption):
    """Ends a pass after a failure outside of workflow code, for instance of the database. ``__cause__`` says which."""
