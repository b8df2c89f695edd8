"""Functions that check the arguments of `Step` methods and build the calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, get_args

from celery_durable import values
from celery_durable.definitions import Definition
from celery_durable.errors import DefinitionInvalid, ValueRefused
from celery_durable.model import OnLost
from celery_durable.step.calls import BodyCall, ChildCall, HasDefinition, MapCall, TaskCall
from celery_durable.values import Duration, Retries, StepConfig, parse_duration

DEFAULT_EVENT_TIMEOUT = "24 hours"
DEFAULT_TASK_TIMEOUT = "24 hours"
MAX_MAP_ITEMS = 10_000
_MIN_TIMEOUT = timedelta(seconds=1)
_CONFIG_FIELDS = frozenset(StepConfig.__dataclass_fields__)


def build_body_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BodyCall:
    """Build a call of `do` from its arguments: [name,] [config,] fn, then the arguments of ``fn``."""
    rest = list(args)
    name = rest.pop(0) if rest and isinstance(rest[0], str) else None
    config = rest.pop(0) if rest and isinstance(rest[0], StepConfig) else None
    if not rest or not callable(rest[0]):
        if name is None and any(map(callable, rest)):  # the function is behind something else: behind its name
            values.require_text("Step name", rest[0])
        raise DefinitionInvalid(
            "step.do() needs a function: step.do('name', fn, *args) or step.do('name', StepConfig(...), fn, *args); "
            f"it got {args!r}."
        )
    if not _CONFIG_FIELDS.isdisjoint(kwargs):
        _check_takes(rest[0], kwargs)
    return BodyCall(name, config, rest[0], tuple(rest[1:]), kwargs)


def _check_takes(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise DefinitionInvalid if an option of a step is among the arguments of a function that does not take it."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a function in C
        return
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in sorted(_CONFIG_FIELDS & kwargs.keys()):
        if not takes_any and name not in parameters:
            raise DefinitionInvalid(
                f"step.do() passes {name}= to {getattr(fn, '__qualname__', repr(fn))}, which has no such parameter. "
                f"To configure the step: step.do('name', StepConfig({name}={kwargs[name]!r}), fn, *args)."
            )


def build_task_call(
    name: str, signature: Any, timeout: Duration, retries: Retries | int | None, on_lost: OnLost | None
) -> TaskCall:
    """Build a call of `task`; raises ValueRefused, DurationInvalid."""
    return TaskCall(name, signature, build_task_config(timeout, retries), _check_on_lost(on_lost))


def _check_on_lost(on_lost: OnLost | None) -> OnLost | None:
    if on_lost is not None and on_lost not in get_args(OnLost):
        raise ValueRefused(f"on_lost={on_lost!r} must be one of {', '.join(get_args(OnLost))}.")
    return on_lost


def build_task_config(timeout: Duration, retries: Retries | int | None) -> StepConfig:
    """Build the configuration of a task from its timeout, at least 1 s, and its retries; raises DurationInvalid."""
    return StepConfig(retries=retries, timeout=parse_duration(timeout, minimum=_MIN_TIMEOUT))


def build_map_call(
    name: str,
    task: Any,
    items: object,
    config: StepConfig,
    *,
    max_concurrency: Any,
    on_lost: OnLost | None,
    return_exceptions: bool,
) -> MapCall:
    """Build a call of `map`; raises ValueRefused."""
    if max_concurrency is not None and (
        isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1
    ):
        raise ValueRefused(
            f"max_concurrency={max_concurrency!r} of step {name!r} must be at least 1, or None for all at once."
        )
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise ValueRefused(
            f"step.map({name!r}) got {items!r} as its items: pass a list or another iterable that is no text."
        )
    given = tuple(items)
    if len(given) > MAX_MAP_ITEMS:
        raise ValueRefused(
            f"step.map({name!r}) got {len(given)} items, and {MAX_MAP_ITEMS} is the most: map chunks of them, or have "
            "child workflows map a part each."
        )
    return MapCall(name, task, given, config, max_concurrency, return_exceptions, _check_on_lost(on_lost))


def build_child_call(
    name: str,
    workflow: HasDefinition,
    params: Any,
    *,
    id: str | None,  # the public name
    timeout: Duration | None,
    labels: Mapping[str, str] | None,
) -> ChildCall:
    """Build a call of `child`; raises DefinitionInvalid, InvalidLabel, TooManyLabels."""
    definition = require_definition(f"step.child({name!r})", workflow)
    child_id = values.read_text(id) if isinstance(id, str) else id
    return ChildCall(name, definition, params, child_id, timeout, values.check_labels(labels))


def require_definition(call: str, workflow: HasDefinition) -> Definition:
    """Return the definition of a workflow that was passed to a call; raises DefinitionInvalid."""
    definition = getattr(workflow, "definition", None)
    if not isinstance(definition, Definition):
        raise DefinitionInvalid(f"{call} needs a workflow, and got {workflow!r}: pass what @durable_workflow made.")
    return definition
