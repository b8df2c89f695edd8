"""The mapping `Durable.workflows`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from celery_durable.app.internals import Internals
from celery_durable.handles import Host, Workflow


class Workflows(Mapping[str, "Workflow[Any, Any]"]):
    """The workflows that an app knows.

    ``durable.workflows["order"]`` is the workflow named "order". ``durable.workflows.ORDER`` is the workflow that a
    package registered under the binding key ``ORDER``.
    """

    def __init__(self, internals: Internals, host: Callable[[], Host]) -> None:
        self._internals, self._host = internals, host

    def __getitem__(self, name: str) -> Workflow[Any, Any]:
        return Workflow(self._internals.registry.get(name), self._host)

    def __getattr__(self, key: str) -> Workflow[Any, Any]:
        if key.startswith("_"):
            raise AttributeError(key)
        bindings = self._internals.bindings
        definition = bindings.find(key)
        if definition is None:
            keys = ", ".join(sorted(bindings)) or "none"
            raise AttributeError(f"No workflow is registered under binding key {key!r} (registered: {keys}).")
        return self[definition.name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._internals.registry.find(name) is not None

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the workflow of this name, or ``default`` if there is none."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get()

    def __iter__(self) -> Iterator[str]:
        return iter(self._internals.registry)

    def __len__(self) -> int:
        return sum(1 for _ in self)
