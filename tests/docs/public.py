"""The public surface: the modules that docs/index.md lists, what they export, and their docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.docs.blocks import ROOT

_ROW = re.compile(r"^\| `(celery_durable[\w.]*)` \|", re.MULTILINE)
NAMES = _ROW.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Docstring:
    """``owner``: the class, for a method; ``subject``: what the docstring describes."""

    name: str
    text: str
    subject: Any
    owner: type[Any] | None = None

    def __str__(self) -> str:
        return self.name


def documented_modules() -> dict[str, ModuleType]:
    return {name: importlib.import_module(name) for name in NAMES}


def exports(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def docstrings() -> list[Docstring]:
    """Each once, although a name may be exported from two modules."""
    found: dict[int, Docstring] = {}
    for module_name, module in documented_modules().items():
        found[id(module)] = Docstring(module_name, inspect.getdoc(module) or "", module)
        for name, value in exports(module).items():
            if id(value) in found or not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            found[id(value)] = Docstring(f"{module_name}.{name}", value.__doc__ or "", value)
            for each in _members(f"{module_name}.{name}", value):
                found.setdefault(id(each.subject), each)
    return list(found.values())


def _members(path: str, owner: Any) -> Iterator[Docstring]:
    for base in inspect.getmro(owner) if inspect.isclass(owner) else ():
        if not base.__module__.startswith("celery_durable"):
            continue
        for name, value in vars(base).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not name.startswith("_") and (inspect.isroutine(value) or inspect.isdatadescriptor(value)):
                yield Docstring(f"{path}.{name}", value.__doc__ or "", value, owner)
