"""The routes of topics: emit a payload to all open waits, and list them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response

from celery_durable.app import Durable
from celery_durable.http import timeouts
from celery_durable.http.access import Access, AccessControl, requires, restrict_to_request_scope
from celery_durable.http.openapi import TOPIC
from celery_durable.http.reading import Cursor, PageSize, json_response
from celery_durable.model import Permission
from celery_durable.wire.requests import Emit
from celery_durable.wire.responses import Emitted, WaiterList

TopicName = Annotated[
    str,
    Path(description="The topic; it may contain slashes.", examples=["user.updated"], json_schema_extra=dict(TOPIC)),
]


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
        return json_response(WaiterList(waiters=page.items, cursor=page.cursor, has_next_page=page.cursor is not None))
