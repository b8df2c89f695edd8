"""The rules, one family in each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules import chance, clock, control_flow, outside, state, step_functions, step_names
from celery_durable.lint.workflow_code import WorkflowCode

_FAMILIES = (clock, chance, outside, state, step_names, control_flow, step_functions)

RULES: tuple[Rule, ...] = tuple(rule for family in _FAMILIES for rule in family.RULES)
CHECKS: tuple[Callable[[WorkflowCode], Iterator[Finding]], ...] = tuple(family.check for family in _FAMILIES)
