"""The routes that read: lists, one instance, its history and its stream."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal

from fastapi import Header, Query
from starlette.responses import Response

from celery_durable import values
from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.errors import WorkflowNotFound
from celery_durable.http import timeouts
from celery_durable.http.access import requires, restrict_to_request_scope
from celery_durable.http.followers import Followers
from celery_durable.http.openapi import EventStream, IfNoneMatch, InstanceId, WorkflowName
from celery_durable.http.stream import Stream, StreamPosition
from celery_durable.insight.explain import explain
from celery_durable.model import (
    InstanceSummary,
    LogLevel,
    Page,
    Permission,
    Record,
    Status,
    VersionedInstance,
    WaitFilter,
)
from celery_durable.redaction import Redaction
from celery_durable.values.labels import MAX_LABELS
from celery_durable.wire.encoding import to_json
from celery_durable.wire.responses import (
    HistoryResponse,
    InstanceList,
    PublishedValues,
    WaitList,
    WorkflowList,
    WorkflowParameters,
)

MAX_PAGE_SIZE = 100
_MAX_WAIT_SECONDS = 60
_MAX_RUN_NUMBER = 2**31 - 1
_LEVELS = list(LogLevel)  # from the least to the most important

PageSize = Annotated[int, Query(alias="pageSize", ge=1, le=MAX_PAGE_SIZE, description="The largest number of items.")]
Cursor = Annotated[str | None, Query(description="The cursor of an earlier page, to get the next one.")]
_LABEL = {"type": "string", "pattern": "^[a-zA-Z0-9_][a-zA-Z0-9_-]{0,63}=[^\\x00-\\x1f\\x7f-\\x9f]{1,255}$"}
Labels = Annotated[
    Sequence[str],
    Query(
        description="Only instances with this label, `name=value`. Repeat it for instances that have all of several.",
        json_schema_extra={"items": _LABEL, "maxItems": MAX_LABELS},
    ),
]
RunNumber = Annotated[
    int | None, Query(alias="runNumber", ge=1, le=_MAX_RUN_NUMBER, description="By default the current run.")
]


class ReadRoutes:
    """The endpoints that read."""

    def __init__(self, durable: Durable, followers: Followers) -> None:
        self._durable, self._followers = durable, followers

    @property
    def _operations(self) -> Operations:
        return restrict_to_request_scope(self._durable.internals.operations)

    def _redaction(self, workflow: str, instance_id: str) -> Redaction:
        return self._durable.internals.redaction(workflow, instance_id)

    @requires(Permission.READING)
    def list_workflows(self) -> Response:
        """List the workflows that the serving process knows."""
        registry = self._durable.internals.registry
        known = [registry.get(name) for name in sorted(self._durable.workflows)]
        found = [WorkflowParameters(name=each.name, parameters=each.params.parameters) for each in known]
        return json_response(WorkflowList(workflows=found))

    @requires(Permission.READING)
    def list_instances(
        self,
        workflow: WorkflowName,
        status: Annotated[Status | None, Query(description="Only in this status.")] = None,
        page_size: PageSize = 25,
        cursor: Cursor = None,
        label: Labels = (),
    ) -> Response:
        """List the instances of a workflow, newest first.

        The items have no parameters and no output.
        """
        labels = values.parse_labels(label)
        page = self._operations.queries.list(workflow, status=status, cursor=cursor, limit=page_size, labels=labels)
        if not page.items and cursor is None and workflow not in self._durable.workflows:
            raise WorkflowNotFound(workflow, [])
        return self._list_response(page)

    def _list_response(self, page: Page[InstanceSummary]) -> Response:
        items = [self._redaction(item.workflow, item.id).redact_summary(item) for item in page.items]
        return json_response(InstanceList(instances=items, cursor=page.cursor, has_next_page=page.cursor is not None))

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
        return self._list_response(page)

    @requires(Permission.READING)
    def stats(self) -> Response:
        """Count the instances by workflow and status.

        The response also has the number of runs that are due and not claimed. A client that may see all instances gets
        the lengths of the queues of known workflows and of waiting tasks, too. A count that is not exact is a minimum.
        """
        # A queue is not of one scope, so a client that is restricted to one gets no queues.
        queues = {} if self._operations.scope_text else self._durable.internals.queue_lengths()
        return json_response(self._operations.stats.read(queues))

    @requires(Permission.READING)
    def waits(
        self,
        event_type: Annotated[str | None, Query(alias="type", description="Only for events of this type.")] = None,
        workflow: Annotated[str | None, Query(alias="workflowName", description="Only of this workflow.")] = None,
        to: Annotated[str | None, Query(description="Only waits that ask this person or team.")] = None,
        is_asking: Annotated[bool, Query(alias="isAsking", description="Only waits that ask a person.")] = False,  # noqa: FBT002  # a query parameter
        page_size: PageSize = 25,
        cursor: Cursor = None,
    ) -> Response:
        """List the steps that wait for an event, those of the newest instances first.

        A page may be short, and have a cursor. A wait that asks a person has the question in `ask`, and in `schema` the
        JSON schema of the answer, to make a form of it. The answer is an event with `answers`.
        """
        chosen = WaitFilter(workflow=workflow, event_type=event_type, to=to, is_asking=is_asking)
        page = self._operations.stats.waits(chosen, cursor=cursor, limit=page_size)
        shown = [self._redaction(each.workflow, each.instance_id).redact_wait(each) for each in page.items]
        return json_response(WaitList(waits=shown, cursor=page.cursor, has_next_page=page.cursor is not None))

    @requires(Permission.READING)
    async def get(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        wait: Annotated[
            float, Query(ge=0, le=_MAX_WAIT_SECONDS, description="The longest time to wait, in seconds.")
        ] = 0,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """Get an instance: its status, its parameters and its current step.

        Every change of the instance replaces its ETag, which is opaque. With `wait`, the server responds when the
        instance has ended or, with If-None-Match, has changed; at the latest after `wait` seconds.
        """
        if wait > 0 or if_none_match is not None:
            with self._followers.one() if wait > 0 else nullcontext():
                found = await self._long_poll(workflow, instance_id, wait, if_none_match)
            if matches_if_none_match(found.tag, if_none_match):
                return Response(status_code=304, headers={"ETag": format_etag(found.tag)})
        return await timeouts.run_in_request_thread(self._get_response, workflow, instance_id)

    def _get_response(self, workflow: str, instance_id: str) -> Response:
        tag, details = self._operations.queries.details(workflow, instance_id)
        shown = self._redaction(workflow, instance_id).redact_details(details)
        return json_response(shown, headers={"ETag": format_etag(tag)})

    async def _long_poll(
        self, workflow: str, instance_id: str, wait: float, if_none_match: str | None
    ) -> VersionedInstance:
        """Return the instance at the end of a long poll. Between two reads it holds no thread and no connection."""
        pause, operations = 0.05, self._operations
        found = await timeouts.run_read(operations.queries.read_with_tag, workflow, instance_id)
        while True:
            has_changed = if_none_match is not None and not matches_if_none_match(found.tag, if_none_match)
            if found.instance.status.is_terminal or has_changed or wait <= 0:
                return found
            await timeouts.pause(min(pause, wait))
            wait -= pause
            found = await self._followers.read_shared(operations, workflow, instance_id, within=pause / 2)
            pause = min(pause * 1.5, 1.0)

    @requires(Permission.READING)
    def explain(self, workflow: WorkflowName, instance_id: InstanceId) -> Response:
        """Explain why an instance is in its current state, and what to do about it.

        The response has a code for programs, a sentence for people, the facts behind them, and commands to run.
        """
        facts = self._operations.queries.facts(workflow, instance_id)
        return json_response(explain(facts.redacted(self._redaction(workflow, instance_id))))

    @requires(Permission.READING)
    def history(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        run_number: RunNumber = None,
        page_size: PageSize = 25,
        order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "asc",
        steps_cursor: Annotated[str | None, Query(alias="stepsCursor")] = None,
        events_cursor: Annotated[str | None, Query(alias="eventsCursor")] = None,
        include_run: Annotated[bool, Query(alias="includeRun")] = False,  # noqa: FBT002  # a query parameter
        include_logs: Annotated[bool, Query(alias="includeLogs")] = False,  # noqa: FBT002  # a query parameter
        logs_cursor: Annotated[str | None, Query(alias="logsCursor")] = None,
        log_level: Annotated[LogLevel | None, Query(alias="logLevel", description="This level and above.")] = None,
        log_category: Annotated[str | None, Query(alias="logCategory", max_length=255)] = None,
        include_attempts: Annotated[bool, Query(alias="includeAttempts")] = False,  # noqa: FBT002  # a query parameter
        attempts_cursor: Annotated[str | None, Query(alias="attemptsCursor")] = None,
    ) -> Response:
        """Read the history of a run: its steps, its events and, if asked for, its log lines and failed attempts.

        With `includeAttempts`, also the attempts that did not succeed, with their tracebacks and their workers.

        With `includeRun`, also its parameters, its status or outcome, the run that it continues, and the manual changes
        to its steps. Each list has its own cursor. A cursor belongs to a run, an order and a filter. Without
        `runNumber`, a cursor continues with its own run.
        """
        page = self._operations.history.page(
            workflow,
            instance_id,
            run=run_number,
            limit=page_size,
            newest_first=order == "desc",
            steps_cursor=steps_cursor,
            events_cursor=events_cursor,
            logs_cursor=logs_cursor,
            with_logs=include_logs,
            with_audit=include_run,
            with_attempts=include_attempts,
            attempts_cursor=attempts_cursor,
            levels=None if log_level is None else _LEVELS[_LEVELS.index(log_level) :],
            category=log_category,
        )
        page = self._redaction(workflow, instance_id).redact_page(page)
        lists = {"steps": page.steps, "events": page.events, "logs": page.logs, "attempts": page.attempts}
        fields: dict[str, Any] = {}
        for name, found in lists.items():
            if found is not None:
                more = {f"{name}_cursor": found.cursor, f"{name}_has_next_page": found.cursor is not None}
                fields |= {name: found.items, **more}
        return json_response(HistoryResponse(run_number=page.run_number, run=page if include_run else None, **fields))

    @requires(Permission.READING)
    def published(self, workflow: WorkflowName, instance_id: InstanceId, run_number: RunNumber = None) -> Response:
        """Read the values that a run publishes while it works, such as its progress.

        The response has the newest value of each key, also after the run has ended.
        """
        run = self._operations.queries.read(workflow, instance_id).run_number if run_number is None else run_number
        found = self._operations.history.published(workflow, instance_id, run=run)
        shown = self._redaction(workflow, instance_id).redact_published(found)
        return json_response(PublishedValues(run_number=run, published=shown))

    @requires(Permission.READING)
    async def stream(
        self,
        workflow: WorkflowName,
        instance_id: InstanceId,
        run_number: RunNumber = None,
        last_event_id: Annotated[
            str | None, Header(alias="Last-Event-ID", description="Continue after this message. Browsers send it.")
        ] = None,
    ) -> Response:
        """Follow a run: server-sent events with its steps, its log lines and its end.

        The messages are `step`, `log`, `published` and `status` as they are recorded, and `end` with the outcome. After
        a client has reconnected, it may get steps and published values again. It recognizes a step by its `stepKey`,
        `status` and `attempts`.
        """
        row = await timeouts.run_in_request_thread(self._operations.queries.read, workflow, instance_id)
        run = row.run_number if run_number is None else run_number
        cursors = await timeouts.run_in_request_thread(self._operations.history.stream_cursors, workflow, instance_id)
        position = StreamPosition(run) if last_event_id is None else StreamPosition.read(cursors, last_event_id)
        if position.run != run:
            position = StreamPosition(run)  # the instance was restarted meanwhile, or the client follows another run
        await timeouts.run_in_request_thread(self._operations.history.outcome, workflow, instance_id, run=run)
        if position.is_over:
            return Response(status_code=204)
        redaction = self._redaction(workflow, instance_id)
        followed = Stream(
            self._operations, self._followers, redaction, workflow, instance_id, position=position, cursors=cursors
        )
        self._followers.enter()
        return EventStream(followed.messages(), on_end=self._followers.leave)


def json_response(what: Record, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(to_json(what), status, headers, "application/json")


# --- ETags: the version tag of an instance, in quotes -----------------------------------------------

_TAG = re.compile(r'(W/)?"([^"]*)"')


def format_etag(tag: str) -> str:
    """Return the ETag header for a version tag."""
    return f'"{tag}"'


def matches_if_none_match(tag: str, if_none_match: str | None) -> bool:
    """Return whether the header If-None-Match lists this tag."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _tags(if_none_match, weak_too=True)


def parse_if_match(if_match: str | None) -> Collection[str] | None:
    """Return the tags that the header If-Match lists, or None if it accepts any."""
    if if_match is None or if_match.strip() == "*":
        return None
    return _tags(if_match, weak_too=False)


def _tags(header: str, *, weak_too: bool) -> set[str]:
    return {text for weak, text in _TAG.findall(header) if weak_too or not weak}
