"""The parameters of a workflow as people see them: names, types, and which ones are required."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the declared type. ``type`` is for people: ``str``, ``list``, ``int | null``, or a model's name."""

    name: str
    type: str
    required: bool


def read_parameters(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the fields of a JSON schema; none if it describes no object with fields."""
    required = schema.get("required", ())
    return tuple(
        Parameter(name, _describe(each), name in required) for name, each in schema.get("properties", {}).items()
    )


def _describe(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(_describe, choices)))
    kind = schema.get("type")
    return _NAMES.get(kind, kind) if isinstance(kind, str) else "any"
