"""The workflows of a harness: those that a test names, or all that are registered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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


# `CodeWatcher`: whether the source of the application has changed since it was imported, for `durable dev`.


class CodeWatcher:
    """Remembers the modules that the process has imported from ``folder``, and when their files were last written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._seen: dict[Path, int] = {}
        self.find_changed()

    def find_changed(self) -> list[Path]:
        """Return the files that were written since the last call, or since their import, without those of packages."""
        changed: list[Path] = []
        for path in self._imported_files():
            try:
                written_at = path.stat().st_mtime_ns
            except OSError:  # deleted, or an editor is replacing it
                continue
            if self._seen.setdefault(path, written_at) != written_at:
                self._seen[path] = written_at
                changed.append(path)
        return changed

    def _imported_files(self) -> list[Path]:
        names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        files = [Path(name) for name in names if isinstance(name, str) and name.endswith(".py")]
        return [path for path in files if self._folder in path.parents and "site-packages" not in path.parts]


def find_syntax_error(path: Path) -> str | None:
    """Return what is wrong with the syntax of a file; None if it can be compiled."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as exc:
        return f"{path}: {exc}"
    return None
