"""Families: a parent and the children that its steps have created."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery_durable.errors import InstanceNotFound, InstanceTerminal
from celery_durable.operations.context import OperationContext
from celery_durable.operations.lifecycle import LifecycleOperations
from celery_durable.store.instances import families
from celery_durable.store.instances.families import ChildrenToEnd


class FamilyOperations:
    """The operations on an instance and its family, each member in its own transaction."""

    def __init__(self, context: OperationContext, lifecycle: LifecycleOperations) -> None:
        self._context = context
        self._end_by_action: Mapping[str, Callable[..., object]] = {
            "terminate": lifecycle.terminate,
            "cancel": lifecycle.cancel_once,
        }

    def end_children(self, payload: Mapping[str, Any]) -> None:
        """End children of a run that was ended, as the event `END_CHILDREN` demands. Repeating it is harmless."""
        ended = ChildrenToEnd(**payload)
        end = self._end_by_action[ended.action]
        for workflow, instance_id in self._context.store.read(functools.partial(families.find_open, ended=ended)):
            with suppress(InstanceNotFound, InstanceTerminal):  # it has ended meanwhile
                end(workflow, instance_id, reason=ended.reason)
