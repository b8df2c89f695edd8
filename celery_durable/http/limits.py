"""The routes of limits. They count for all instances, so a client that is restricted to a scope may not use them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import Path, Query
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from celery_durable import commands
from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.http import timeouts
from celery_durable.http.access import Access, AccessControl, requires, restrict_to_request_scope
from celery_durable.http.openapi import NAME
from celery_durable.http.problems import Forbidden
from celery_durable.http.reading import Cursor, PageSize, json_response
from celery_durable.model import Permission
from celery_durable.redaction import redact_limit_details
from celery_durable.wire.requests import ChangeLimit
from celery_durable.wire.responses import LimitList

LimitName = Annotated[
    str,
    Path(alias="limitName", description="The limit's name.", examples=["stripe"], json_schema_extra=dict(NAME)),
]


class LimitRoutes:
    """The endpoints of limits."""

    def __init__(self, durable: Durable, access_control: AccessControl) -> None:
        self._durable, self._access_control = durable, access_control

    @property
    def _operations(self) -> Operations:
        operations = restrict_to_request_scope(self._durable.internals.operations)
        if operations.scope_text:
            raise Forbidden("Limits count for all instances: the hook has to return True for them, or refuse them.")
        return operations

    @requires(Permission.READING)
    def list_limits(
        self,
        name: Annotated[str | None, Query(description="Only the keys of this limit.")] = None,
        page_size: PageSize = 25,
        cursor: Cursor = None,
    ) -> Response:
        """List the limits that steps have asked for: their numbers, and how many hold and await them.

        A limit with keys has an item for each of them.
        """
        page = self._operations.limits.list(name=name, cursor=cursor, limit=page_size)
        redact = self._durable.internals.redaction("", "").redact_limit
        more = page.cursor is not None
        return json_response(LimitList(limits=list(map(redact, page.items)), cursor=page.cursor, has_next_page=more))

    @requires(Permission.READING)
    def get_limit(
        self, limit_name: LimitName, key: Annotated[str, Query(description="One key of a limit that has keys.")] = ""
    ) -> Response:
        """Get a limit: the steps that hold it, longest first, and the first ones that wait for it."""
        found = self._operations.limits.get(limit_name, key=key)
        return json_response(redact_limit_details(self._durable.internals.redaction, found))

    @requires(Permission.MANAGEMENT)
    async def change_limit(self, request: Request, limit_name: LimitName, body: ChangeLimit) -> Response:
        """Replace numbers of a limit, until they are reset.

        A lower number stops no step that runs; with a higher one, waiting steps continue. The name of the person is
        recorded.
        """
        operations = self._operations
        known = await self._access_control.actor(Access(Permission.MANAGEMENT, "change_limit", None, None, request))
        body = body if known is None else dataclasses.replace(body, by=known)
        if body.by is None:
            raise RequestValidationError([{"type": "missing", "loc": ("body", "by"), "msg": "Say who does it"}])
        change = commands.change_limit
        return json_response(await timeouts.run_in_request_thread(change, operations, limit_name, body))
