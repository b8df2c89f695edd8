"""Durable workflows for Celery: plain Python functions that survive crashes, deploys and week-long waits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable.app import Durable
    from celery_durable.decorators import LinearWorkflow, durable_workflow
    from celery_durable.definitions import LinearStep, durable_step
    from celery_durable.errors import (
        Cancelled,
        DurableError,
        EventPayloadInvalid,
        EventRefused,
        EventTimeout,
        InstanceAlreadyExists,
        InstanceNotFound,
        InstanceTerminal,
        NonRetryableError,
        NotConfigured,
        ResultTimeout,
        StepFailed,
        StepLost,
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
    from celery_durable.handles import LimitHandle, Workflow, WorkflowInstance
    from celery_durable.insight.explain import Diagnosis
    from celery_durable.linear import Completed, Dead, LinearContext, Outcome, Retry, TaskType, Waiting
    from celery_durable.model import (
        AttemptOutcome,
        AttemptRecord,
        AuditRecord,
        Child,
        CreateOptions,
        ErrorInfo,
        EventRecord,
        History,
        HistoryPage,
        HoldState,
        InstanceStatus,
        InstanceSummary,
        ItemCounts,
        ItemFailure,
        LimitDetails,
        LimitHold,
        LimitRecord,
        LogLevel,
        LogRecord,
        OnLost,
        OnParentEnd,
        Origin,
        OutboundEvent,
        Page,
        ParentStep,
        Published,
        ReceivedEvent,
        RestartOrCreateResult,
        RunningStep,
        Status,
        StepRecord,
        StepStatus,
        StepType,
        Waiter,
        WorkflowEvent,
    )
    from celery_durable.redaction import Redact, RedactionContext
    from celery_durable.service import WorkflowService, require_workflows
    from celery_durable.step import CurrentStep, Step, StepFuture, StepLog, StepTx, current_step
    from celery_durable.values import Duration, Limit, Retries, StepConfig

__all__ = [
    "AttemptOutcome",
    "AttemptRecord",
    "AuditRecord",
    "Cancelled",
    "Child",
    "Completed",
    "CreateOptions",
    "CurrentStep",
    "Dead",
    "Diagnosis",
    "Durable",
    "DurableError",
    "Duration",
    "ErrorInfo",
    "EventPayloadInvalid",
    "EventRecord",
    "EventRefused",
    "EventTimeout",
    "History",
    "HistoryPage",
    "HoldState",
    "InstanceAlreadyExists",
    "InstanceNotFound",
    "InstanceStatus",
    "InstanceSummary",
    "InstanceTerminal",
    "ItemCounts",
    "ItemFailure",
    "Limit",
    "LimitDetails",
    "LimitHandle",
    "LimitHold",
    "LimitRecord",
    "LinearContext",
    "LinearStep",
    "LinearWorkflow",
    "LogLevel",
    "LogRecord",
    "NonRetryableError",
    "NotConfigured",
    "OnLost",
    "OnParentEnd",
    "Origin",
    "OutboundEvent",
    "Outcome",
    "Page",
    "ParentStep",
    "Published",
    "ReceivedEvent",
    "Redact",
    "RedactionContext",
    "RestartOrCreateResult",
    "ResultTimeout",
    "Retries",
    "Retry",
    "RunningStep",
    "Status",
    "Step",
    "StepConfig",
    "StepFailed",
    "StepFuture",
    "StepLog",
    "StepLost",
    "StepMaxAttemptsExceeded",
    "StepNameReused",
    "StepRecord",
    "StepStatus",
    "StepTimeout",
    "StepTx",
    "StepType",
    "StepTypeMismatch",
    "StoreMismatch",
    "TaskType",
    "Waiter",
    "Waiting",
    "Workflow",
    "WorkflowEvent",
    "WorkflowFailed",
    "WorkflowInstance",
    "WorkflowNotFound",
    "WorkflowParamsInvalid",
    "WorkflowService",
    "WorkflowsRequired",
    "current_step",
    "durable_step",
    "durable_workflow",
    "require_workflows",
]

_ROOMS = (
    "errors",
    "model",
    "values",
    "insight.explain",
    "definitions",
    "step",
    "linear",
    "redaction",
    "service",
    "handles",
    "app",
    "decorators",
)  # the light ones first


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: every `celery` command imports this module."""
    if name in __all__:
        for room in _ROOMS:
            home = vars(import_module(f"{__name__}.{room}"))
            if name in home:
                return globals().setdefault(name, home[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")  # Python's own sentence


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
