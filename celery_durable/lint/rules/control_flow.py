"""Control flow: forgotten branches and coroutines, suspensions that do not get through, steps inside of steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.source import Function, walk_scope
from celery_durable.lint.workflow_code import STEP_METHODS, SUBMITTING_METHODS, WAITING_METHODS, WorkflowCode

NEVER_GATHERED = Rule("CD601", "Pass the branch to step.gather or step.first, or call its result().")
NEVER_AWAITED = Rule("CD602", "Await it.")
SWALLOWS = Rule("CD603", "Catch Exception, or raise it again.")
LEAVES_FINALLY = Rule("CD604", "Return after the try statement, not in its finally.")
STEP_IN_STEP = Rule("CD605", "Call step methods in the workflow itself; run branches with step.submit and step.gather.")

RULES = (NEVER_GATHERED, NEVER_AWAITED, SWALLOWS, LEAVES_FINALLY, STEP_IN_STEP)

_SWALLOWED = {
    "builtins.BaseException": "suspension",
    "celery_durable.Cancelled": "cancellation",
    "celery_durable.errors.Cancelled": "cancellation",
}
"""What of the steps in its try a handler of this exception swallows."""
_COROUTINES = {"asyncio.sleep", "asyncio.gather", "asyncio.wait", "asyncio.wait_for"}


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield what is started and forgotten, and what stops a suspension."""
    for node in code.walk():
        if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call):
            yield from _check_forgotten(code, node, node.value)
        if isinstance(node, (ast.Try, ast.TryStar)) and _may_suspend(code, node.body):
            yield from _check_try(code, node)
        if isinstance(node, ast.With) and _may_suspend(code, node.body):
            yield from _check_suppress(code, node)
    for body in code.bodies:
        yield from _check_body(code, body)


def _check_forgotten(code: WorkflowCode, statement: ast.Expr | ast.Assign, call: ast.Call) -> Iterator[Finding]:
    method = code.step_method(call)
    if method in SUBMITTING_METHODS and not _is_used(code, statement):
        yield NEVER_GATHERED.find(call, f"Workflow {code.workflow!r} submits a branch and never gathers it.")
    is_async = isinstance(code.function, ast.AsyncFunctionDef)
    if is_async and method in {*WAITING_METHODS, "first"}:
        yield NEVER_AWAITED.find(call, f"Workflow {code.workflow!r} does not await step.{method}().")
    called = code.source.find_function(call.func)
    name = code.source.resolve(call.func)
    if (isinstance(called, ast.AsyncFunctionDef) or name in _COROUTINES) and isinstance(statement, ast.Expr):
        yield NEVER_AWAITED.find(
            call, f"Workflow code of {code.workflow!r} does not await {ast.unparse(call.func)}(), so it never runs."
        )


def _is_used(code: WorkflowCode, statement: ast.Expr | ast.Assign) -> bool:
    """Whether the code reads what the statement assigns. What is not a plain variable may be read elsewhere."""
    if isinstance(statement, ast.Expr):
        return False
    names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if len(names) < len(statement.targets):
        return True
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names
        for node in ast.walk(code.function)
    )


def _may_suspend(code: WorkflowCode, statements: list[ast.stmt]) -> bool:
    return any(code.passes_step(node) for statement in statements for node in ast.walk(statement))


def _check_try(code: WorkflowCode, statement: ast.Try | ast.TryStar) -> Iterator[Finding]:
    for handler in statement.handlers:
        swallowed = "suspension" if handler.type is None else _find_swallowed(code, handler.type)
        if swallowed is not None and not _raises_again(handler):
            caught = "except:" if handler.type is None else f"except {ast.unparse(handler.type)}:"
            yield SWALLOWS.find(
                handler, f"{caught!r} in workflow {code.workflow!r} swallows the {swallowed} of the steps in its try."
            )
    for node in _walk_leaving(statement.finalbody):
        word = type(node).__name__.lower()
        yield LEAVES_FINALLY.find(
            node,
            f"{word!r} in a finally of workflow {code.workflow!r} swallows the suspension of the steps in its try.",
        )


def _check_suppress(code: WorkflowCode, statement: ast.With) -> Iterator[Finding]:
    for item in statement.items:
        match item.context_expr:
            case ast.Call(func=called, args=arguments) if code.source.resolve(called) == "contextlib.suppress":
                found = filter(None, (_find_swallowed(code, argument) for argument in arguments))
                if (swallowed := next(found, None)) is not None:
                    yield SWALLOWS.find(
                        item.context_expr,
                        f"{ast.unparse(item.context_expr)!r} in workflow {code.workflow!r} swallows the {swallowed} of "
                        "its steps.",
                    )


def _find_swallowed(code: WorkflowCode, caught: ast.expr) -> str | None:
    """Return what a handler of this exception, or of these, swallows; None if it swallows nothing of a step."""
    if isinstance(caught, ast.Tuple):
        return next(filter(None, (_find_swallowed(code, each) for each in caught.elts)), None)
    return _SWALLOWED.get(code.source.resolve(caught) or "")


def _raises_again(handler: ast.ExceptHandler) -> bool:
    for node in ast.walk(handler):
        match node:
            case ast.Raise(exc=None):
                return True
            case ast.Raise(exc=ast.Name(id=name)) if name == handler.name:
                return True
    return False


def _walk_leaving(statements: list[ast.stmt], *, is_in_loop: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements that leave a finally. A break or continue of a loop inside of it does not."""
    for statement in statements:
        if isinstance(statement, ast.Return) or (isinstance(statement, (ast.Break, ast.Continue)) and not is_in_loop):
            yield statement
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            loops = is_in_loop or isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
            inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
            yield from _walk_leaving(inner, is_in_loop=loops)


def _check_body(code: WorkflowCode, body: Function) -> Iterator[Finding]:
    if code.source.bindings(body).names & code.step_names:
        return
    for node in walk_scope(body):
        method = code.step_method(node)
        if method in STEP_METHODS and code.function in set(code.source.scopes(node)):
            assert isinstance(node, ast.Call)
            yield STEP_IN_STEP.find(
                node, f"A step's function in workflow {code.workflow!r} calls step.{method}(), which raises StepMisuse."
            )
