"""The workflows of a harness: those that a test names, as handles, as functions or by what is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_durable.definitions import SHARED, Definition, Registry, define
from celery_durable.handles import Workflow

Code = Workflow[Any, Any] | Definition | Callable[..., Any]
"""A workflow as a test may name it: its handle, or its plain function."""


Codes = Iterable[Code] | Mapping[str, Code]
"""Several, also as a package's ``required_workflows``."""


class Deployed(Registry):
    """What the runners of a harness know. A name that is deployed again is new code for it."""

    def __init__(self, workflows: Codes | None) -> None:
        super().__init__(SHARED if workflows is None else None)
        for workflow in listed(workflows or ()):
            self.add(definition_of(workflow))

    def replace(self, definition: Definition) -> None:
        """Take the place of the code that has this name, as a deploy does."""
        self._definitions[definition.name] = definition

    def withdraw(self, name: str) -> None:
        """Forget a workflow, as a worker of an older release that never knew it."""
        self._definitions.pop(name, None)

    def without(self, workflows: Iterable[Code | str]) -> Deployed:
        """The same as of now, but for some: what a worker knows that runs another release."""
        rest = Deployed(())
        rest._definitions = dict(self._definitions)
        for each in workflows:
            rest.withdraw(self.get(each if isinstance(each, str) else definition_of(each).name).name)
        return rest


def listed(workflows: Codes) -> list[Code]:
    """Workflows as given: one by one, or as a package exports them, by binding key."""
    return list(workflows.values() if isinstance(workflows, Mapping) else workflows)


def definition_of(workflow: Code) -> Definition:
    """The workflow as data."""
    if isinstance(workflow, Definition):
        return workflow
    return workflow.definition if isinstance(workflow, Workflow) else define(workflow)
