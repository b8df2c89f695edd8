"""The backend of `celery-durable`: instances over the HTTP API (see docs/http.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable.cli.backends.backend import InstanceSnapshot, WorkflowInfo
from celery_durable.cli.backends.client import Client, WrongApi
from celery_durable.cli.errors import CliError
from celery_durable.explain import Code, Diagnosis
from celery_durable.model import (
    AuditRecord,
    Child,
    ErrorInfo,
    EventRecord,
    History,
    InstanceStatus,
    InstanceSummary,
    ItemCounts,
    LogLevel,
    LogRecord,
    Origin,
    Page,
    ParentStep,
    Published,
    RestartOrCreateResult,
    Status,
    StepRecord,
    StepStatus,
    StepType,
)
from celery_durable.runtime import Runtime

_PAGE = 100


class HttpBackend:
    """Instances of one API. Requests that change something are repeated only if a repetition has no effect."""

    def __init__(self, client: Client, runtime: Runtime) -> None:
        self._client, self._runtime = client, runtime

    def now(self) -> datetime:
        """Return the server's time, to the second; before the first response, the time of this machine."""
        return self._client.server_time or datetime.now(UTC)  # noqa: TID251  # there is no database here to ask

    def monotonic(self) -> float:
        """Return seconds of this machine's monotonic clock."""
        return self._runtime.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause the calling thread."""
        self._runtime.sleep(seconds)

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that the server knows."""
        return [WorkflowInfo(each["name"]) for each in self._client.get("workflows").data["workflows"]]

    def list(
        self,
        workflow: str | None,
        *,
        status: Status | None,
        cursor: str | None,
        limit: int,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Return a page of instances of one workflow. A large page takes several requests."""
        if workflow is None:
            raise CliError(
                "The HTTP API lists one workflow at a time.",
                "Name a workflow. To list them: celery-durable workflows list",
            )
        items: list[InstanceSummary] = []
        filters = {"status": status, "label": [f"{name}={value}" for name, value in (labels or {}).items()]}
        while len(items) < limit:
            query = filters | {"cursor": cursor, "pageSize": min(_PAGE, limit - len(items))}
            found = self._client.get(*_instances(workflow), query=query).data
            items += [_summary(workflow, each) for each in found["instances"]]
            cursor = found.get("cursor")
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
        meta = response.data["meta"]
        status = Status(response.data["details"]["status"])
        return InstanceSnapshot(
            status, meta["runNumber"], meta["pauseRequested"], response.etag, _parse_time(meta["createdAt"])
        )

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Read the history page by page."""
        path = _instances(workflow, instance_id, "history")
        query = {"pageSize": _PAGE, "runNumber": run}
        first = page = self._client.get(*path, query=query | {"includeRun": True}).data
        steps, events = list(page["steps"]), list(page["events"])
        query["runNumber"] = first["runNumber"]
        while cursors := {key: page[key] for key in ("stepsCursor", "eventsCursor") if key in page}:
            page = self._client.get(*path, query=query | cursors).data
            for kind, collected in (("steps", steps), ("events", events)):
                if f"{kind}Cursor" in cursors:
                    collected.extend(page[kind])
                else:
                    page.pop(f"{kind}Cursor", None)  # this list was complete, and the response repeats its first page
        run_data, types = first["run"], {each["stepKey"]: each["type"] for each in steps}
        return History(
            workflow=workflow,
            instance_id=instance_id,
            run_number=first["runNumber"],
            status=_status(run_data["details"]),
            params=run_data["params"],
            created_at=_parse_time(run_data["createdAt"]),
            started_at=_optional_time(run_data["startedAt"]),
            completed_at=_optional_time(run_data["completedAt"]),
            reason=run_data["reason"],
            steps=tuple(_step_record(each) for each in steps),
            events=tuple(_event_record(seq, each) for seq, each in enumerate(events)),
            origin=_origin(run_data.get("origin")),
            audit=tuple(_audit_record(first["runNumber"], each, types) for each in run_data.get("audit", [])),
            labels=run_data.get("labels", {}),
            parent=_parent(run_data.get("parent")),
        )

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
        return {
            key: Published(each["value"], _parse_time(each["updatedAt"])) for key, each in data["published"].items()
        }

    def explain(self, workflow: str, instance_id: str) -> Diagnosis | None:
        """Return the diagnosis; None if the server has an older version."""
        try:
            data = self._client.get(*_instances(workflow, instance_id, "explain")).data
        except WrongApi:
            return None
        return Diagnosis(Code(data["code"]), data["sentence"], data["facts"], tuple(data["actions"]))

    def create(self, workflow: str, params: Any, *, id: str | None, labels: Mapping[str, str] | None = None) -> str:
        """Create it. The request is repeated only with an id, because the second attempt is then refused."""
        body = {"params": params} | ({} if id is None else {"id": id}) | ({"labels": dict(labels)} if labels else {})
        response = self._client.post(*_instances(workflow), body=body, is_idempotent=id is not None, new_id=id)
        return str(response.data["id"])

    def restart_or_create(
        self, workflow: str, params: Any, *, id: str, labels: Mapping[str, str]
    ) -> RestartOrCreateResult:
        """Restart or create. Never repeated: the run of the first attempt may have ended, and would run again."""
        body = {"params": params} | ({"labels": labels} if labels else {})
        data = self._client.post(*_instances(workflow, id, "restart-or-create"), body=body).data
        return RestartOrCreateResult(data["outcome"], data["id"], data["runNumber"], Status(data["details"]["status"]))

    def send_event(self, workflow: str, instance_id: str, type_: str, payload: Any, *, id: str | None) -> bool:
        """Send the event. The request is repeated only with an id, because the run accepts an id once."""
        body = {"type": type_, "payload": payload} | ({} if id is None else {"id": id})
        path = _instances(workflow, instance_id, "events")
        return bool(self._client.post(*path, body=body, is_idempotent=id is not None).data["accepted"])

    def pause(self, workflow: str, instance_id: str) -> None:
        """Pause the instance. This request and the next ones are never repeated."""
        self._client.post(*_instances(workflow, instance_id, "pause"))

    def resume(self, workflow: str, instance_id: str) -> None:
        """Resume the instance, or withdraw a pause that has not taken effect."""
        self._client.post(*_instances(workflow, instance_id, "resume"))

    def terminate(self, workflow: str, instance_id: str, *, reason: str | None) -> None:
        """End the instance; refused if it has ended."""
        self._client.post(*_instances(workflow, instance_id, "terminate"), body=_reason_body(reason))

    def restart(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Start a new run, from any status."""
        response = self._client.post(*_instances(workflow, instance_id, "restart"), body=_reason_body(reason))
        return int(response.data["runNumber"])

    def retry(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Retry the failed step; refused if the instance has not failed."""
        response = self._client.post(*_instances(workflow, instance_id, "retry"), body=_reason_body(reason))
        return int(response.data["runNumber"])

    def rewind(self, workflow: str, instance_id: str, step: str, *, reason: str | None) -> int:
        """Start a new run, from any status."""
        body = {"step": step} | (_reason_body(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "rewind"), body=body).data["runNumber"])

    def set_result(self, workflow: str, instance_id: str, step: str, value: Any, *, by: str, reason: str | None) -> int:
        """Complete the step. A server that authenticates users may record another name than ``by``."""
        body = {"step": step, "result": value, "by": by} | (_reason_body(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "set-result"), body=body).data["runNumber"])

    def skip(self, workflow: str, instance_id: str, step: str, *, by: str, reason: str | None) -> int:
        """Complete the step without a result, as `set_result` does."""
        body = {"step": step, "by": by} | (_reason_body(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "skip"), body=body).data["runNumber"])

    def fork(self, workflow: str, instance_id: str, step: str, *, id: str | None) -> str:
        """Create it. The request is repeated only with an id, because the second attempt is then refused."""
        body = {"step": step} | ({} if id is None else {"id": id})
        path = _instances(workflow, instance_id, "fork")
        return str(self._client.post(*path, body=body, is_idempotent=id is not None).data["id"])


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
            page = self._client.get(*self._path, query=query).data
            for line in map(_log_record, page["logs"]):
                if line.id > self._last_id:
                    self._last_id = line.id
                    yield line
            if not page["logsHasNextPage"]:
                return
            self._cursor = page["logsCursor"]


def _instances(workflow: str, *rest: str) -> tuple[str, ...]:
    return ("workflows", workflow, "instances", *rest)


def _reason_body(reason: str | None) -> dict[str, Any] | None:
    return None if reason is None else {"reason": reason}


# --- parsing responses --------------------------------------------------------------------------


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _optional_time(text: str | None) -> datetime | None:
    return None if text is None else _parse_time(text)


def _error(data: dict[str, Any]) -> ErrorInfo | None:
    error = data.get("error")
    return None if error is None else ErrorInfo(error["name"], error["message"])


def _status(data: dict[str, Any]) -> InstanceStatus:
    return InstanceStatus(Status(data["status"]), _error(data), data.get("output"))


def _summary(workflow: str, data: dict[str, Any]) -> InstanceSummary:
    return InstanceSummary(
        id=data["id"],
        workflow=workflow,
        run_number=data["runNumber"],
        status=Status(data["details"]["status"]),
        error=_error(data["details"]),
        run_at=None,  # the API does not return it
        created_at=_parse_time(data["createdAt"]),
        updated_at=_parse_time(data["updatedAt"]),
        labels=data.get("labels", {}),
    )


def _step_record(data: dict[str, Any]) -> StepRecord:
    return StepRecord(
        step_key=data["stepKey"],
        name=data["name"],
        type=StepType(data["type"]),
        status=_step_status(data["status"], data["type"]),
        attempts=data["attempts"],
        max_attempts=data["maxAttempts"],
        timeout=None if data["timeoutMs"] is None else timedelta(milliseconds=data["timeoutMs"]),
        next_retry_at=_optional_time(data["nextRetryAt"]),
        wake_at=_optional_time(data["wakeAt"]),
        wait_event_type=data["waitEventType"],
        result=data.get("result"),
        error=_error(data),
        created_at=_optional_time(data["createdAt"]),
        started_at=_optional_time(data["startedAt"]),
        finished_at=_optional_time(data["finishedAt"]),
        wait_topic=data.get("waitTopic"),
        task=data.get("task"),
        task_id=data.get("taskId"),
        child=_child(data.get("child")),
        items=_items(data.get("items")),
    )


def _step_status(data: str, type_: str) -> StepStatus:
    if type_ == StepType.LINEAR:
        return _LINEAR[data]
    return StepStatus(data)


_LINEAR = {
    "planned": StepStatus.LINEAR_PENDING,
    "ready": StepStatus.READY,
    "running": StepStatus.RUNNING,
    "waiting": StepStatus.LINEAR_WAITING,
    "done": StepStatus.DONE,
    "dead": StepStatus.DEAD,
}


def _child(data: dict[str, Any] | None) -> Child | None:
    return None if data is None else Child(data["workflowName"], data["instanceId"])


def _items(data: dict[str, Any] | None) -> ItemCounts | None:
    return None if data is None else ItemCounts(data["total"], data["done"], data["failed"])


def _event_record(seq: int, data: dict[str, Any]) -> EventRecord:
    return EventRecord(
        seq=seq,
        event_id=data["id"],
        type=data["type"],
        payload=data["payload"],
        created_at=_parse_time(data["createdAt"]),
        delivered_at=_optional_time(data["deliveredAt"]),
        consumed_by_step_key=data["consumedByStepKey"],
    )


def _parent(data: dict[str, Any] | None) -> ParentStep | None:
    if data is None:
        return None
    return ParentStep(data["workflowName"], data["instanceId"], data["runNumber"], data["stepKey"])


def _origin(data: dict[str, Any] | None) -> Origin | None:
    return None if data is None else Origin(data["instanceId"], data["runNumber"], data["stepKey"])


def _audit_record(run: int, data: dict[str, Any], types: Mapping[str, str]) -> AuditRecord:
    """Parse an audit record. ``types``: the types of steps by key, because linear steps have other statuses."""
    before = data["before"]
    return AuditRecord(
        run_number=run,
        step_key=data["stepKey"],
        action=data["action"],
        by=data["by"],
        reason=data["reason"],
        status_before=_step_status(before["status"], types.get(data["stepKey"], "")),
        attempts_before=before["attempts"],
        error_before=_error(before),
        created_at=_parse_time(data["createdAt"]),
    )


def _log_record(data: dict[str, Any]) -> LogRecord:
    return LogRecord(
        id=int(data["id"]),
        run_number=data["runNumber"],
        level=LogLevel(data["level"]),
        category=data["category"],
        message=data["message"],
        data=data["data"],
        step_key=data["stepKey"],
        attempt=data["attempt"],
        is_replay=data["isReplay"],
        created_at=_parse_time(data["createdAt"]),
    )
