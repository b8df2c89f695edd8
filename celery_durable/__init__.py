"""Durable workflows for Celery: plain Python functions that survive crashes, deploys and week-long waits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable.app import Durable
    from celery_durable.authoring import LinearWorkflow, durable_workflow
    from celery_durable.definitions import LinearStep, durable_step
    from celery_durable.errors import (
        DurableError,
        EventPayloadInvalid,
        EventTimeout,
        InstanceAlreadyExists,
        InstanceNotFound,
        InstanceTerminal,
        NonRetryableError,
        NotConfigured,
        ResultTimeout,
        StepFailed,
        StepMaxAttemptsExceeded,
        StepNameReused,
        StepTimeout,
        StepTypeMismatch,
        StoreMismatch,
        WorkflowFailed,
        WorkflowNotFound,
        WorkflowParamsInvalid,
        WorkflowsRequired,
    )
    from celery_durable.handles import Workflow, WorkflowInstance
    from celery_durable.linear import Completed, Dead, LinearContext, Retry, TaskType, Waiting
    from celery_durable.model import (
        CreateOptions,
        History,
        InstanceStatus,
        LogLevel,
        OutboundEvent,
        Page,
        Published,
        ReceivedEvent,
        Status,
        WorkflowEvent,
    )
    from celery_durable.operations.service import WorkflowService, require_workflows
    from celery_durable.redaction import Redact, Shown
    from celery_durable.step import Step, StepFuture, StepTx
    from celery_durable.values import Retries, StepConfig

__all__ = [
    "Completed",
    "CreateOptions",
    "Dead",
    "Durable",
    "DurableError",
    "EventPayloadInvalid",
    "EventTimeout",
    "History",
    "InstanceAlreadyExists",
    "InstanceNotFound",
    "InstanceStatus",
    "InstanceTerminal",
    "LinearContext",
    "LinearStep",
    "LinearWorkflow",
    "LogLevel",
    "NonRetryableError",
    "NotConfigured",
    "OutboundEvent",
    "Page",
    "Published",
    "ReceivedEvent",
    "Redact",
    "ResultTimeout",
    "Retries",
    "Retry",
    "Shown",
    "Status",
    "Step",
    "StepConfig",
    "StepFailed",
    "StepFuture",
    "StepMaxAttemptsExceeded",
    "StepNameReused",
    "StepTimeout",
    "StepTx",
    "StepTypeMismatch",
    "StoreMismatch",
    "TaskType",
    "Waiting",
    "Workflow",
    "WorkflowEvent",
    "WorkflowFailed",
    "WorkflowInstance",
    "WorkflowNotFound",
    "WorkflowParamsInvalid",
    "WorkflowService",
    "WorkflowsRequired",
    "durable_step",
    "durable_workflow",
    "require_workflows",
]

_ROOMS = (
    "errors",
    "model",
    "values",
    "definitions",
    "step",
    "linear",
    "redaction",
    "operations.service",
    "handles",
    "app",
    "authoring",
)  # the light ones first


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: every `celery` command passes here on its way to our verbs."""
    if name in __all__:
        for room in _ROOMS:
            home = vars(import_module(f"{__name__}.{room}"))
            if name in home:
                return globals().setdefault(name, home[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")  # Python's own sentence


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
