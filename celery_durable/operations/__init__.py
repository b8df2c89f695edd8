"""Operations on instances from outside a pass: create, read, control, emit, rewind, intervene.

Each operation checks its input, runs one transaction, and then wakes the workers. If the broker is down, work is
delayed, but no call fails (LAW 1).
"""

from __future__ import annotations

from celery_durable.operations.base import PublishRuns, Versions
from celery_durable.operations.create import CreateOperations, IfExists
from celery_durable.operations.interventions import InterventionOperations
from celery_durable.operations.lost_tasks import LostTaskOperations
from celery_durable.operations.outbox import OutboxOperations
from celery_durable.operations.overview import OverviewOperations
from celery_durable.operations.queries import QueryOperations, Snapshot
from celery_durable.operations.retention import RetentionOperations
from celery_durable.operations.rewind import RewindOperations
from celery_durable.operations.topics import TopicOperations

__all__ = ["IfExists", "Operations", "PublishRuns", "Snapshot", "Versions"]


class Operations(
    CreateOperations,
    LostTaskOperations,
    TopicOperations,
    RewindOperations,
    InterventionOperations,
    QueryOperations,
    OverviewOperations,
    OutboxOperations,
    RetentionOperations,
):
    """All operations over one store. After a commit, ``publish_runs`` receives the runs that became due."""
