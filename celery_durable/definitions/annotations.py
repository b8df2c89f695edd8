"""The types that functions declare.

An annotation that cannot be resolved at run time does no harm: a warning is logged once, and values stay JSON data.
"""

from __future__ import annotations

import functools
import inspect
import logging
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery_durable.values import Codec

logger = logging.getLogger("celery_durable")


def build_resolved_codec(annotation: Any, what: str) -> Codec:
    """Return the codec of a type, and resolve the type now. ``what`` names it in errors."""
    codec = Codec.for_stored_values(lambda: annotation, what=what)
    codec.resolve_type(annotation)
    return codec


def resolve_annotation_or_warn(fn: Callable[..., Any], name: str) -> Any:
    """The annotated type of a parameter or of "return"; None without an annotation.

    If the annotation cannot be resolved, logs a warning once and returns None.
    """
    found = resolve_annotation(fn, name)
    if isinstance(found, str):
        _warn_unresolved_once(f"{fn.__module__}.{fn.__qualname__}", found)
        return None
    return found


def resolve_annotation(fn: Callable[..., Any], name: str) -> Any:
    """Resolve one annotation on its own, so that another one that cannot be resolved does no harm.

    Returns its text if it cannot be resolved itself, and None if there is none.
    """
    try:
        annotation = fn.__annotations__[name]
    except (AttributeError, KeyError, NameError):
        return None
    code = inspect.unwrap(fn)
    holder = SimpleNamespace(__annotations__={name: annotation}, __type_params__=getattr(code, "__type_params__", ()))
    try:
        return typing.get_type_hints(holder, globalns=getattr(code, "__globals__", {}), include_extras=True)[name]
    except Exception:  # noqa: BLE001  # the text may be any expression, such as a name imported under TYPE_CHECKING
        return str(annotation)


@functools.cache
def _warn_unresolved_once(where: str, annotation: str) -> None:
    logger.warning(
        "Annotation %s of %s names nothing that exists at run time, so its values stay plain JSON data: "
        "import or define it at the top of the module",
        annotation,
        where,
    )
