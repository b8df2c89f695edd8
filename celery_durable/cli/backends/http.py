"""The backend of `celery-durable`: instances over the HTTP API (see docs/http.md)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from celery_durable.cli.backends.backend import InstanceSnapshot, ListQuery, WorkflowInfo
from celery_durable.cli.backends.client import Client, WrongApi
from celery_durable.cli.errors import CliError
from celery_durable.commands import A, Command, Q, Target
from celery_durable.explain import Diagnosis
from celery_durable.model import History, InstanceSummary, LogLevel, LogRecord, Page, Published
from celery_durable.runtime import Runtime
from celery_durable.wire import records, responses

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
        return [WorkflowInfo(each.name) for each in found.workflows]

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """Return a page of instances of one workflow. A large page takes several requests."""
        if query.workflow is None:
            raise CliError(
                "The HTTP API lists one workflow at a time.",
                "Name a workflow. To list them: celery-durable workflows list",
            )
        items: list[InstanceSummary] = []
        filters = {"status": query.status, "label": [f"{name}={value}" for name, value in query.labels.items()]}
        cursor = query.cursor
        while len(items) < query.limit:
            parameters = filters | {"cursor": cursor, "pageSize": min(_PAGE, query.limit - len(items))}
            found = responses.InstanceList.parse(self._client.get(*_instances(query.workflow), query=parameters).data)
            items += [records.summary(query.workflow, each) for each in found.instances]
            cursor = found.cursor
            if cursor is None:
                break
        return Page(tuple(items), cursor)

    def read_snapshot(
        self, workflow: str, instance_id: str, *, known_version: object = None, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Send one long poll."""
        query = {"wait": f"{wait_seconds:.3f}"} if known_version is not None and wait_seconds > 0 else {}
        response = self._client.get(
            *_instances(workflow, instance_id), query=query, known_etag=known_version, wait_seconds=wait_seconds
        )
        if response.data is None:
            return None
        found = responses.InstanceView.parse(response.data)
        meta = found.meta
        return InstanceSnapshot(
            found.details.status, meta.run_number, meta.pause_requested, response.etag, meta.created_at
        )

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Read the history page by page."""
        path = _instances(workflow, instance_id, "history")
        query = {"pageSize": _PAGE, "runNumber": run}
        page = found = self._history_page(path, query | {"includeRun": True})
        query["runNumber"] = found.run_number
        while page.steps_cursor or page.events_cursor:
            cursors = {"stepsCursor": page.steps_cursor, "eventsCursor": page.events_cursor}
            # A list without a cursor is complete, and the response repeats its first page.
            page = self._history_page(path, query | cursors)
            if cursors["stepsCursor"]:
                found.steps += page.steps
            else:
                page.steps_cursor = None
            if cursors["eventsCursor"]:
                found.events += page.events
            else:
                page.events_cursor = None
        return records.history(workflow, instance_id, found)

    def _history_page(self, path: tuple[str, ...], query: dict[str, Any]) -> responses.HistoryView:
        return responses.HistoryView.parse(self._client.get(*path, query=query).data)

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> HttpLogTail:
        """Return a reader that continues at the API's cursors."""
        filters = {"runNumber": run, "logLevel": level, "logCategory": category}
        return HttpLogTail(self._client, _instances(workflow, instance_id, "history"), filters)

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """Return the published values; none if the server has an older version."""
        try:
            data = self._client.get(*_instances(workflow, instance_id, "published"), query={"runNumber": run}).data
        except WrongApi:
            return {}
        return records.published(responses.PublishedValuesResponse.parse(data).published)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis | None:
        """Return the diagnosis; None if the server has an older version."""
        try:
            data = self._client.get(*_instances(workflow, instance_id, "explain")).data
        except WrongApi:
            return None
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


class HttpLogTail:
    """Reads the log lines of a run. The last page is read again, because new lines may have been added to it."""

    def __init__(self, client: Client, path: tuple[str, ...], filters: dict[str, Any]) -> None:
        self._client, self._path, self._filters = client, path, filters
        self._cursor: str | None = None
        self._last_id = 0

    def read_new_lines(self) -> Iterator[LogRecord]:
        """Yield the new lines, page by page."""
        while True:
            query = {**self._filters, "includeLogs": True, "pageSize": _PAGE, "logsCursor": self._cursor}
            page = responses.HistoryView.parse(self._client.get(*self._path, query=query).data)
            for line in map(records.log_record, page.logs or ()):
                if line.id > self._last_id:
                    self._last_id = line.id
                    yield line
            if not page.logs_has_next_page:
                return
            self._cursor = page.logs_cursor


def _instances(workflow: str, *rest: str) -> tuple[str, ...]:
    return ("workflows", workflow, "instances", *rest)
