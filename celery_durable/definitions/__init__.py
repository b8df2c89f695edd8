"""Workflows as data: name, function, types and defaults. A definition knows no app and no database."""

from celery_durable.definitions.definition import Definition
from celery_durable.definitions.linear import LinearDefinition, LinearStep, define_linear
from celery_durable.definitions.steps import StepFunction, describe_step, durable_step, runs_in_orm
from celery_durable.definitions.workflows import SHARED, Registry, WorkflowDefinition, WorkflowOptions, define
