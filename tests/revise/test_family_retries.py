"""`retry(family=True)`: failed children are retried first, and their parents wait for the same children again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import Retries, Step, StepConfig, StepFailed, StepTimeout, WorkflowEvent, durable_workflow
from celery_durable.errors import InstanceNotErrored, VersionMismatch
from celery_durable.model import Child, Scope
from celery_durable.signals import ignore, listen, workflow_restarted
from celery_durable.testing import DurableHarness, HarnessInstance
from tests.support.databases import on_databases

database = on_databases("sqlite", "postgresql", "mariadb")
ran: list[str] = []
broken: set[str] = set()
"""The ids of leaves that fail."""


@durable_workflow(name="retries-leaf")
def leaf(event: WorkflowEvent[Any], step: Step) -> Any:
    step.do("work", StepConfig(retries=0), work, event.instance_id)
    return step.wait_for_event("said", "said", timeout="30 days").payload


def work(instance_id: str) -> None:
    if instance_id in broken:
        raise ValueError(f"{instance_id} is broken")


@durable_workflow(name="retries-middle")
def middle(event: WorkflowEvent[Any], step: Step) -> Any:
    step.do("before", ran.append, event.instance_id)
    return step.child("leaf", leaf, id=f"{event.instance_id}-leaf", timeout="10 days")


@durable_workflow(name="retries-top")
def top(event: WorkflowEvent[Any], step: Step) -> Any:
    kids = [step.submit_child(f"kid {n}", middle, id=f"{event.instance_id}-{n}") for n in range(2)]
    return step.gather(*kids, step.submit_child("generated", leaf))


@durable_workflow(name="retries-patient")
def patient(event: WorkflowEvent[Any], step: Step) -> Any:
    try:
        return step.child("leaf", leaf, id=f"{event.instance_id}-leaf", timeout="1 day")
    except StepTimeout:
        raise
    except StepFailed as exc:
        return exc.error_message


@durable_workflow(name="retries-swarm")
def swarm(event: WorkflowEvent[Any], step: Step) -> Any:
    """A map over children. An item has a second attempt if the first one fails; one is repeated after two days."""
    retries = Retries(limit=event.payload.get("limit", 0), delay=0)
    return step.map("leaves", worker, event.payload["items"], max_concurrency=2, timeout="2 days", retries=retries)


@durable_workflow(name="retries-worker")
def worker(event: WorkflowEvent[str], step: Step) -> Any:
    step.do("work", StepConfig(retries=0), work, event.payload)
    return step.wait_for_event("said", "said", timeout="30 days").payload


@durable_workflow(name="retries-swarms")
def swarms(event: WorkflowEvent[Any], step: Step) -> Any:
    return step.map("swarms", swarm, event.payload)


@pytest.fixture
def harness(store_url: str) -> Iterator[DurableHarness]:
    ran.clear()
    broken.clear()
    with DurableHarness([leaf, middle, top, patient, worker, swarm, swarms], store_url=store_url, wipe=True) as harness:
        yield harness


def tell(harness: DurableHarness, id: str, what: Any) -> None:
    harness.instance(leaf, id).send_event("said", what)
    harness.run_until_idle()


def states(harness: DurableHarness) -> dict[str, str]:
    return {each.id: str(each.status) for each in harness.durable.internals.operations.queries.list(limit=50).items}


def fail_middle(harness: DurableHarness) -> HarnessInstance[Any]:
    broken.add("m-leaf")
    parent = harness.create(middle, id="m")
    harness.run_until_idle()
    assert states(harness) == {"m": "errored", "m-leaf": "errored"}
    broken.clear()
    return parent


@pytest.mark.parametrize("asked", ["parent", "child"])
def test_the_parent_waits_for_the_same_child_again(harness: DurableHarness, asked: str) -> None:
    parent = fail_middle(harness)
    harness.advance("1 hour")
    assert (parent if asked == "parent" else harness.instance(leaf, "m-leaf")).retry(family=True) == 2
    harness.run_until_idle()
    assert states(harness) == {"m": "waiting", "m-leaf": "waiting"}
    (before, waiting) = parent.history().steps
    assert (waiting.status, waiting.child, waiting.wake_at) == (
        "waiting", Child("retries-leaf", "m-leaf"), harness.clock.now + timedelta(days=10),
    )  # fmt: skip
    tell(harness, "m-leaf", "well")
    assert (parent.result(timeout=1), ran, before.status) == ("well", ["m"], "completed")


def test_a_child_with_a_long_id_is_retried_and_answers(store_url: str) -> None:
    ran.clear()
    broken.clear()
    key, settings = "m" * 250, {"durable_max_instance_id": 255}
    broken.add(f"{key}-leaf")
    with DurableHarness([leaf, middle], store_url=store_url, wipe=True, settings=settings) as harness:
        parent = harness.create(middle, id=key)
        harness.run_until_idle()
        broken.clear()
        parent.retry(family=True)
        harness.run_until_idle()
        assert states(harness) == {key: "waiting", f"{key}-leaf": "waiting"}
        tell(harness, f"{key}-leaf", "well")
        assert parent.result(timeout=1) == "well"


def test_all_who_failed_are_retried_deepest_first(harness: DurableHarness) -> None:
    broken.update({"t-0-leaf", "t-1-leaf"})
    parent = harness.create(top, id="t")
    harness.run_until_idle()
    generated = next(step.child.instance_id for step in parent.history().steps if step.name == "generated")
    tell(harness, generated, "kept")
    assert set(states(harness).values()) == {"errored", "complete"}
    preview = [(each.instance_id) for each in harness.durable.internals.operations.families.preview_retry(
        "retries-middle", "t-1"
    )]  # fmt: skip
    assert preview == ["t-0-leaf", "t-0", "t-1-leaf", "t-1", "t"]
    broken.clear()
    assert harness.instance(middle, "t-1").retry(family=True) == 2
    harness.run_until_idle()
    assert {each for each, state in states(harness).items() if state == "waiting"} == set(preview)
    tell(harness, "t-0-leaf", 0)
    tell(harness, "t-1-leaf", 1)
    assert parent.result(timeout=1) == [0, 1, "kept"]


def test_a_parent_takes_the_outcome_of_a_child_that_was_retried_alone(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    harness.instance(leaf, "m-leaf").retry()
    harness.run_until_idle()
    tell(harness, "m-leaf", "well")
    assert states(harness) == {"m": "errored", "m-leaf": "complete"}
    parent.retry(family=True)
    harness.run_until_idle()
    assert parent.result(timeout=1) == "well"


def test_a_parent_waits_for_a_child_that_is_running_again(harness: DurableHarness) -> None:
    """As when a process died between the retries of the two."""
    parent = fail_middle(harness)
    harness.instance(leaf, "m-leaf").retry()
    assert [each.instance_id for each in harness.durable.internals.operations.families.preview_retry(
        "retries-middle", "m"
    )] == ["m"]  # fmt: skip
    parent.retry(family=True)
    harness.run_until_idle()
    tell(harness, "m-leaf", "well")
    assert parent.result(timeout=1) == "well"


def test_a_child_that_fails_again_fails_its_parent_again(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    broken.add("m-leaf")
    for run in (2, 3):
        assert parent.retry(family=True) == run
        harness.run_until_idle()
        assert states(harness) == {"m": "errored", "m-leaf": "errored"}
    broken.clear()
    assert parent.retry(family=True) == 4
    harness.run_until_idle()
    tell(harness, "m-leaf", "well")
    assert parent.result(timeout=1) == "well"


def test_a_child_that_was_too_late_gets_its_whole_time_again(harness: DurableHarness) -> None:
    parent = harness.create(patient, id="p")
    harness.advance("2 days")
    assert states(harness) == {"p": "errored", "p-leaf": "waiting"}
    parent.retry(family=True)
    harness.advance("23 hours")
    tell(harness, "p-leaf", "at last")
    assert parent.result(timeout=1) == "at last"


def test_a_terminated_child_is_replaced(harness: DurableHarness) -> None:
    parent = harness.create(top, id="t")
    harness.run_until_idle()
    first = next(step.child.instance_id for step in parent.history().steps if step.name == "generated")
    tell(harness, "t-0-leaf", 0)
    tell(harness, "t-1-leaf", 1)
    harness.instance(leaf, first).terminate()
    harness.run_until_idle()
    parent.retry(family=True)
    harness.run_until_idle()
    second = next(step.child.instance_id for step in parent.history().steps if step.name == "generated")
    tell(harness, second, 2)
    assert (parent.result(timeout=1), states(harness)[first]) == ([0, 1, 2], "terminated")


def test_a_plain_retry_creates_another_child_and_conflicts_over_a_fixed_id(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    parent.retry()
    harness.run_until_idle()
    assert parent.status().error.name == "InstanceAlreadyExists"


def test_the_children_of_a_retried_parent_end_with_it(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    harness.advance("1 hour")
    parent.retry(family=True)
    harness.run_until_idle()
    harness.advance("1 hour")
    parent.terminate()
    harness.run_until_idle()
    assert states(harness) == {"m": "terminated", "m-leaf": "terminated"}


def test_only_errored_instances_of_this_version_are_retried(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    families = harness.durable.internals.operations.families
    with pytest.raises(VersionMismatch):
        families.retry("retries-middle", "m", if_version=["another"])
    assert states(harness) == {"m": "errored", "m-leaf": "errored"}
    parent.retry(family=True)
    with pytest.raises(InstanceNotErrored):
        parent.retry(family=True)


def test_a_parent_that_fails_again_while_its_child_is_retried_is_of_another_version(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    operations = harness.durable.internals.operations
    version = operations.queries.read_with_tag("retries-middle", "m").tag

    def retry_parent(**_: object) -> None:
        ignore(workflow_restarted, retry_parent)
        parent.retry()
        harness.run_until_idle()

    listen(workflow_restarted, retry_parent)
    with pytest.raises(VersionMismatch):
        operations.families.retry("retries-middle", "m", if_version=[version])
    assert (states(harness)["m"], parent.status().error.name) == ("errored", "InstanceAlreadyExists")


def test_a_preview_names_nothing_outside_the_scope_of_its_caller(harness: DurableHarness) -> None:
    broken.add("m-leaf")
    operations, labels = harness.durable.internals.operations, {"tenant": "acme"}
    operations.create.instance("retries-middle", id="m", labels=labels)
    harness.run_until_idle()
    parent, child = Child("retries-middle", "m"), Child("retries-leaf", "m-leaf")
    assert operations.families.preview_retry("retries-middle", "m") == [child, parent]
    assert operations.restrict_to(Scope(labels)).families.preview_retry("retries-middle", "m") == [parent]


def test_explain_names_the_child_and_the_retry_that_keeps_it(harness: DurableHarness) -> None:
    parent = fail_middle(harness)
    harness.advance("1 hour")
    assert str(parent.explain()) == (
        'It failed 1 h ago with ValueError: m-leaf is broken (step "leaf", 1 attempt). The cause was its child '
        "retries-leaf/m-leaf, which is errored.\n"
        "  durable.workflows['retries-middle'].get('m').history()\n"
        "  durable.workflows['retries-middle'].get('m').retry(family=True)\n"
        "  durable.workflows['retries-middle'].get('m').restart()"
    )
    harness.instance(leaf, "m-leaf").retry()
    assert "which is active." in parent.explain().sentence
    assert "retry(family=True)" not in str(harness.instance(leaf, "m-leaf").explain())


# --- maps over workflows ------------------------------------------------------------------------


def workers(harness: DurableHarness) -> dict[str, HarnessInstance[Any]]:
    """The children of maps by their parameter; of several, the newest."""
    listed = harness.durable.internals.operations.queries.list("retries-worker", limit=50).items
    kids = [harness.instance(worker, each.id) for each in reversed(listed)]
    return {kid.history().params: kid for kid in kids}


def say(harness: DurableHarness, item: str, what: Any) -> None:
    workers(harness)[item].send_event("said", what)
    harness.run_until_idle()


def fail_swarm(harness: DurableHarness, **more: Any) -> HarnessInstance[Any]:
    broken.update({"b", "d"})
    parent = harness.create(swarm, {"items": ["a", "b", "c", "d"], **more}, id="s")
    harness.run_until_idle()
    for each in "ac":
        say(harness, each, each)
    assert parent.status().status == "errored"
    broken.clear()
    return parent


def statuses(harness: DurableHarness) -> dict[str, str]:
    return {item: str(kid.status().status) for item, kid in workers(harness).items()}


@pytest.mark.parametrize("asked", ["parent", "child"])
def test_a_map_waits_for_the_same_children_again(harness: DurableHarness, asked: str) -> None:
    parent = fail_swarm(harness)
    before = {item: kid.id for item, kid in workers(harness).items()}
    preview = [each.instance_id for each in harness.durable.internals.operations.families.preview_retry(
        "retries-swarm", "s"
    )]  # fmt: skip
    assert preview == [before["b"], before["d"], "s"]
    (parent if asked == "parent" else workers(harness)["d"]).retry(family=True)
    harness.run_until_idle()
    assert statuses(harness) == {"a": "complete", "b": "waiting", "c": "complete", "d": "waiting"}
    (waiting,) = parent.history().steps
    assert (waiting.status, waiting.items.done, waiting.items.total) == ("waiting", 2, 4)
    assert {child.instance_id for child in waiting.items.children} == {before["b"], before["d"]}
    say(harness, "d", "D")
    say(harness, "b", "B")
    assert parent.result(timeout=1) == ["a", "B", "c", "D"]
    assert {item: kid.id for item, kid in workers(harness).items()} == before


def test_a_map_takes_the_outcome_of_children_that_were_retried_alone(harness: DurableHarness) -> None:
    parent = fail_swarm(harness)
    for kid in (workers(harness)["b"], workers(harness)["d"]):
        kid.retry()
    harness.run_until_idle()
    for each in "bd":
        say(harness, each, each)
    assert parent.status().status == "errored"
    parent.retry(family=True)
    harness.run_until_idle()
    assert parent.result(timeout=1) == ["a", "b", "c", "d"]


def test_children_of_a_map_that_fail_again_fail_it_again(harness: DurableHarness) -> None:
    parent = fail_swarm(harness)
    broken.add("b")
    for run in (2, 3):
        assert parent.retry(family=True) == run
        harness.run_until_idle()
        if run == 2:
            assert statuses(harness)["d"] == "waiting"
            say(harness, "d", "d")
        assert parent.status().error.message == "item 1: b is broken"
        (failed,) = [each for each in parent.history().attempts if each.item == 1]
        assert failed.task_id == workers(harness)["b"].id
    broken.clear()
    parent.retry(family=True)
    harness.run_until_idle()
    say(harness, "b", "b")
    assert parent.result(timeout=1) == ["a", "b", "c", "d"]


def test_a_map_replaces_children_that_were_terminated(harness: DurableHarness) -> None:
    parent = harness.create(swarm, {"items": ["a", "b"]}, id="s")
    harness.run_until_idle()
    say(harness, "a", "a")
    first = workers(harness)["b"]
    first.terminate()
    harness.run_until_idle()
    parent.retry(family=True)
    harness.run_until_idle()
    assert workers(harness)["b"].id != first.id
    say(harness, "b", "b")
    assert parent.result(timeout=1) == ["a", "b"]


def test_a_late_child_of_a_map_gets_its_whole_time_again_and_ends_with_the_map(harness: DurableHarness) -> None:
    parent = harness.create(swarm, {"items": ["a", "b"]}, id="s")
    harness.run_until_idle()
    say(harness, "a", "a")
    harness.advance("3 days")
    late = workers(harness)["b"]
    assert (parent.status().error.name, late.status().status) == ("StepTimeout", "waiting")
    parent.retry(family=True)
    harness.advance("47 hours")
    assert parent.status().status == "waiting"
    harness.advance("2 hours")
    assert parent.status().error.message.startswith(f"item 1: Instance '{late.id}' ")
    parent.retry(family=True)
    harness.run_until_idle()
    parent.terminate()
    harness.run_until_idle()
    assert late.status().status == "terminated"


def test_an_item_with_attempts_left_creates_another_child(harness: DurableHarness) -> None:
    broken.add("b")
    parent = harness.create(swarm, {"items": ["a", "b"], "limit": 1}, id="s")
    harness.run_until_idle()
    say(harness, "a", "a")
    kids = len(harness.durable.internals.operations.queries.list("retries-worker", limit=50).items)
    assert (parent.status().status, kids) == ("errored", 3)
    broken.clear()
    parent.retry(family=True)
    harness.run_until_idle()
    say(harness, "b", "b")
    assert parent.result(timeout=1) == ["a", "b"]
    assert len(harness.durable.internals.operations.queries.list("retries-worker", limit=50).items) == kids


def test_families_of_maps_are_retried_deepest_first(harness: DurableHarness) -> None:
    broken.update({"b", "c"})
    parent = harness.create(swarms, [{"items": ["a", "b"]}, {"items": ["c"]}], id="ss")
    harness.run_until_idle()
    say(harness, "a", "a")
    assert parent.status().status == "errored"
    broken.clear()
    kids = workers(harness)
    preview = harness.durable.internals.operations.families.preview_retry("retries-worker", kids["c"].id)
    assert [each.workflow for each in preview] == [
        "retries-worker", "retries-swarm", "retries-worker", "retries-swarm", "retries-swarms",
    ]  # fmt: skip
    kids["c"].retry(family=True)
    harness.run_until_idle()
    for each in "bc":
        say(harness, each, each)
    assert parent.result(timeout=1) == [["a", "b"], ["c"]]


def test_explain_names_a_failed_child_of_a_map(harness: DurableHarness) -> None:
    parent = fail_swarm(harness)
    kids = workers(harness)
    assert (
        f"The causes were its children retries-worker/{kids['b'].id}, which is errored, and others."
        in parent.explain().sentence
    )
    assert "retry(family=True)" in str(parent.explain())
