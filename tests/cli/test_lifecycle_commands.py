"""start, send-event, pause, resume, terminate, restart and migrate: what they do, say and refuse."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from celery_durable.store.schema.tables import REVISION
from tests.cli.conftest import Shop

# --- start --------------------------------------------------------------------------------------


def test_start_prints_the_id_for_the_next_command(shop: Shop) -> None:
    said = shop.pipe("start", "echo")
    assert (said.out, said.err, said.code) == ("id-1\n", "", 0)
    shop.no_color = True
    assert shop.terminal("start", "echo", "--id", "e-1") == (
        "Started   echo/e-1\nShow it: celery -A <your app> durable show echo e-1"
    )


def test_parameters_come_from_everywhere(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.json").write_text('{"from": "file", "n": 1}')
    for number, (words, params) in enumerate((
        ((), None),
        (("--params", '{"a": [1, null]}'), {"a": [1, None]}),
        (("--params", "@params.json"), {"from": "file", "n": 1}),
        (("--params", "-"), {"from": "stdin"}),
        (("-P", "text=1", "-P", "number:=1", "-P", "eq=a=b"), {"text": "1", "number": 1, "eq": "a=b"}),
        (("--params", "@params.json", "-P", "n:=2"), {"from": "file", "n": 2}),
    )):  # fmt: skip
        said = shop.pipe("start", "echo", "--id", f"e-{number}", *words, stdin='{"from": "stdin"}')
        assert said.code == 0, said.err
        assert shop.durable.internals.operations.history.read("echo", f"e-{number}").params == params


def test_what_cannot_be_read_is_wrong_usage(shop: Shop) -> None:
    quoted = "A text needs quotes inside the shell's: '\"text\"'"
    for words, complaint in (
        (
            ("--params", "{bad"),
            "Invalid value for '--params': '{bad' is not JSON (Expecting property name enclosed in double quotes: "
            f"line 1 column 2 (char 1)). {quoted}",
        ),
        (("--params", "NaN"), f"Invalid value for '--params': 'NaN' is not JSON (NaN is no JSON value). {quoted}"),
        (
            ("--params", "@nofile"),
            "Invalid value for '--params': nofile cannot be read: [Errno 2] No such file or directory: 'nofile'",
        ),
        (("-P", "text"), "Invalid value for -P: 'text' is neither key=text nor key:=JSON"),
        (("-P", "=text"), "Invalid value for -P: '=text' is neither key=text nor key:=JSON"),
        (("-P", "a=1", "-P", "a:=2"), "Invalid value for -P: 'a' is given twice"),
        (
            ("-P", "a:=x"),
            "Invalid value for -P: a:=x is not JSON (Expecting value: line 1 column 1 (char 0)); for text: a=...",
        ),
        (("--params", "[1]", "-P", "a=1"), "Invalid value for -P: needs --params to be a JSON object"),
        (("--timeout", "5"), "--timeout needs --wait or --follow."),
        (
            ("--restart", "--id", "e-1", "--if-running", "skip"),
            "--restart excludes --if-exists, --if-running, --delay and --at-latest.",
        ),
        (
            ("--id", "e-1", "--if-running", "skip", "--wait"),
            "--wait and --follow are for a new instance: leave out --if-exists and --if-running.",
        ),
        (
            ("--wait", "--timeout", "soon"),
            "Invalid value for '--timeout': Duration 'soon' cannot be used: a unit is unknown, missing or out of "
            'order. Write a timedelta, seconds as a number, or text such as "10 seconds", "1.5 h", "3 days".',
        ),
    ):
        said = shop.pipe("start", "echo", *words)
        assert (said.err.splitlines()[-1], said.out, said.code) == (f"Error: {complaint}", "", 2)
    assert shop.pipe("ls").out == ""


def test_start_limits_the_duration_of_runs(shop: Shop) -> None:
    assert shop.pipe("start", "nap", "--id", "n-1", "--max-run", "2 hours").code == 0
    shop.work("nap", "n-1")
    assert ["limit", "7200"] in shop.pipe("show", "nap", "n-1").rows
    assert "  Each run may take 2 h\n" in shop.terminal("show", "nap", "n-1")
    assert json.loads(shop.pipe("show", "nap", "n-1", "-o", "json").out)["run"]["maxRunMs"] == 7_200_000
    shop.clock.advance(seconds=7200)
    shop.work("nap", "n-1")
    assert shop.durable.internals.operations.queries.read("nap", "n-1").status == "terminated"
    said = shop.pipe("start", "nap", "--id", "n-1", "--restart", "--max-run", "2 hours")
    assert (said.code, said.err.splitlines()[-1]) == (
        2,
        "Error: --max-run is for a new instance: a restarted one keeps its limit.",
    )


def test_start_postpones_an_instance(shop: Shop) -> None:
    words = ("start", "nap", "--id", "n-1", "--if-exists", "postpone", "--delay", "30 seconds", "--at-latest", "40")
    assert shop.pipe(*words).rows == [["n-1", "waiting"]]
    shop.clock.advance(seconds=20)
    shop.no_color = True
    assert shop.terminal(*words).splitlines()[0].split() == ["Now", "waiting:", "nap/n-1"]
    shop.clock.advance(seconds=19)
    shop.work("nap", "n-1")
    row = shop.durable.internals.operations.queries.read("nap", "n-1")
    assert (row.status, row.run_at) == ("waiting", row.created_at + timedelta(seconds=40))


def test_start_does_not_overlap_runs(shop: Shop) -> None:
    for policy in ("skip", "queue"):
        assert shop.pipe("start", "nap", "--id", "n-1", "--if-running", policy).rows == [["n-1", "active"]]
    said = shop.pipe("start", "nap", "--if-running", "skip")
    assert said.err.splitlines()[0] == 'error: if_running="skip" needs an id: a random one never exists.'


def test_start_and_follow_shows_each_step_as_it_comes(shop: Shop) -> None:
    todo = [
        lambda: shop.work("order", "o-1"),
        lambda: shop.durable.internals.operations.events.send("order", "o-1", "approval", "eve"),
        lambda: shop.clock.advance(minutes=1),
        lambda: shop.work("order", "o-1"),
    ]
    shop.clock.meanwhile = lambda: todo.pop(0)()
    said = shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-1", "--follow")
    assert said.rows == [
        ["o-1"],
        ["2030-01-01T00:00:00.012Z", "log", "info", 'order received cents=500 note="two words"'],
        ["2030-01-01T00:00:00.012Z", "step", "completed", "count", "12 ms", "", ""],
        ["2030-01-01T00:00:00.012Z", "step", "waiting", "await approval", 'event "approval", times out in 1 d', ""],
        ["2030-01-01T00:01:00.012Z", "log", "warn", "decided by=eve"],
        ["2030-01-01T00:01:00.012Z", "step", "completed", "await approval", ""],
        ["2030-01-01T00:01:00.012Z", "run", "complete", ""],
        ["complete", '"paid"'],
    ]


def test_a_terminal_that_follows_sees_the_time_of_day(shop: Shop) -> None:
    shop.work_at_once()
    shop.no_color = True
    assert shop.terminal("start", "echo", "--id", "e-1", "--follow").splitlines() == [
        "Started   echo/e-1",
        "00:00:00.000Z   run    complete",
        "  null",
    ]


# --- send-event ---------------------------------------------------------------------------------


def test_an_event_can_carry_nothing_or_a_file(order: Shop, tmp_path: Path) -> None:
    (tmp_path / "payload.json").write_text('["é"]')
    order.pipe("send-event", "order", "o-1", "one")
    order.pipe("send-event", "order", "o-1", "two", "--payload", f"@{tmp_path}/payload.json")
    order.pipe("send-event", "order", "o-1", "three", "--payload", "-", stdin="3")
    events = order.durable.internals.operations.history.read("order", "o-1").events
    assert [(event.type, event.payload) for event in events] == [("one", None), ("two", ["é"]), ("three", 3)]


# --- lifecycle ----------------------------------------------------------------------------------


def test_a_pause_of_what_runs_waits_for_the_step(shop: Shop) -> None:
    said = []

    @shop.durable.workflow(name="busy")
    def busy(event, step):
        step.do("first", lambda: said.append(shop.pipe("pause", "busy", "b-1").rows))
        step.do("second", lambda: 2)

    shop.pipe("start", "busy", "--id", "b-1")
    assert shop.work("busy", "b-1") == "paused"
    assert said == [[["Will pause when the running step ends", "busy/b-1"]]]
    assert [row[1] for row in shop.pipe("show", "busy", "b-1").rows if row[0] == "step"] == ["first"]


def test_commands_have_the_names_of_the_methods_too(shop: Shop) -> None:
    assert shop.pipe("create", "order", "-P", "order_id=42", "--id", "o-1").rows == [["o-1"]]


def test_cancel_lets_a_run_clean_up(shop: Shop) -> None:
    @shop.durable.workflow(name="tour")
    def tour(event, step):
        step.do("book", lambda: 1)
        try:
            step.wait_for_event("go", "go")
        finally:
            step.sleep("rest", "1 hour")

    for each in ("t-1", "t-2", "t-3"):
        shop.pipe("start", "tour", "--id", each)
    assert shop.pipe("cancel", "tour", "t-3").rows == [["Cancelled", "tour/t-3"]]
    shop.work("tour", "t-1")
    shop.work("tour", "t-2")
    said = shop.pipe("cancel", "--where", "workflow=tour status=waiting", "--reason", "rain")
    assert said.rows == [["Would cancel", "tour/t-2"], ["Would cancel", "tour/t-1"]]
    said = shop.pipe("cancel", "--where", "workflow=tour status=waiting", "--reason", "rain", "--yes")
    assert said.rows == [["Cancelling", "tour/t-2"], ["Cancelling", "tour/t-1"]]
    shop.clock.advance(seconds=5)
    shop.work("tour", "t-1")
    assert shop.pipe("explain", "tour", "t-1").rows == [
        [
            "SLEEPING",
            'It was cancelled 5 s ago (rain); its workflow cleans up. Sleeps at step "rest"; wakes in 1 h.',
        ]
    ]
    assert "   cancelled 5 s ago" in shop.terminal("show", "tour", "t-1")
    assert ["cancel", "2030-01-01T00:00:00.000Z"] in shop.pipe("show", "tour", "t-1").rows
    shown = json.loads(shop.pipe("show", "tour", "t-1", "-o", "json").out)
    assert shown["run"]["cancelRequestedAt"] == "2030-01-01T00:00:00Z"
    shop.clock.advance(hours=1)
    assert shop.work("tour", "t-1") == "terminated: cancelled: rain"
    assert shop.pipe("explain", "tour", "t-1").rows[0] == ["TERMINATED", "It was cancelled 0 ms ago: rain."]
    assert shop.pipe("cancel", "tour", "t-2", "t-1").rows == [["Cancelled", "tour/t-2"]]


def test_operators_need_no_workflow_code(order: Shop, store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Shop(store_url, monkeypatch)
    stranger.durable.internals.registry = type(stranger.durable.internals.registry)()
    try:
        for words in (("ls",), ("show",), ("logs",), ("pause",), ("resume",), ("restart",), ("terminate",)):
            target = ("order", "o-1") if words != ("ls",) else ()
            assert stranger.pipe(*words, *target).code == 0, words
        assert stranger.pipe("start", "order").code == 3
    finally:
        stranger.durable.close()


# --- migrate ------------------------------------------------------------------------------------


def test_migrate_makes_the_tables_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(f"sqlite:///{tmp_path}/new.sqlite3", monkeypatch)
    hint = "hint: Bring it up to date: celery -A <your app> durable migrate\n"
    for words in (("migrate", "--check"), ("ls",), ("start", "echo")):
        said = shop.pipe(*words)
        assert said.err == (
            f"error: The database has no celery_durable tables; this version needs revision '{REVISION}'.\n" + hint
        )
        assert said.code == 1
    assert shop.pipe("migrate").rows == [["Migrated", f"revision none -> {REVISION}"]]
    assert shop.pipe("migrate").rows == [["Up to date", f"revision {REVISION}"]]
    assert shop.pipe("migrate", "--check").rows == [["Up to date", f"revision {REVISION}"]]
    assert shop.pipe("ls").code == 0
    with shop.durable.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE workflow_label")
    said = shop.pipe("migrate", "--check")
    assert said.code == 1
    assert said.err.startswith("error: The database lacks workflow_label, although its revision is current.")
    shop.durable.close()


def test_migrate_prints_sql_for_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop("postgresql+psycopg://nobody@127.0.0.1:1/none", monkeypatch)
    said = shop.pipe("migrate", "--sql")
    assert said.code == 0, said.err
    assert "CREATE TABLE workflow_instance (" in said.out
    assert shop.pipe("migrate", "--sql", "--check").code == 2
    shop.durable.close()


# --- prune --------------------------------------------------------------------------------------


def test_prune_counts_and_deletes_only_when_told_to(shop: Shop) -> None:
    shop.pipe("start", "echo", "--id", "e-1")
    shop.pipe("terminate", "echo", "e-1")
    shop.pipe("start", "echo", "--id", "e-2")
    shop.clock.advance(days=2)
    counted = shop.pipe("prune", "--older-than", "1 day")
    assert (counted.out, counted.code) == ("Would delete\t1\n", 0)
    assert shop.pipe("prune", "--older-than", "3 days", "--yes").out == "Deleted\t0\n"
    assert shop.pipe("prune", "--older-than", "1 day", "--status", "complete", "--yes").out == "Deleted\t0\n"
    assert shop.pipe("prune", "--older-than", "1 day", "--workflow", "echo", "--yes").out == "Deleted\t1\n"
    assert [item.id for item in shop.durable.internals.operations.queries.list().items] == ["e-2"]
