"""All operations over one store: those of the core, and those of the rooms `revise` and `insight`."""

from __future__ import annotations

import dataclasses

from celery_durable.insight.history import HistoryOperations
from celery_durable.insight.queries import QueryOperations
from celery_durable.insight.stats import StatsOperations
from celery_durable.model import Scope
from celery_durable.operations.answers import AnswerOperations
from celery_durable.operations.asks import AskOperations
from celery_durable.operations.context import OperationContext
from celery_durable.operations.create import CreateOperations
from celery_durable.operations.events import EventOperations
from celery_durable.operations.lifecycle import LifecycleOperations
from celery_durable.operations.limits import LimitOperations
from celery_durable.operations.outbox import OutboxOperations
from celery_durable.operations.retention import RetentionOperations
from celery_durable.operations.topics import TopicOperations
from celery_durable.revise.families import FamilyOperations
from celery_durable.revise.interventions import InterventionOperations
from celery_durable.revise.rewind import RewindOperations


class Operations:
    """All operations over one store, by noun: ``operations.lifecycle.pause(...)``."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self.create = CreateOperations(context)
        self.lifecycle = LifecycleOperations(context)
        self.events = EventOperations(context)
        self.asks = AskOperations(context)
        self.topics = TopicOperations(context)
        self.rewind = RewindOperations(context)
        self.interventions = InterventionOperations(context)
        self.families = FamilyOperations(context)
        self.queries = QueryOperations(context)
        self.history = HistoryOperations(context)
        self.stats = StatsOperations(context)
        self.outbox = OutboxOperations(context)
        self.limits = LimitOperations(context)
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
