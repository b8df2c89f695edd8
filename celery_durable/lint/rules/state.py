"""State that a replay does not rebuild: changed globals, and variables that a step's function changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.source import Function, Scope, Source, walk_scope
from celery_durable.lint.workflow_code import WorkflowCode

CHANGES_GLOBAL = Rule("CD401", "Keep it in a local variable, or change it in a step.")
READS_GLOBAL = Rule("CD402", "Read it in a step, or pass it as a parameter of the instance.")
BODY_CHANGES_VARIABLE = Rule("CD403", "Return the value from the step's function: a replay only sees the result.")

RULES = (CHANGES_GLOBAL, READS_GLOBAL, BODY_CHANGES_VARIABLE)

_CHANGING_METHODS = {
    "append", "add", "update", "pop", "remove", "clear", "extend", "insert", "setdefault", "discard", "popitem",
    "appendleft", "popleft", "sort", "reverse",
}  # fmt: skip
_MUTABLE_TYPES = {
    "builtins.list", "builtins.dict", "builtins.set", "collections.defaultdict", "collections.deque",
    "collections.Counter", "collections.OrderedDict",
}  # fmt: skip
_MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield changes and reads of state that lives outside of a pass."""
    source = code.source
    changed_in_functions = _find_changed_globals(source)
    changes = dict(_find_changes(source, code.walk(), code.function))
    for place, name in changes.items():
        if source.find_scope(name.id, name) is source.tree:
            yield CHANGES_GLOBAL.find(
                place, f"Workflow code of {code.workflow!r} changes the global {name.id!r}, again on each pass."
            )
    changing_names = set(changes.values())
    for node in code.walk():
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node in changing_names:
            continue
        if node.id in changed_in_functions and source.find_scope(node.id, node) is source.tree:
            sentence = f"Workflow code of {code.workflow!r} reads the global {node.id!r}, which other code changes."
            yield READS_GLOBAL.find(node, sentence)
    for body in code.bodies:
        yield from _check_body(code, body)


def _check_body(code: WorkflowCode, body: Function) -> Iterator[Finding]:
    """Yield changes of the workflow's variables in a function that no replay calls."""
    for node, name in _find_changes(code.source, walk_scope(body), body):
        if code.source.find_scope(name.id, name) is code.function:
            yield BODY_CHANGES_VARIABLE.find(
                node,
                f"A step's function changes {name.id!r} of workflow {code.workflow!r}, which a replay does not do.",
            )


def _find_changed_globals(source: Source) -> set[str]:
    """Return the globals that some function of the module rebinds or changes in place."""
    return {
        name.id
        for function in source.functions()
        for _, name in _find_changes(source, walk_scope(function), function)
        if source.find_scope(name.id, name) is source.tree
    }


def _find_changes(source: Source, nodes: Iterator[ast.AST], scope: Scope) -> Iterator[tuple[ast.expr, ast.Name]]:
    """Yield where code changes a variable of another scope: the place and the variable."""
    own = source.bindings(scope).names
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if name not in own:
                yield node, node  # declared global or nonlocal
            case ast.Subscript(value=ast.Name() as name, ctx=ast.Store() | ast.Del()) if _is_mutable(source, name, own):
                yield node, name
            case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr=method)) if (
                method in _CHANGING_METHODS and _is_mutable(source, name, own)
            ):
                yield node, name


def _is_mutable(source: Source, name: ast.Name, own: set[str]) -> bool:
    """Whether a variable of another scope is assigned a collection that can be changed."""
    if name.id in own:
        return False
    return any(
        isinstance(value, _MUTABLE_DISPLAYS)
        or (isinstance(value, ast.Call) and source.resolve(value.func) in _MUTABLE_TYPES)
        for value in source.assigned_values(name)
    )
