"""Planting a mutant: the source of a function is changed, compiled in its module, and put in the function's place."""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import functools
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import celery_durable
from celery_durable.store.engine import statements
from celery_durable.store.engine.statements import Statement
from tests.mutants.mutant import Edit, Mutant


class DoesNotApply(Exception):
    """The lines that a mutant changes are not there: the code has moved on, and the mutant must follow."""


def plant(mutant: Mutant) -> None:
    """Change the code of this process; there is no way back."""
    for edit in mutant.edits:
        _change(edit)
    statements._compiled.clear()  # without the change


def unknown_names(mutant: Mutant) -> set[str]:
    """The global names of the changed functions that their modules lack, and the attributes that the package lacks."""
    found: set[str] = set()
    sources: dict[Any, str] = {}
    changed = {function: edit for edit in mutant.edits for _, function, _ in [_edited(edit, sources)]}
    for function, edit in changed.items():
        known_globals = {**vars(builtins), **function.__globals__}
        for instruction in _instructions(_compiled(edit, sources[function])):
            if instruction.opname == "LOAD_GLOBAL":
                known: Container[str] = known_globals
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                known = _words()
            else:
                continue
            if instruction.argval not in known:
                found.add(instruction.argval)
    return found


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


@functools.cache
def _words() -> frozenset[str]:
    package = Path(celery_durable.__file__).parent
    texts = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def find(mutant: Mutant) -> None:
    """Raise DoesNotApply where the lines that a mutant changes are not there; changes nothing."""
    sources: dict[Any, str] = {}
    for edit in mutant.edits:
        _edited(edit, sources)


_sources: dict[Any, str] = {}


def _change(edit: Edit) -> None:
    module, function, source = _edited(edit, _sources)
    scope: dict[str, Any] = {}
    exec(_compiled(edit, source), vars(module), scope)
    function.__code__ = scope[function.__name__].__code__


def _compiled(edit: Edit, source: str) -> types.CodeType:
    flags = __future__.annotations.compiler_flag
    return compile(source, f"<mutant of {edit.where}>", "exec", flags, dont_inherit=True)


def _edited(edit: Edit, sources: dict[Any, str]) -> tuple[Any, Any, str]:
    module_name, _, path = edit.where.partition(":")
    module = importlib.import_module(f"celery_durable.{module_name}")
    found: Any = module
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    function = _function_of(found)
    source = sources.get(function) or _unparse(function)
    if edit.old not in source:
        raise DoesNotApply(f"{edit.where} has nowhere {edit.old!r}")
    sources[function] = source.replace(edit.old, edit.new)
    return module, function, sources[function]


def _unparse(function: Any) -> str:
    """The function as the syntax tree spells it, without decorators, comments and line breaks."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.decorator_list = []
    return ast.unparse(tree)


def _function_of(found: Any) -> Any:
    if isinstance(found, Statement):
        return found.build
    if isinstance(found, staticmethod):
        return found.__func__
    return inspect.unwrap(found)
