"""Names and order of steps: a name identifies a step, so it must be the same on each pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules.chance import PROCESS_CALLS, RANDOM_CALLS, UUID_CALLS
from celery_durable.lint.rules.clock import CLOCKS
from celery_durable.lint.source import walk_scope
from celery_durable.lint.workflow_code import NAMING_METHODS, STEP_METHODS, SUBMITTING_METHODS, WorkflowCode

UNSTABLE_NAME = Rule("CD501", "Build the name from the event, from results, or from the index of a loop.")
SET_ORDER = Rule("CD502", "Put the elements into an order: sorted(...).")
CONSTANT_IN_LOOP = Rule("CD503", 'Put the loop\'s index or key into the name, such as f"charge {index}".')

RULES = (UNSTABLE_NAME, SET_ORDER, CONSTANT_IN_LOOP)

_UNSTABLE = (CLOCKS, RANDOM_CALLS, UUID_CALLS, PROCESS_CALLS)
_SET_TYPES = {"builtins.set", "builtins.frozenset"}
_SET_METHODS = {"union", "intersection", "difference", "symmetric_difference", "copy"}
_IN_ORDER = {"builtins.list", "builtins.tuple", "builtins.enumerate", "builtins.iter", "builtins.reversed"}
_WITHOUT_ORDER = {"builtins.sorted", "builtins.set", "builtins.frozenset", "builtins.len", "builtins.sum",
                  "builtins.any", "builtins.all", "builtins.min", "builtins.max", "collections.Counter"}  # fmt: skip


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield names that differ between passes, loops over sets, and names that a loop uses again."""
    for node in code.walk():
        if code.step_method(node) in NAMING_METHODS | SUBMITTING_METHODS:
            assert isinstance(node, ast.Call)
            yield from _check_name(code, node)
        yield from _check_order(code, node)
        if isinstance(node, (ast.For, ast.While)) and not _repeats_names(code):
            yield from _check_loop(code, node)


def _check_name(code: WorkflowCode, call: ast.Call) -> Iterator[Finding]:
    for node in ast.walk(call.args[0]) if call.args else ():
        name = next((found for table in _UNSTABLE if (found := table.find_name(code.source, node))), None)
        if name is None and isinstance(node, ast.FormattedValue) and _is_set(code, node.value):
            name = "the order of a set"
        elif name is not None:
            name = f"{name.removeprefix('builtins.')}()"
        if name is not None:
            yield UNSTABLE_NAME.find(
                call.args[0],
                f"A step's name in workflow {code.workflow!r} comes from {name}: each pass would run another step.",
            )


def _check_order(code: WorkflowCode, node: ast.AST) -> Iterator[Finding]:
    """Yield where code follows the order of a set, which differs between processes."""
    match node:
        case ast.For(iter=iterated) if _is_set(code, iterated) and _calls_step(code, node):
            yield _order_finding(code, iterated)
        case ast.ListComp() | ast.GeneratorExp() | ast.DictComp() | ast.SetComp():
            if _calls_step(code, node):
                for each in node.generators:
                    if _is_set(code, each.iter):
                        yield _order_finding(code, each.iter)
        case ast.Call(func=called, args=[argument, *_]) if _is_set(code, argument):
            is_join = isinstance(called, ast.Attribute) and called.attr == "join"
            if (is_join or code.source.resolve(called) in _IN_ORDER) and not _is_put_in_order(code, node):
                yield _order_finding(code, node)
        case ast.Call(func=ast.Attribute(value=value, attr="pop"), args=[]) if _is_set(code, value):
            yield _order_finding(code, node)


def _order_finding(code: WorkflowCode, node: ast.expr) -> Finding:
    return SET_ORDER.find(
        node, f"Workflow code of {code.workflow!r} follows the order of a set, which differs between processes."
    )


def _is_put_in_order(code: WorkflowCode, node: ast.AST) -> bool:
    parent = code.source.parent(node)
    return isinstance(parent, ast.Call) and code.source.resolve(parent.func) in _WITHOUT_ORDER


def _is_set(code: WorkflowCode, expression: ast.expr) -> bool:
    match expression:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _SET_METHODS:
            return _is_set(code, value)
        case ast.Call(func=called):
            return code.source.resolve(called) in _SET_TYPES
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), right=right):
            return _is_set(code, left) or _is_set(code, right)
        case ast.Name():
            values = code.source.assigned_values(expression)
            known = [each for each in values if each is not None]
            return _is_annotated_set(code, expression) or (
                bool(known) and len(known) == len(values) and all(_is_set(code, each) for each in known)
            )
    return False


def _is_annotated_set(code: WorkflowCode, name: ast.Name) -> bool:
    scope = code.source.find_scope(name.id, name)
    annotation = None if scope is None else code.source.bindings(scope).annotations.get(name.id)
    of = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return of is not None and code.source.resolve(of) in _SET_TYPES


def _calls_step(code: WorkflowCode, node: ast.AST) -> bool:
    return any(code.step_method(each) in STEP_METHODS or code.passes_step(each) for each in ast.walk(node))


def _repeats_names(code: WorkflowCode) -> bool:
    """Whether some step of the module may have ``repeat=True``, with which a name is used again on purpose."""
    return any(isinstance(node, ast.keyword) and node.arg == "repeat" for node in ast.walk(code.source.tree))


def _check_loop(code: WorkflowCode, loop: ast.For | ast.While) -> Iterator[Finding]:
    """Yield steps with a constant name whose arguments come from the loop: different work under one name."""
    changing, run_here = _find_names_that_change(loop), set(walk_scope(code.function))
    for node in ast.walk(loop):
        if node not in run_here or code.step_method(node) not in NAMING_METHODS | SUBMITTING_METHODS:
            continue
        assert isinstance(node, ast.Call)
        match node.args:
            case [ast.Constant(value=str(name)), *arguments]:
                values = [*arguments, *(keyword.value for keyword in node.keywords)]
                if any(_reads(value, changing) for value in values):
                    yield CONSTANT_IN_LOOP.find(
                        node,
                        f"A loop in workflow {code.workflow!r} uses the step name {name!r} for different arguments.",
                    )


def _find_names_that_change(loop: ast.For | ast.While) -> set[str]:
    places = [loop.target, *loop.body] if isinstance(loop, ast.For) else loop.body
    return {
        node.id
        for place in places
        for node in ast.walk(place)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _reads(value: ast.expr, names: set[str]) -> bool:
    if isinstance(value, ast.Lambda):  # a call of the same lambda is the same work
        return False
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(value))
