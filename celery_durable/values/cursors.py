"""Page cursors: opaque text that says where a list goes on, and nothing of what is listed.

They come back from outside, so they are read as anything else from there: what this module did not write is refused.
"""

from __future__ import annotations

import base64
import json

from celery_durable.errors import CursorInvalid
from celery_durable.values.names import UNSTORABLE

_LONGEST = 4096
_LARGEST = 2**63 - 1

CursorPart = int | str


def write_cursor(kind: str, *parts: CursorPart) -> str:
    """The cursor of a list of this kind, after the item that ``parts`` name."""
    text = json.dumps([kind, *parts], ensure_ascii=False, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str, kind: str, *types: type[CursorPart]) -> list[CursorPart]:
    """What `write_cursor` was given: whole numbers from 0 to 2**63 - 1, and storable text. Raises CursorInvalid."""
    if len(cursor) > _LONGEST:
        raise CursorInvalid(cursor)
    try:
        found = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as exc:
        raise CursorInvalid(cursor) from exc
    if not isinstance(found, list) or len(found) != 1 + len(types) or found[0] != kind:
        raise CursorInvalid(cursor)
    parts = found[1:]
    if not all(_is(part, type_) for part, type_ in zip(parts, types, strict=True)):
        raise CursorInvalid(cursor)
    return parts


def _is(part: object, type_: type[CursorPart]) -> bool:
    if type_ is int:
        return type(part) is int and 0 <= part <= _LARGEST
    return isinstance(part, str) and not UNSTORABLE.search(part)
