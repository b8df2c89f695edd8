"""The API of workflow code: `Step` in a workflow, `StepTx` in a step's function, `StepFuture`, and `StepLog`."""

from celery_durable.step.calls import (
    BodyCall,
    ChildCall,
    Defined,
    MapCall,
    SleepCall,
    StepCall,
    StepContext,
    StepFuture,
    TaskCall,
    Typed,
    WaitCall,
)
from celery_durable.step.log import LogContext, StepLog
from celery_durable.step.tx import NewEmission, NewEvent, NewInstance, StepTx, TxBuffer, allow_to_end
from celery_durable.step.workflow import Step

__all__ = [
    "BodyCall",
    "ChildCall",
    "Defined",
    "LogContext",
    "MapCall",
    "NewEmission",
    "NewEvent",
    "NewInstance",
    "SleepCall",
    "Step",
    "StepCall",
    "StepContext",
    "StepFuture",
    "StepLog",
    "StepTx",
    "TaskCall",
    "TxBuffer",
    "Typed",
    "WaitCall",
    "allow_to_end",
]
