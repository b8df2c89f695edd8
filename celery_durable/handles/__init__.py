"""`Workflow` and `WorkflowInstance`, the handles by which applications start and control workflows, and `Limits`."""

from celery_durable.handles.host import Host, HostInternals
from celery_durable.handles.limits import LimitHandle, Limits
from celery_durable.handles.workflow import AsyncFunction, Workflow, WorkflowDecorator, WorkflowInstance
