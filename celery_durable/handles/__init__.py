"""`Workflow` and `WorkflowInstance`, the handles by which applications start and control workflows."""

from celery_durable.handles.host import Host, HostInternals
from celery_durable.handles.workflow import Workflow, WorkflowDecorator, WorkflowInstance

__all__ = ["Host", "HostInternals", "Workflow", "WorkflowDecorator", "WorkflowInstance"]
