"""The check of one module: all rules on all workflow code, without what a `# noqa` comment allows."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules import CHECKS
from celery_durable.lint.source import Source
from celery_durable.lint.workflow_code import find_workflow_code

NOT_PYTHON = Rule("CD001", "Fix the syntax, or run the linter with the Python version that the code is written for.")

_NOQA = re.compile(r"#\s*noqa(?::\s*(?P<codes>[A-Z][A-Z0-9]*(?:[,\s]+[A-Z][A-Z0-9]*)*))?", re.IGNORECASE)


def check(text: str) -> list[Finding]:
    """Return the mistakes in a module, in the order of its lines."""
    try:
        source = Source(ast.parse(text))
    except (SyntaxError, ValueError) as exc:  # ValueError: a null byte
        line, column = (exc.lineno or 1, exc.offset or 1) if isinstance(exc, SyntaxError) else (1, 1)
        sentence = f"This is not Python that can be read: {getattr(exc, 'msg', exc)}."
        return [Finding(line, column, NOT_PYTHON.code, sentence, NOT_PYTHON.remedy, line)]
    found = {each for code in find_workflow_code(source) for find in CHECKS for each in find(code)}
    if not found:
        return []
    allowed = _read_noqa_comments(text)
    return sorted(each for each in found if not _is_allowed(each, allowed))


def _read_noqa_comments(text: str) -> Mapping[int, tuple[str, ...]]:
    """Return the codes that the comment of each line allows. An empty code allows everything."""
    allowed = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
        if comment is not None:
            allowed[token.start[0]] = tuple(re.split(r"[,\s]+", (comment["codes"] or "").upper()))
    return allowed


def _is_allowed(finding: Finding, allowed: Mapping[int, tuple[str, ...]]) -> bool:
    lines = (finding.line, finding.last_line)
    return any(finding.code.startswith(code) for line in lines for code in allowed.get(line, ()))
