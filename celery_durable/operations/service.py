"""The interface for a package that brings workflows to an application: four operations, independent of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sqlalchemy.orm import Session

from celery_durable.errors import WorkflowsRequired
from celery_durable.model import HistoryPage, InstanceStatus
from celery_durable.operations import Operations


class WorkflowService(Protocol):
    """The interface that package authors depend on.

    The application passes them `Durable.service`; their tests pass a harness's.
    """

    def create_instance(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
    ) -> str:
        """Record a new instance and make it due. Returns its id.

        With ``session`` it is written in the caller's transaction, together with the caller's rows or not at all.
        Raises WorkflowNotFound, WorkflowParamsInvalid, InvalidLabel, InstanceAlreadyExists.
        """

    def send_event(
        self,
        workflow: str,
        instance_id: str,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
    ) -> bool:
        """Send an event. Returns False if an event with this ``id`` was accepted before.

        ``session`` works as in `create_instance`. Raises InstanceNotFound, InstanceTerminal.
        """

    def get_instance_status(self, workflow: str, instance_id: str) -> InstanceStatus:
        """Return the status of an instance; raises InstanceNotFound."""

    def list_history(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int | None = None,
        limit: int = 25,
        steps_cursor: str | None = None,
        events_cursor: str | None = None,
    ) -> HistoryPage:
        """Return a page of the steps and events of a run, by default the current one; raises InstanceNotFound."""


class Service:
    """A `WorkflowService` over operations."""

    def __init__(self, operations: Callable[[], Operations]) -> None:
        self._operations = operations

    def create_instance(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
    ) -> str:
        """Record a new instance and make it due."""
        return self._operations().create(workflow, params, id=id, labels=labels, session=session)

    def send_event(
        self,
        workflow: str,
        instance_id: str,
        event_type: str,
        payload: Any = None,
        *,
        id: str | None = None,
        session: Session | None = None,
    ) -> bool:
        """Send an event."""
        return self._operations().send_event(workflow, instance_id, event_type, payload, id=id, session=session)

    def get_instance_status(self, workflow: str, instance_id: str) -> InstanceStatus:
        """Return the status of an instance."""
        return self._operations().get(workflow, instance_id).status

    def list_history(self, workflow: str, instance_id: str, **page: Any) -> HistoryPage:
        """Return a page of the steps and events of a run."""
        return self._operations().history_page(workflow, instance_id, **page)


def require_workflows(service: WorkflowService | None, *, package: str) -> WorkflowService:
    """Return the service that a package was given. Raises WorkflowsRequired with the remedy if it is None."""
    if service is None:
        raise WorkflowsRequired(package)
    return service
