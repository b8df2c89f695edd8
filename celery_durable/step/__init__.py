"""The API of workflow code: `Step` in a workflow, `StepTx` in a step's function, `StepFuture`, and `StepLog`."""

from celery_durable.step.calls import BodyCall, SleepCall, StepCall, StepContext, StepFuture, WaitCall
from celery_durable.step.current import CurrentStep, current_step, running_attempt
from celery_durable.step.log import LogContext, StepLog
from celery_durable.step.remote_calls import ChildCall, HasDefinition, MapCall, TaskCall, TypedWorkflow
from celery_durable.step.tx import NewEmission, NewEvent, NewInstance, StepTx, TxBuffer
from celery_durable.step.workflow import Step
