"""Calls of functions that a rule names in a table: the common part of several families."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.source import Source
from celery_durable.lint.workflow_code import WorkflowCode


@dataclass(frozen=True, slots=True)
class CallTable:
    """Functions that workflow code may not call, by their full names or the prefixes of these.

    ``effect`` follows "which" in the sentence. ``without_arguments``: wrong only with fewer arguments than this.
    """

    rule: Rule
    effect: str
    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()
    without_arguments: Mapping[str, int] | None = None
    allowed: frozenset[str] = frozenset()

    def find_name(self, source: Source, node: ast.AST) -> str | None:
        """Return the full name of the function if the node calls one of the table."""
        name = source.resolve(node.func) if isinstance(node, ast.Call) else None
        if name is None or name in self.allowed:
            return None
        assert isinstance(node, ast.Call)
        wanted = (self.without_arguments or {}).get(name)
        if wanted is not None:
            return name if len(node.args) + len(node.keywords) < wanted else None
        is_listed = name in self.names or (name.startswith(self.prefixes) and not name.endswith(("Error", "Exception")))
        return name if is_listed else None

    def find(self, code: WorkflowCode) -> Iterator[Finding]:
        """Yield the calls in workflow code, without those in the name of a step, which have a rule of their own."""
        for node in code.walk():
            name = self.find_name(code.source, node)
            if name is not None and not is_in_step_name(code, node):
                assert isinstance(node, ast.Call)
                shown = name.removeprefix("builtins.")
                yield self.rule.find(node, f"Workflow code of {code.workflow!r} calls {shown}(), which {self.effect}.")


def is_in_step_name(code: WorkflowCode, node: ast.AST) -> bool:
    """Whether a node is part of the first argument of a step method."""
    child, parent = node, code.source.parent(node)
    while parent is not None and not isinstance(parent, ast.stmt):
        if code.step_method(parent) is not None:
            assert isinstance(parent, ast.Call)
            return bool(parent.args) and parent.args[0] is child
        child, parent = parent, code.source.parent(parent)
    return False
