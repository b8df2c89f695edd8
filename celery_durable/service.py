"""The interface for a package that brings workflows to an application: four operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from celery_durable.all_operations import Operations
from celery_durable.errors import WorkflowsRequired
from celery_durable.model import HistoryPage, InstanceStatus

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


class WorkflowService(Protocol):
    """The interface that package authors depend on: `Durable.service`, and in their tests a harness's."""

    def create_instance(
        self,
        workflow: str,
        params: Any = None,
        *,
        id: str | None = None,
        labels: Mapping[str, str] | None = None,
        session: Session | None = None,
    ) -> str:
        """Record a new instance and make it due.

        Args:
            workflow: The name of a registered workflow.
            params: The parameters, of the type that the workflow declares.
            id: The instance's id; None means a random id.
            labels: The instance's labels.
            session: A session whose transaction writes the instance, together with the caller's rows or not at all.

        Returns:
            The instance's id.

        Raises:
            WorkflowNotFound: No workflow of this name is registered in this process.
            WorkflowParamsInvalid: ``params`` does not fit the type that the workflow declares.
            InvalidLabel: A label breaks the rules for labels.
            InstanceAlreadyExists: The id is taken.
            StoreUnavailable: The database cannot do this now.
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
        """Send an event to an instance.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            event_type: The event's type.
            payload: JSON data.
            id: The event's id, which is accepted once for each run; None means a random id.
            session: A session whose transaction writes the event.

        Returns:
            False if an event with this id was accepted before.

        Raises:
            InstanceNotFound: No instance has this id.
            InstanceTerminal: The instance has ended, and the event is new.
            StoreUnavailable: The database cannot do this now.
        """

    def get_instance_status(self, workflow: str, instance_id: str) -> InstanceStatus:
        """Return the status of an instance.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.

        Raises:
            InstanceNotFound: No instance has this id.
            StoreUnavailable: The database cannot do this now.
        """

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
        """Return a page of the steps and events of a run.

        Args:
            workflow: The workflow's name.
            instance_id: The instance's id.
            run: The number of the run; None means the current one.
            limit: The largest number of items to return in each list.
            steps_cursor: Continues the steps of an earlier page.
            events_cursor: Continues the events of an earlier page.

        Returns:
            The page.

        Raises:
            InstanceNotFound: No instance has this id.
            StoreUnavailable: The database cannot do this now.
        """


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
        return self._operations().create.instance(workflow, params, id=id, labels=labels, session=session)

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
        return self._operations().events.send(workflow, instance_id, event_type, payload, id=id, session=session)

    def get_instance_status(self, workflow: str, instance_id: str) -> InstanceStatus:
        """Return the status of an instance."""
        return self._operations().queries.get(workflow, instance_id).status

    def list_history(self, workflow: str, instance_id: str, **page: Any) -> HistoryPage:
        """Return a page of the steps and events of a run."""
        return self._operations().history.page(workflow, instance_id, **page)


def require_workflows(service: WorkflowService | None, *, package: str) -> WorkflowService:
    """Return the service that a package was given.

    Args:
        service: The service, or None if the application passed none.
        package: The package's name, for the error.

    Raises:
        WorkflowsRequired: ``service`` is None.
    """
    if service is None:
        raise WorkflowsRequired(package)
    return service
