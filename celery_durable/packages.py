"""Registering the workflows of packages under binding keys: passed directly, or from modules or entry points.

A package exports ``required_workflows``, a dict of binding keys and workflows, and never creates an engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from celery_durable.definitions import Definition, Registry
from celery_durable.errors import BindingKeyTaken, DefinitionInvalid, ValueRefused, WorkflowNameTaken
from celery_durable.handles import Workflow

ENTRY_POINT_GROUP = "celery_durable.workflows"
"""The entry points of packages that export workflows: ``sessions = "sessions.workflows:required_workflows"``."""
EXPORTED_NAME = "required_workflows"

RequiredWorkflows = Mapping[str, Workflow[Any, Any]]


class Bindings:
    """The workflows of an app by binding key, the name by which Python code refers to them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._bound: dict[str, Definition] = {}

    def add(self, required: RequiredWorkflows, *, reserved: Iterable[str] = ()) -> None:
        """Register all of a package's workflows, or none if it raises. Registering them again is harmless.

        ``reserved``: names that are no binding keys. Raises WorkflowNameTaken, BindingKeyTaken and DefinitionInvalid.
        """
        if not isinstance(required, Mapping):
            raise DefinitionInvalid(f"{required!r} cannot be registered: pass a dict of binding keys and workflows.")
        new = {key: self._check_binding(key, workflow, reserved) for key, workflow in required.items()}
        names: dict[str, Definition] = {}
        for definition in new.values():
            existing = names.setdefault(definition.name, self._registry.find(definition.name) or definition)
            if existing.source_location != definition.source_location:
                raise WorkflowNameTaken(definition.name, existing.source_location, definition.source_location)
        for definition in new.values():
            self._registry.add(definition)
        self._bound |= new

    def _check_binding(self, key: Any, workflow: Any, reserved: Iterable[str]) -> Definition:
        if not isinstance(workflow, Workflow):
            raise DefinitionInvalid(
                f"{workflow!r} under key {key!r} is no workflow: decorate it with @durable_workflow."
            )
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or key in reserved:
            raise DefinitionInvalid(
                f"Binding key {key!r} of workflow {workflow.name!r} cannot be used: write an identifier, such as "
                "ORDER, that is no method of a dict."
            )
        existing = self._bound.get(key)
        if existing is not None and (existing.name, existing.source_location) != (
            workflow.name,
            workflow.definition.source_location,
        ):
            raise BindingKeyTaken(key, existing.source_location, workflow.definition.source_location)
        return workflow.definition

    def find(self, key: str) -> Definition | None:
        """The workflow that is bound to a key; None if there is none."""
        bound = self._bound.get(key)
        return None if bound is None else self._registry.get(bound.name)

    def __iter__(self) -> Any:
        return iter(self._bound)


def load_from_packages(packages: object, related_name: str) -> list[RequiredWorkflows]:
    """Return what ``<package>.<related_name>`` exports for each package that has it; ValueRefused for a single name."""
    if isinstance(packages, (str, bytes)) or not isinstance(packages, Iterable):
        raise ValueRefused(f"packages={packages!r} cannot be used: pass a list of import names, such as ['shop'].")
    found = []
    for package in packages:
        importlib.import_module(package)
        name = f"{package}.{related_name}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name != name:  # the module exists, and one of its own imports is missing
                raise
            continue
        found.append(getattr(module, EXPORTED_NAME, {}))
    return found


def load_from_entry_points() -> list[RequiredWorkflows]:
    """Load what installed packages export as entry points, ordered by name; raises DefinitionInvalid."""
    found = []
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: (each.name, each.value)):
        loaded = entry.load()
        required = loaded if isinstance(loaded, Mapping) else getattr(loaded, EXPORTED_NAME, None)
        if not isinstance(required, Mapping):
            raise DefinitionInvalid(
                f"Entry point {entry.name} = {entry.value} of group {ENTRY_POINT_GROUP} is no dict of workflows, and "
                f"no module with one called {EXPORTED_NAME}."
            )
        found.append(required)
    return found
