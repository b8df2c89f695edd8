"""The backend of `celery-durable`: instances over the HTTP API (see docs/reference/http.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from celery_durable.insight.explain import Diagnosis
from celery_durable.model import (
    AttemptRecord,
    EventWait,
    History,
    InstanceDetails,
    InstanceSummary,
    LimitDetails,
    LimitRecord,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RunRef,
    Stats,
    WaitFilter,
)
from celery_durable.runtime import Runtime
from celery_durable.wire.encoding import parse
from celery_durable.wire.responses import (
    HistoryResponse,
    InstanceList,
    LimitList,
    PublishedValues,
    WaitList,
    WorkflowList,
)

if TYPE_CHECKING:  # commands that read need no request
    from celery_durable.commands import A, Command, Q, Target
    from celery_durable.wire.requests import ChangeLimit

_PAGE = 100


class HttpBackend:
    """Instances of one API. Requests that change something are repeated only if a repetition has no effect."""

    def __init__(self, client: Client, runtime: Runtime) -> None:
        self._client, self.runtime = client, runtime

    def now(self) -> datetime:
        """Return the server's time, to the second; before the first response, the time of this machine."""
        return self._client.server_time or datetime.now(UTC)  # noqa: TID251  # there is no database here to ask

    def workflows(self) -> list[WorkflowInfo]:
        found = parse(WorkflowList, self._client.get("workflows").data)
        return [WorkflowInfo(each.name, each.parameters) for each in found.workflows]

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """A large page takes several requests."""
        items: list[InstanceSummary] = []
        filters = {"status": query.status, "label": [f"{name}={value}" for name, value in query.labels.items()]}
        cursor = query.cursor
        while len(items) < query.limit:
            page_filters = filters | {"cursor": cursor, "pageSize": min(_PAGE, query.limit - len(items))}
            path = ("instances",) if query.workflow is None else _instances(query.workflow)
            page = parse(InstanceList, self._client.get(*path, query=page_filters).data)
            items += page.instances
            cursor = page.cursor
            if cursor is None:
                break
        return Page(tuple(items), cursor)

    def read_snapshot(self, workflow: str, instance_id: str) -> InstanceSnapshot:
        return _snapshot(self._client.get(*_instances(workflow, instance_id)))

    def wait_for_change(
        self, workflow: str, instance_id: str, version: object | None, *, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        query = {"wait": f"{wait_seconds:.3f}"} if version is not None and wait_seconds > 0 else {}
        reply = self._client.get(
            *_instances(workflow, instance_id), query=query, known_etag=version, wait_seconds=wait_seconds
        )
        return None if reply.data is None else _snapshot(reply)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        path, query = _instances(workflow, instance_id, "history"), {"runNumber": run}
        page = found = self._history_page(path, query | {"includeRun": True, "includeAttempts": True})
        query["runNumber"] = found.run_number
        steps, events, attempts = [*found.steps], [*found.events], [*(found.attempts or ())]
        more_steps, more_events, more_attempts = page.steps_cursor, page.events_cursor, page.attempts_cursor
        while more_steps or more_events or more_attempts:
            cursors = {"stepsCursor": more_steps, "eventsCursor": more_events, "attemptsCursor": more_attempts}
            # A list without a cursor is complete. The response has the first page of it again, except of attempts.
            page = self._history_page(path, query | cursors | {"includeAttempts": more_attempts is not None})
            steps += page.steps if more_steps else ()
            events += page.events if more_events else ()
            attempts += page.attempts or ()
            more_steps = page.steps_cursor if more_steps else None
            more_events = page.events_cursor if more_events else None
            more_attempts = page.attempts_cursor
        whole = replace(found, steps=steps, events=events, attempts=attempts)
        return whole.to_history(workflow, instance_id)

    def _history_page(self, path: tuple[str, ...], query: Mapping[str, Any]) -> HistoryResponse:
        return parse(HistoryResponse, self._client.get(*path, query={**query, "pageSize": _PAGE}).data)

    def tail(self, ref: RunRef, *, level: LogLevel | None = None, category: str | None = None) -> LogTail:
        path = _instances(ref.workflow, ref.instance_id, "history")
        query = {"runNumber": ref.run_number, "logLevel": level, "logCategory": category, "includeLogs": True}

        def read_page(cursor: str | None) -> tuple[Iterable[LogRecord], str | None, bool]:
            page = self._history_page(path, query | {"logsCursor": cursor})
            return page.logs or (), page.logs_cursor or cursor, page.logs_cursor is not None

        return make_tail(read_page)

    def tail_attempts(self, ref: RunRef) -> AttemptTail:
        path = _instances(ref.workflow, ref.instance_id, "history")
        query = {"runNumber": ref.run_number, "includeAttempts": True}

        def read_page(cursor: str | None) -> tuple[Iterable[AttemptRecord], str | None, bool]:
            page = self._history_page(path, query | {"attemptsCursor": cursor})
            next_cursor = page.attempts_cursor
            return page.attempts or (), next_cursor or cursor, next_cursor is not None

        return make_tail(read_page)

    def published(self, ref: RunRef) -> dict[str, Published]:
        path = _instances(ref.workflow, ref.instance_id, "published")
        found = parse(PublishedValues, self._client.get(*path, query={"runNumber": ref.run_number}).data)
        return dict(found.published)

    def stats(self) -> Stats:
        return parse(Stats, self._client.get("stats").data)

    def waits(self, chosen: WaitFilter, *, cursor: str | None, limit: int) -> Page[EventWait]:
        """A page of the API has 100 items at most."""
        filters = {"workflowName": chosen.workflow, "type": chosen.event_type, "to": chosen.to}
        query = {**filters, "isAsking": chosen.is_asking, "cursor": cursor, "pageSize": min(limit, _PAGE)}
        page = parse(WaitList, self._client.get("waits", query=query).data)
        return Page(tuple(page.waits), page.cursor)

    def limits(self, *, cursor: str | None, limit: int) -> Page[LimitRecord]:
        """A page of the API has 100 items at most."""
        query = {"cursor": cursor, "pageSize": min(limit, _PAGE)}
        page = parse(LimitList, self._client.get("limits", query=query).data)
        return Page(tuple(page.limits), page.cursor)

    def limit(self, name: str, key: str) -> LimitDetails:
        return parse(LimitDetails, self._client.get("limits", name, query={"key": key or None}).data)

    def change_limit(self, name: str, body: ChangeLimit) -> None:
        self._client.patch("limits", name, body=body.to_dict())

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        return parse(Diagnosis, self._client.get(*_instances(workflow, instance_id, "explain")).data)

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A:
        """The request is repeated only if a repetition has no effect."""
        data = body.to_dict()
        reply = self._client.post(
            *command.words(target),
            body=None if body.is_optional and not data else data,
            is_idempotent=body.may_repeat,
            new_id=target.instance_id,
        )
        return parse(command.response, reply.data)


def _instances(workflow: str, *rest: str) -> tuple[str, ...]:
    return ("workflows", workflow, "instances", *rest)


def _snapshot(reply: Reply) -> InstanceSnapshot:
    found = parse(InstanceDetails, reply.data)
    return InstanceSnapshot(found.details.status, found.meta.run_number, reply.etag, found.meta.created_at)
