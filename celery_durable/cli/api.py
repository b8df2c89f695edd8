"""The instances behind an HTTP API, for the verbs (see docs/http.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_durable.cli.backend import Seen, WorkflowInfo
from celery_durable.cli.client import Client, NoApi
from celery_durable.cli.command import CliError
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
    """The instances of one API."""

    def __init__(self, client: Client, runtime: Runtime) -> None:
        self._client, self._runtime = client, runtime

    def now(self) -> datetime:
        """The server's time, to the second; this machine's before it was asked anything."""
        return self._client.server_time or datetime.now(UTC)  # noqa: TID251  # there is no database here to ask

    def monotonic(self) -> float:
        """Of this machine."""
        return self._runtime.monotonic()

    def sleep(self, seconds: float) -> None:
        """On this machine."""
        self._runtime.sleep(seconds)

    def workflows(self) -> list[WorkflowInfo]:
        """Those that the server knows."""
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
        """Of one workflow; several of the API's pages where more are wanted than it gives at once."""
        if workflow is None:
            raise CliError(
                "The HTTP API lists one workflow at a time.", "Name it; there are: celery-durable workflows list"
            )
        items: list[InstanceSummary] = []
        chosen = {"status": status, "label": [f"{name}={value}" for name, value in (labels or {}).items()]}
        while len(items) < limit:
            query = chosen | {"cursor": cursor, "pageSize": min(_PAGE, limit - len(items))}
            found = self._client.get(*_instances(workflow), query=query).data
            items += [_summary(workflow, each) for each in found["instances"]]
            cursor = found.get("cursor")
            if cursor is None:
                break
        return Page(tuple(items), cursor)

    def look(self, workflow: str, instance_id: str, *, known: object = None, patience: float = 0.0) -> Seen | None:
        """One long poll."""
        query = {"wait": f"{patience:.3f}"} if known is not None and patience > 0 else {}
        reply = self._client.get(*_instances(workflow, instance_id), query=query, known=known, wait=patience)
        if reply.data is None:
            return None
        meta = reply.data["meta"]
        status = Status(reply.data["details"]["status"])
        return Seen(status, meta["runNumber"], meta["pauseRequested"], reply.etag, _instant(meta["createdAt"]))

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Page by page."""
        path = _instances(workflow, instance_id, "history")
        query = {"pageSize": _PAGE, "runNumber": run}
        first = page = self._client.get(*path, query=query | {"includeRun": True}).data
        steps, events = list(page["steps"]), list(page["events"])
        query["runNumber"] = first["runNumber"]
        while cursors := {key: page[key] for key in ("stepsCursor", "eventsCursor") if key in page}:
            page = self._client.get(*path, query=query | cursors).data
            for kind, gathered in (("steps", steps), ("events", events)):
                if f"{kind}Cursor" in cursors:
                    gathered.extend(page[kind])
                else:
                    page.pop(f"{kind}Cursor", None)  # of the first page, which came again
        about, types = first["run"], {each["stepKey"]: each["type"] for each in steps}
        return History(
            workflow=workflow,
            instance_id=instance_id,
            run_number=first["runNumber"],
            status=_status(about["details"]),
            params=about["params"],
            created_at=_instant(about["createdAt"]),
            started_at=_maybe(about["startedAt"]),
            completed_at=_maybe(about["completedAt"]),
            reason=about["reason"],
            steps=tuple(_step(each) for each in steps),
            events=tuple(_event(place, each) for place, each in enumerate(events)),
            origin=_origin(about.get("origin")),
            audit=tuple(_audited(first["runNumber"], each, types) for each in about.get("audit", [])),
            labels=about.get("labels", {}),
            parent=_parent(about.get("parent")),
        )

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> HttpTail:
        """By the API's cursors."""
        narrowed = {"runNumber": run, "logLevel": level, "logCategory": category}
        return HttpTail(self._client, _instances(workflow, instance_id, "history"), narrowed)

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """As the server shows it; one of an earlier version shows nothing."""
        try:
            said = self._client.get(*_instances(workflow, instance_id, "published"), query={"runNumber": run}).data
        except NoApi:
            return {}
        return {key: Published(each["value"], _instant(each["updatedAt"])) for key, each in said["published"].items()}

    def explain(self, workflow: str, instance_id: str) -> Diagnosis | None:
        """As the server sees it; one of an earlier version says nothing."""
        try:
            said = self._client.get(*_instances(workflow, instance_id, "explain")).data
        except NoApi:
            return None
        return Diagnosis(Code(said["code"]), said["sentence"], said["facts"], tuple(said["actions"]))

    def create(self, workflow: str, params: Any, *, id: str | None, labels: Mapping[str, str] | None = None) -> str:
        """Tried again only with an id, which can be taken but once."""
        body = {"params": params} | ({} if id is None else {"id": id}) | ({"labels": dict(labels)} if labels else {})
        made = self._client.post(*_instances(workflow), body=body, is_safe=id is not None, makes=id).data["id"]
        return str(made)

    def restart_or_create(
        self, workflow: str, params: Any, *, id: str, labels: Mapping[str, str]
    ) -> RestartOrCreateResult:
        """Not tried again: the run that a first try began may have ended meanwhile."""
        body = {"params": params} | ({"labels": labels} if labels else {})
        said = self._client.post(*_instances(workflow, id, "restart-or-create"), body=body).data
        return RestartOrCreateResult(said["outcome"], said["id"], said["runNumber"], Status(said["details"]["status"]))

    def send_event(self, workflow: str, instance_id: str, type_: str, payload: Any, *, id: str | None) -> bool:
        """Tried again only with an id, which is accepted but once."""
        body = {"type": type_, "payload": payload} | ({} if id is None else {"id": id})
        path = _instances(workflow, instance_id, "events")
        return bool(self._client.post(*path, body=body, is_safe=id is not None).data["accepted"])

    def pause(self, workflow: str, instance_id: str) -> None:
        """Not tried again, as all that follow."""
        self._client.post(*_instances(workflow, instance_id, "pause"))

    def resume(self, workflow: str, instance_id: str) -> None:
        """Takes back a pause that has not happened yet."""
        self._client.post(*_instances(workflow, instance_id, "resume"))

    def terminate(self, workflow: str, instance_id: str, *, reason: str | None) -> None:
        """Refused where it has ended."""
        self._client.post(*_instances(workflow, instance_id, "terminate"), body=_because(reason))

    def restart(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """From any state."""
        made = self._client.post(*_instances(workflow, instance_id, "restart"), body=_because(reason))
        return int(made.data["runNumber"])

    def retry(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Refused where it has not ended errored."""
        made = self._client.post(*_instances(workflow, instance_id, "retry"), body=_because(reason))
        return int(made.data["runNumber"])

    def rewind(self, workflow: str, instance_id: str, step: str, *, reason: str | None) -> int:
        """From any state."""
        body = {"step": step} | (_because(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "rewind"), body=body).data["runNumber"])

    def set_result(self, workflow: str, instance_id: str, step: str, value: Any, *, by: str, reason: str | None) -> int:
        """Under another name than ``by`` where the server knows who is asking."""
        body = {"step": step, "result": value, "by": by} | (_because(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "set-result"), body=body).data["runNumber"])

    def skip(self, workflow: str, instance_id: str, step: str, *, by: str, reason: str | None) -> int:
        """As `set_result`."""
        body = {"step": step, "by": by} | (_because(reason) or {})
        return int(self._client.post(*_instances(workflow, instance_id, "skip"), body=body).data["runNumber"])

    def fork(self, workflow: str, instance_id: str, step: str, *, id: str | None) -> str:
        """Tried again only with an id, which can be taken but once."""
        body = {"step": step} | ({} if id is None else {"id": id})
        path = _instances(workflow, instance_id, "fork")
        return str(self._client.post(*path, body=body, is_safe=id is not None).data["id"])


class HttpTail:
    """The log lines of a run. A page that was not full is read again, for what has come since."""

    def __init__(self, client: Client, path: tuple[str, ...], narrowed: dict[str, Any]) -> None:
        self._client, self._path, self._narrowed = client, path, narrowed
        self._cursor: str | None = None
        self._seen = 0

    def news(self) -> Iterator[LogRecord]:
        """In pages."""
        while True:
            query = {**self._narrowed, "includeLogs": True, "pageSize": _PAGE, "logsCursor": self._cursor}
            page = self._client.get(*self._path, query=query).data
            for line in map(_line, page["logs"]):
                if line.id > self._seen:
                    self._seen = line.id
                    yield line
            if not page["logsHasNextPage"]:
                return
            self._cursor = page["logsCursor"]


def _instances(workflow: str, *rest: str) -> tuple[str, ...]:
    return ("workflows", workflow, "instances", *rest)


def _because(reason: str | None) -> dict[str, Any] | None:
    return None if reason is None else {"reason": reason}


# --- what the API answers with ------------------------------------------------------------------


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _maybe(text: str | None) -> datetime | None:
    return None if text is None else _instant(text)


def _error(said: dict[str, Any]) -> ErrorInfo | None:
    error = said.get("error")
    return None if error is None else ErrorInfo(error["name"], error["message"])


def _status(said: dict[str, Any]) -> InstanceStatus:
    return InstanceStatus(Status(said["status"]), _error(said), said.get("output"))


def _summary(workflow: str, said: dict[str, Any]) -> InstanceSummary:
    return InstanceSummary(
        id=said["id"],
        workflow=workflow,
        run_number=said["runNumber"],
        status=Status(said["details"]["status"]),
        error=_error(said["details"]),
        run_at=None,  # the API keeps it to itself
        created_at=_instant(said["createdAt"]),
        updated_at=_instant(said["updatedAt"]),
        labels=said.get("labels", {}),
    )


def _step(said: dict[str, Any]) -> StepRecord:
    return StepRecord(
        step_key=said["stepKey"],
        name=said["name"],
        type=StepType(said["type"]),
        status=_step_status(said["status"], said["type"]),
        attempts=said["attempts"],
        max_attempts=said["maxAttempts"],
        timeout=None if said["timeoutMs"] is None else timedelta(milliseconds=said["timeoutMs"]),
        next_retry_at=_maybe(said["nextRetryAt"]),
        wake_at=_maybe(said["wakeAt"]),
        wait_event_type=said["waitEventType"],
        result=said.get("result"),
        error=_error(said),
        created_at=_maybe(said["createdAt"]),
        started_at=_maybe(said["startedAt"]),
        finished_at=_maybe(said["finishedAt"]),
        wait_topic=said.get("waitTopic"),
        task=said.get("task"),
        task_id=said.get("taskId"),
        child=_child(said.get("child")),
        items=_items(said.get("items")),
    )


def _step_status(said: str, type_: str) -> StepStatus:
    if type_ == StepType.LINEAR:
        return _LINEAR[said]
    return StepStatus(said)


_LINEAR = {
    "planned": StepStatus.LINEAR_PENDING,
    "ready": StepStatus.READY,
    "running": StepStatus.RUNNING,
    "waiting": StepStatus.LINEAR_WAITING,
    "done": StepStatus.DONE,
    "dead": StepStatus.DEAD,
}


def _child(said: dict[str, Any] | None) -> Child | None:
    return None if said is None else Child(said["workflowName"], said["instanceId"])


def _items(said: dict[str, Any] | None) -> ItemCounts | None:
    return None if said is None else ItemCounts(said["total"], said["done"], said["failed"])


def _event(place: int, said: dict[str, Any]) -> EventRecord:
    return EventRecord(
        seq=place,
        event_id=said["id"],
        type=said["type"],
        payload=said["payload"],
        created_at=_instant(said["createdAt"]),
        delivered_at=_maybe(said["deliveredAt"]),
        consumed_by_step_key=said["consumedByStepKey"],
    )


def _parent(said: dict[str, Any] | None) -> ParentStep | None:
    if said is None:
        return None
    return ParentStep(said["workflowName"], said["instanceId"], said["runNumber"], said["stepKey"])


def _origin(said: dict[str, Any] | None) -> Origin | None:
    return None if said is None else Origin(said["instanceId"], said["runNumber"], said["stepKey"])


def _audited(run: int, said: dict[str, Any], types: Mapping[str, str]) -> AuditRecord:
    """``types``: of the run's steps, by key; statuses of linear ones have names of their own."""
    before = said["before"]
    return AuditRecord(
        run_number=run,
        step_key=said["stepKey"],
        action=said["action"],
        by=said["by"],
        reason=said["reason"],
        status_before=_step_status(before["status"], types.get(said["stepKey"], "")),
        attempts_before=before["attempts"],
        error_before=_error(before),
        created_at=_instant(said["createdAt"]),
    )


def _line(said: dict[str, Any]) -> LogRecord:
    return LogRecord(
        id=int(said["id"]),
        run_number=said["runNumber"],
        level=LogLevel(said["level"]),
        category=said["category"],
        message=said["message"],
        data=said["data"],
        step_key=said["stepKey"],
        attempt=said["attempt"],
        is_replay=said["isReplay"],
        created_at=_instant(said["createdAt"]),
    )
