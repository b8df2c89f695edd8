"""Checks of names and ids, and clean-up of free text, so that every database can store them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from celery_durable.errors import (
    InvalidEventType,
    InvalidInstanceId,
    InvalidTopic,
    NameInvalid,
)
from celery_durable.model import ANSWER_ID_PREFIX

P = ParamSpec("P")
T = TypeVar("T")

_IDENTIFIER = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_-]*")
_TOPIC = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.:/-]*")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

MAX_ID_LENGTH = 255
"""The size of the columns of ids and names, in characters. The settings may allow less."""
MAX_TOPIC_LENGTH = 100
_MAX_ERROR_LENGTH = 10_000

UNSTORABLE_CHARACTERS = re.compile(r"[\x00\ud800-\udfff]")
"""Characters that some databases refuse in text: NUL, and half a surrogate pair."""


def check_identifier(what: str, value: object, limit: int) -> str:
    """Return a name of letters, digits, ``_`` and ``-`` that does not begin with ``-``. Raises NameInvalid."""
    return check_identifier_as(NameInvalid, what, value, limit)


def check_instance_id(value: object, limit: int) -> str:
    """Return a valid instance id. Raises InvalidInstanceId."""
    return check_identifier_as(InvalidInstanceId, "Instance id", value, limit)


def check_event_type(value: object, limit: int) -> str:
    """Return a valid event type. Raises InvalidEventType."""
    return check_identifier_as(InvalidEventType, "Event type", value, limit)


def check_topic(value: object) -> str:
    """Return a valid topic: like an event type, but it may contain ``.``, ``:`` and ``/``. Raises InvalidTopic."""
    text = require_text("Topic", value, InvalidTopic)
    if len(text) > MAX_TOPIC_LENGTH or not _TOPIC.fullmatch(text):
        rule = f"use 1 to {MAX_TOPIC_LENGTH} of the characters a-z A-Z 0-9 _ - . : / and begin with none of - . : /"
        raise InvalidTopic("Topic", value, rule)
    return read_text(text)


def check_identifier_as(error: type[NameInvalid], what: str, value: object, limit: int) -> str:
    """Do what `check_identifier` does. Raises ``error``."""
    text = require_text(what, value, error)
    # fullmatch: "$" would let a trailing newline pass.
    if len(text) > limit or not _IDENTIFIER.fullmatch(text):
        raise error(what, value, f"use 1 to {limit} of the characters a-z A-Z 0-9 _ - and do not begin with '-'")
    return read_text(text)


def check_text_name(what: str, value: object, limit: int, error: type[NameInvalid] = NameInvalid) -> str:
    """Return a name of any characters but control characters, such as a step name. Raises ``error``."""
    # Each step comes here: no call for plain text.
    text = value if type(value) is str else read_text(require_text(what, value, error))
    if not 0 < len(text) <= limit or _CONTROL_CHARACTERS.search(text):
        raise error(what, value, f"use text of 1 to {limit} characters without control characters")
    return text


def check_event_id(value: object) -> str:
    """Return a valid event id, other than those of answers. Raises NameInvalid."""
    text = check_text_name("Event id", value, MAX_ID_LENGTH)
    if text.startswith(ANSWER_ID_PREFIX):
        raise NameInvalid("Event id", value, f"{ANSWER_ID_PREFIX!r} begins the ids of answers to a wait with ask=")
    return text


def read_text(value: str) -> str:
    """Return the text of a subclass of str. An f-string would write the member of an enum as "Topic.PRICES"."""
    return str.__str__(value)


def require_text(what: str, value: object, error: type[NameInvalid] = NameInvalid) -> str:
    """Return text that was passed in. Raises ``error`` for anything else. ``what`` names the argument."""
    if not isinstance(value, str):
        raise error(what, value, f"it is of type {type(value).__name__}; pass text (str)")
    return value


def sanitize_text(text: str, limit: int) -> str:
    """Return free text without NUL and lone surrogates, cut to ``limit`` characters."""
    clean = UNSTORABLE_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", ""))
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def sanitize_error(name: str, message: str) -> tuple[str, str]:
    """Return the name and the message of an error as `sanitize_text` makes them, each cut to its column."""
    return sanitize_text(name, MAX_ID_LENGTH), sanitize_text(message, _MAX_ERROR_LENGTH)


def list_keywords(what: str, function: Callable[P, T]) -> Callable[P, T]:
    """Make the TypeError for an unknown keyword of a function list those that it has."""
    known = list(inspect.signature(function).parameters)[1:]  # without `self`, or the decorated function

    @functools.wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        if unknown := [name for name in given if name not in known]:
            raise TypeError(f"{what} takes no {unknown[0]}=. It takes {', '.join(f'{name}=' for name in known)}.")
        return function(*args, **given)

    return checked


def list_fields(cls: type[T]) -> type[T]:
    """Make the TypeError for an unknown field of a dataclass list those that it has."""
    init: Any = cls.__init__
    setattr(cls, "__init__", list_keywords(cls.__name__, init))  # noqa: B010  # mypy refuses the assignment
    return cls
