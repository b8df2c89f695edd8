"""Workflows as data: name, function, types and defaults; and what the engine needs to know of a step's function.

A definition knows no app and no database, so the decorated function can be imported anywhere. The handle with
``.create()`` is in `handles`.
"""

from celery_durable.definitions.definition import Definition
from celery_durable.definitions.linear import LinearDefinition, LinearStep, define_linear
from celery_durable.definitions.steps import StepFunction, describe_step, durable_step, runs_in_orm
from celery_durable.definitions.workflows import SHARED, Registry, WorkflowDefinition, WorkflowOptions, define

__all__ = [
    "SHARED",
    "Definition",
    "LinearDefinition",
    "LinearStep",
    "Registry",
    "StepFunction",
    "WorkflowDefinition",
    "WorkflowOptions",
    "define",
    "define_linear",
    "describe_step",
    "durable_step",
    "runs_in_orm",
]
