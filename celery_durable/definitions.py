"""A workflow as data: its name, function, types and defaults; and what a step function wants.

A definition knows no app and no database, so the decorated function can be imported anywhere;
the handle with ``.create()`` lives in `app`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import typing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from celery_durable.errors import AsyncNotSupported, DefinitionInvalid, WorkflowNameTaken, WorkflowNotFound
from celery_durable.model import WorkflowEvent
from celery_durable.values import UNSET, Codec, Duration, Retries, StepConfig, identifier, label

logger = logging.getLogger("celery_durable")

F = TypeVar("F", bound=Callable[..., Any])

_STEP_CONFIG = "__durable_step__"


@dataclass(frozen=True, slots=True)
class WorkflowDefinition:
    """What is registered under a name: code, types, defaults. ``queue`` None: the app's."""

    name: str
    fn: Callable[..., Any]
    queue: str | None
    step_defaults: StepConfig | None
    max_steps: int | None
    params: Codec
    output: Codec

    @property
    def where(self) -> str:
        """The code's place, for people."""
        return f"{self.fn.__module__}.{self.fn.__qualname__}"


def define(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str | None = None,
    step_defaults: StepConfig | None = None,
    max_steps: int | None = None,
) -> WorkflowDefinition:
    """Read a workflow function: ``fn(event: WorkflowEvent[P], step: Step) -> R``."""
    if not inspect.isfunction(fn):
        raise DefinitionInvalid(f"{fn!r} cannot be a workflow: decorate a plain function.")
    if _is_async(fn):
        raise AsyncNotSupported("Workflow", fn.__qualname__)
    if inspect.isgeneratorfunction(fn):
        raise DefinitionInvalid(f"Workflow function {fn.__qualname__} contains a yield: return its result instead.")
    signature = inspect.signature(fn)
    try:
        signature.bind(None, None)
    except TypeError:
        raise DefinitionInvalid(
            f"Workflow function {fn.__qualname__} must take two parameters: "
            "def fn(event: WorkflowEvent[Params], step: Step)."
        ) from None
    if max_steps is not None and max_steps < 1:
        raise DefinitionInvalid(f"max_steps={max_steps} of {fn.__qualname__} must be at least 1.")
    first = next(iter(signature.parameters))
    return WorkflowDefinition(
        name=identifier("Workflow name", fn.__name__ if name is None else name, 255),
        fn=fn,
        queue=None if queue is None else label("Queue", queue, 255),
        step_defaults=step_defaults,
        max_steps=max_steps,
        # Found when they are needed: the module may define the types below the workflow.
        params=Codec.ours(lambda: _payload_type(_declared(fn, first))),
        output=Codec.ours(lambda: _declared(fn, "return")),
    )


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)


def _payload_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is WorkflowEvent:
        return typing.get_args(annotation)[0]
    return None


def _declared(fn: Callable[..., Any], name: str) -> Any:
    """The type that a parameter, or "return", is annotated with; None where none is, or none that exists."""
    found = _annotation(fn, name)
    if isinstance(found, str):
        _tell_once(f"{fn.__module__}.{fn.__qualname__}", found)
        return None
    return found


def _annotation(fn: Callable[..., Any], name: str) -> Any:
    """One annotation by itself, so that another that cannot be resolved does no harm; as text if this one cannot."""
    try:
        written = fn.__annotations__[name]
    except (AttributeError, KeyError, NameError):
        return None
    code = inspect.unwrap(fn)
    alone = SimpleNamespace(__annotations__={name: written}, __type_params__=getattr(code, "__type_params__", ()))
    try:
        return typing.get_type_hints(alone, globalns=getattr(code, "__globals__", {}), include_extras=True)[name]
    except Exception:  # noqa: BLE001  # the text may be any expression: a TYPE_CHECKING import, a remark
        return str(written)


@functools.cache
def _tell_once(where: str, annotation: str) -> None:
    logger.warning(
        "Annotation %s of %s names nothing that exists at run time, so its values stay plain JSON data: "
        "import or define it at the top of the module",
        annotation,
        where,
    )


class Registry:
    """The workflows that this process knows, by name."""

    def __init__(self, parent: Registry | None = None) -> None:
        self._definitions: dict[str, WorkflowDefinition] = {}
        self._parent = parent

    def add(self, definition: WorkflowDefinition) -> None:
        """Register; the same function again (a module imported anew) replaces itself."""
        taken = self.find(definition.name)
        if taken is not None and taken.where != definition.where:
            raise WorkflowNameTaken(definition.name, taken.where, definition.where)
        self._definitions[definition.name] = definition

    def find(self, name: str) -> WorkflowDefinition | None:
        """The workflow of this name, None when this process does not know it."""
        found = self._definitions.get(name)
        return found if found is not None or self._parent is None else self._parent.find(name)

    def get(self, name: str) -> WorkflowDefinition:
        """The workflow of this name; raises WorkflowNotFound."""
        found = self.find(name)
        if found is None:
            raise WorkflowNotFound(name, list(self))
        return found

    def __iter__(self) -> Iterator[str]:
        inherited = [] if self._parent is None else [n for n in self._parent if n not in self._definitions]
        return iter([*inherited, *self._definitions])


SHARED = Registry()
"""What `@durable_workflow` registers: known to every app of the process, as `@shared_task` is."""


# --- steps --------------------------------------------------------------------------------------


def durable_step(
    *, retries: Retries | int | None = UNSET, timeout: Duration | None = UNSET, repeat: bool = UNSET
) -> Callable[[F], F]:
    """Give a function its step defaults where it is defined; the function itself stays as it is."""
    config = StepConfig(retries=retries, timeout=timeout, repeat=repeat)

    def mark(fn: F) -> F:
        if _is_async(fn):
            raise AsyncNotSupported("Step", getattr(fn, "__qualname__", repr(fn)))
        setattr(fn, _STEP_CONFIG, config)
        return fn

    return mark


@dataclass(frozen=True, slots=True)
class StepFunction:
    """What the engine needs to know of a step's callable."""

    name: str | None
    wants_tx: bool
    config: StepConfig | None
    result: Codec


_known: weakref.WeakKeyDictionary[Callable[..., Any], StepFunction] = weakref.WeakKeyDictionary()


def describe_step(fn: Callable[..., Any]) -> StepFunction:
    """Inspect a step's callable, once."""
    try:
        found = _known.get(fn)
    except TypeError:  # unhashable or not weakly referable, as a bound method of a slotted object is
        return _describe(fn)
    if found is None:
        found = _known[fn] = _describe(fn)
    return found


def _describe(fn: Callable[..., Any]) -> StepFunction:
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    code: Callable[..., Any] = inner if inspect.isroutine(inner) else type(inner).__call__
    name = getattr(inner, "__name__", None)
    if _is_async(code):
        raise AsyncNotSupported("Step", name or repr(inner))
    if inspect.isclass(inner):
        code, result = inner.__init__, inner
    else:
        result = _declared(code, "return")
    return StepFunction(
        name=None if name == "<lambda>" else name,
        wants_tx=_wants_tx(fn, code),
        config=getattr(inner, _STEP_CONFIG, None),
        result=Codec.ours(lambda: result),  # not of fn: it would keep the key of its own cache entry alive
    )


def _wants_tx(fn: Callable[..., Any], code: Callable[..., Any]) -> bool:
    """Whether the first parameter is annotated StepTx, or carries no annotation and is named tx."""
    try:
        first = next(iter(inspect.signature(fn).parameters.values()), None)
    except (ValueError, TypeError):  # builtins without a signature
        return False
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    if first.annotation is first.empty:
        return first.name == "tx"
    annotation = _annotation(code, first.name)
    if isinstance(annotation, str):  # a name that only type checkers import
        return annotation.rpartition(".")[2].strip("\"' ") == "StepTx"
    return getattr(annotation, "__durable_tx__", False) is True
