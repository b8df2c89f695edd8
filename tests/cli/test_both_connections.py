"""The same scenarios over the store and over HTTP: the same commands say the same of the same instances."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from celery_durable import Completed, Dead, LinearStep, Step, Waiting, WorkflowEvent
from celery_durable.cli.backends import http
from celery_durable.definitions import define_linear
from celery_durable.model import from_us
from tests.cli.conftest import Shop

AT = "2030-01-01T00:00:02.012Z"


class TripIn(BaseModel):
    where: str
    days: int
    tags: list[str] = []


def test_an_order_from_its_start_to_its_end(shop: Shop, connection: Any) -> None:
    assert connection("start", "order", "-P", "order_id=42", "--id", "o-1").rows == [["o-1"]]
    shop.clock.advance(seconds=2)
    shop.work("order", "o-1")
    assert connection("ls", "-w", "order").rows[0][:5] == ["order", "o-1", "waiting", "1", "2030-01-01T00:00:00.000Z"]
    assert connection("show", "order", "o-1", "--full").rows[:3] == [
        ["instance", "order", "o-1", "waiting", "1", "2030-01-01T00:00:00.000Z", ""],
        ["params", '{"order_id":"42","cents":500}'],
        ["step", "count", "do", "completed", "1/6", "12 ms", "", "", "2030-01-01T00:00:02.000Z", AT, '{"cents":500}'],
    ]
    send = ("send-event", "order", "o-1", "approval", "--payload", '{"by": "eve"}', "--event-id", "mail-7")
    assert connection(*send).rows == [["Sent", "approval", "order/o-1"]]
    assert connection(*send).rows == [["Repeated", "approval", "order/o-1"]]
    shop.clock.advance(minutes=1)
    assert shop.work("order", "o-1") == "complete"
    late = "2030-01-01T00:01:02.012Z"
    assert connection("history", "order", "o-1", "--include-logs").rows == [
        ["2030-01-01T00:00:00.000Z", "run", "active", "run 1 of order/o-1"],
        [AT, "event", "approval", "mail-7", "consumed by await approval"],
        [AT, "step", "completed", "count", "12 ms", "", ""],
        [AT, "log", "info", "payments", 'order received cents=500 note="two words"'],
        [late, "step", "completed", "await approval", ""],
        [late, "run", "complete", ""],
        [late, "log", "warn", "workflow", 'decided by={"by":"eve"}'],
    ]
    assert [row[0] for row in connection("watch", "order", "o-1").rows] == [AT, AT, late, late, late]
    assert connection("logs", "order", "o-1", "--level", "warn").rows == [
        [late, "warn", "workflow", 'decided by={"by":"eve"}']
    ]
    assert connection("logs", "order", "o-1", "--category", "none").err == "No log lines.\n"


def test_lifecycle_commands_print_the_new_state(order: Shop, connection: Any) -> None:
    assert connection("resume", "order", "o-1").rows == [["Was not paused", "order/o-1"]]
    assert connection("pause", "order", "o-1").rows == [["Paused", "order/o-1"]]
    assert connection("resume", "order", "o-1").rows == [["Resumed", "order/o-1"]]
    assert connection("terminate", "order", "o-1", "--reason", "sold twice").rows == [["Terminated", "order/o-1"]]
    assert connection("restart", "order", "o-1", "--reason", "a mistake").rows == [["Restarted", "order/o-1", "run 2"]]
    assert connection("show", "order", "o-1").rows[1] == ["reason", "a mistake"]
    first = connection("show", "order", "o-1", "--run", "1").rows
    assert first[0][3:5] == ["terminated", "1"]
    assert first[1] == ["reason", "sold twice"]


def test_wake_has_an_instance_checked_and_ends_no_sleep_early(shop: Shop, connection: Any) -> None:
    shop.pipe("start", "nap", "--id", "n-1")
    shop.work("nap", "n-1")
    assert connection("wake", "nap", "n-1").rows == [["Woken", "nap/n-1"]]
    assert shop.work("nap", "n-1").startswith("waiting until 2030-01-04")
    assert connection("show", "nap", "n-1").rows[0][3] == "waiting"
    connection("pause", "nap", "n-1")
    assert connection("wake", "nap", "n-1").rows == [["Not woken: it is paused, or a worker holds it", "nap/n-1"]]
    connection("terminate", "nap", "n-1")
    said = connection("wake", "nap", "n-1")
    assert (said.code, said.err.splitlines()[0]) == (
        1,
        "error: Cannot wake instance 'n-1' of workflow 'nap': it is terminated.",
    )


def test_wake_starts_a_scheduled_instance_now(shop: Shop, connection: Any) -> None:
    later = from_us(shop.clock.now_us + 3_600_000_000)
    shop.durable.internals.operations.create.instance("echo", "early", id="e-1", run_at=later)
    assert shop.work("echo", "e-1") != "complete"
    connection("wake", "echo", "e-1")
    assert shop.work("echo", "e-1") == "complete"


AGAIN = "Start again without a cursor."
REFUSALS = [
    (
        ("show", "order", "none"), 3, "Workflow 'order' has no instance 'none'.",
        "List its instances: {} ls --workflow order",
    ),
    (
        ("logs", "order", "o-1", "--run", "7"), 3,
        "Instance 'o-1' of workflow 'order' has no run 7; it has runs 1 to 1.", None,
    ),
    (("start", "ordre"), 3, "The app knows no workflow 'ordre'.", "Did you mean 'order'? To list them: {list}"),
    (("ls", "-w", "unlike"), 3, "The app knows no workflow 'unlike'.", "To list them: {list}"),
    (("explain", "ordre/o-1"), 3, "The app knows no workflow 'ordre'.", "Did you mean 'order'? To list them: {list}"),
    (("start", "order"), 1, "'order' needs order_id (str).", "{} start order -P order_id=..."),
    (
        ("start", "order", "-P", "order_id=1", "--id", "o-1"), 1, "Workflow 'order' already has an instance 'o-1'.",
        "Use another --id, or inspect this one: {} show order o-1",
    ),
    (
        ("start", "order", "-P", "cents=many", "-P", "order_id=1"), 1,
        "Parameters of workflow 'order' are not valid: $.cents: Input should be a valid integer, unable to parse "
        "string as an integer.", None,
    ),
    (
        ("ls", "-w", "order", "--cursor", "mine"), 1,
        "Cursor 'mine' was not made by this list with this filter, for this caller.", AGAIN,
    ),
    (
        ("send-event", "order", "o-1", "no good"), 1,
        "Event type 'no good' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - and do not begin with "
        "'-'.", None,
    ),
    (
        ("rewind", "order", "o-1", "await aproval"), 3,
        "Run 1 of instance 'o-1' of workflow 'order' has no step 'await aproval'.", "Did you mean 'await approval'?",
    ),
    (
        ("ls", "-w", "nap", "--label", "a=1", "--label", "a=2"), 1,
        "Label 'a=2' is not allowed: write it as name=value, each name once.", None,
    ),
    (
        ("start", "nap", "--label", "tenant"), 1,
        "Label 'tenant' is not allowed: write it as name=value, each name once.", None,
    ),
]  # fmt: skip
"""Commands, their exit codes, errors and hints, which name what can be typed on the connection."""


def test_a_refusal_is_one_error_and_one_hint_and_the_same_on_both(order: Shop, connection: Any) -> None:
    listing = f"{connection.name} workflows" + (" list" if connection.name == "celery-durable" else "")
    for words, code, error, hint in REFUSALS:
        said = connection(*words)
        hints = "" if hint is None else f"hint: {hint.format(connection.name, list=listing)}\n"
        assert (said.err, said.out, said.code) == (f"error: {error}\n{hints}", "", code), words


def test_advice_is_what_can_be_typed_on_this_connection(order: Shop, connection: Any) -> None:
    order.pipe("terminate", "order", "o-1")
    said = connection("send-event", "order", "o-1", "approval")
    assert said.err.splitlines() == [
        "error: Cannot send an event to instance 'o-1' of workflow 'order': it is terminated.",
        f"hint: To start a new run: {connection.name} restart order o-1",
    ]
    assert connection("show", "order", "none").err.splitlines()[1] == (
        f"hint: List its instances: {connection.name} ls --workflow order"
    )


def test_start_waits_for_the_output_or_fails_as_the_instance_did(shop: Shop, connection: Any) -> None:
    shop.work_at_once()
    said = connection("start", "echo", "--params", '{"a": "é"}', "--id", "e-1", "--wait")
    assert (said.rows, said.code) == ([["e-1"], ["complete", '{"a":"é"}']], 0)
    said = connection("start", "bad", "--id", "b-1", "--follow")
    assert (said.rows[0], said.code) == (["b-1"], 1)
    assert said.err == "error: Instance 'b-1' of workflow 'bad' ended errored: NoPaper: out of paper\n"
    said = connection("start", "nap", "--id", "n-1", "--wait", "--timeout", "0.2")
    assert (said.code, said.err.splitlines()[0]) == (
        4,
        "error: Instance 'n-1' of workflow 'nap' is still waiting after 0.2 s.",
    )


@pytest.mark.parametrize("command", [("watch",), ("logs", "-f")])
def test_what_is_followed_is_told_until_it_ends(order: Shop, connection: Any, command: tuple[str, ...]) -> None:
    order.work_at_once()
    with connection.when_it_waits(
        lambda: order.durable.internals.operations.events.send("order", "o-1", "approval", "eve")
    ):
        said = connection(command[0], "order", "o-1", *command[1:])
    assert said.code == 0, said.err
    told = ["order received", "decided by=eve"]
    lines = [line for line in said.out.splitlines() if any(each in line for each in told)]
    assert len(lines) == 2
    assert "decided by=eve" in (said.out.splitlines()[-1] if command[0] == "logs" else said.out.splitlines()[-3])


def test_a_watch_ends_with_its_run_also_if_another_run_follows(order: Shop, connection: Any) -> None:
    with connection.when_it_waits(lambda: order.durable.internals.operations.rewind.restart("order", "o-1")):
        said = connection("watch", "order", "o-1", "--timeout", "5")
    assert (said.code, said.err) == (1, "error: Instance 'o-1' of workflow 'order' ended terminated\n")


def test_a_long_history_comes_in_pages(shop: Shop, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @shop.durable.workflow(name="long")
    def long(event: Any, step: Any) -> int:
        for number in range(7):
            said = f"line {number}"
            step.log.info(said)
            step.do(f"step {number}", lambda: 1)
        return 7

    monkeypatch.setattr(http, "_PAGE", 3)
    shop.durable.internals.operations.create.instance("long", id="l-1")
    for number in range(4):
        shop.durable.internals.operations.events.send("long", "l-1", "news", number)
    shop.work("long", "l-1")
    told = json.loads(connection("export", "long", "l-1").out)
    assert [each["name"] for each in told["steps"]] == [f"step {number}" for number in range(7)]
    assert [each["payload"] for each in told["events"]] == [0, 1, 2, 3]
    assert [each["message"] for each in told["logs"]] == [f"line {number}" for number in range(7)]
    assert told["run"]["details"] == {"status": "complete", "output": 7}
    ours = json.loads(shop.pipe("export", "long", "l-1").out)
    for each in (*told["events"], *ours["events"]):
        del each["seq"]
    assert told == ours


def test_many_instances_are_changed_at_once_after_a_dry_run(shop: Shop, connection: Any) -> None:
    for number in range(3):
        shop.pipe("start", "nap", "--id", f"n-{number}")
        shop.work("nap", f"n-{number}")
    shop.pipe("pause", "nap", "n-1")
    where = ("--where", "workflow=nap status=waiting")
    dry = connection("terminate", *where)
    assert dry.rows == [["Would terminate", "nap/n-2"], ["Would terminate", "nap/n-0"]]
    assert dry.err == "Would terminate 2 instances; nothing was changed. Add --yes to do it.\n"
    done = connection("terminate", *where, "--yes", "--reason", "enough")
    assert (done.rows, done.err) == ([["Terminated", "nap/n-2"], ["Terminated", "nap/n-0"]], "2 instances.\n")
    assert [row[1:3] for row in connection("ls", "-w", "nap").rows] == [
        ["n-2", "terminated"],
        ["n-1", "paused"],
        ["n-0", "terminated"],
    ]
    assert connection("terminate", *where, "--yes").err == "0 instances.\n"


def test_several_are_named_and_one_that_refuses_stops_nobody(shop: Shop, connection: Any) -> None:
    for number in range(2):
        shop.pipe("start", "nap", "--id", f"n-{number}")
    said = connection("terminate", "nap", "n-0", "none", "n-1")
    assert said.rows == [["Terminated", "nap/n-0"], ["Terminated", "nap/n-1"]]
    assert said.err.splitlines()[0] == "error: Workflow 'nap' has no instance 'none'."
    assert said.code == 3


def test_what_failed_is_tried_again_gone_back_from_or_forked(shop: Shop, connection: Any) -> None:
    shop.pipe("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    assert connection("retry", "bad", "b-1", "--reason", "paper is in").rows == [["Retried", "bad/b-1", "run 2"]]
    assert connection("retry", "bad", "b-1").code == 1
    shop.work("bad", "b-1", 2)
    assert connection("retry", "--where", "error=NoPaper workflow=bad", "--yes").rows == [
        ["Retried", "bad/b-1", "run 3"]
    ]
    shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-1")
    shop.work("order", "o-1")
    gone = connection("rewind", "order", "o-1", "await approval")
    assert gone.rows == [["Rewound", "order/o-1", "run 2", "from await approval"]]
    assert connection("fork", "order", "o-1", "count", "--id", "o-2").rows == [["o-2"]]
    assert connection("rewind", "order", "o-1", "none").code == 3


def test_steps_are_settled_by_hand(order: Shop, connection: Any) -> None:
    settle = ("set-result", "order", "o-1", "await approval", '{"ok": true}', "--by", "eve", "--reason", "by phone")
    assert connection(*settle).rows == [["Completed", "order/o-1", "run 1", "await approval"]]
    order.work("order", "o-1")
    rows = connection("show", "order", "o-1", "--full").rows
    assert [row[1:5] + row[6:] for row in rows if row[0] == "audit"] == [
        ["set-result", "await approval", "waiting", "eve", "by phone"]
    ]
    order.pipe("start", "nap", "--id", "n-1")
    order.work("nap", "n-1")
    assert connection("skip", "nap", "n-1", "cool off", "--by", "eve").rows == [
        ["Skipped", "nap/n-1", "run 1", "cool off"]
    ]
    assert connection("skip", "nap", "n-1", "cool off", "--by", "eve").err.startswith(
        "error: Step 'cool off' of run 1 of"
    )


def test_who_ended_instances_is_shown(shop: Shop, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("n-1", "n-2", "n-3"):
        connection("start", "nap", "--id", each)
        shop.work("nap", each)
    connection("cancel", "nap", "n-1", "--by", "eve", "--reason", "rain")
    monkeypatch.setenv("LOGNAME", "ada")
    connection("terminate", "nap", "n-3")
    assert connection("cancel", "--where", "workflow=nap status=waiting", "--yes").rows == [["Cancelling", "nap/n-2"]]
    shown = {each: connection("show", "nap", each, "--full").rows for each in ("n-1", "n-2", "n-3")}
    audits = {each: [row[1:5] + row[6:] for row in rows if row[0] == "audit"] for each, rows in shown.items()}
    assert audits == {
        "n-1": [["cancel", "", "", "eve", "rain"]],
        "n-2": [["cancel", "", "", "ada", ""]],
        "n-3": [["terminate", "", "", "ada", ""]],
    }


def test_where_a_run_comes_from_is_told(order: Shop, connection: Any) -> None:
    connection("fork", "order", "o-1", "await approval", "--id", "o-2")
    assert ["origin", "o-1", "1", "await approval"] in connection("show", "order", "o-2").rows


def test_start_begins_again_what_has_ended_and_leaves_alone_what_goes_on(shop: Shop, connection: Any) -> None:
    start = ("start", "echo", "--params", "1", "--id", "e-1", "--restart")
    assert connection(*start).rows == [["e-1", "created", "1"]]
    assert connection(*start).rows == [["e-1", "unchanged", "1"]]
    shop.work("echo", "e-1")
    assert connection(*start).rows == [["e-1", "restarted", "2"]]
    shop.work_at_once()
    shop.work("echo", "e-1", 2)
    assert connection(*start, "--wait").rows == [["e-1", "restarted", "3"], ["complete", "1"]]
    assert connection("start", "echo", "--restart").code == 2


def test_why_it_waits_is_explained_for_pipes_and_programs(order: Shop, connection: Any) -> None:
    action = f"{connection.name} send-event order o-1 approval --payload @payload.json"
    assert connection("explain", "order/o-1").rows == [
        ["WAITING_EVENT", 'Waits for event "approval" at step "await approval"; times out in 1 d.'], ["action", action],
    ]  # fmt: skip
    said = json.loads(connection("explain", "order/o-1", "--json").out)
    assert (set(said), said["code"]) == ({"code", "sentence", "facts", "actions"}, "WAITING_EVENT")
    assert (said["facts"]["event_type"], said["facts"]["due_at"]) == ("approval", "2030-01-02T00:00:02.012Z")


def test_a_retry_may_start_later(shop: Shop, connection: Any) -> None:
    connection("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    said = connection("retry", "bad", "b-1", "--delay", "10 minutes")
    assert said.rows == [["Will retry", "bad/b-1", "run 2"]], said.err
    assert connection("ls", "-w", "bad").rows[0][2:4] == ["waiting", "2"]
    sentence = "A new run is to start later, and starts in 10 min."
    assert connection("explain", "bad", "b-1").rows[0] == ["SCHEDULED", sentence]


def test_a_linear_run_goes_on_from_the_step_that_failed(shop: Shop, connection: Any) -> None:
    parcel = define_linear("parcel", module=__name__, version=1, steps=[LinearStep("PACK"), LinearStep("PAY")])
    parcel.handlers["PACK"] = lambda ctx: Completed("packed")
    parcel.handlers["PAY"] = lambda ctx: Dead("the card is blocked") if ctx.run_number < 4 else Waiting("paid")
    shop.durable.internals.registry.add(parcel)
    connection("start", "parcel", "--id", "p-1")
    assert shop.work("parcel", "p-1") == "errored: Dead"
    assert ["action", f"{connection.name} retry parcel p-1"] in connection("explain", "parcel", "p-1").rows
    assert connection("retry", "parcel", "p-1", "--reason", "a new card").rows == [["Retried", "parcel/p-1", "run 2"]]
    assert ["origin", "p-1", "1", "1"] in connection("show", "parcel", "p-1").rows
    shop.work("parcel", "p-1", 2)
    settle = ("set-result", "parcel", "p-1", "PAY", '"in cash"', "--by", "eve", "--reason", "#42")
    assert connection(*settle).rows == [["Completed", "parcel/p-1", "run 3", "PAY"]]
    assert shop.work("parcel", "p-1", 3) == "complete"
    rows = connection("show", "parcel", "p-1").rows
    assert [row[1:4:2] for row in rows if row[0] == "step"] == [["PACK", "DONE"], ["PAY", "DONE"]]
    (audit,) = [row for row in rows if row[0] == "audit"]
    assert (audit[1:5], audit[6]) == (["set-result", "1", "dead", "eve"], "#42")
    assert connection("rewind", "parcel", "p-1", "PAY").rows == [["Rewound", "parcel/p-1", "run 4", "from PAY"]]
    assert shop.work("parcel", "p-1", 4).startswith("waiting")
    assert connection("skip", "parcel", "p-1", "PAY", "--by", "eve").rows == [["Skipped", "parcel/p-1", "run 4", "PAY"]]
    assert [row[3] for row in connection("show", "parcel", "p-1").rows if row[0] == "audit"] == ["waiting"]
    assert shop.work("parcel", "p-1", 4) == "complete"
    said = connection("skip", "parcel", "p-1", "PAYS", "--by", "eve")
    assert said.err.startswith("error: Cannot skip a step of instance 'p-1' of workflow 'parcel': it is complete.")
    assert connection("fork", "parcel", "p-1", "PAY", "--id", "p-2").rows == [["p-2"]]


def test_what_each_instance_is_at(shop: Shop, connection: Any) -> None:
    """A step that a worker runs, a wait, and a start that is to come."""
    rows: list[Any] = []
    renewer = shop.durable.internals.runner._renewer

    def write_report() -> None:
        renewer._renew_all()
        shop.clock.advance(seconds=57)
        renewer._renew_all()
        rows[:] = [row[6:] for row in connection("ls", "-w", "report").rows]
        rows.append(connection("explain", "report", "r-1").rows[0])
        rows.append(json.loads(connection("ls", "-w", "report", "-o", "json").out)["instances"][-1])

    @shop.durable.workflow(name="report")
    def report(event: WorkflowEvent[None], step: Step) -> None:
        if event.instance_id == "r-2":
            step.gather(
                step.submit_sleep("rest", "3 days"), step.submit_wait_for_event("sign", "signature", timeout="2 days")
            )
        step.do("long report", write_report)

    for instance_id in ("r-1", "r-2"):
        connection("start", "report", "--id", instance_id, "--label", "tenant=acme", "--label", "stage=new")
    report.create(id="r-3", run_at=from_us(shop.clock.now_us) + timedelta(days=1))
    shop.work("report", "r-2")
    shop.work("report", "r-1")
    *listed, explained, running = rows
    assert listed == [
        ["starts at 2030-01-02T00:00:00.000Z", "", ""],
        ['sign: event "signature", times out at 2030-01-03T00:00:00.000Z', "stage=new tenant=acme", ""],
        [
            'step "long report", attempt 1, since 2030-01-01T00:00:00.000Z, on celery@tests',
            "stage=new tenant=acme",
            "",
        ],
    ]
    assert explained == [
        "RUNNING",
        'It runs step "long report", attempt 1, for 57 s, on celery@tests; the lease is valid for 30 s.',
    ]
    assert (running["running"], running["worker"]) == (
        {"stepKey": "long report", "attempt": 1, "since": "2030-01-01T00:00:00Z"},
        "celery@tests",
    )


def test_missing_parameters_are_named(shop: Shop, connection: Any) -> None:
    @shop.durable.workflow(name="trip")
    def trip(event: WorkflowEvent[TripIn], step: Step) -> None: ...

    missing = connection("start", "trip")
    assert (missing.code, missing.err) == (
        1,
        f"error: 'trip' needs where (str), days (int).\nhint: {connection.name} start trip -P where=... -P days:=...\n",
    )
    listed = connection("workflows") if connection.name != "celery-durable" else connection("workflows", "list")
    assert [row[1] for row in listed.rows if row[0] == "trip"] == ["where: str, days: int, tags?: list"]


def test_a_workflow_that_only_the_database_knows_is_no_mistake(shop: Shop) -> None:
    """Its code was removed, and its instances are still there."""
    definition = shop.durable.workflows["nap"]
    definition.create(id="n-1")
    del shop.durable.internals.registry._definitions["nap"]
    assert shop.pipe("ls", "-w", "nap", "-s", "errored").code == 0


def test_operators_see_the_same_of_all_workflows(order: Shop, connection: Any) -> None:
    connection("start", "echo", "--id", "e-1", "--params", "1")
    assert [row[:3] for row in connection("ls").rows] == [["echo", "e-1", "active"], ["order", "o-1", "waiting"]]
    document = json.loads(connection("ls", "-o", "json").out)
    assert [each["workflowName"] for each in document["instances"]] == ["echo", "order"]
    assert connection("stats").rows[:3] == [
        ["count", "echo", "active", "1"],
        ["count", "order", "waiting", "1"],
        ["due", "1", AT],
    ]
    stats = json.loads(connection("stats", "-o", "json").out)
    assert stats["instances"][0] == {"workflowName": "echo", "status": "active", "count": 1, "isExact": True}
    assert stats["queues"][0]["name"] == "durable"
    assert (stats["due"]["count"], stats["due"]["isExact"]) == (1, True)
    waits = connection("waits", "-t", "approval").rows
    assert waits == [["approval", "order", "o-1", "await approval", AT, "2030-01-02T00:00:02.012Z", "waiting", "", ""]]
    [wait] = json.loads(connection("waits", "-o", "json").out)["waits"]
    assert (wait["instanceId"], wait["stepName"], wait["runNumber"]) == ("o-1", "await approval", 1)
    assert connection("waits", "-w", "echo").rows == []
    assert connection("waits", "-t", "other").err == "No instance waits for an event of type 'other'.\n"
