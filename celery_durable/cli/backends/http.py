"""The backend of `celery-durable`: instances over the HTTP API (see docs/reference/http.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery_durable.cli.backends.backend import (
    AttemptTail,
    InstanceSnapshot,
    ListQuery,
    LogTail,
    WorkflowInfo,
    make_tail,
)
from celery_durable.cli.backends.client import Client, Reply
from celery_durable.cli.errors import CliError
from celery_durable.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    EventWait,
    History,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RunRef,
    Stats,
)
from celery_durable.runtime import Runtime
from celery_durable.values import Parameter
from celery_durable.wire import records, responses

if TYPE_CHECKING:  # commands that read need no request
    from celery_durable.commands import A, Command, Q, Target

_PAGE = 100


class HttpBackend:
    """Instances of one API. Requests that change something are repeated only if a repetition has no effect."""

    def __init__(self, client: Client, runtime: Runtime) -> None:
        self._client, self.runtime = client, runtime

    def now(self) -> datetime:
        """Return the server's time, to the second; before the first response, the time of this machine."""
        return self._client.server_time or datetime.now(UTC)  # noqa: TID251  # there is no database here to ask

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that the server knows."""
        found = responses.WorkflowList.parse(self._client.get("workflows").data)
        return [
            WorkflowInfo(each.name, [Parameter(field.name, field.type, field.required) for field in each.parameters])
            for each in found.workflows
        ]

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """Return a page of instances. A large page takes several requests."""
        items: list[InstanceSummary] = []
        filters = {"status": query.status, "label": [f"{name}={value}" for name, value in query.labels.items()]}
        cursor = query.cursor
        while len(items) < query.limit:
            page_filters = filters | {"cursor": cursor, "pageSize": min(_PAGE, query.limit - len(items))}
            found, cursor = _read_page(self._client, query.workflow, page_filters)
            items += found
            if cursor is None:
                break
        return Page(tuple(items), cursor)

    def read_snapshot(self, workflow: str, instance_id: str) -> InstanceSnapshot:
        """Send one request."""
        return _snapshot(self._client.get(*_instances(workflow, instance_id)))

    def wait_for_change(
        self, workflow: str, instance_id: str, version: object | None, *, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Send one long poll."""
        query = {"wait": f"{wait_seconds:.3f}"} if version is not None and wait_seconds > 0 else {}
        reply = self._client.get(
            *_instances(workflow, instance_id), query=query, known_etag=version, wait_seconds=wait_seconds
        )
        return None if reply.data is None else _snapshot(reply)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Read the history page by page."""
        path, query = _instances(workflow, instance_id, "history"), {"runNumber": run}
        page = found = self._history_page(path, query | {"includeRun": True, "includeAttempts": True})
        query["runNumber"] = found.run_number
        steps, events, attempts = page.steps_cursor, page.events_cursor, page.attempts_cursor
        while steps or events or attempts:
            cursors = {"stepsCursor": steps, "eventsCursor": events, "attemptsCursor": attempts}
            # A list without a cursor is complete, and the response repeats its first page.
            page = self._history_page(path, query | cursors | {"includeAttempts": attempts is not None})
            found.steps += page.steps if steps else []
            found.events += page.events if events else []
            found.attempts = [*(found.attempts or ()), *((page.attempts or ()) if attempts else ())]
            steps = page.steps_cursor if steps else None
            events = page.events_cursor if events else None
            attempts = page.attempts_cursor if attempts else None
        return records.history(workflow, instance_id, found)

    def _history_page(self, path: tuple[str, ...], query: Mapping[str, Any]) -> responses.HistoryView:
        return responses.HistoryView.parse(self._client.get(*path, query={**query, "pageSize": _PAGE}).data)

    def tail(self, ref: RunRef, *, level: LogLevel | None = None, category: str | None = None) -> LogTail:
        """Return a reader that continues at the API's cursors."""
        path = _instances(ref.workflow, ref.instance_id, "history")
        query = {"runNumber": ref.run_number, "logLevel": level, "logCategory": category, "includeLogs": True}

        def read_page(cursor: str | None) -> tuple[Iterable[LogRecord], str | None, bool]:
            page = self._history_page(path, query | {"logsCursor": cursor})
            return map(records.log_record, page.logs or ()), page.logs_cursor or cursor, page.logs_cursor is not None

        return make_tail(read_page)

    def tail_attempts(self, ref: RunRef) -> AttemptTail:
        """Return a reader that continues at the API's cursors, as `tail` does."""
        path = _instances(ref.workflow, ref.instance_id, "history")
        query = {"runNumber": ref.run_number, "includeAttempts": True}

        def read_page(cursor: str | None) -> tuple[Iterable[AttemptRecord], str | None, bool]:
            page = self._history_page(path, query | {"attemptsCursor": cursor})
            next_cursor = page.attempts_cursor
            return map(records.attempt_record, page.attempts or ()), next_cursor or cursor, next_cursor is not None

        return make_tail(read_page)

    def published(self, ref: RunRef) -> dict[str, Published]:
        """Return the published values."""
        path = _instances(ref.workflow, ref.instance_id, "published")
        data = self._client.get(*path, query={"runNumber": ref.run_number}).data
        return records.published(responses.PublishedValuesResponse.parse(data).published)

    def stats(self) -> tuple[Stats, Mapping[str, int | None]]:
        """Return the counts and the queues of the server."""
        return records.stats(responses.StatsView.parse(self._client.get("stats").data))

    def waits(self, *, workflow: str | None, event_type: str | None, limit: int) -> Sequence[EventWait]:
        """Return the first waits. Raises CliError for more than a page, since the API has no cursor for them."""
        if limit > _PAGE:
            raise CliError(f"The HTTP API lists {_PAGE} waits at most.", f"Use --limit {_PAGE}, --type or --workflow.")
        query = {"workflowName": workflow, "type": event_type, "pageSize": limit}
        found = responses.WaitList.parse(self._client.get("waits", query=query).data)
        return [records.event_wait(each) for each in found.waits]

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Return the diagnosis."""
        data = self._client.get(*_instances(workflow, instance_id, "explain")).data
        return records.diagnosis(responses.Explanation.parse(data))

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A:
        """Send the command. The request is repeated only if a repetition has no effect."""
        data = body.to_dict()
        reply = self._client.post(
            *command.words(target),
            body=None if body.is_optional and not data else data,
            is_idempotent=body.may_repeat,
            new_id=target.instance_id,
        )
        return command.response.parse(reply.data)


def _instances(workflow: str, *rest: str) -> tuple[str, ...]:
    return ("workflows", workflow, "instances", *rest)


def _snapshot(reply: Reply) -> InstanceSnapshot:
    found = responses.InstanceView.parse(reply.data)
    meta = found.meta
    return InstanceSnapshot(found.details.status, meta.run_number, meta.pause_requested, reply.etag, meta.created_at)


def _read_page(
    client: Client, workflow: str | None, parameters: dict[str, Any]
) -> tuple[list[InstanceSummary], str | None]:
    """Read a page of the instances of a workflow, or of all, and the cursor of the next page."""
    if workflow is not None:
        page = responses.InstanceList.parse(client.get(*_instances(workflow), query=parameters).data)
        return [records.summary(workflow, each) for each in page.instances], page.cursor
    all_ = responses.InstanceListOfAll.parse(client.get("instances", query=parameters).data)
    return [records.summary(each.workflow_name, each) for each in all_.instances], all_.cursor
