"""Declared types, made fit for pydantic."""

from __future__ import annotations

import sys
import types
import typing
from typing import Annotated, Any, LiteralString, NotRequired, Required, Union

import typing_extensions

_PYDANTIC_READS_TYPED_DICTS = sys.version_info >= (3, 12)


def adapt_for_pydantic(annotation: Any) -> Any:
    """The same type, with what pydantic refuses in it replaced by what means the same.

    Before Python 3.12 it reads only the TypedDict of typing_extensions: that of typing forgets there which keys are
    required where annotations are text. The annotations themselves still say so.
    """
    if annotation is LiteralString:
        return str
    return annotation if _PYDANTIC_READS_TYPED_DICTS else _convert(annotation, {})


def _convert(annotation: Any, known: dict[Any, Any]) -> Any:
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        if annotation not in known:
            known[annotation] = annotation  # one that holds itself stays, and is refused by pydantic
            known[annotation] = _convert_typed_dict(annotation, known)
        return known[annotation]
    args = typing.get_args(annotation)
    new = tuple(_convert(arg, known) for arg in args)
    if all(one is other for one, other in zip(args, new, strict=True)):
        return annotation
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return Annotated[(new[0], *annotation.__metadata__)]
    if origin in (Union, types.UnionType):
        return Union[new]  # noqa: UP007  # made of what is only known now
    return annotation.copy_with(new) if hasattr(annotation, "copy_with") else annotation.__origin__[new]


def _convert_typed_dict(given: Any, known: dict[Any, Any]) -> Any:
    fields: dict[str, Any] = {}
    for key, hint in typing.get_type_hints(given, include_extras=True).items():
        qualifier, inner = (Required if key in given.__required_keys__ else NotRequired), hint
        if typing.get_origin(hint) in (Required, NotRequired):
            qualifier, (inner,) = typing.get_origin(hint), typing.get_args(hint)
        fields[key] = qualifier[_convert(inner, known)]
    make: Any = typing_extensions.TypedDict
    made = make(given.__name__, fields)
    made.__module__, made.__doc__ = given.__module__, given.__doc__
    if (config := getattr(given, "__pydantic_config__", None)) is not None:
        made.__pydantic_config__ = config
    return made
