"""A form for the answer to a question, made from its JSON schema. What a form cannot show is a field for JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PREFIX = "field."
_INPUTS = {"integer": "number", "number": "number", "string": "text"}
_FORMATS = {"date": "date", "email": "email", "uri": "url"}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the answer, or the whole answer, with an empty ``name``. ``kind``: an input's type, choice or json.

    ``choices``: pairs of JSON text and label.
    """

    name: str
    label: str
    kind: str
    is_required: bool
    is_whole: bool = False
    about: str = ""
    choices: Sequence[tuple[str, str]] = ()
    default: str = ""

    @property
    def input_name(self) -> str:
        """The name of the input."""
        return f"{_PREFIX}{self.name}"

    def has_problem(self, path: str) -> bool:
        """Return whether a path, such as ``$.items[3]``, lies in this field."""
        return self.is_whole or re.fullmatch(rf"\$\.{re.escape(self.name)}([.\[].*)?", path) is not None

    def read(self, text: str) -> Any:
        """Return the value of a text; raises ValueError if it is no JSON. The check of the answer names other flaws."""
        if self.kind in ("choice", "json"):
            return json.loads(text)
        if self.kind == "number":
            try:
                return json.loads(text)
            except ValueError:
                return text
        return text


def make_fields(schema: Mapping[str, Any] | None) -> list[Field]:
    """Return the fields of a form for values of this schema."""
    schema = schema or {}
    found = _resolve(schema, schema)
    properties = found.get("properties") if found.get("type") == "object" else None
    if not isinstance(properties, Mapping) or not properties:
        return [_make_field("", found, schema, is_required=True, is_whole=True)]
    required = found.get("required", ())
    return [
        _make_field(name, each if isinstance(each, Mapping) else {}, schema, is_required=name in required)
        for name, each in properties.items()
    ]


def read_form(fields: Sequence[Field], form: Mapping[str, str]) -> tuple[Any, list[tuple[str, str]]]:
    """Return the answer that a form holds, and what in it is no JSON: pairs of a path and a sentence."""
    answer: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for each in fields:
        text = form.get(each.input_name, "").replace("\r\n", "\n")
        if not text and (each.kind not in ("text", "json") or not each.is_required):
            continue  # the check of the answer says if it is missing
        try:
            answer[each.name] = each.read(text)
        except ValueError as exc:
            problems.append(("$" if each.is_whole else f"$.{each.name}", f"This is not JSON: {exc}"))
    return (answer.get("") if fields[0].is_whole else answer), problems


def _resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference names, or the one beside null; otherwise this one."""
    options = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(options) == 1:
        schema = {**schema, **options[0]}
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    return {**root.get("$defs", {}).get(name, {}), **{key: schema[key] for key in schema if key != "$ref"}}


def _make_field(
    name: str, schema: Mapping[str, Any], root: Mapping[str, Any], *, is_required: bool, is_whole: bool = False
) -> Field:
    found = _resolve(schema, root)
    kind, choices = _find_kind(found)
    default = found.get("default")
    label = str(found.get("title") or name or "Answer")
    return Field(
        name,
        label,
        kind,
        is_required,
        is_whole,
        str(found.get("description", "")) if not is_whole else "",
        choices,
        "" if default is None else default if isinstance(default, str) and not choices else json.dumps(default),
    )


def _find_kind(schema: Mapping[str, Any]) -> tuple[str, Sequence[tuple[str, str]]]:
    if isinstance(values := schema.get("enum"), Sequence):
        return "choice", [(json.dumps(each), each if isinstance(each, str) else json.dumps(each)) for each in values]
    match schema.get("type"):
        case "boolean":
            return "choice", [("true", "yes"), ("false", "no")]
        case str(type_) if type_ in _INPUTS:
            return _FORMATS.get(str(schema.get("format")), _INPUTS[type_]), ()
    return "json", ()
