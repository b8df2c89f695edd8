"""The routes that change instances, one for each of the `commands`, and those of topics.

Some requests need more than the permission of their route: the id that will be written, or the name of the user.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import Body, Path
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from celery_durable import commands, values
from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.commands import A, Command, Q, Target
from celery_durable.definitions import Definition
from celery_durable.errors import BatchTooLarge, ValueRefused
from celery_durable.http import timeouts
from celery_durable.http.access import Access, AccessControl, requires, restrict_to_request_scope
from celery_durable.http.openapi import TOPIC, IfMatch, InstanceId, WorkflowName
from celery_durable.http.reading import Cursor, PageSize, json_response, parse_if_match
from celery_durable.model import Permission
from celery_durable.wire.requests import (
    Cancel,
    CreateBatch,
    CreateInstance,
    Emit,
    EmptyRequest,
    Fork,
    RequestModel,
    RestartOrCreate,
    SendEvent,
    SetResult,
    Skip,
    Terminate,
)
from celery_durable.wire.responses import Emitted, WaiterList

N = TypeVar("N", Cancel, Terminate, Skip, SetResult, SendEvent)
"""A body with the name of a person."""


class CommandRoutes:
    """The endpoints of commands."""

    def __init__(self, durable: Durable, access_control: AccessControl) -> None:
        self._durable, self._access_control = durable, access_control
        self._completions: dict[str, Callable[[Request, Target, Any], Awaitable[Any]]] = {
            commands.create.name: self._complete_create,
            commands.create_batch.name: self._complete_create_batch,
            commands.fork.name: self._complete_fork,
            commands.cancel.name: functools.partial(self._name_person, "cancel"),
            commands.terminate.name: functools.partial(self._name_person, "terminate"),
            commands.set_result.name: self._complete_step_change,
            commands.skip.name: self._complete_step_change,
            commands.restart_or_create.name: self._complete_restart_or_create,
            commands.send_event.name: self._complete_event,
        }

    @property
    def _operations(self) -> Operations:
        return restrict_to_request_scope(self._durable.internals.operations)

    def endpoint(self, command: Command[Q, A]) -> Callable[..., Awaitable[Response]]:
        """Return the endpoint of a command. FastAPI reads its parameters from its signature."""

        async def serve(
            request: Request, workflow: str, instance_id: str = "", body: Any = None, if_match: str | None = None
        ) -> Response:
            target = Target(workflow, instance_id)
            body = await self.complete(command.name, request, target, command.request() if body is None else body)
            target = dataclasses.replace(target, if_version=parse_if_match(if_match))
            answer = await timeouts.run_in_request_thread(command.run, self._operations, target, body)
            return json_response(answer, status=answer.http_status)

        serve.__name__, serve.__doc__ = command.name, command.doc
        serve.__signature__ = _signature(command)  # type: ignore[attr-defined]  # inspect reads it
        return requires(command.permission)(serve)

    async def complete(self, name: str, request: Request, target: Target, body: RequestModel) -> Any:
        """Return the body with what the client may not say itself; raises what refuses the request."""
        complete = self._completions.get(name)
        return body if complete is None else await complete(request, target, body)

    # --- what a request does not say itself -----------------------------------------------------

    async def _complete_create(self, request: Request, target: Target, body: CreateInstance) -> CreateInstance:
        """Choose the id, and ask whether this client may create it, and read it if it exists."""
        definition = self._durable.internals.registry.get(target.workflow)
        instance_id = self._operations.new_id() if body.id is None else self._check_id(body.id)
        await self._admit(request, Permission.CREATION, "create", target.workflow, instance_id)
        _check_limit(definition, body)
        if body.if_exists == "return":
            await self._admit(request, Permission.READING, "create", target.workflow, instance_id)
        if body.if_exists == "postpone" or body.if_running is not None:
            await self._admit(request, Permission.MANAGEMENT, "create", target.workflow, instance_id)
        return dataclasses.replace(body, id=instance_id)

    async def _complete_create_batch(self, request: Request, target: Target, body: CreateBatch) -> CreateBatch:
        """Ask whether this client may create each of the instances."""
        self._durable.internals.registry.get(target.workflow)
        max_batch = self._durable.internals.settings.max_batch
        if len(body.instances) > max_batch:
            raise BatchTooLarge(len(body.instances), max_batch)
        for instance_id in dict.fromkeys([self._check_id(each.id) for each in body.instances]):
            await self._admit(request, Permission.CREATION, "create_batch", target.workflow, instance_id)
        return body

    async def _complete_fork(self, request: Request, target: Target, body: Fork) -> Fork:
        """Choose the id, and ask whether this client may create it."""
        new_id = self._operations.new_id() if body.id is None else self._check_id(body.id)
        await self._admit(request, Permission.CREATION, "fork", target.workflow, new_id)
        return dataclasses.replace(body, id=new_id)

    async def _complete_restart_or_create(
        self, request: Request, target: Target, body: RestartOrCreate
    ) -> RestartOrCreate:
        """Ask whether this client may also manage the instance."""
        self._check_id(target.instance_id)
        await self._admit(request, Permission.MANAGEMENT, "restart_or_create", target.workflow, target.instance_id)
        return body

    async def _complete_step_change(self, request: Request, target: Target, body: Skip) -> Skip:
        """Name the person, who must be known."""
        body = await self._name_person("set_result" if isinstance(body, SetResult) else "skip", request, target, body)
        return body if body.by is not None else _refuse_missing("by", "Say who does it")

    async def _complete_event(self, request: Request, target: Target, body: SendEvent) -> SendEvent:
        """Name the person whose answer it is. Another event has a type."""
        if body.answers is None:
            return body if body.type is not None else _refuse_missing("type", "Field required")
        body = await self._name_person("send_event", request, target, body, Permission.EVENTS)
        return body if body.by is not None else _refuse_missing("by", "Say who answers")

    async def _name_person(
        self,
        operation: str,
        request: Request,
        target: Target,
        body: N,
        permission: Permission = Permission.MANAGEMENT,
    ) -> N:
        """Name the person: the name from the actor hook, otherwise the one in the body."""
        access = Access(permission, operation, target.workflow, target.instance_id, request)
        known = await self._access_control.actor(access)
        return body if known is None else dataclasses.replace(body, by=known)

    def _check_id(self, instance_id: str) -> str:
        return values.check_instance_id(instance_id, self._durable.internals.settings.max_instance_id)

    async def _admit(
        self, request: Request, permission: Permission, operation: str, workflow: str, instance_id: str
    ) -> None:
        await self._access_control.admit(Access(permission, operation, workflow, instance_id, request))


def _refuse_missing(field: str, message: str) -> NoReturn:
    raise RequestValidationError([{"type": "missing", "loc": ("body", field), "msg": message}])


def _check_limit(definition: Definition, body: CreateInstance) -> None:
    """Refuse a limit that is longer than the workflow's: only the application itself may lengthen it."""
    longest = definition.max_run_duration
    if body.max_run_ms is not None and longest is not None and body.max_run_ms > longest / timedelta(milliseconds=1):
        raise ValueRefused(
            f"maxRunMs is {body.max_run_ms}, longer than the max_run_duration of workflow {definition.name!r}, "
            f"{longest // timedelta(milliseconds=1)} ms. A request may only shorten it."
        )


def _signature(command: Command[Q, A]) -> inspect.Signature:
    """Return the signature of a command's endpoint: its path, its body and its headers."""
    annotations: dict[str, Any] = {"request": Request, "workflow": WorkflowName}
    defaults: dict[str, Any] = {}
    if "{instanceId}" in command.path:
        annotations["instance_id"] = InstanceId
    if not command.request.is_optional:
        annotations["body"] = command.request
    elif command.request is not EmptyRequest:
        annotations["body"], defaults["body"] = Annotated[command.request | None, Body()], None
    if command.is_conditional:
        annotations["if_match"], defaults["if_match"] = IfMatch, None
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, inspect.Parameter.empty),
                annotation=annotation,
            )
            for name, annotation in annotations.items()
        ]
    )


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
