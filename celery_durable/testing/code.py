"""The workflows of a harness: those that a test names, as handles, as functions or by what is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery_durable.app import Workflow
from celery_durable.definitions import SHARED, Registry, WorkflowDefinition, define

Code = Workflow[Any, Any] | WorkflowDefinition | Callable[..., Any]
"""A workflow as a test may name it: its handle, or its plain function."""


class Deployed(Registry):
    """What the runners of a harness know. A name that is deployed again is new code for it."""

    def __init__(self, workflows: Iterable[Code] | None) -> None:
        super().__init__(SHARED if workflows is None else None)
        for workflow in workflows or ():
            self.add(definition_of(workflow))

    def replace(self, definition: WorkflowDefinition) -> None:
        """Take the place of the code that has this name, as a deploy does."""
        self._definitions[definition.name] = definition

    def withdraw(self, name: str) -> None:
        """Forget a workflow, as a worker of an older release that never knew it."""
        self._definitions.pop(name, None)


def definition_of(workflow: Code) -> WorkflowDefinition:
    """The workflow as data."""
    if isinstance(workflow, WorkflowDefinition):
        return workflow
    return workflow.definition if isinstance(workflow, Workflow) else define(workflow)
