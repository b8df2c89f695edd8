"""Conversion of annotations that pydantic cannot read into equivalent ones that it can."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, LiteralString, NotRequired, Required, Union

import typing_extensions

from celery_durable.errors import AsyncNotSupported, DefinitionInvalid

_PYDANTIC_READS_TYPED_DICTS = sys.version_info >= (3, 12)


def adapt_for_pydantic(annotation: Any) -> Any:
    """Return an equivalent type that pydantic can read.

    Before Python 3.12 it reads only typing_extensions' TypedDict. That of typing loses which keys are required if its
    annotations are strings, so this restores it.
    """
    if annotation is LiteralString:
        return str
    return annotation if _PYDANTIC_READS_TYPED_DICTS else _convert(annotation, {})


def _convert(annotation: Any, known: dict[Any, Any]) -> Any:
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        if annotation not in known:
            known[annotation] = annotation  # a recursive type stays unchanged, and pydantic refuses it
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
        return Union[new]  # noqa: UP007  # its parts are known only at run time
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


_MAX_CLASS_NAME = 512


def name_class(annotation: Any) -> str | None:
    """Return the name by which `find_class` finds a class; None for anything else, such as a union."""
    if not isinstance(annotation, type):
        return None
    name = f"{annotation.__module__}:{annotation.__qualname__}"
    return name if len(name) <= _MAX_CLASS_NAME and find_class(name) is annotation else None


def find_class(name: str) -> type | None:
    """Return the class of this name, if this process has imported its module."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


# Async functions.


def is_async_function(fn: Callable[..., Any]) -> bool:
    """Whether calling ``fn``, which may be a partial, a method or an object, gives a coroutine."""
    # Not the function that a decorator wraps: what it returns may be the result, as from `asgiref.async_to_sync`.
    inner, code = _unwrap(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(code)


def refuse_async(what: str, fn: Callable[..., Any]) -> None:
    """Raise AsyncNotSupported for an async function, DefinitionInvalid for an async generator."""
    if is_async_function(fn):
        raise AsyncNotSupported(what, _name_of(fn))
    refuse_async_generator(what, fn)


def refuse_async_generator(what: str, fn: Callable[..., Any]) -> None:
    """Raise DefinitionInvalid for an async generator, which has no result."""
    if inspect.isasyncgenfunction(_unwrap(fn)[1]):
        raise DefinitionInvalid(
            f"{what} {_name_of(fn)!r} is an async generator, which has no result: return a list instead."
        )


def _unwrap(fn: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the function of a partial, and what is called if that is an object."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    return inner, inner if inspect.isroutine(inner) else type(inner).__call__


def _name_of(fn: Callable[..., Any]) -> str:
    inner, _ = _unwrap(fn)
    return getattr(inner, "__name__", repr(inner))
