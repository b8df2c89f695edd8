"""The routes of topics: emit a payload to all open waits, and list them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Path
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.app import Durable
from celery_durable.http import timeouts
from celery_durable.http.access import Access, AccessControl, requires, restrict_to_request_scope
from celery_durable.http.openapi import TOPIC
from celery_durable.http.reading import Cursor, PageSize, json_response
from celery_durable.model import Waiter
from celery_durable.wire.permissions import Permission
from celery_durable.wire.requests import Emit
from celery_durable.wire.responses import ResponseModel

TopicName = Annotated[
    str,
    Path(description="The topic; it may contain slashes.", examples=["user.updated"], json_schema_extra=dict(TOPIC)),
]


class Emitted(ResponseModel):
    """The number of waits that received the payload."""

    resumed: int

    model_config = ConfigDict(json_schema_extra={"examples": [{"resumed": 3}]})


class WaiterView(ResponseModel):
    """An open wait."""

    workflow_name: str
    instance_id: str
    run_number: int
    step_name: str
    opened_at: datetime
    deadline: datetime


class WaiterList(ResponseModel):
    """A page, oldest instances first. ``cursor`` continues it."""

    waiters: list[WaiterView]
    cursor: str | None = None
    has_next_page: bool

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "waiters": [
                        {
                            "workflowName": "order",
                            "instanceId": "order-42",
                            "runNumber": 1,
                            "stepName": "wait for the price",
                            "openedAt": "2030-01-01T08:00:00.000000Z",
                            "deadline": "2030-01-02T08:00:00.000000Z",
                        }
                    ],
                    "hasNextPage": False,
                }
            ]
        }
    )


class TopicRoutes:
    """The endpoints of topics."""

    def __init__(self, durable: Durable, access_control: AccessControl) -> None:
        self._durable, self._access_control = durable, access_control

    @requires(Permission.EVENTS)
    async def emit(self, request: Request, topic: TopicName, body: Emit) -> Response:
        """Send a payload to all waits that are open on a topic now.

        An emission reaches instances of all workflows, so it requires the permissions for events and for management.
        Later waits do not receive the payload.
        """
        await self._access_control.admit(Access(Permission.MANAGEMENT, "emit", None, None, request))
        resumed = await timeouts.run_in_request_thread(
            restrict_to_request_scope(self._durable.internals.operations).topics.emit, topic, body.payload, id=body.id
        )
        return json_response(Emitted(resumed=resumed))

    @requires(Permission.READING)
    def waiters(self, topic: TopicName, page_size: PageSize = 25, cursor: Cursor = None) -> Response:
        """List the open waits on a topic.

        They are of instances of all workflows, the oldest instances first.
        """
        page = restrict_to_request_scope(self._durable.internals.operations).topics.waiters(
            topic, cursor=cursor, limit=page_size
        )
        more = {} if page.cursor is None else {"cursor": page.cursor}
        items = [_view_waiter(waiter) for waiter in page.items]
        return json_response(WaiterList(waiters=items, has_next_page=page.cursor is not None, **more))


def _view_waiter(waiter: Waiter) -> WaiterView:
    return WaiterView(
        workflow_name=waiter.workflow,
        instance_id=waiter.instance_id,
        run_number=waiter.run_number,
        step_name=waiter.step,
        opened_at=waiter.opened_at,
        deadline=waiter.deadline,
    )
