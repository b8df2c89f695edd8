"""The functions of steps, and the arguments that they get."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.source import Function, Source
from celery_durable.lint.workflow_code import BODY_METHODS, WorkflowCode

COROUTINE = Rule("CD701", "Pass the async function itself: step.do('name', fn, *args).")
CONFIGURATION = Rule("CD702", 'Pass it in a StepConfig before the function: step.do("name", StepConfig(...), fn, ...).')

RULES = (COROUTINE, CONFIGURATION)

_FIELDS = {"retries", "timeout", "repeat", "on_lost"}


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield steps whose function returns a coroutine, and configuration that goes to the function."""
    for node in code.walk():
        if code.step_method(node) in BODY_METHODS:
            assert isinstance(node, ast.Call)
            function = _find_step_function(code.source, node.args)
            if function is not None:
                if (name := _find_coroutine(code.source, function)) is not None:
                    yield COROUTINE.find(
                        node, f"A step of workflow {code.workflow!r} gets a coroutine of {name}(), not its result."
                    )
                for name in _find_configuration(node, function):
                    yield CONFIGURATION.find(
                        node, f"A step of workflow {code.workflow!r} passes {name}= to its function, which takes none."
                    )


def _find_step_function(source: Source, arguments: list[ast.expr]) -> Function | None:
    """Return the function of ``[name,] [config,] fn, *args`` if the module has it."""
    rest = list(arguments)
    if rest and isinstance(rest[0], (ast.Constant, ast.JoinedStr, ast.BinOp)):
        rest.pop(0)
    if rest and _is_config(source, rest[0]):
        rest.pop(0)
    if not rest:
        return None
    match rest[0]:
        case ast.Call(func=called, args=[inner, *_]) if source.resolve(called) == "functools.partial":
            return source.find_function(inner)
    return source.find_function(rest[0])


def _find_coroutine(source: Source, function: Function) -> str | None:
    """Return the name of an async function of the module, if a plain function returns what it returns, a coroutine."""
    if isinstance(function, ast.AsyncFunctionDef):
        return None
    if isinstance(function, ast.Lambda):
        returned: list[ast.expr | None] = [function.body]
    else:
        returned = [each.value for each in function.body if isinstance(each, ast.Return)]
    for each in returned:
        if isinstance(each, ast.Call) and isinstance(source.find_function(each.func), ast.AsyncFunctionDef):
            return ast.unparse(each.func)
    return None


def _is_config(source: Source, argument: ast.expr) -> bool:
    values = source.assigned_values(argument) if isinstance(argument, ast.Name) else [argument]
    return any(
        isinstance(each, ast.Call) and source.resolve(each.func) == "celery_durable.StepConfig" for each in values
    )


def _find_configuration(call: ast.Call, function: Function) -> list[str]:
    takes = function.args
    if takes.kwarg is not None:
        return []
    names = {each.arg for each in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs)}
    return sorted({each.arg for each in call.keywords if each.arg is not None} & _FIELDS - names)
