"""The routes that read across all workflows: instances, counts and waits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from celery_durable import values
from celery_durable.app import Durable
from celery_durable.http.access import requires, restrict_to_request_scope
from celery_durable.http.reading import Cursor, Labels, PageSize, json_response
from celery_durable.http.view import View
from celery_durable.model import Status
from celery_durable.operations import Operations
from celery_durable.wire import responses, views
from celery_durable.wire.permissions import Permission


class OverviewRoutes:
    """The endpoints that read across all workflows."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    @property
    def _operations(self) -> Operations:
        return restrict_to_request_scope(self._durable.internals.operations)

    @requires(Permission.READING)
    def list_all_instances(
        self,
        status: Annotated[Status | None, Query(description="Only in this status.")] = None,
        page_size: PageSize = 25,
        cursor: Cursor = None,
        label: Labels = (),
    ) -> Response:
        """List the instances of all workflows, newest first.

        The items have no parameters and no output.
        """
        page = self._operations.queries.list(
            None, status=status, cursor=cursor, limit=page_size, labels=values.parse_labels(label)
        )
        more = {} if page.cursor is None else {"cursor": page.cursor}
        redaction = self._durable.internals.redaction
        items = [View(redaction(item.workflow, item.id)).item_of_any(item) for item in page.items]
        return json_response(
            responses.InstanceListOfAll(instances=items, has_next_page=page.cursor is not None, **more)
        )

    @requires(Permission.READING)
    def stats(self) -> Response:
        """Count the instances by workflow and status.

        The response also has the number of runs that are due and not claimed. A client that may see all instances gets
        the lengths of the queues of known workflows and of waiting tasks, too. A count that is not exact is a minimum.
        """
        found = self._operations.stats.read()
        # A queue is not of one scope, so a client that is restricted to one gets no queues.
        queues = {} if self._operations.scope_text else self._durable.internals.queue_lengths()
        return json_response(views.stats_view(found, queues))

    @requires(Permission.READING)
    def waits(
        self,
        event_type: Annotated[str | None, Query(alias="type", description="Only for events of this type.")] = None,
        workflow: Annotated[str | None, Query(alias="workflowName", description="Only of this workflow.")] = None,
        page_size: PageSize = 25,
    ) -> Response:
        """List the steps that wait for an event, those of the newest instances first."""
        found = self._operations.stats.waits(workflow=workflow, event_type=event_type, limit=page_size)
        return json_response(views.wait_list(found))
