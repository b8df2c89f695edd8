"""What operators read across all instances: counts, due runs, queues, and waits for events."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict

from celery_durable.model import Status
from celery_durable.wire.responses.model import WHEN, ResponseModel


class StatusCount(ResponseModel):
    """The number of instances of a workflow in a status. If it is not exact, there are at least so many."""

    workflow_name: str
    status: Status
    count: int
    is_exact: bool


class DueRuns(ResponseModel):
    """The runs that are due and that no worker has claimed, and since when the oldest of them is due."""

    count: int
    is_exact: bool
    oldest: datetime | None


class QueueLength(ResponseModel):
    """A queue. ``messages`` is null if the broker does not answer or cannot count."""

    name: str
    messages: int | None


class StatsView(ResponseModel):
    """Counts of instances, without zeros; due runs; and the queues of known workflows and of waiting tasks."""

    instances: list[StatusCount]
    due: DueRuns
    queues: list[QueueLength]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "instances": [{"workflowName": "order", "status": "waiting", "count": 3, "isExact": True}],
                    "due": {"count": 1, "isExact": True, "oldest": WHEN},
                    "queues": [{"name": "durable", "messages": 1}],
                }
            ]
        }
    )


class EventWaitView(ResponseModel):
    """A step that waits for an event."""

    workflow_name: str
    instance_id: str
    run_number: int
    status: Status
    wait_event_type: str
    step_name: str
    since: datetime
    wake_at: datetime | None


class WaitList(ResponseModel):
    """Steps that wait for an event, those of the newest instances first."""

    waits: list[EventWaitView]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "waits": [
                        {
                            "workflowName": "order",
                            "instanceId": "order-42",
                            "runNumber": 1,
                            "status": "waiting",
                            "waitEventType": "approval",
                            "stepName": "wait for approval",
                            "since": WHEN,
                            "wakeAt": "2030-01-02T08:00:00.000000Z",
                        }
                    ]
                }
            ]
        }
    )
