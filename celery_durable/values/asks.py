"""What a wait asks a person: a question, whom, and the JSON schema of the answer. It is JSON text in the step's row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery_durable.errors import ValueRefused
from celery_durable.values.names import MAX_ID_LENGTH, check_text_name
from celery_durable.values.payloads import PayloadLimits, ValidationFailed, encode

_MAX_QUESTION = 16 * 1024
_LIMITS = PayloadLimits()


def check_question(step: str, ask: object, to: object) -> str | None:
    """Return the question as JSON text, or None if there is none; raises ValueRefused."""
    if ask is None:
        if to is not None:
            raise ValueRefused(f"Wait {step!r} got to={to!r} without ask=: pass the question, too.")
        return None
    if to is not None:
        check_text_name(f"to= of wait {step!r}", to, MAX_ID_LENGTH)
    if not isinstance(ask, (str, Mapping)) or not ask:
        raise ValueRefused(f"ask={ask!r} of wait {step!r} cannot be used: pass a sentence, or a dict of facts.")
    text = encode(ask, what=f"ask= of wait {step!r}", limits=_LIMITS)
    if len(text) > _MAX_QUESTION:
        raise ValueRefused(
            f"ask= of wait {step!r} has {len(text)} characters as JSON, and {_MAX_QUESTION} are the most: "
            "ask in a sentence, and give a link to the rest."
        )
    return text


def encode_ask(question: str, to: str | None, schema: Mapping[str, Any] | None) -> str:
    """Return the JSON text of what a wait asks, with a question from `check_question`."""
    return f'{{"ask":{question},"schema":{_dump(schema)}{write_addressee(to)}'


def write_addressee(to: str | None) -> str:
    """Return how the JSON text of an ask to this addressee ends. No other ask ends like that."""
    return f',"to":{_dump(to)}}}'


def read_ask(text: str | None) -> dict[str, Any]:
    """Return the ``ask``, ``to`` and ``schema`` of a JSON text; nothing for None."""
    found: dict[str, Any] = {} if text is None else json.loads(text)
    return found


class SchemaUnusable(Exception):
    """A value cannot be checked by its JSON schema here. The message says why."""


def check_json_schema(schema: Mapping[str, Any], text: str) -> None:
    """Check a JSON text by the JSON schema of its type alone; raises ValidationFailed, SchemaUnusable.

    It says less than the type: it has no validators of the author.
    """
    try:
        import jsonschema_rs  # an extra  # noqa: PLC0415
    except ModuleNotFoundError:
        raise SchemaUnusable("jsonschema-rs is not installed") from None
    try:
        # The mask keeps the value out of the messages. Nothing is fetched, whatever a schema refers to.
        validator = jsonschema_rs.Draft202012Validator(dict(schema), mask="Input", retriever=_fetch_nothing)
    except ValueError as exc:
        raise SchemaUnusable(f"its JSON schema cannot be used: {exc}".partition("\n")[0]) from exc
    errors = list(validator.iter_errors(json.loads(text)))
    if errors:
        raise ValidationFailed([(_write_path(each.instance_path), each.message) for each in errors])


def _write_path(parts: Sequence[str | int]) -> str:
    return "$" + "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in parts)


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of it")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
