"""The workflows of a harness: those that a test names, or all that are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_durable.definitions import SHARED, Definition, Registry, define
from celery_durable.handles import Workflow

Code = Workflow[Any, Any] | Definition | Callable[..., Any]
"""How a test may name a workflow: its handle, its definition or its plain function."""


Codes = Iterable[Code] | Mapping[str, Code]
"""Several workflows, or a package's ``required_workflows``."""


class Deployed(Registry):
    """The workflows that the runners of a harness know. Deploying a name again replaces its code."""

    def __init__(self, workflows: Codes | None) -> None:
        super().__init__(SHARED if workflows is None else None)
        for workflow in listed(workflows or ()):
            self.add(definition_of(workflow))

    def replace(self, definition: Definition) -> None:
        """Replace the code of this name, as a deploy does."""
        self._definitions[definition.name] = definition

    def withdraw(self, name: str) -> None:
        """Remove a workflow, as for a worker of an older release that never had it."""
        self._definitions.pop(name, None)

    def without(self, workflows: Iterable[Code | str]) -> Deployed:
        """Return a copy without some workflows, for a worker of another release."""
        rest = Deployed(())
        rest._definitions = dict(self._definitions)
        for each in workflows:
            rest.withdraw(self.get(each if isinstance(each, str) else definition_of(each).name).name)
        return rest


def listed(workflows: Codes) -> list[Code]:
    """Return workflows as a list. A package's mapping gives its values."""
    return list(workflows.values() if isinstance(workflows, Mapping) else workflows)


def definition_of(workflow: Code) -> Definition:
    """Return the definition of a workflow."""
    if isinstance(workflow, Definition):
        return workflow
    return workflow.definition if isinstance(workflow, Workflow) else define(workflow)
