"""A rule, and a mistake that it finds."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """``code``: CD and three digits, of which the first is the family. ``remedy``: what to write instead."""

    code: str
    remedy: str

    def find(self, node: ast.expr | ast.stmt | ast.ExceptHandler, sentence: str) -> Finding:
        """Return a finding at a node of the module."""
        return Finding(
            node.lineno, node.col_offset + 1, self.code, sentence, self.remedy, node.end_lineno or node.lineno
        )


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A mistake. ``line`` and ``column`` count from 1, ``last_line`` is the last one of the code at fault."""

    line: int
    column: int
    code: str
    sentence: str
    remedy: str
    last_line: int
