"""The tasks that are sent when a run has ended: read where the workflow is defined, named when one is sent."""

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
"""How much deeper an output lies in the letter than by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class CompletionHook:
    """A Celery task, or a task's name."""

    task: Any

    @classmethod
    def read(cls, task: Any, *, what: str) -> CompletionHook | None:
        """What a workflow says is to be sent, None for nothing; raises DefinitionInvalid, NameInvalid."""
        if task is None:
            return None
        # By the type alone: to look at a task that its app has not made yet would configure the app here and now.
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
    """What is sent when a run is complete, and when it failed or took too long."""

    on_complete: CompletionHook | None = None
    on_failure: CompletionHook | None = None

    @classmethod
    def read(cls, owner: str, *, on_complete: Any, on_failure: Any) -> CompletionHooks:
        """Those of a workflow; raises DefinitionInvalid, NameInvalid."""
        return cls(
            CompletionHook.read(on_complete, what=f"on_complete of {owner}"),
            CompletionHook.read(on_failure, what=f"on_failure of {owner}"),
        )


def build_completion_message(
    name: str, outcome: Mapping[str, Any], *, id_: str, limits: PayloadLimits
) -> OutboxMessage:
    """The task ``name`` with ``outcome`` as its argument; without its ``output`` where the whole would be too large."""
    deep = limits.depth + _EXTRA_DEPTH
    try:
        return build_task_message(name, (outcome,), {}, id_=id_, limits=PayloadLimits(limits.size_bytes, deep))
    except PayloadTooLarge:
        omitted = {} if outcome["output"] is None else {"output": None, "outputOmitted": True}
        return build_task_message(name, ({**outcome, **omitted},), {}, id_=id_, limits=PayloadLimits(2**31, deep))
