"""Steps that others do, as the commands show them: over the store, and over HTTP."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from celery_durable import NonRetryableError, Step, StepConfig, WorkflowEvent, values
from celery_durable.cli.output.render import describe_run
from celery_durable.model import ItemRef, RunRef, to_us
from tests.cli.conftest import Shop
from tests.support.references import reference_of

TASK, NAP = "Celery task media.resize, times out at", "instance nap/n-1, times out at"


@pytest.fixture
def album(shop: Shop) -> Shop:
    """The shop with an album a-1, two of whose steps are done by tasks and one by a nap."""

    @shop.durable.workflow(name="album")
    def album(event: WorkflowEvent[None], step: Step) -> Any:
        cover = step.submit_task("cover", "media.resize", timeout="1 hour", retries=1)
        back = step.submit_task("back", "media.resize", timeout="2 hours")
        rest = step.submit_child("rest", shop.durable.workflows["nap"], id="n-1", timeout="4 days")
        return step.gather(cover, back, rest)

    shop.pipe("start", "album", "--id", "a-1")
    shop.work("album", "a-1")
    shop.work("nap", "n-1")
    return shop


def key(shop: Shop) -> int:
    """By which the database knows the album."""
    return shop.durable.internals.operations.queries.get("album", "a-1").instance.pk


def answer(shop: Shop, name: str, payload: str) -> None:
    """What comes back from the worker of a task."""
    steps = shop.durable.internals.operations.history.read("album", "a-1").steps
    seq, step = next((seq, step) for seq, step in enumerate(steps, start=1) if step.name == name)
    event_type = f"task:{key(shop)}:{seq}:{step.attempts}:{step.task}"
    reference = reference_of(shop.durable.internals.store, RunRef("album", "a-1", 1), event_type)
    assert shop.durable.internals.operations.answers.accept(reference, payload).is_taken
    shop.work("album", "a-1")


def test_who_does_the_steps_is_shown_and_told(album: Shop, connection: Any) -> None:
    began = "2030-01-01T00:00:00.000Z"
    shown = connection("show", "album", "a-1").rows
    assert [row[:5] + row[6:] for row in shown[1:-1]] == [
        ["step", "cover", "task", "waiting", "1/2", f"{TASK} 2030-01-01T01:00:00.000Z", "", began, ""],
        ["step", "back", "task", "waiting", "1/1", f"{TASK} 2030-01-01T02:00:00.000Z", "", began, ""],
        ["step", "rest", "child", "waiting", "", f"{NAP} 2030-01-05T00:00:00.000Z", "", began, ""],
    ]  # fmt: skip
    assert connection("history", "album", "a-1").rows[1:] == [
        [began, "step", "waiting", "cover", f"{TASK} 2030-01-01T01:00:00.000Z", ""],
        [began, "step", "waiting", "back", f"{TASK} 2030-01-01T02:00:00.000Z", ""],
        [began, "step", "waiting", "rest", f"{NAP} 2030-01-05T00:00:00.000Z", ""],
    ]
    first = album.durable.internals.operations.history.read("album", "a-1").steps[0].task_id
    assert connection("explain", "album", "a-1").rows == [
        [
            "TASK_NOT_CONSUMED",
            f"Waits for 2 Celery tasks, 0 of 2 have answered; the oldest is media.resize ({first}), under way for "
            "0 ms, at step \"cover\"; the next times out in 1 h. No worker of this app consumes its queue 'celery'. If "
            'no other application does, start one. Also: step "rest" waits for instance nap/n-1.',
        ],
        ["action", "celery -A <your app> worker -Q celery"],
        ["action", f"celery -A <your app> inspect query_task {first}"],
    ]


def test_a_task_that_failed_waits_for_its_next_attempt(album: Shop, connection: Any) -> None:
    answer(album, "cover", values.encode_error_answer("OSError", "disk full"))
    step = connection("show", "album", "a-1").rows[1]
    again = "next attempt at 2030-01-01T00:00:10.000Z"
    assert step[1:5] + step[6:8] == ["cover", "task", "waiting", "1/2", again, "OSError: disk full"]
    assert connection("explain", "album", "a-1").rows[0] == [
        "RETRY_SCHEDULED",
        'Tries step "cover" again in 10 s; attempt 1/2 failed: OSError: disk full. Also: step "back" waits for '
        'Celery task media.resize; step "rest" waits for instance nap/n-1.',
    ]  # fmt: skip


def test_what_they_answer_is_followed_to_the_end(album: Shop, connection: Any) -> None:
    answer(album, "cover", values.encode_error_answer("OSError", "disk full"))
    album.clock.advance(seconds=10)
    album.work("album", "a-1")
    answer(album, "cover", values.encode_answer('{"width":7}'))
    answer(album, "back", values.encode_answer(None))
    with connection.when_it_waits(lambda: _wake(album)):
        said = connection("watch", "album", "a-1")
    start, late, later = "2030-01-01T00:00:00.000Z", "2030-01-01T00:00:10.000Z", "2030-01-04T00:00:00.000Z"
    assert (said.code, [row for row in said.rows if "waiting" not in row]) == (
        0,
        [
            [start, "attempt", "failed", "step cover, attempt 1, failed: OSError: disk full"],
            [late, "step", "completed", "cover", "10 s", "2 attempts", ""],
            [late, "step", "completed", "back", "10 s", "", ""],
            [later, "step", "completed", "rest", ""],
            [later, "run", "complete", ""],
        ],
    )
    rows = connection("show", "album", "a-1", "--full").rows
    assert [row[-1] for row in rows if row[0] in ("step", "output")] == [
        '{"width":7}', "null", '"rested"', '[{"width":7},null,"rested"]',
    ]  # fmt: skip
    assert [row[1:2] + row[4:] for row in rows if row[0] == "event"] == [
        [f"task:{key(album)}:1:1:media.resize", "cover", "", '{"error":{"name":"OSError","message":"disk full"}}'],
        [f"task:{key(album)}:1:2:media.resize", "cover", "", '{"output":{"width":7}}'],
        [f"task:{key(album)}:2:1:media.resize", "back", "", '{"output":null}'],
        ["child:3:nap/n-1", "rest", "", '{"output":"rested"}'],
    ]


def _wake(shop: Shop) -> None:
    """The nap ends, and answers."""
    shop.clock.now_us = to_us(datetime(2030, 1, 4, tzinfo=UTC))
    shop.work("nap", "n-1")
    shop.work("album", "a-1")


@pytest.mark.parametrize("failed", ["cover", "rest"])
def test_one_that_failed_for_good_is_settled_in_a_new_run(album: Shop, connection: Any, failed: str) -> None:
    @album.durable.workflow(name="single")
    def single(event: WorkflowEvent[str], step: Step) -> Any:
        if event.payload == "rest":
            return step.child("rest", album.durable.workflows["nap"], id="n-2")
        return step.task("cover", "media.resize", timeout="1 hour")

    connection("start", "single", "--params", json.dumps(failed), "--id", "s-1")
    album.work("single", "s-1")
    if failed == "rest":
        connection("terminate", "nap", "n-2", "--reason", "enough")
    else:
        album.clock.advance(hours=1)
    assert album.work("single", "s-1").startswith("errored: ")
    settle = ("set-result", "single", "s-1", failed, '"by hand"', "--by", "eve")
    assert connection(*settle).rows == [["Completed", "single/s-1", "run 2", failed]]
    assert album.work("single", "s-1", 2) == "complete"
    assert connection("show", "single", "s-1", "--full").rows[-1] == ["output", '"by hand"']


@pytest.mark.parametrize("options", [(), ("--no-children",)])
@pytest.mark.parametrize("targets", [("album", "a-1"), ("--where", "workflow=album", "--yes")])
def test_terminate_ends_the_children_unless_told_otherwise(
    album: Shop, connection: Any, options: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    assert connection("terminate", *targets, *options).rows == [["Terminated", "album/a-1"]]
    album.clock.advance(minutes=1)
    album.durable.tick()
    assert connection("show", "nap", "n-1").rows[0][3] == ("waiting" if options else "terminated")


@pytest.mark.parametrize("targets", [("house", "h-1"), ("--where", "status=errored", "--yes")])
def test_retry_family_keeps_the_child(shop: Shop, connection: Any, targets: tuple[str, ...]) -> None:
    broken = [True]

    @shop.durable.workflow(name="room")
    def room(event: WorkflowEvent[None], step: Step) -> Any:
        return step.do("paint", StepConfig(retries=0), lambda: 1 / 0 if broken[0] else "green")

    @shop.durable.workflow(name="house")
    def house(event: WorkflowEvent[None], step: Step) -> Any:
        return step.child("room", room, id="r-1")

    connection("start", "house", "--id", "h-1")
    for ref in (("house", "h-1"), ("room", "r-1"), ("house", "h-1")):
        shop.work(*ref)
    broken[0] = False
    dry = connection("retry", "house", "h-1", "--family", "--dry-run").rows
    assert dry == [["Would retry", "house/h-1", "room/r-1", "house/h-1"]]
    alone = connection("retry", "house", "h-1", "--dry-run").rows
    assert alone == [["Would retry", "house/h-1", "house/h-1"]]
    said = connection("retry", *targets, "--family").rows
    assert ["Retried", "house/h-1" if len(targets) == 2 else "room/r-1", "run 2"] in said
    for ref in (("room", "r-1"), ("house", "h-1")):
        shop.work(*ref, 2)
    assert connection("show", "house", "h-1", "--full").rows[-1] == ["output", '"green"']


def test_whose_child_an_instance_is_is_shown(album: Shop, connection: Any) -> None:
    assert ["parent", "album", "a-1", "1", "rest", ""] in connection("show", "nap", "n-1").rows
    started = ["run", "active", "run 1 of nap/n-1", "Child of album/a-1#1, step rest"]
    assert started in [row[1:] for row in connection("history", "nap", "n-1").rows]
    parent = {"workflow": "album", "instance_id": "a-1", "run_number": 1, "step_key": "rest", "item": None}
    assert json.loads(connection("explain", "nap", "n-1", "--json").out)["facts"]["parent"] == parent
    told = json.loads(connection("export", "nap", "n-1").out)
    assert told["run"]["parent"] == {"workflowName": "album", "instanceId": "a-1", "runNumber": 1, "stepKey": "rest"}
    assert "parent" not in json.loads(connection("export", "album", "a-1").out)["run"]
    assert not [row for row in connection("show", "album", "a-1").rows if row[0] == "parent"]
    said = describe_run(album.durable.internals.operations.history.read("nap", "n-1"))
    assert said == ["Child of album/a-1#1, step rest"]


@pytest.fixture(params=["store", "file"])
def replayed(request: pytest.FixtureRequest, album: Shop, tmp_path: Path) -> Any:
    """`replay album a-1`, from the database, or from what `export` prints of it."""

    def call() -> list[list[str]]:
        if request.param == "store":
            return album.pipe("replay", "album", "a-1").rows
        path = tmp_path / "a-1.json"
        path.write_text(album.pipe("export", "album", "a-1").out)
        return album.pipe("replay", "--file", str(path)).rows

    return call


def test_open_ones_are_where_a_replay_ends(album: Shop, replayed: Any) -> None:
    run = ["run", "album", "a-1", "1", "waiting"]
    assert replayed() == [run, ["end", "The record is open at steps 'cover', 'back', 'rest'."]]
    answer(album, "cover", values.encode_error_answer("OSError", "disk full"))  # it is to be sent again
    answer(album, "back", values.encode_answer("7"))
    assert replayed() == [
        run, ["step", "back", "task", "replayed"], ["end", "The record is open at steps 'cover', 'rest'."],
    ]  # fmt: skip


def test_what_they_answered_is_replayed(album: Shop, replayed: Any) -> None:
    answer(album, "cover", values.encode_answer('{"width":7}'))
    answer(album, "back", values.encode_answer(None))
    _wake(album)
    assert replayed() == [
        ["run", "album", "a-1", "1", "complete"],
        ["step", "cover", "task", "replayed"],
        ["step", "back", "task", "replayed"],
        ["step", "rest", "child", "replayed"],
        ["end", "The code returns."],
    ]


def test_code_that_does_a_step_itself_does_not_follow(album: Shop, replayed: Any) -> None:
    answer(album, "cover", values.encode_answer("7"))

    def today(event: WorkflowEvent[None], step: Step) -> Any:
        return step.do("cover", lambda: pytest.fail("a body was run"))

    today.__qualname__ = album.durable.internals.registry.get("album").fn.__qualname__
    album.durable.workflow(name="album")(today)
    said = "Step 'cover' is recorded as 'task', but the code now calls it as 'do'."
    assert replayed()[-2][:2] == ["differs", said]


def test_a_map_shows_its_counts_and_the_items_that_failed(shop: Shop, connection: Any) -> None:
    @shop.durable.workflow(name="press")
    def press(event: WorkflowEvent[None], step: Step) -> Any:
        return step.map("pages", "media.resize", range(13), return_exceptions=True)

    connection("start", "press", "--id", "p-1")
    shop.work("press", "p-1")
    shown = connection("show", "press", "p-1").rows
    assert [row for row in shown if row[0] == "item"] == [["item", "pages", "13", "0", "0", "", "", "", ""]]
    assert [row[6] for row in shown if row[0] == "step"] == ["Celery tasks media.resize, 0 of 13 done"]
    store, ref = shop.durable.internals.store, RunRef("press", "p-1", 1)
    pk = shop.durable.internals.operations.queries.get("press", "p-1").instance.pk
    fail = values.encode_error_answer("OSError", "disk full", is_non_retryable=True)
    for position in range(12):
        answered = values.encode_answer('"done"') if position == 4 else fail
        reference = reference_of(store, ref, ItemRef(pk, "pages", position, 1).type)
        assert shop.durable.internals.operations.answers.accept(reference, answered).is_taken
    shown = connection("show", "press", "p-1").rows
    assert [row[6] for row in shown if row[0] == "step"] == ["Celery tasks media.resize, 1 of 13 done, 11 failed"]
    rows = [row for row in shown if row[0] == "item"]
    assert [row[:5] for row in rows] == [["item", "pages", "13", "1", "11"] for _ in range(10)]
    assert [row[5] for row in rows] == ["0", "1", "2", "3", "5", "6", "7", "8", "9", "10"]
    assert rows[0][6:] == ["1", "OSError: disk full", ""]
    document = json.loads(connection("show", "press", "p-1", "-o", "json").out)
    [step] = document["steps"]
    assert {**step["items"], "failures": len(step["items"]["failures"])} == {
        "total": 13, "done": 1, "failed": 11, "failures": 10, "children": [],
    }  # fmt: skip
    assert step["items"]["failures"][4] == {
        "position": 5, "attempts": 1, "error": {"name": "OSError", "message": "disk full"},
    }  # fmt: skip


def test_a_map_over_a_workflow_shows_the_children_of_its_items(shop: Shop, connection: Any) -> None:
    @shop.durable.workflow(name="bill")
    def bill(event: WorkflowEvent[int], step: Step) -> None:
        step.sleep("rest", "1 day" if event.payload else 0)
        raise NonRetryableError("no money")

    @shop.durable.workflow(name="month")
    def month(event: WorkflowEvent[None], step: Step) -> Any:
        return step.map("bills", bill, range(2))

    connection("start", "month", "--id", "m-1")
    shop.work("month", "m-1")
    pk = shop.durable.internals.operations.queries.get("month", "m-1").instance.pk
    failed, open_ = (ItemRef(pk, "bills", position, 1).work_id(1) for position in range(2))
    shop.work("bill", failed)
    shop.work("bill", open_)
    assert [row for row in connection("show", "month", "m-1").rows if row[0] == "item"] == [
        ["item", "bills", "2", "0", "1", "0", "1", "NonRetryableError: no money", f"bill/{failed}"],
        ["item", "bills", "2", "0", "1", "", "", "", f"bill/{open_}"],
    ]
    [step] = json.loads(connection("show", "month", "m-1", "-o", "json").out)["steps"]
    assert (step["workflow"], step["items"]["children"]) == ("bill", [{"workflowName": "bill", "instanceId": open_}])
    assert step["items"]["failures"][0]["child"] == {"workflowName": "bill", "instanceId": failed}
    explained = json.loads(connection("explain", "month", "m-1", "--json").out)
    assert (explained["code"], explained["facts"]["children"]) == ("WAITING_CHILD", [open_])
    assert ["parent", "month", "m-1", "1", "bills", "1"] in connection("show", "bill", open_).rows
