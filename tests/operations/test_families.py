"""The children of a run that is terminated end with it, and theirs; what else ends a run leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Cancelled, Retries, Status, Step, StepTimeout, WorkflowEvent, durable_workflow
from celery_durable.errors import WorkflowFailed
from celery_durable.model import OutboxKind
from celery_durable.testing import DurableHarness, HarnessInstance
from tests.support.databases import on_databases

database = on_databases("sqlite", "postgresql", "mariadb")


@durable_workflow(name="families-leaf")
def leaf(event: WorkflowEvent[Any], step: Step) -> Any:
    return step.wait_for_event("go", "go", timeout="30 days").payload


@durable_workflow(name="families-branch")
def branch(event: WorkflowEvent[Any], step: Step) -> Any:
    return step.child("leaf", leaf, id=f"{event.instance_id}-leaf")


@durable_workflow(name="families-tree")
def tree(event: WorkflowEvent[Any], step: Step) -> Any:
    """A parent with children in all states: two wait, one has lost a race, one was not waited for, one has ended."""
    done = step.child("done", leaf, id=f"{event.instance_id}-done")
    step.first("sooner", step.submit_sleep("nap", "1 hour"), step.submit_child("loser", leaf, id="loser"))
    try:
        step.child("late", leaf, id="late", timeout="1 hour")
    except StepTimeout:
        step.do("note", lambda: "too late")
    own = step.submit_child("own", branch, id="own")
    free = step.submit_child("free", leaf, id="free", on_parent_end="continue")
    return [done, *step.gather(own, free)]


@durable_workflow(name="families-short", max_run_duration="2 hours")
def short(event: WorkflowEvent[Any], step: Step) -> Any:
    step.gather(step.submit_child("leaf", leaf, id="leaf"), step.submit_sleep("nap", "1 hour"))
    return None


@durable_workflow(name="families-hasty")
def hasty(event: WorkflowEvent[str], step: Step) -> None:
    """It waits for nobody, completes or fails."""
    option: Any = {"on_parent_end": event.payload} if event.payload == "abandon" else {}
    kid = step.submit_child("leaf", leaf, id=event.payload, **option)
    step.first("sooner", step.submit_sleep("nap", "1 hour"), kid)
    if event.payload == "fails":
        raise ValueError("no")


@durable_workflow(name="families-crowd")
def crowd(event: WorkflowEvent[int], step: Step) -> Any:
    return step.gather(*(step.submit_child(f"leaf {n}", leaf, id=f"leaf-{n}") for n in range(event.payload)))


@durable_workflow(name="families-swarm")
def swarm(event: WorkflowEvent[Any], step: Step) -> Any:
    """A map with children in all states: one has ended, one is late and repeated, one is open, and one is to come."""
    return step.map("leaves", leaf, range(4), max_concurrency=2, timeout="1 hour", retries=Retries(limit=1, delay=0))


@pytest.fixture
def harness(store_url: str) -> Iterator[DurableHarness]:
    with DurableHarness([leaf, branch, tree, short, hasty, crowd, swarm], store_url=store_url, wipe=True) as harness:
        yield harness


def states(harness: DurableHarness) -> dict[str, str]:
    return {each.id: str(each.status) for each in harness.durable.internals.operations.queries.list(limit=500).items}


def grow(harness: DurableHarness) -> HarnessInstance[Any]:
    parent = harness.create(tree, id="t")
    harness.run_until_idle()
    harness.instance(leaf, "t-done").send_event("go", 1)
    harness.advance("3 hours")
    assert states(harness) == {
        "t": "waiting", "t-done": "complete", "loser": "waiting", "late": "waiting", "own": "waiting",
        "own-leaf": "waiting", "free": "waiting",
    }  # fmt: skip
    return parent


def test_the_children_of_a_terminated_run_end_too_and_theirs(harness: DurableHarness) -> None:
    grow(harness).terminate("sold twice")
    harness.run_until_idle()
    assert states(harness) == {
        "t": "terminated", "t-done": "complete", "loser": "terminated", "late": "terminated", "own": "terminated",
        "own-leaf": "terminated", "free": "waiting",
    }  # fmt: skip
    reason = "its parent families-tree/t was terminated: sold twice"
    assert harness.instance(branch, "own").history().reason == reason
    assert (
        harness.instance(leaf, "own-leaf").history().reason
        == f"its parent families-branch/own was terminated: {reason}"
    )
    assert harness.durable.internals.operations.outbox.read() == []


@pytest.mark.parametrize("end", ["terminate", "cancel"])
def test_children_with_long_ids_end_too(store_url: str, end: str) -> None:
    """The event type of an answer is cut to the size of its column, and with it the name of the child."""
    settings = {"durable_max_instance_id": 255}
    with DurableHarness([leaf, branch], store_url=store_url, wipe=True, settings=settings) as harness:
        ids = ["b" * length for length in (190, 249, 250)]
        parents = [harness.create(branch, id=each) for each in ids]
        harness.run_until_idle()
        getattr(parents[1], end)("sold twice")
        getattr(parents[2], end)("sold twice")
        harness.run_until_idle()
        ended = {ids[0]: "waiting", ids[1]: "terminated", ids[2]: "terminated"}
        assert states(harness) == ended | {f"{each}-leaf": state for each, state in ended.items()}
        harness.instance(leaf, f"{ids[0]}-leaf").send_event("go", 1)
        harness.run_until_idle()
        assert parents[0].result(timeout=1) == 1


def test_a_caller_may_leave_the_children(harness: DurableHarness) -> None:
    grow(harness).terminate(children=False)
    harness.run_until_idle()
    assert set(states(harness).values()) == {"terminated", "complete", "waiting"}
    harness.instance(leaf, "own-leaf").send_event("go", 1)
    harness.run_until_idle()
    assert states(harness)["own"] == "complete"


def test_a_run_that_takes_too_long_takes_its_children_along(harness: DurableHarness) -> None:
    harness.create(short, id="s")
    harness.advance("1 hour")
    assert states(harness) == {"s": "waiting", "leaf": "waiting"}
    harness.advance("1 hour")
    assert states(harness) == {"s": "terminated", "leaf": "terminated"}


def test_a_cancelled_run_takes_its_children_along_when_it_ends(harness: DurableHarness) -> None:
    grow(harness).cancel("sold twice")
    harness.run_until_idle()
    assert [states(harness)[each] for each in ("t", "own", "own-leaf", "free")] == [*["terminated"] * 3, "waiting"]


def test_a_run_that_completes_or_fails_leaves_its_children(harness: DurableHarness) -> None:
    for how in ("completes", "fails"):
        harness.create(hasty, how, id=f"p-{how}")
    harness.advance("1 hour")
    assert states(harness) == {
        "p-completes": "complete", "p-fails": "errored", "completes": "waiting", "fails": "waiting",
    }  # fmt: skip


def test_a_child_that_was_started_again_after_its_parent_had_ended_is_left(harness: DurableHarness) -> None:
    """As when the broker was down for a while, or the event comes a second time."""
    harness.create(branch, id="b")
    harness.run_until_idle()
    harness.instance(branch, "b").terminate()
    harness.instance(leaf, "b-leaf").terminate()
    harness.clock.advance(timedelta(seconds=1))
    harness.instance(leaf, "b-leaf").restart()
    harness.run_until_idle()
    assert states(harness) == {"b": "terminated", "b-leaf": "waiting"}


def test_the_children_of_a_deleted_parent_end(harness: DurableHarness) -> None:
    harness.create(branch, id="b")
    harness.run_until_idle()
    harness.instance(branch, "b").terminate()
    assert harness.durable.internals.operations.retention.prune(older_than=0, workflow="families-branch") == 1
    harness.run_until_idle()
    assert states(harness) == {"b-leaf": "terminated"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_many_children_take_several_messages(harness: DurableHarness) -> None:
    harness.create(crowd, 230, id="c")
    harness.run_until_idle()
    harness.instance(crowd, "c").terminate()
    assert [each.kind for each in harness.durable.internals.operations.outbox.read()] == [OutboxKind.EVENT] * 3
    harness.run_until_idle(max_ticks=5000)
    assert set(states(harness).values()) == {"terminated"}


def test_a_parent_without_children_writes_no_message(harness: DurableHarness) -> None:
    harness.create(leaf, id="l")
    harness.run_until_idle()
    harness.instance(leaf, "l").terminate()
    assert harness.durable.internals.operations.outbox.read() == []


def test_only_two_words_say_what_becomes_of_a_child(harness: DurableHarness) -> None:
    harness.create(hasty, "abandon", id="h")
    harness.run_until_idle()
    with pytest.raises(WorkflowFailed, match="on_parent_end='abandon' must be one of terminate, continue"):
        harness.instance(hasty, "h").result(timeout=1)


# --- cancel -------------------------------------------------------------------------------------

cleaned: list[tuple[str, str]] = []


@durable_workflow(name="families-careful")
def careful(event: WorkflowEvent[Any], step: Step) -> Any:
    """A parent or a child that cleans up, the child for longer than the parent."""
    try:
        if event.payload == "child":
            return step.wait_for_event("go", "go", timeout="30 days").payload
        kids = [step.submit_child(f"kid {n}", careful, "child", id=f"kid-{n}") for n in range(2)]
        free = step.submit_child("free", careful, "child", id="free", on_parent_end="continue")
        return step.gather(*kids, free)
    except Cancelled as cancelled:
        why = cancelled.reason or ""
        if event.payload == "child":
            step.sleep("think", "1 hour")
        step.do("clean up", lambda: cleaned.append((event.instance_id, why)))
        raise


@pytest.fixture
def careful_harness(store_url: str) -> Iterator[DurableHarness]:
    cleaned.clear()
    with DurableHarness([careful], store_url=store_url, wipe=True) as harness:
        yield harness


def test_the_children_of_a_cancelled_run_clean_up_too(careful_harness: DurableHarness) -> None:
    parent = careful_harness.workflow(careful).create("parent", id="p")
    careful_harness.run_until_idle()
    parent.cancel("sold twice")
    careful_harness.run_until_idle()
    assert (cleaned, parent.status().status) == ([("p", "sold twice")], Status.TERMINATED)
    careful_harness.advance("1 hour")
    why = "its parent families-careful/p was cancelled: sold twice"
    assert sorted(cleaned) == [("kid-0", why), ("kid-1", why), ("p", "sold twice")]
    statuses = {id_: careful_harness.instance(careful, id_).status().status for id_ in ("kid-0", "kid-1", "free")}
    assert statuses == {"kid-0": Status.TERMINATED, "kid-1": Status.TERMINATED, "free": Status.WAITING}


def test_a_parent_that_is_cancelled_twice_terminates_its_children(careful_harness: DurableHarness) -> None:
    parent = careful_harness.workflow(careful).create("parent", id="p")
    careful_harness.run_until_idle()
    parent.cancel()
    parent.cancel()
    careful_harness.run_until_idle()
    assert (cleaned, careful_harness.instance(careful, "kid-0").status().status) == ([], Status.TERMINATED)


def test_a_repeated_message_does_not_end_the_cleanup_of_a_child(careful_harness: DurableHarness) -> None:
    child = careful_harness.workflow(careful).create("child", id="c")
    careful_harness.run_until_idle()
    for _ in range(2):
        careful_harness.durable.internals.operations.lifecycle.cancel_once(
            "families-careful", "c", reason="its parent has ended"
        )
    careful_harness.advance("1 hour")
    assert (cleaned, child.status().status) == ([("c", "its parent has ended")], Status.TERMINATED)


@pytest.mark.parametrize("end", ["terminate", "cancel"])
def test_the_children_of_a_map_end_too(harness: DurableHarness, end: str) -> None:
    parent = harness.create(swarm, id="s")
    harness.run_until_idle()
    [step] = parent.history().steps
    done, late = (child.instance_id for child in step.items.children)
    harness.instance(leaf, done).send_event("go", 1)
    harness.advance("61 minutes")
    assert sorted(states(harness).values()) == ["complete", *["waiting"] * 5]
    getattr(parent, end)("sold twice")
    harness.run_until_idle()
    ended = states(harness)
    assert (ended.pop(done), len(ended), set(ended.values())) == ("complete", 5, {"terminated"})
    assert late in ended
