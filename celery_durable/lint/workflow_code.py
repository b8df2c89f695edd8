"""The code of a module that runs on every pass: the functions of workflows, and what they call.

A function is workflow code if it is decorated as a workflow, if a parameter of it is annotated with `Step`, if it has
a parameter named ``step`` and calls its methods, or if workflow code of the same module calls it. A function that is
passed to a step method runs once for each attempt, so it may do what it likes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from celery_durable.lint.source import Function, Source, walk_scope

BODY_METHODS = {"do", "submit"}
WAITING_METHODS = {"do", "sleep", "sleep_until", "wait_for_event", "wait_for_topic", "task", "map", "child", "gather"}
NAMING_METHODS = {*WAITING_METHODS, "first", "submit"} - {"gather"}
SUBMITTING_METHODS = {
    "submit", "submit_sleep", "submit_wait_for_event", "submit_wait_for_topic", "submit_task", "submit_map",
    "submit_child",
}  # fmt: skip
STEP_METHODS = {*WAITING_METHODS, *SUBMITTING_METHODS, "first"}
"""The methods of `Step` that only the workflow's own code may call."""

_STEP_TYPES = {"celery_durable.Step", "celery_durable.AsyncStep"}
_WORKFLOW_DECORATORS = {"celery_durable.durable_workflow"}
_CALLS_ITS_ARGUMENT = {"sorted", "min", "max", "map", "filter", "sort", "reduce", "groupby"}


@dataclass(frozen=True, eq=False, slots=True)
class WorkflowCode:
    """One function that runs on every pass, the names of its `Step`, and the functions it passes to step methods."""

    source: Source
    function: Function
    workflow: str
    step_names: frozenset[str]
    bodies: list[Function] = field(default_factory=list)

    def walk(self) -> Iterator[ast.AST]:
        """Yield the nodes that run in a pass, without functions that the code defines."""
        for node in walk_scope(self.function):
            yield node
            if isinstance(node, ast.Call) and _get_called_name(node) in _CALLS_ITS_ARGUMENT:
                for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                    if isinstance(argument, ast.Lambda):
                        yield from walk_scope(argument)

    def step_method(self, node: ast.AST) -> str | None:
        """Return the name of the method if a node calls one of the code's `Step`."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in self.step_names:
                return method
        return None

    def passes_step(self, node: ast.AST) -> bool:
        """Whether a node is a call that may suspend: of a step method, or of a function that gets the `Step`."""
        if not isinstance(node, ast.Call):
            return False
        arguments = (*node.args, *(keyword.value for keyword in node.keywords))
        return self.step_method(node) in {*WAITING_METHODS, "first"} or any(
            isinstance(each, ast.Name) and each.id in self.step_names for each in arguments
        )


def find_workflow_code(source: Source) -> list[WorkflowCode]:
    """Return all workflow code of a module. Helpers follow the workflow that calls them."""
    codes: dict[Function, WorkflowCode] = {}
    todo: list[WorkflowCode] = []
    for function in source.functions():
        step_names = _find_step_names(source, function)
        if step_names:
            todo.append(WorkflowCode(source, function, function.name, step_names))
    while todo:
        code = todo.pop(0)
        if code.function in codes:
            continue
        codes[code.function] = code
        for node in code.walk():
            if isinstance(node, ast.Call):
                code.bodies.extend(_find_bodies(code, node))
                called = source.find_function(node.func)
                if called is not None and not isinstance(called, ast.Lambda):
                    todo.append(WorkflowCode(source, called, code.workflow, _inherit_step_names(code, called)))
    return list(codes.values())


def _find_step_names(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Return the names of the parameters that are a `Step`; none if the function is no workflow code by itself."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotated = {each.arg for each in parameters if _is_step_type(source, each.annotation)}
    if annotated:
        return frozenset(annotated)
    if _is_workflow(source, function) and len(parameters) > 1:
        return frozenset({parameters[1].arg})
    if any(each.arg == "step" and each.annotation is None for each in parameters):
        named = WorkflowCode(source, function, function.name, frozenset({"step"}))
        if any(named.step_method(node) in STEP_METHODS for node in named.walk()):
            return named.step_names
    return frozenset()


def _is_step_type(source: Source, annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.Constant(value="Step" | "AsyncStep"):
            return True
        case ast.Name() | ast.Attribute():
            return source.resolve(annotation) in _STEP_TYPES
    return False


def _is_workflow(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if source.resolve(called) in _WORKFLOW_DECORATORS:
            return True
        if isinstance(called, ast.Attribute) and called.attr == "workflow":
            return True
    return False


def _find_bodies(code: WorkflowCode, call: ast.Call) -> Iterator[Function]:
    if code.step_method(call) in BODY_METHODS:
        for argument in call.args[:3]:
            body = code.source.find_function(argument)
            if body is not None:
                yield body


def _inherit_step_names(code: WorkflowCode, called: Function) -> frozenset[str]:
    """Return the names of the caller's `Step` that a function inside of it sees."""
    own = code.source.bindings(called).names
    around = set(code.source.scopes(called))
    return code.step_names - own if code.function in around else frozenset()


def _get_called_name(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None
