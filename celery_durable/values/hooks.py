"""The Celery tasks that a workflow sends when a run ends (``on_complete``, ``on_failure``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_durable.errors import DefinitionInvalid, PayloadTooLarge
from celery_durable.model import OutboxMessage
from celery_durable.values.names import MAX_ID_LENGTH, check_text_name
from celery_durable.values.outbox_messages import build_task_message
from celery_durable.values.payloads import PayloadLimits

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
    """Return the message for the task ``name`` with ``outcome`` as its argument.

    If the message would be too large, it omits the ``output`` of the outcome.
    """
    deep = limits.depth + _EXTRA_DEPTH
    try:
        return build_task_message(name, (outcome,), {}, id_=id_, limits=PayloadLimits(limits.size_bytes, deep))
    except PayloadTooLarge:
        omitted = {} if outcome["output"] is None else {"output": None, "outputOmitted": True}
        return build_task_message(name, ({**outcome, **omitted},), {}, id_=id_, limits=PayloadLimits(2**31, deep))
