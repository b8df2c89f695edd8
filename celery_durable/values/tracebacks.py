"""The traceback of an exception as it is stored: the author's frames first, those of celery_durable as one line.

No values of local variables.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from celery_durable.errors import DefinitionInvalid, NonRetryableError, ValueRefused
from celery_durable.model import NO_TRACE, ErrorTrace
from celery_durable.values.names import UNSTORABLE_CHARACTERS

logger = logging.getLogger("celery_durable")

Tracebacks = Literal["full", "author", "none"]
"""What is stored: all frames, those of the application alone, or only the place of the innermost of these."""

MAX_TRACEBACK_BYTES = 16 * 1024
_MAX_FILE_LENGTH = 255
_MAX_CHAIN = 20
"""How many exceptions of a chain of causes, or of a group, are written."""
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(
    {path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def trace_error(
    error: BaseException, mode: Tracebacks = "full", redact: Callable[[str], str] = lambda message: message
) -> ErrorTrace:
    """Return the traceback of an exception and of its causes, as it is stored, if it can be described. Raises nothing.

    ``redact``: returns the text to store instead of an exception's message.
    """
    try:
        frames = _read_frames(error, with_lines=False)
        innermost = _find_innermost(frames)
        text = None if mode == "none" else shorten_middle("".join(_format_chain(error, mode, redact)))
    except Exception:
        logger.warning("The traceback of %s cannot be recorded", type(error).__name__, exc_info=True)
        return NO_TRACE
    if innermost is None:
        return ErrorTrace(text)
    return ErrorTrace(text, _clean(innermost.filename)[-_MAX_FILE_LENGTH:], innermost.lineno)


def hide_engine_frames(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return the exception for `logging`, with the frames of the author and of libraries alone, if there are any.

    Python reads those of its causes and of the members of groups from these themselves, so they are replaced.
    """
    known, linked = {id(error)}, [error]
    for each in linked:
        for other in (each.__cause__, each.__context__, *getattr(each, "exceptions", ())):
            if isinstance(other, BaseException) and id(other) not in known:
                known.add(id(other))
                linked.append(other)
                other.__traceback__ = _leave_out_engine_frames(other.__traceback__)
    return type(error), error, _leave_out_engine_frames(error.__traceback__)


def _leave_out_engine_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of celery_durable, or the same one if it has no others."""
    kept, whole = [], trace
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(trace)
        trace = trace.tb_next
    shown: TracebackType | None = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or whole


def shorten_middle(text: str, limit_bytes: int = MAX_TRACEBACK_BYTES) -> str:
    """Return text that every database can store, of at most ``limit_bytes`` bytes in UTF-8, without its middle."""
    text = _clean(text)
    encoded = text.encode()
    if len(encoded) <= limit_bytes:
        return text
    note = f"\n  ... {len(encoded) - limit_bytes} bytes or more are left out ...\n"
    half = (limit_bytes - len(note)) // 2
    head, tail = encoded[:half].decode(errors="ignore"), encoded[-half:].decode(errors="ignore")
    return head + note + tail


def _clean(text: str) -> str:
    return UNSTORABLE_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", ""))


# --- frames -------------------------------------------------------------------------------------


def _read_frames(error: BaseException, *, with_lines: bool = True) -> traceback.StackSummary:
    """Return the frames of an exception. ``with_lines``: read the source files, too."""
    return traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=with_lines)


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OURS)


def _is_library(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return name.startswith(("<frozen ", *_LIBRARIES)) or any(part in name for part in _PACKAGES)


def _is_author(frame: traceback.FrameSummary) -> bool:
    return not _is_ours(frame) and not _is_library(frame)


def _find_innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of the author's code; of a library, if the application is installed like one."""
    for is_wanted in (_is_author, lambda frame: not _is_ours(frame), lambda _: True):
        for frame in reversed(frames):
            if is_wanted(frame):
                return frame
    return None


# --- text ---------------------------------------------------------------------------------------


def _format_chain(error: BaseException, mode: Tracebacks, redact: Callable[[str], str]) -> Iterator[str]:
    """Yield the text of an exception and of the exceptions before it, oldest first, as Python prints them."""
    chain: list[tuple[BaseException, str]] = [(error, "")]
    seen = {id(error)}
    while len(chain) < _MAX_CHAIN:
        last, _ = chain[-1]
        is_cause = last.__cause__ is not None
        earlier = last.__cause__ if is_cause or last.__suppress_context__ else last.__context__
        if earlier is None or id(earlier) in seen:
            break
        seen.add(id(earlier))
        how = "The above exception was the direct cause of" if is_cause else "During handling of the above exception,"
        chain.append((earlier, f"\n{how} the following exception{'' if is_cause else ' occurred'}:\n\n"))
    for each, link in reversed(chain):
        yield from _format_one(each, mode, redact)
        yield link


def _format_one(error: BaseException, mode: Tracebacks, redact: Callable[[str], str]) -> Iterator[str]:
    frames = _read_frames(error)
    if frames:
        yield "Traceback (most recent call last):\n"
        yield from _format_frames(frames, mode)
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions[:_MAX_CHAIN]
        for number, member in enumerate(members, 1):
            yield f"  Member {number} of {len(error.exceptions)}:\n"
            for text in _format_one(member, mode, redact):
                yield "".join(f"    {line}\n" for line in text.splitlines())
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = redact(get_error_text(error))
    yield f"{name}: {message}\n" if message else f"{name}\n"
    notes = getattr(error, "__notes__", ())
    for note in notes if isinstance(notes, (list, tuple)) else ():
        yield f"{redact(str(note))}\n"


def _format_frames(frames: traceback.StackSummary, mode: Tracebacks) -> Iterator[str]:
    shown = [frame for frame in frames if not _is_ours(frame)]
    ours = len(frames) - len(shown)
    if mode == "author" and any(map(_is_author, shown)):
        shown = [frame for frame in shown if _is_author(frame)]
    yield from traceback.StackSummary.from_list(shown).format()
    counts = {"celery_durable": ours, "libraries": len(frames) - ours - len(shown)}
    hidden = [f"{n} {'frame' if n == 1 else 'frames'} of {what}" for what, n in counts.items() if n]
    if hidden:
        yield f"  ... {', '.join(hidden)}\n"


# What is recorded of an exception in user code: its name and text, and whether another attempt may follow (LAW 9).
#
# This includes exceptions that are not an `Exception`. `tasks.process_stops` recognizes those that stop the process.


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name and the text that are recorded for an error."""
    return error.name if isinstance(error, NonRetryableError) else type(error).__name__, get_error_text(error)


def get_error_text(error: BaseException) -> str:
    """Return ``str(error)``, or a note if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001  # the error is recorded even if its text cannot be built
        return f"(its __str__ raised {type(exc).__name__})"


def forbids_retry(error: BaseException) -> bool:
    """Return whether no attempt follows this error, such as NonRetryableError, or any class of that name."""
    is_final = isinstance(error, (NonRetryableError, ValueRefused, DefinitionInvalid))
    return is_final or type(error).__name__ == NonRetryableError.__name__
