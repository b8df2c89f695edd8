"""Operations on instances from outside a pass: create, read, control, emit, rewind, intervene.

Each operation checks its input, runs one transaction, and only then wakes the workers. A broker that is down delays
work but fails no call (LAW 1).
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
    """All operations over one store. After the commit, ``publish_runs`` receives the runs that became due."""
