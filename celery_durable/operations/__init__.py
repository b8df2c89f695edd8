"""Operations on instances from outside a pass: create, read, control, emit, rewind, intervene.

Each checks its input, runs one transaction, and wakes the workers. Without the database it raises StoreUnavailable. If
the broker is down, work is delayed, but no call fails (LAW 1).
"""

from __future__ import annotations

import dataclasses

from celery_durable.model import Scope
from celery_durable.operations.answers import AnswerOperations
from celery_durable.operations.context import OperationContext, PublishRuns, Versions
from celery_durable.operations.create import CreateOperations
from celery_durable.operations.events import EventOperations
from celery_durable.operations.families import FamilyOperations
from celery_durable.operations.history import HistoryOperations
from celery_durable.operations.interventions import InterventionOperations
from celery_durable.operations.lifecycle import LifecycleOperations
from celery_durable.operations.outbox import OutboxOperations
from celery_durable.operations.queries import QueryOperations, Snapshot
from celery_durable.operations.retention import RetentionOperations
from celery_durable.operations.rewind import RewindOperations
from celery_durable.operations.stats import StatsOperations
from celery_durable.operations.topics import TopicOperations

__all__ = ["OperationContext", "Operations", "PublishRuns", "Snapshot", "Versions"]


class Operations:
    """All operations over one store, by noun: ``operations.lifecycle.pause(...)``."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self.create = CreateOperations(context)
        self.lifecycle = LifecycleOperations(context)
        self.events = EventOperations(context)
        self.topics = TopicOperations(context)
        self.rewind = RewindOperations(context)
        self.interventions = InterventionOperations(context)
        self.families = FamilyOperations(context)
        self.queries = QueryOperations(context)
        self.history = HistoryOperations(context)
        self.stats = StatsOperations(context)
        self.outbox = OutboxOperations(context)
        self.retention = RetentionOperations(context)
        self.answers = AnswerOperations(context)

    def restrict_to(self, scope: Scope | None) -> Operations:
        """Return the operations of a caller that finds only the instances of one scope."""
        return Operations(dataclasses.replace(self._context, scope=scope))

    def new_id(self) -> str:
        """Return a new random id, with the prefix of the caller's scope."""
        return self._context.new_id()

    @property
    def scope_text(self) -> str:
        """A text that is equal for callers with the same scope."""
        return self._context.scope_text
