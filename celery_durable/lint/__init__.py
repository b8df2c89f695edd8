"""The linter: source text of a module in, mistakes in its workflows out. It imports neither that nor this package."""

from celery_durable.lint.checking import check
from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules import RULES

__all__ = ["RULES", "Finding", "Rule", "check"]
