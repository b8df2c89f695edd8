"""Outbox messages from the Celery tasks and outbound events that a step sends with its commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_durable.errors import DefinitionInvalid, PayloadTooLarge, TaskRefused
from celery_durable.model import OutboxKind, OutboxMessage, TaskReference
from celery_durable.values.names import MAX_ID_LENGTH, check_text_name
from celery_durable.values.payloads import ALREADY_CHECKED_LIMITS, PayloadLimits, encode

_DELAY_OPTIONS = ("countdown", "eta")
_STORABLE_OPTIONS = frozenset({
    "compression", "exchange", "expires", "headers", "ignore_result", "priority", "queue", "routing_key", "shadow",
    "soft_time_limit", "time_limit",
})  # fmt: skip
"""Options whose meaning does not depend on when the task is sent."""
_PRIORITY_LEVELS = 256
_CANVAS_TYPES = ("chain", "group", "chord")


def build_task_message(
    what: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    id_: str,
    limits: PayloadLimits,
) -> OutboxMessage:
    """Return the message for a Celery Signature, or for a task or its name with ``args`` and ``kwargs``.

    Raises TaskRefused for what the outbox cannot store (a countdown, a canvas), NotSerializable, PayloadTooLarge.
    """
    options: Mapping[str, Any] = {}
    if isinstance(what, Mapping) and "task" in what:  # a Signature is a dict
        if args or kwargs:
            raise TaskRefused(what["task"], "a signature carries its own arguments; pass it alone")
        if what.get("subtask_type") in _CANVAS_TYPES:
            raise TaskRefused(what["task"], "a canvas is many messages; send a task that starts it")
        name, args, kwargs, options = what["task"], what["args"], what["kwargs"], what["options"]
    else:
        name = what if isinstance(what, str) else getattr(what, "name", None)
        if not isinstance(name, str):
            raise TaskRefused(what, "pass a signature, a task, or a task's name")
    check_text_name("Task name", name, MAX_ID_LENGTH)
    for option in options:
        if option in _DELAY_OPTIONS:
            why = (
                f"{option} would have the broker hold it, which loses it with the broker; step.sleep() before the step"
            )
            raise TaskRefused(name, why)
        if option not in _STORABLE_OPTIONS:
            raise TaskRefused(
                name, f"option {option!r} cannot be kept. These can: {', '.join(sorted(_STORABLE_OPTIONS))}"
            )
    body = {"args": list(args), "kwargs": dict(kwargs), "options": dict(options)}
    return OutboxMessage(id_, OutboxKind.TASK, name, encode(body, what=f"Task {name!r}", limits=limits))


def encode_step_task(what: Any, *, limits: PayloadLimits) -> str:
    """Encode the task of a task step for `build_replying_task_message`. Raises what `build_task_message` raises."""
    return _encode_task(build_task_message(what, (), {}, id_="", limits=limits))


def encode_map_task(what: Any, item: Any, *, limits: PayloadLimits) -> str:
    """Encode the task of a map step for one item: its first argument. Raises what `build_task_message` raises."""
    if isinstance(what, Mapping) and "task" in what:
        what = {**what, "args": [item, *what["args"]]}
        message = build_task_message(what, (), {}, id_="", limits=limits)
    else:
        message = build_task_message(what, (item,), {}, id_="", limits=limits)
    return _encode_task(message)


def encode_map_child(workflow: str, params: str) -> str:
    """Encode the child of a map step for one item, for `read_map_child`. ``params`` is JSON text."""
    return f'{{"workflow":{json.dumps(workflow)},"params":{params}}}'


def read_map_child(body: str) -> str:
    """Return the parameters that `encode_map_child` encoded, as JSON text."""
    return encode(json.loads(body)["params"], what="Parameters", limits=ALREADY_CHECKED_LIMITS)


def _encode_task(message: OutboxMessage) -> str:
    return encode(
        {"name": message.name, **message.content}, what=f"Task {message.name!r}", limits=ALREADY_CHECKED_LIMITS
    )


def build_replying_task_message(body: str, *, id_: str, reference: TaskReference) -> OutboxMessage:
    """Return the outbox message of a task that was encoded, and answers under this reference."""
    content = json.loads(body)
    name = content.pop("name")
    text = encode(content | {"reference": reference.to_json()}, what=f"Task {name!r}", limits=ALREADY_CHECKED_LIMITS)
    return OutboxMessage(id_, OutboxKind.TASK, name, text)


def read_task_route(body: str) -> tuple[str | None, int | None] | None:
    """Return the queue and the priority of an encoded task, None for what Celery decides; None for an encoded child."""
    options = json.loads(body).get("options")
    if options is None:
        return None
    queue, priority = options.get("queue"), options.get("priority")
    is_queue = isinstance(queue, str) and len(queue) <= MAX_ID_LENGTH
    is_priority = isinstance(priority, int) and 0 <= priority < _PRIORITY_LEVELS
    return queue if is_queue else None, priority if is_priority else None


def build_event_message(name: str, payload: Any, *, id_: str, limits: PayloadLimits) -> OutboxMessage:
    """Return the message of an outbound event. Raises NameInvalid, NotSerializable, PayloadTooLarge."""
    check_text_name("Outbound event", name, MAX_ID_LENGTH)
    return OutboxMessage(
        id_, OutboxKind.EVENT, name, encode(payload, what=f"Payload of outbound event {name!r}", limits=limits)
    )


# The Celery tasks that a workflow sends when a run ends (``on_complete``, ``on_failure``).


_EXTRA_DEPTH = 3
"""How many levels the output is nested in the arguments of the task."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletionHook:
    """A Celery task, or a task's name."""

    task: Any

    @classmethod
    def read(cls, task: Any, *, what: str) -> CompletionHook | None:
        """Return the hook for a task or a task's name, None for None. Raises DefinitionInvalid, NameInvalid."""
        if task is None:
            return None
        # Checks only the type: reading an attribute of a lazy task proxy would configure the Celery app now.
        if hasattr(type(task), "_get_current_object"):
            return cls(task)
        name = task if isinstance(task, str) else getattr(task, "name", None)
        if not isinstance(name, str) or isinstance(task, Mapping):
            raise DefinitionInvalid(
                f"{what} is {task!r}, which is no task: pass a Celery task, or a task's name. It is called with what "
                "became of the run, and goes where task_routes says."
            )
        return cls(check_text_name("Task name", name, MAX_ID_LENGTH))

    @property
    def name(self) -> str:
        """The task's name; raises NameInvalid."""
        return check_text_name("Task name", self.task if isinstance(self.task, str) else self.task.name, MAX_ID_LENGTH)


@dataclass(frozen=True, slots=True)
class CompletionHooks:
    """The hooks of one workflow: for a run that completes, and for one that fails or exceeds its deadline."""

    on_complete: CompletionHook | None = None
    on_failure: CompletionHook | None = None

    def of(self, *, is_complete: bool) -> CompletionHook | None:
        """The hook of a run that completes, or of one that ends otherwise."""
        return self.on_complete if is_complete else self.on_failure

    @classmethod
    def read(cls, owner: str, *, on_complete: Any, on_failure: Any) -> CompletionHooks:
        """Return the hooks of the workflow ``owner``. Raises DefinitionInvalid, NameInvalid."""
        return cls(
            CompletionHook.read(on_complete, what=f"on_complete of {owner}"),
            CompletionHook.read(on_failure, what=f"on_failure of {owner}"),
        )


def build_completion_message(
    name: str, outcome: Mapping[str, Any], *, id_: str, limits: PayloadLimits
) -> OutboxMessage:
    """Return the message for the task ``name``, without the ``output`` of its argument if that is too large."""
    deep = limits.depth + _EXTRA_DEPTH
    try:
        return build_task_message(name, (outcome,), {}, id_=id_, limits=PayloadLimits(limits.size_bytes, deep))
    except PayloadTooLarge:
        omitted = {} if outcome["output"] is None else {"output": None, "outputOmitted": True}
        return build_task_message(name, ({**outcome, **omitted},), {}, id_=id_, limits=PayloadLimits(2**31, deep))
