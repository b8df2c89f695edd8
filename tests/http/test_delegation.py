"""Steps that others do, over HTTP: who does them, what they answer, and that nothing of it passes by the hook."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from celery_durable import RedactionContext, Step, WorkflowEvent, values
from celery_durable.model import RunRef
from tests.http.conftest import Shop
from tests.support.references import reference_of

ALBUM = "/workflows/album/instances/a-1"


@pytest.fixture
def album(shop: Shop) -> Shop:
    """The shop with an album a-1: two of its steps are done by tasks, and one by an order."""

    @shop.durable.workflow(name="album")
    def album(event: WorkflowEvent[None], step: Step) -> Any:
        cover = step.submit_task("cover", "media.resize", timeout="1 hour", retries=1)
        back = step.submit_task("back", "media.resize", timeout="2 hours")
        order = step.submit_child("print", shop.durable.workflows["order"], {"order_id": "42"}, id="o-1")
        return step.gather(cover, back, order)

    album.create(id="a-1")
    shop.work()
    return shop


def answer(shop: Shop, seq: int, payload: str) -> None:
    """What comes back from the worker of the task at this place."""
    key = shop.durable.internals.operations.queries.get("album", "a-1").instance.pk
    reference = reference_of(
        shop.durable.internals.store, RunRef("album", "a-1", 1), f"task:{key}:{seq}:1:media.resize"
    )
    assert shop.durable.internals.operations.answers.accept(reference, payload).is_taken


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_who_does_a_step_is_shown(album: Shop, api: TestClient) -> None:
    ids = [step.task_id for step in album.durable.internals.operations.history.read("album", "a-1").steps]
    current = api.get(ALBUM).json()["meta"]["currentStep"]
    assert current == {
        "stepKey": "cover", "name": "cover", "type": "task", "status": "waiting", "attempts": 1, "maxAttempts": 2,
        "timeoutMs": 3_600_000, "wakeAt": "2030-01-01T01:00:00Z", "createdAt": "2030-01-01T00:00:00Z",
        "task": "media.resize", "taskId": ids[0],
    }  # fmt: skip
    steps = api.get(f"{ALBUM}/history").json()["steps"]
    child = {"workflowName": "order", "instanceId": "o-1"}
    assert [(step["type"], step.get("task"), step.get("taskId"), step.get("child")) for step in steps] == [
        ("task", "media.resize", ids[0], None), ("task", "media.resize", ids[1], None), ("child", None, None, child),
    ]  # fmt: skip
    order = api.get("/workflows/order/instances/o-1/history", params={"includeRun": True}).json()["run"]
    assert order["parent"] == {"workflowName": "album", "instanceId": "a-1", "runNumber": 1, "stepKey": "print"}
    assert "parent" not in api.get(f"{ALBUM}/history", params={"includeRun": True}).json()["run"]
    found = api.get(f"{ALBUM}/explain").json()
    assert (found["code"], found["facts"]["task_id"], found["facts"]["tasks_out"]) == ("TASK_NOT_CONSUMED", ids[0], 2)


def test_what_they_answered_passes_the_hook_as_what_it_is(album: Shop) -> None:
    answer(album, 1, values.encode_error_answer("OSError", "disk full"))
    album.work()
    answer(album, 2, values.encode_answer('{"key":"secret"}'))

    def redact(value: Any, shown: RedactionContext) -> Any:
        return "***" if (shown.kind, shown.name) in {("result", "back"), ("error", "cover")} else value

    album.durable.internals.redact = redact
    guarded = album.client()
    events = guarded.get(f"{ALBUM}/history").json()["events"]
    assert [event["payload"] for event in events] == [
        {"error": {"name": "OSError", "message": "***"}},
        "[redacted]",  # nobody has taken it, so nobody knows whose it is
    ]
    album.work()
    events = guarded.get(f"{ALBUM}/history").json()["events"]
    assert [event["payload"] for event in events][1] == {"output": "***"}
    album.durable.internals.redact = None
    open_ = album.client().get(f"{ALBUM}/history").json()["events"]
    assert [event["payload"] for event in open_][1] == {"output": {"key": "secret"}}


@pytest.mark.parametrize(("command", "more", "result"), [("set-result", {"result": [7]}, [7]), ("skip", {}, None)])
def test_they_are_settled_by_hand_while_they_are_out(
    album: Shop, api: TestClient, command: str, more: dict[str, Any], result: Any
) -> None:
    answer(album, 2, values.encode_answer("1"))
    for step in ("cover", "print"):
        said = api.post(f"{ALBUM}/{command}", json={"step": step, "by": "eve", **more})
        assert (said.status_code, said.json()) == (200, {"ok": True, "runNumber": 1})
    album.work()
    told = api.get(f"{ALBUM}/history", params={"includeRun": True}).json()
    assert [step.get("result") for step in told["steps"]] == [result, 1, result]
    assert [(record["stepKey"], record["before"]) for record in told["run"]["audit"]] == [
        ("cover", {"status": "waiting", "attempts": 1}),
        ("print", {"status": "waiting", "attempts": 1}),
    ]
    ref = RunRef("album", "a-1", 1)
    late = reference_of(album.durable.internals.store, ref, "task:1:1:media.resize")
    assert not album.durable.internals.operations.answers.accept(late, values.encode_answer("8")).is_taken
    assert told["steps"] == api.get(f"{ALBUM}/history").json()["steps"]
