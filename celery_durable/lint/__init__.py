"""The linter: source text of a module in, mistakes in its workflows out.

The room is pure: it imports no code that it checks, and nothing of this package.
"""

from celery_durable.lint.checking import check
from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules import RULES

__all__ = ["RULES", "Finding", "Rule", "check"]
