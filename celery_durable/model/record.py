"""The base of records: what operations return, and its one JSON form: camelCase fields, without those that are None."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, ValidationInfo
from pydantic.alias_generators import to_camel

from celery_durable.model.states import StepState, StepStatus, StepType

_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def _describe(schema: dict[str, Any], record: type) -> None:
    """Complete the JSON schema of a record: its fields as its docstring describes them, without those that are None."""
    docs = [inspect.cleandoc(each.__doc__ or "").partition("\n\nAttributes:\n") for each in record.__mro__]
    schema["description"] = docs[0][0]
    texts = {name: " ".join(text.split()) for doc in reversed(docs) for name, text in _ATTRIBUTE.findall(doc[2])}
    for name, hint in get_type_hints(record, include_extras=True).items():
        aliases = [each.alias for each in getattr(hint, "__metadata__", ()) if getattr(each, "alias", None)]
        about = schema["properties"].get(aliases[0] if aliases else to_camel(name), {})
        if name in texts:
            about["description"] = texts[name]
        match about.get("anyOf"):
            case [{**kind}, {"type": "null"}]:
                del about["anyOf"]
                about |= kind
    fields = schema["properties"].items()
    schema["required"] = [name for name, about in fields if about.pop("default", ...) is not None]


class Record:
    """The base of records."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(alias_generator=to_camel, json_schema_extra=_describe)


def _from_ms(ms: Any) -> timedelta:
    if not isinstance(ms, int) or abs(ms) > _MAX_MS:
        raise ValueError("Input should be a number of milliseconds")  # pydantic reports no TypeError
    return timedelta(milliseconds=ms)


def _read_state(state: Any, info: ValidationInfo) -> StepStatus:
    """Return the status that is shown as ``state``. The type of the step, if the record has it, comes first."""
    status = _STATUSES.get(state)
    if status is None:
        raise ValueError(f"Input should be one of {', '.join(StepState)}")
    is_linear = info.data.get("type") is StepType.LINEAR
    return StepStatus.LINEAR_WAITING if is_linear and status is StepStatus.WAITING else status


_MAX_MS = timedelta.max // timedelta(milliseconds=1)
_STATUSES = {status.state: status for status in reversed(StepStatus)}  # `waiting` is that of other steps than linear

Milliseconds = Annotated[
    timedelta, PlainValidator(_from_ms), PlainSerializer(lambda it: it // timedelta(milliseconds=1), return_type=int)
]
"""A duration. JSON has its milliseconds."""
ShownStatus = Annotated[
    StepStatus, PlainValidator(_read_state), PlainSerializer(lambda it: it.state, return_type=StepState)
]
"""The status of a step. JSON has its `StepState`."""
RecordId = Annotated[int, PlainSerializer(str, return_type=str)]
"""A number that only grows. JSON has it as text, because not every client reads 64 bits."""
WorkflowName = Annotated[str, Field(alias="workflowName")]
