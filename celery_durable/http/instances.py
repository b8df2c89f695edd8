"""The routes that change instances: create, pause, terminate, restart, complete a step, send an event."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response

from celery_durable import values
from celery_durable.app import Durable
from celery_durable.errors import BatchTooLarge, InstanceAlreadyExists, InstanceNotFound
from celery_durable.http import requests, timeouts
from celery_durable.http.access import Access, AccessControl, Permission, requires, restrict_to_request_scope
from celery_durable.http.etags import parse_if_match
from celery_durable.http.openapi import IfMatch, InstanceId, WorkflowName
from celery_durable.http.reading import json_response
from celery_durable.model import CreateOptions, Status
from celery_durable.operations import Operations
from celery_durable.wire import responses

OptionalReason = Annotated[requests.Reason | None, Body()]


class InstanceRoutes:
    """The endpoints that change instances."""

    def __init__(self, durable: Durable, access_control: AccessControl) -> None:
        self._durable, self._access_control = durable, access_control

    @property
    def _operations(self) -> Operations:
        return restrict_to_request_scope(self._durable.internals.operations)

    @requires(Permission.CREATION)
    async def create(self, request: Request, workflow: WorkflowName, body: requests.CreateInstance) -> Response:
        """Create an instance and start it.

        An id that is in use is refused; `restart` runs an existing instance again. With `ifExists` "return", the
        response is 200 with the existing instance, which also requires the permission to read it.
        """
        self._durable.internals.registry.get(workflow)
        instance_id = self._operations.new_id() if body.id is None else self._check_id(body.id)
        await self._admit(request, "create", workflow, instance_id)
        if body.if_exists == "return":
            await self._access_control.admit(Access(Permission.READING, "create", workflow, instance_id, request))

        def create() -> Response:
            try:
                self._operations.create.instance(
                    workflow, body.params, id=instance_id, run_at=body.run_at, labels=body.labels
                )
            except InstanceAlreadyExists as taken:
                if body.if_exists == "error":
                    raise
                try:
                    found = self._operations.queries.read(workflow, instance_id)
                except InstanceNotFound:  # out of the caller's scope
                    raise taken from None
                status = responses.StatusView(status=found.status)
                return json_response(responses.InstanceItem(id=instance_id, details=status))
            return json_response(
                _created_item(instance_id, Status.ACTIVE if body.run_at is None else Status.WAITING), status=201
            )

        return await timeouts.run_in_request_thread(create)

    @requires(Permission.CREATION)
    async def create_batch(self, request: Request, workflow: WorkflowName, body: requests.CreateBatch) -> Response:
        """Create several instances at once.

        Existing and repeated ids are skipped and are not in the response. One invalid item refuses the whole batch.
        """
        self._durable.internals.registry.get(workflow)
        if len(body.instances) > self._durable.internals.settings.max_batch:
            raise BatchTooLarge(len(body.instances), self._durable.internals.settings.max_batch)
        batch: list[CreateOptions[Any]] = [
            CreateOptions(self._check_id(each.id), each.params, each.labels) for each in body.instances
        ]
        for instance_id in dict.fromkeys(each.id for each in batch):
            await self._admit(request, "create_batch", workflow, instance_id)
        made = await timeouts.run_in_request_thread(self._operations.create.batch, workflow, batch)
        return json_response(responses.InstanceBatch(instances=[_created_item(instance_id) for instance_id in made]))

    def _check_id(self, instance_id: str) -> str:
        return values.check_instance_id(instance_id, self._durable.internals.settings.max_instance_id)

    async def _admit(self, request: Request, operation: str, workflow: str, instance_id: str) -> None:
        """Call the hooks with the id that will be written."""
        await self._access_control.admit(Access(Permission.CREATION, operation, workflow, instance_id, request))

    @requires(Permission.MANAGEMENT)
    def pause(self, workflow: WorkflowName, instance_id: InstanceId, if_match: IfMatch = None) -> Response:
        """Pause an instance at its next step boundary.

        Timers and deadlines continue.
        """
        self._operations.lifecycle.pause(workflow, instance_id, if_version=parse_if_match(if_match))
        return json_response(responses.Done(ok=True))

    @requires(Permission.MANAGEMENT)
    def resume(self, workflow: WorkflowName, instance_id: InstanceId, if_match: IfMatch = None) -> Response:
        """Resume a paused instance.

        An instance that is not paused stays unchanged, but a requested pause is cancelled.
        """
        self._operations.lifecycle.resume(workflow, instance_id, if_version=parse_if_match(if_match))
        return json_response(responses.Done(ok=True))

    @requires(Permission.MANAGEMENT)
    def terminate(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: OptionalReason = None,
        if_match: IfMatch = None,
    ) -> Response:
        """End an instance permanently.

        The result of a step that is running is not recorded.
        """
        reason = None if body is None else body.reason
        self._operations.lifecycle.terminate(workflow, instance_id, reason=reason, if_version=parse_if_match(if_match))
        return json_response(responses.Done(ok=True))

    @requires(Permission.MANAGEMENT)
    def restart(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: OptionalReason = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Start a new run of an instance, with the same parameters.

        The instance may be in any status. Prior runs stay readable.
        """
        reason = None if body is None else body.reason
        number = self._operations.rewind.restart(
            workflow, instance_id, reason=reason, if_version=parse_if_match(if_match)
        )
        return json_response(responses.Restarted(ok=True, run_number=number))

    @requires(Permission.MANAGEMENT)
    def retry(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: OptionalReason = None,
        if_match: IfMatch = None,
    ) -> Response:
        """Retry the step that failed an errored instance, in a new run.

        The failed step gets fresh attempts. Steps that finished before the failure are kept.
        """
        reason = None if body is None else body.reason
        number = self._operations.rewind.retry(
            workflow, instance_id, reason=reason, if_version=parse_if_match(if_match)
        )
        return json_response(responses.Restarted(ok=True, run_number=number))

    @requires(Permission.MANAGEMENT)
    def rewind(
        self, workflow: WorkflowName, instance_id: InstanceId, body: requests.Rewind, if_match: IfMatch = None
    ) -> Response:
        """Start a new run of an instance that continues from a step.

        It keeps the steps that finished before this step was called, and all events. The instance may be in any
        status.
        """
        number = self._operations.rewind.restart(
            workflow, instance_id, from_step=body.step, reason=body.reason, if_version=parse_if_match(if_match)
        )
        return json_response(responses.Restarted(ok=True, run_number=number))

    @requires(Permission.MANAGEMENT)
    async def fork(
        self, request: Request, workflow: WorkflowName, instance_id: InstanceId, body: requests.Fork
    ) -> Response:
        """Create an instance that continues from a step of another instance.

        It also requires the permission to create the new instance. The other instance stays unchanged.
        """
        new_id = self._operations.new_id() if body.id is None else self._check_id(body.id)
        await self._admit(request, "fork", workflow, new_id)
        await timeouts.run_in_request_thread(self._operations.rewind.fork, workflow, instance_id, body.step, id=new_id)
        return json_response(_created_item(new_id), status=201)

    @requires(Permission.MANAGEMENT)
    async def set_result(
        self,
        request: Request,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: requests.SetResult,
        if_match: IfMatch = None,
    ) -> Response:
        """Complete a step by hand, with a result.

        An open step is completed in the same run. A step that failed its instance is completed in a new run. The name
        of the person, the time and the reason are recorded.
        """
        by = await self._actor(request, "set_result", workflow, instance_id, body.by)
        number = await timeouts.run_in_request_thread(
            self._operations.interventions.set_result,
            workflow,
            instance_id,
            body.step,
            body.result,
            by=by,
            reason=body.reason,
            if_version=parse_if_match(if_match),
        )
        return json_response(responses.StepCompleted(ok=True, run_number=number))

    @requires(Permission.MANAGEMENT)
    async def skip(
        self,
        request: Request,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: requests.Skip,
        if_match: IfMatch = None,
    ) -> Response:
        """Complete a step by hand, without a result.

        A sleep ends at once. Otherwise like set-result.
        """
        by = await self._actor(request, "skip", workflow, instance_id, body.by)
        number = await timeouts.run_in_request_thread(
            self._operations.interventions.skip,
            workflow,
            instance_id,
            body.step,
            by=by,
            reason=body.reason,
            if_version=parse_if_match(if_match),
        )
        return json_response(responses.StepCompleted(ok=True, run_number=number))

    async def _actor(self, request: Request, operation: str, workflow: str, instance_id: str, named: str | None) -> str:
        """Return who makes the change: the name from the actor hook, otherwise the one in the body."""
        known = await self._access_control.actor(
            Access(Permission.MANAGEMENT, operation, workflow, instance_id, request)
        )
        by = named if known is None else known
        if by is None:
            flaw = {"type": "missing", "loc": ("body", "by"), "msg": "Say who does it"}
            raise RequestValidationError([flaw])
        return by

    @requires(Permission.CREATION)
    async def restart_or_create(
        self,
        request: Request,
        workflow: WorkflowName,
        instance_id: InstanceId,
        body: requests.RestartOrCreate,
        if_match: IfMatch = None,
    ) -> Response:
        """Restart an instance if it is in one of these statuses, or create it if there is none.

        It requires the permissions to create and to manage the instance. An instance in another status stays
        unchanged.
        """
        self._check_id(instance_id)
        await self._access_control.admit(
            Access(Permission.MANAGEMENT, "restart_or_create", workflow, instance_id, request)
        )
        started = await timeouts.run_in_request_thread(
            self._operations.create.restart_or_create,
            workflow,
            body.params,
            id=instance_id,
            if_status=body.if_status,
            if_version=parse_if_match(if_match),
            reason=body.reason,
            labels=body.labels,
        )
        status = responses.StatusView(status=started.status)
        return json_response(
            responses.RestartOrCreateResult(
                outcome=started.outcome, id=instance_id, run_number=started.run_number, details=status
            )
        )

    @requires(Permission.EVENTS)
    def send_event(
        self, workflow: WorkflowName, instance_id: InstanceId, body: requests.SendEvent, if_match: IfMatch = None
    ) -> Response:
        """Send an event to an instance.

        It is stored until the workflow waits for its type, also while the instance is paused.
        """
        accepted = self._operations.events.send(
            workflow, instance_id, body.type, body.payload, id=body.id, if_version=parse_if_match(if_match)
        )
        # Only the status: a client that may send events may lack the permission to read outputs and errors.
        status = self._operations.queries.read(workflow, instance_id).status
        return json_response(responses.EventSent(status=responses.StatusView(status=status), accepted=accepted))


def _created_item(instance_id: str, status: Status = Status.ACTIVE) -> responses.InstanceItem:
    return responses.InstanceItem(id=instance_id, details=responses.StatusView(status=status))
