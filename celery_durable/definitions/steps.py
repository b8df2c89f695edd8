"""What the engine needs to know of a step's function: its name, its defaults, the type of its result."""

from __future__ import annotations

import functools
import inspect
import logging
import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, overload

from celery_durable.errors import DefinitionInvalid
from celery_durable.values import (
    UNSET,
    Codec,
    Duration,
    Limit,
    OnCancelStep,
    OnLostStep,
    Retries,
    StepConfig,
    is_async_function,
    refuse_async_generator,
)

F = TypeVar("F", bound=Callable[..., Any])

_STEP_CONFIG = "__durable_step__"
_RUNS_IN_ORM = "__durable_orm__"


@overload
def durable_step(fn: F, /) -> F: ...
@overload
def durable_step(
    *,
    retries: Retries | int | None = UNSET,
    timeout: Duration | None = UNSET,
    repeat: bool = UNSET,
    on_lost: OnLostStep = UNSET,
    on_cancel: OnCancelStep = UNSET,
    limits: Sequence[Limit] = UNSET,
    orm: bool = True,
) -> Callable[[F], F]: ...
def durable_step(
    fn: Any = None,
    /,
    *,
    retries: Retries | int | None = UNSET,
    timeout: Duration | None = UNSET,
    repeat: bool = UNSET,
    on_lost: OnLostStep = UNSET,
    on_cancel: OnCancelStep = UNSET,
    limits: Sequence[Limit] = UNSET,
    orm: bool = True,
) -> Any:
    """Give a function step defaults where it is defined. It can still be called as before.

    ``orm``: whether the function runs inside the step's transaction, so that what it writes with the framework's ORM is
    committed with the step. This concerns functions that take `StepTx` in a project with
    ``celery_durable.contrib.django`` or ``celery_durable.contrib.flask``, and has no effect elsewhere.
    """
    config = StepConfig(
        retries=retries, timeout=timeout, repeat=repeat, on_lost=on_lost, on_cancel=on_cancel, limits=limits
    )

    def mark(fn: F) -> F:
        if not callable(fn):
            raise DefinitionInvalid(f"{fn!r} cannot be a step: decorate a function, or write @durable_step(retries=3).")
        refuse_async_generator("Step", fn)
        if inspect.isroutine(fn) and not isinstance(return_type := resolve_annotation(fn, "return"), str):
            build_resolved_codec(return_type, _describe_return_type(fn))
        setattr(fn, _STEP_CONFIG, config)
        setattr(fn, _RUNS_IN_ORM, orm)
        return fn

    return mark if fn is None else mark(fn)


def _describe_return_type(fn: Any) -> str:
    return f"The return type of step function {getattr(fn, '__qualname__', fn)}"


@dataclass(frozen=True, slots=True)
class StepFunction:
    name: str | None
    wants_tx: bool
    orm: bool
    is_async: bool
    config: StepConfig | None
    result: Codec


def runs_in_orm(fn: Callable[..., Any]) -> bool:
    """Whether a step's function runs inside the step's transaction, if the store wants that (`durable_step`)."""
    return bool(getattr(fn, _RUNS_IN_ORM, True))


_step_functions: weakref.WeakKeyDictionary[Callable[..., Any], StepFunction] = weakref.WeakKeyDictionary()


def describe_step(fn: Callable[..., Any]) -> StepFunction:
    """Inspect a step's callable and cache the result; raises DefinitionInvalid."""
    try:
        found = _step_functions.get(fn)
    except TypeError:  # unhashable, or without weak references, such as a bound method of a slotted object
        return _describe(fn)
    if found is None:
        found = _step_functions[fn] = _describe(fn)
    return found


def _describe(fn: Callable[..., Any]) -> StepFunction:
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code: Callable[..., Any] = inner if inspect.isroutine(inner) else type(inner).__call__
    name = getattr(inner, "__name__", None)
    refuse_async_generator("Step", fn)
    if inspect.isclass(inner):
        code, result = inner.__init__, inner
    else:
        result = resolve_annotation_or_warn(code, "return")
    return StepFunction(
        name=None if name == "<lambda>" else name,
        wants_tx=_wants_tx(fn, code),
        orm=runs_in_orm(inner),
        is_async=is_async_function(fn),
        config=getattr(inner, _STEP_CONFIG, None),
        result=_result_codec(inner, result),
    )


def _result_codec(inner: Any, result: Any) -> Codec:
    # The codec must not refer to the callable itself, which would keep its own weak cache entry alive.
    codec = Codec.for_stored_values(lambda: result, what=_describe_return_type(inner))
    try:
        _ = codec.is_typed  # resolve the type now, before a body runs whose result could not be recorded
    except DefinitionInvalid:
        if not inspect.isclass(inner):
            raise
        return Codec()  # a class used as a step declares no result type; an instance that is not JSON data is refused
    return codec


def _wants_tx(fn: Callable[..., Any], code: Callable[..., Any]) -> bool:
    """Whether the first parameter is annotated with StepTx, or is named tx and has no annotation."""
    try:
        first = next(iter(inspect.signature(fn).parameters.values()), None)
    except (ValueError, TypeError):  # builtins without a signature
        return False
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    if first.annotation is first.empty:
        return first.name == "tx"
    annotation = resolve_annotation(code, first.name)
    if isinstance(annotation, str):  # a name that only type checkers import
        return annotation.rpartition(".")[2].strip("\"' ") == "StepTx"
    return getattr(annotation, "__durable_tx__", False) is True


# The types that functions declare.
#
# An annotation that cannot be resolved at run time does no harm: a warning is logged once, and values stay JSON data.


logger = logging.getLogger("celery_durable")


def build_resolved_codec(annotation: Any, what: str) -> Codec:
    """Return the codec of a type, and resolve the type now. ``what`` names it in errors."""
    codec = Codec.for_stored_values(lambda: annotation, what=what)
    codec.resolve_type(annotation)
    return codec


def resolve_annotation_or_warn(fn: Callable[..., Any], name: str) -> Any:
    """The annotated type of a parameter or of "return"; None, with one warning, if it cannot be resolved."""
    found = resolve_annotation(fn, name)
    if isinstance(found, str):
        _warn_unresolved_once(f"{fn.__module__}.{fn.__qualname__}", found)
        return None
    return found


def resolve_annotation(fn: Callable[..., Any], name: str) -> Any:
    """Resolve one annotation on its own, apart from those that cannot be; else return its text, or None without one."""
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
