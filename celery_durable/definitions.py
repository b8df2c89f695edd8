"""Workflows as data: name, function, types and defaults; and what the engine needs to know of a step's function.

A definition knows no app and no database, so the decorated function can be imported anywhere. The handle with
``.create()`` is in `handles`.
"""

from __future__ import annotations

import abc
import functools
import inspect
import logging
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, TypedDict, TypeVar, overload

from celery_durable.errors import AsyncNotSupported, DefinitionInvalid, WorkflowNameTaken, WorkflowNotFound
from celery_durable.model import PlannedStep, RunPlan, WorkflowEvent, WorkflowKind
from celery_durable.values import (
    UNSET,
    Backoff,
    Codec,
    CompletionHooks,
    Duration,
    Retries,
    StepConfig,
    StepPolicy,
    check_identifier,
    check_text_name,
    parse_duration,
)

logger = logging.getLogger("celery_durable")

F = TypeVar("F", bound=Callable[..., Any])

_STEP_CONFIG = "__durable_step__"
_MIN_DURATION = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition(abc.ABC):
    """A workflow that is registered under a name.

    ``queue``: None for the app's. ``retention``: how long an ended instance is kept, None for forever, UNSET for the
    app's. ``max_run_duration``, ``max_suspend_duration``: how long a run, and a single suspension, may take. None is
    for no limit; linear workflows have none. ``hooks``: the tasks to send when a run has ended.
    """

    name: str
    queue: str | None
    params: Codec
    output: Codec
    retention: timedelta | None = UNSET
    max_run_duration: timedelta | None = None
    max_suspend_duration: timedelta | None = None
    hooks: CompletionHooks = field(default_factory=CompletionHooks)
    kind: ClassVar[WorkflowKind]

    @property
    def is_limited(self) -> bool:
        """Whether its runs have a limit on their duration or on a suspension."""
        return self.max_run_duration is not None or self.max_suspend_duration is not None

    @property
    @abc.abstractmethod
    def source_location(self) -> str:
        """Where the code is defined, for people. It also tells two workflows of the same name apart."""

    @abc.abstractmethod
    def plan(self, policy: StepPolicy) -> RunPlan:
        """The rows with which its runs start; ``policy``: the app's default policy of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowDefinition(Definition):
    """A workflow that is a function: its code, types and defaults."""

    fn: Callable[..., Any]
    step_defaults: StepConfig | None
    max_steps: int | None
    kind = WorkflowKind.REPLAY

    @property
    def source_location(self) -> str:
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def plan(self, policy: StepPolicy) -> RunPlan:  # noqa: ARG002  # its steps are what the function calls
        return RunPlan()


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A step of a linear workflow. Its handler is found by ``name``.

    ``max_attempts``: in total; 1 for no retry, None for no limit. ``delay``, ``backoff``, ``max_delay``: how soon it is
    retried after an exception. ``timeout``: of each attempt, None for none. Values that you leave out come from the
    app's ``durable_step_defaults``.
    """

    name: str
    max_attempts: int | None = UNSET
    delay: Duration = UNSET
    backoff: Backoff = UNSET
    max_delay: Duration | None = UNSET
    timeout: Duration | None = UNSET

    def __post_init__(self) -> None:
        check_text_name("Step name", self.name, 256)
        max_attempts: Any = self.max_attempts
        if (
            max_attempts is not UNSET
            and max_attempts is not None
            and (isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1)
        ):
            raise DefinitionInvalid(f"max_attempts={max_attempts!r} of step {self.name!r} must be at least 1, or None.")
        _ = self.config

    @property
    def config(self) -> StepConfig:
        """These values as a StepConfig."""
        max_attempts = self.max_attempts
        limit = max_attempts - 1 if isinstance(max_attempts, int) else max_attempts
        retries = Retries(limit=limit, delay=self.delay, backoff=self.backoff, max_delay=self.max_delay)
        return StepConfig(retries=retries, timeout=self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDefinition(Definition):
    """A workflow that is a list of steps, each with a handler. A run that has started follows only its own rows."""

    module: str
    version: int
    steps: tuple[LinearStep, ...]
    handlers: dict[str, Callable[..., Any]]
    kind = WorkflowKind.LINEAR

    @property
    def source_location(self) -> str:
        return f"{self.module}:{self.name}"

    def plan(self, policy: StepPolicy) -> RunPlan:
        policies = [policy.override_with(step.config) for step in self.steps]
        planned = (PlannedStep(s.name, p.max_attempts, p.timeout) for s, p in zip(self.steps, policies, strict=True))
        return RunPlan(WorkflowKind.LINEAR, tuple(planned), self.version)

    def policy_of(self, step: str, policy: StepPolicy) -> StepPolicy:
        """The policy of a step. A recorded step that is no longer in the list has the default, ``policy``."""
        return next((policy.override_with(each.config) for each in self.steps if each.name == step), policy)


def define_linear(
    name: str,
    *,
    module: str,
    version: int,
    steps: Sequence[LinearStep],
    queue: str | None = None,
    params: Any = None,
    retention: Duration | None = UNSET,
    on_complete: Any = None,
    on_failure: Any = None,
) -> LinearDefinition:
    """Check a linear workflow and return its definition, still without handlers; raises DefinitionInvalid."""
    check_identifier("Workflow name", name, 255)
    number: Any = version
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**31:
        raise DefinitionInvalid(f"version={version!r} of linear workflow {name!r} must be a whole number from 1.")
    if not steps:
        raise DefinitionInvalid(
            f"Linear workflow {name!r} has no steps: nothing would ever happen. Give it at least one."
        )
    names = [step.name for step in steps]
    if duplicates := [each for each in dict.fromkeys(names) if names.count(each) > 1]:
        raise DefinitionInvalid(
            f"Linear workflow {name!r} has step {duplicates[0]!r} twice. A step's name finds its handler and its "
            "result: give the second another name; two names may have the same handler."
        )
    return LinearDefinition(
        name=name,
        module=module,
        version=version,
        steps=tuple(steps),
        handlers={},
        queue=None if queue is None else check_text_name("Queue", queue, 255),
        params=_build_resolved_codec(params, f"The parameter type of linear workflow {name!r}"),
        output=Codec(),
        retention=retention if retention is UNSET else _parse_optional_duration(retention),
        hooks=CompletionHooks.read(f"linear workflow {name!r}", on_complete=on_complete, on_failure=on_failure),
    )


class WorkflowOptions(TypedDict, total=False):
    """The options of the decorators and of `define`; `durable_workflow` documents them."""

    name: str | None
    queue: str | None
    step_defaults: StepConfig | None
    max_steps: int | None
    retention: Duration | None
    max_run_duration: Duration | None
    max_suspend_duration: Duration | None
    on_complete: Any
    on_failure: Any


def define(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str | None = None,
    step_defaults: StepConfig | None = None,
    max_steps: int | None = None,
    retention: Duration | None = UNSET,
    max_run_duration: Duration | None = None,
    max_suspend_duration: Duration | None = None,
    on_complete: Any = None,
    on_failure: Any = None,
) -> WorkflowDefinition:
    """Check a workflow function, ``fn(event: WorkflowEvent[P], step: Step) -> R``, and return its definition.

    Raises DefinitionInvalid, and AsyncNotSupported for a coroutine function.
    """
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
    params = Codec.for_stored_values(
        lambda: _payload_type(_resolve_annotation_or_warn(fn, first)),
        what=f"The parameter type of workflow {fn.__qualname__}",
    )
    output = Codec.for_stored_values(
        lambda: _resolve_annotation_or_warn(fn, "return"), what=f"The return type of workflow {fn.__qualname__}"
    )
    # A type that cannot be resolved yet is resolved when it is needed: the module may define it below the workflow.
    if not isinstance(params_type := _resolve_annotation(fn, first), str):
        params.resolve_type(_payload_type(params_type))
    if not isinstance(return_type := _resolve_annotation(fn, "return"), str):
        output.resolve_type(return_type)
    return WorkflowDefinition(
        name=check_identifier("Workflow name", fn.__name__ if name is None else name, 255),
        fn=fn,
        queue=None if queue is None else check_text_name("Queue", queue, 255),
        step_defaults=step_defaults,
        max_steps=max_steps,
        params=params,
        output=output,
        retention=retention if retention is UNSET else _parse_optional_duration(retention),
        max_run_duration=_parse_optional_duration(max_run_duration),
        max_suspend_duration=_parse_optional_duration(max_suspend_duration),
        hooks=CompletionHooks.read(fn.__qualname__, on_complete=on_complete, on_failure=on_failure),
    )


def _build_resolved_codec(annotation: Any, what: str) -> Codec:
    codec = Codec.for_stored_values(lambda: annotation, what=what)
    codec.resolve_type(annotation)
    return codec


def _parse_optional_duration(duration: Duration | None) -> timedelta | None:
    return None if duration is None else parse_duration(duration, minimum=_MIN_DURATION)


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)


def _payload_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is WorkflowEvent:
        return typing.get_args(annotation)[0]
    return None


def _resolve_annotation_or_warn(fn: Callable[..., Any], name: str) -> Any:
    """The annotated type of a parameter or of "return"; None without an annotation.

    If the annotation cannot be resolved, logs a warning once and returns None.
    """
    found = _resolve_annotation(fn, name)
    if isinstance(found, str):
        _warn_unresolved_once(f"{fn.__module__}.{fn.__qualname__}", found)
        return None
    return found


def _resolve_annotation(fn: Callable[..., Any], name: str) -> Any:
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


class Registry:
    """The workflows that this process knows, by name."""

    def __init__(self, parent: Registry | None = None) -> None:
        self._definitions: dict[str, Definition] = {}
        self._parent = parent

    def add(self, definition: Definition) -> None:
        """Register a definition. A reloaded module replaces its own definition.

        Raises WorkflowNameTaken if other code has this name.
        """
        existing = self.find(definition.name)
        if existing is not None and existing.source_location != definition.source_location:
            raise WorkflowNameTaken(definition.name, existing.source_location, definition.source_location)
        self._definitions[definition.name] = definition

    def find(self, name: str) -> Definition | None:
        """The workflow of this name; None if this process does not know it."""
        found = self._definitions.get(name)
        return found if found is not None or self._parent is None else self._parent.find(name)

    def get(self, name: str) -> Definition:
        """The workflow of this name; raises WorkflowNotFound."""
        found = self.find(name)
        if found is None:
            raise WorkflowNotFound(name, list(self))
        return found

    def __iter__(self) -> Iterator[str]:
        inherited = [] if self._parent is None else [n for n in self._parent if n not in self._definitions]
        return iter([*inherited, *self._definitions])


SHARED = Registry()
"""The workflows that `@durable_workflow` registers. Every app of the process knows them, as with `@shared_task`."""


# --- steps --------------------------------------------------------------------------------------


@overload
def durable_step(fn: F, /) -> F: ...
@overload
def durable_step(
    *, retries: Retries | int | None = UNSET, timeout: Duration | None = UNSET, repeat: bool = UNSET
) -> Callable[[F], F]: ...
def durable_step(
    fn: Any = None,
    /,
    *,
    retries: Retries | int | None = UNSET,
    timeout: Duration | None = UNSET,
    repeat: bool = UNSET,
) -> Any:
    """Give a function step defaults where it is defined. It can still be called as before."""
    config = StepConfig(retries=retries, timeout=timeout, repeat=repeat)

    def mark(fn: F) -> F:
        if _is_async(fn):
            raise AsyncNotSupported("Step", getattr(fn, "__qualname__", repr(fn)))
        if inspect.isroutine(fn) and not isinstance(return_type := _resolve_annotation(fn, "return"), str):
            _build_resolved_codec(return_type, _describe_return_type(fn))
        setattr(fn, _STEP_CONFIG, config)
        return fn

    return mark if fn is None else mark(fn)


def _describe_return_type(fn: Any) -> str:
    return f"The return type of step function {getattr(fn, '__qualname__', fn)}"


@dataclass(frozen=True, slots=True)
class StepFunction:
    """What the engine needs to know about a step's callable."""

    name: str | None
    wants_tx: bool
    config: StepConfig | None
    result: Codec


_step_functions: weakref.WeakKeyDictionary[Callable[..., Any], StepFunction] = weakref.WeakKeyDictionary()


def describe_step(fn: Callable[..., Any]) -> StepFunction:
    """Inspect a step's callable and cache the result; raises AsyncNotSupported and DefinitionInvalid."""
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
    if _is_async(code):
        raise AsyncNotSupported("Step", name or repr(inner))
    if inspect.isclass(inner):
        code, result = inner.__init__, inner
    else:
        result = _resolve_annotation_or_warn(code, "return")
    return StepFunction(
        name=None if name == "<lambda>" else name,
        wants_tx=_wants_tx(fn, code),
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
    annotation = _resolve_annotation(code, first.name)
    if isinstance(annotation, str):  # a name that only type checkers import
        return annotation.rpartition(".")[2].strip("\"' ") == "StepTx"
    return getattr(annotation, "__durable_tx__", False) is True
