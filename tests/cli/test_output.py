"""`-o table|json|tsv`: the same records in the format that the user names, the same JSON over both connections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Shop
from tests.cli.connections import Direct, served

CREATED, COUNTED = "2030-01-01T00:00:00Z", "2030-01-01T00:00:02.012000Z"
WAIT = {
    "stepKey": "await approval",
    "name": "await approval",
    "type": "waitForEvent",
    "status": "waiting",
    "attempts": 0,
    "wakeAt": "2030-01-02T00:00:02.012000Z",
    "waitEventType": "approval",
    "createdAt": COUNTED,
}


def read(connection: Any, *words: str) -> Any:
    said = connection(*words, "-o", "json")
    assert said.code == 0, said.err
    return json.loads(said.out)


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "-w", "order"),
        ("show", "order", "o-1"),
        ("history", "order", "o-1", "--include-logs"),
        ("logs", "order", "o-1"),
        ("watch", "order", "o-1"),
        ("explain", "order", "o-1"),
    ],
)
def test_both_programs_print_the_same_json(order: Shop, words: tuple[str, ...]) -> None:
    if words[0] == "watch":
        order.pipe("terminate", "order", "o-1")
    api = served(order)
    direct, over_http = (each(*words, "-o", "json") for each in (Direct(order), api))
    assert direct.code == over_http.code
    adapted = direct.out.replace("celery -A <your app> durable", "celery-durable")
    assert adapted == over_http.out
    assert all(json.loads(line) for line in adapted.splitlines()) if words[0] == "watch" else json.loads(adapted)


def test_a_list_is_a_page_of_the_api_with_the_workflow_of_each_instance(order: Shop) -> None:
    order.pipe("start", "nap", "--id", "n-1", "--label", "tenant=acme")
    found = read(Direct(order), "ls", "--limit", "1")
    cursor = found.pop("cursor")
    assert found == {
        "instances": [
            {
                "workflowName": "nap",
                "id": "n-1",
                "details": {"status": "active"},
                "runNumber": 1,
                "labels": {"tenant": "acme"},
                "runAt": COUNTED,
                "createdAt": COUNTED,
                "updatedAt": COUNTED,
            }
        ],
        "hasNextPage": True,
    }
    rest = read(Direct(order), "ls", "--limit", "1", "--cursor", cursor)
    assert [each["id"] for each in rest["instances"]] == ["o-1"]
    assert rest["hasNextPage"] is False
    assert read(Direct(order), "ls", "-w", "echo") == {"instances": [], "hasNextPage": False}


def test_show_prints_the_run_with_its_steps_events_and_published_values(order: Shop) -> None:
    found = read(Direct(order), "show", "order", "o-1")
    assert {"workflowName", "instanceId", "runNumber", "run", "steps", "events", "attempts"} <= set(found)
    assert found["run"] == {
        "details": {"status": "waiting"},
        "params": {"order_id": "42", "cents": 1999},
        "labels": {},
        "instanceCreatedAt": CREATED,
        "createdAt": CREATED,
        "startedAt": "2030-01-01T00:00:02Z",
        "audit": [],
    }
    assert found["steps"][1] == WAIT
    assert (found["currentRunNumber"], found["published"]) == (1, {})


def test_log_lines_are_one_document_or_one_line_each_if_they_are_followed(order: Shop) -> None:
    found = read(Direct(order), "logs", "order", "o-1")
    assert (found["runNumber"], [line["message"] for line in found["logs"]]) == (1, ["order received"])
    order.pipe("terminate", "order", "o-1")
    followed = order.pipe("logs", "order", "o-1", "-f", "-o", "json").out.splitlines()
    assert [json.loads(line) for line in followed] == found["logs"]


def test_updates_are_one_line_each(order: Shop) -> None:
    order.pipe("terminate", "order", "o-1")
    updates = [json.loads(line) for line in order.pipe("watch", "order", "o-1", "-o", "json").out.splitlines()]
    assert [list(each) for each in updates] == [["log"], ["step"], ["step"], ["details"]]
    assert updates[-1] == {"details": {"status": "terminated"}}


def test_overviews_of_the_database(order: Shop) -> None:
    direct = Direct(order)
    *others, order_in = read(direct, "workflows")["workflows"]
    assert others == [{"name": name, "parameters": []} for name in ("bad", "charge", "echo", "nap")]
    assert order_in["parameters"] == [
        {"name": "order_id", "type": "str", "required": True},
        {"name": "cents", "type": "int", "required": False},
    ]
    run = {"workflowName": "order", "instanceId": "o-1", "runNumber": 1}
    [wait] = read(direct, "waits")["waits"]
    assert wait == run | {
        "status": "waiting",
        "waitEventType": "approval",
        "stepName": "await approval",
        "stepKey": "await approval",
        "since": COUNTED,
        "wakeAt": WAIT["wakeAt"],
    }
    assert read(direct, "leases") == {"leases": []}
    assert read(direct, "outbox") == {"outbox": []}
    assert read(direct, "waiters", "user.updated") == {"waiters": [], "hasNextPage": False}
    assert read(direct, "replay", "order", "o-1") == run | {
        "status": "waiting",
        "matches": True,
        "steps": [{"stepKey": "count", "name": "count", "type": "do", "isReplayed": True}],
        "differences": [],
        "openStepChanges": [],
        "end": read(direct, "replay", "order", "o-1")["end"],
    }


def test_a_table_may_go_into_a_pipe_and_records_onto_a_terminal(order: Shop) -> None:
    assert order.pipe("ls", "-o", "table").out.splitlines()[0].split() == [
        "WORKFLOW", "ID", "STATUS", "RUN", "CREATED", "CHANGED", "AT",
    ]  # fmt: skip
    assert order.terminal("ls", "-o", "tsv") == order.pipe("ls").out.rstrip()
    assert json.loads(order.terminal("explain", "order", "o-1", "--json"))["code"] == "WAITING_EVENT"


def test_an_unknown_format_is_wrong_usage(shop: Shop) -> None:
    said = shop.pipe("ls", "-o", "yaml")
    assert said.code == 2
    assert "'yaml' is not one of 'table', 'json', 'tsv'" in said.err


def printed_fields(document: Any) -> set[str]:
    """The fields of a document, and of the items of its lists."""
    if isinstance(document, list):
        return set().union(*map(printed_fields, document))
    items = [item for value in document.values() if isinstance(value, list) for item in value if isinstance(item, dict)]
    return set(document) | printed_fields(items)
