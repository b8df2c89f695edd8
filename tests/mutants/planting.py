"""Planting a mutant: the source of a function is changed, compiled in its module, and put in the function's place."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from typing import Any

from celery_durable.store.engine import Statement
from celery_durable.testing import databases
from tests.mutants.mutants import Edit, Mutant


class DoesNotApply(Exception):
    """The lines that a mutant changes are not there: the code has moved on, and the mutant must follow."""


def plant(mutant: Mutant) -> None:
    """Change the code of this process; there is no way back."""
    for edit in mutant.edits:
        _change(edit)
    databases.compiled.clear()


def find(mutant: Mutant) -> None:
    """Raise DoesNotApply where the lines that a mutant changes are not there; changes nothing."""
    sources: dict[Any, str] = {}
    for edit in mutant.edits:
        _edited(edit, sources)


_sources: dict[Any, str] = {}


def _change(edit: Edit) -> None:
    module, function, source = _edited(edit, _sources)
    body = source[source.index("async def " if inspect.iscoroutinefunction(function) else "def ") :]
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(body, f"<mutant of {edit.where}>", "exec", flags, dont_inherit=True), vars(module), scope)
    function.__code__ = scope[function.__name__].__code__


def _edited(edit: Edit, sources: dict[Any, str]) -> tuple[Any, Any, str]:
    module_name, _, path = edit.where.partition(":")
    module = importlib.import_module(f"celery_durable.{module_name}")
    found: Any = module
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    function = _function_of(found)
    source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
    if edit.old not in source:
        raise DoesNotApply(f"{edit.where} has nowhere {edit.old!r}")
    sources[function] = source.replace(edit.old, edit.new)
    return module, function, sources[function]


def _function_of(found: Any) -> Any:
    if isinstance(found, Statement):
        return found.build
    if isinstance(found, staticmethod):
        return found.__func__
    return found
