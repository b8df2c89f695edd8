"""The workflows that a process knows."""

from __future__ import annotations

from collections.abc import Iterator

from celery_durable.definitions.definition import Definition
from celery_durable.errors import WorkflowNameTaken, WorkflowNotFound


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
