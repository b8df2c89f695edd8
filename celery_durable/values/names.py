"""Names, ids and free text, made sure to fit every database."""

from __future__ import annotations

import re

from celery_durable.errors import InvalidEventType, InvalidInstanceId, InvalidLabel, InvalidTopic, NameInvalid

_IDENTIFIER = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_-]*")
_TOPIC = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.:/-]*")
_NO_LABEL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

LONGEST_ID = 255
"""What the columns of ids and names hold, whatever the settings allow."""
LONGEST_TOPIC = 100
LONGEST_LABEL = 64
_LONGEST_ERROR = 10_000

UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")
"""What some database refuses in text: NUL, and half a surrogate pair."""


def identifier(what: str, value: object, limit: int) -> str:
    """A name of letters, digits, ``_`` and ``-`` that does not begin with ``-``."""
    return _identifier(NameInvalid, what, value, limit)


def instance_id(value: object, limit: int) -> str:
    """An instance id; raises InvalidInstanceId."""
    return _identifier(InvalidInstanceId, "Instance id", value, limit)


def event_type(value: object, limit: int) -> str:
    """An event type; raises InvalidEventType."""
    return _identifier(InvalidEventType, "Event type", value, limit)


def topic(value: object) -> str:
    """A topic: an event type that may have ``.``, ``:`` and ``/`` in it; raises InvalidTopic."""
    if not isinstance(value, str) or len(value) > LONGEST_TOPIC or not _TOPIC.fullmatch(value):
        rule = f"use 1 to {LONGEST_TOPIC} of the characters a-z A-Z 0-9 _ - . : / and begin with none of - . : /"
        raise InvalidTopic("Topic", value, rule)
    return value


def _identifier(error: type[NameInvalid], what: str, value: object, limit: int) -> str:
    # fullmatch: "$" would let a trailing newline pass.
    if not isinstance(value, str) or len(value) > limit or not _IDENTIFIER.fullmatch(value):
        raise error(what, value, f"use 1 to {limit} of the characters a-z A-Z 0-9 _ - and do not begin with '-'")
    return value


def label(what: str, value: object, limit: int) -> str:
    """A step name or log category: any text without control characters."""
    return _text(NameInvalid, what, value, limit)


def label_name(value: object) -> str:
    """The name of an instance's label; raises InvalidLabel."""
    return _identifier(InvalidLabel, "Label name", value, LONGEST_LABEL)


def label_value(name: str, value: object) -> str:
    """The value of an instance's label; raises InvalidLabel."""
    return _text(InvalidLabel, f"Label {name!r} with the value", value, LONGEST_ID)


def _text(error: type[NameInvalid], what: str, value: object, limit: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limit or _NO_LABEL.search(value):
        raise error(what, value, f"use text of 1 to {limit} characters without control characters")
    return value


def storable(text: str, limit: int) -> str:
    """Free text, such as an error message, made fit for every database: no NUL, no lone surrogates, bounded."""
    clean = UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", ""))
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def storable_error(name: str, message: str) -> tuple[str, str]:
    """An error's name and message, made fit for every database."""
    return storable(name, LONGEST_ID), storable(message, _LONGEST_ERROR)
