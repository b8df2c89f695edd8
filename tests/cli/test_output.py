"""`-o table|json|tsv`: the same records in the format that the user names, the same JSON over both connections."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from celery_durable import Step, StepTx, WorkflowEvent
from celery_durable.cli import durable
from celery_durable.cli.remote import celery_durable
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.cli.conftest import Shop
from tests.cli.connections import Direct, served

CREATED, COUNTED = "2030-01-01T00:00:00Z", "2030-01-01T00:00:02.012000Z"
CLI_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
READING = ("workflows", "ls", "show", "history", "logs", "watch", "explain")
READING_THE_DATABASE = ("waiters", "waits", "leases", "stats", "outbox", "preflight", "replay", "doctor")
WAIT = {
    "stepKey": "await approval",
    "name": "await approval",
    "type": "waitForEvent",
    "status": "waiting",
    "attempts": 0,
    "maxAttempts": None,
    "timeoutMs": None,
    "nextRetryAt": None,
    "wakeAt": "2030-01-02T00:00:02.012000Z",
    "waitEventType": "approval",
    "createdAt": COUNTED,
    "startedAt": None,
    "finishedAt": None,
}


def read(connection: Any, *words: str) -> Any:
    said = connection(*words, "-o", "json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_every_command_that_reads_has_the_option() -> None:
    for group, names in ((durable, READING + READING_THE_DATABASE), (celery_durable, READING[1:])):
        for name in names:
            command = group.get_command(click.Context(group), name)
            assert command is not None
            assert "--output" in [opt for param in command.params for opt in param.opts], name


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
    with served(order) as api:
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
    assert list(found) == [
        "workflowName", "instanceId", "runNumber", "run", "steps", "events", "attempts", "published",
        "currentRunNumber",
    ]  # fmt: skip
    assert found["run"] == {
        "details": {"status": "waiting"},
        "params": {"order_id": "42", "cents": 1999},
        "labels": {},
        "createdAt": CREATED,
        "startedAt": "2030-01-01T00:00:02Z",
        "completedAt": None,
        "reason": None,
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
    assert others == [{"name": name} for name in ("bad", "charge", "echo", "nap")]
    assert order_in["parameters"] == [
        {"name": "order_id", "type": "str", "required": True},
        {"name": "cents", "type": "int", "required": False},
    ]
    stats = read(direct, "stats")
    assert stats["instances"] == [{"workflowName": "order", "status": "waiting", "count": 1, "isExact": True}]
    assert stats["due"] == {"count": 0, "isExact": True, "oldest": None}
    assert [list(queue) for queue in stats["queues"]] == [["name", "messages"]]
    run = {"workflowName": "order", "instanceId": "o-1", "runNumber": 1}
    assert read(direct, "waits") == {
        "waits": [
            run
            | {
                "status": "waiting",
                "waitEventType": "approval",
                "stepName": "await approval",
                "since": COUNTED,
                "wakeAt": WAIT["wakeAt"],
            }
        ]
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


def documented_fields() -> dict[str, set[str]]:
    """The fields that docs/reference/cli.md names for each command that reads."""
    page = CLI_PAGE.read_text(encoding="utf-8").partition("| Command | JSON |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ", maxsplit=1) for line in page.splitlines() if line.startswith("| `")]
    return {command.strip("`"): set(re.findall(r"`([a-zA-Z]+)`", fields)) for command, fields in rows}


def printed_fields(document: Any) -> set[str]:
    """The fields of a document, and of the items of its lists."""
    if isinstance(document, list):
        return set().union(*map(printed_fields, document))
    items = [item for value in document.values() if isinstance(value, list) for item in value if isinstance(item, dict)]
    return set(document) | printed_fields(items)


def test_the_page_lists_every_command_that_reads() -> None:
    assert sorted(documented_fields()) == sorted(READING + READING_THE_DATABASE)


@pytest.fixture
def full(order: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each list prints while a step runs, with an unsent task and a waiter."""
    monkeypatch.setattr(
        order.durable.internals.outbox, "_send", lambda sent: PublishReport.of(len(sent), SendState.UNSENT)
    )
    lists: dict[str, Any] = {}

    def print_lists() -> None:
        order.durable.internals.runner._renewer._renew_all()
        for words in ("ls --limit 2", "workflows", "waiters prices --limit 1", "waits", "leases", "outbox", "stats"):
            lists[words.split()[0]] = read(Direct(order), *words.split())
        lists["explain"] = read(Direct(order), "explain", "order", "o-1")
        lists["doctor"] = json.loads(order.pipe("doctor", "-o", "json").out)

    def send(tx: StepTx) -> str:
        return tx.send_task("shop.mail", 7)

    @order.durable.workflow(name="busy")
    def busy(event: WorkflowEvent[bool], step: Step) -> None:
        if event.payload:
            step.do("mail", send)
            step.do("look", print_lists)
        step.wait_for_topic("next price", "prices", timeout="1 hour")

    for number, prints in enumerate((False, False, True)):
        busy.create(prints, id=f"b-{number}")
        assert order.work("busy", f"b-{number}").startswith("waiting until")
    return lists


def test_the_page_names_the_fields_of_every_list(full: dict[str, Any]) -> None:
    documented = documented_fields()
    other_words = {"ls": {"true"}, "stats": {"null"}, "outbox": {"null"}, "explain": {"json"}, "doctor": {"json"}}
    found = {command: printed_fields(document) for command, document in full.items()}
    stated = {command: documented[command] - other_words.get(command, set()) for command in found}
    assert found["stats"] | {"count", "isExact", "oldest"} == stated.pop("stats")
    assert {command: found[command] for command in stated} == stated


def test_the_page_names_the_fields_of_a_run(order: Shop) -> None:
    show, history, logs = (read(Direct(order), *words, "order", "o-1") for words in (["show"], ["history"], ["logs"]))
    documented = documented_fields()
    assert set(show) <= documented["show"]
    assert set(show["run"]) - {"createdAt", "startedAt", "completedAt"} <= documented["show"]
    assert set(history) == set(show) - {"published", "currentRunNumber"}
    assert set(logs) <= documented["logs"]
    assert set(read(Direct(order), "replay", "order", "o-1")) <= documented["replay"]
