"""Errored instances in groups."""

from __future__ import annotations

import pytest

from celery_durable.ancestry import RunFailure
from celery_durable.model import ErrorInfo, RunOutcome, Scope, Status
from celery_durable.store.engine import bounds
from celery_durable.store.instances import lists, overview
from celery_durable.store.instances.lists import InstanceFilter
from tests.store.world import World

WORKFLOWS = ("order", "ship")


def fail(world: World, id_: str, message: str, *, step: str | None = "charge", workflow: str = "order") -> None:
    failed = None if step is None else RunFailure((step,), 1).text
    outcome = RunOutcome(Status.ERRORED, error_name="CardDeclined", error_message=message, failed_steps=failed)
    world.end_run(world.claim(world.create(id_, workflow=workflow, initial_labels={"n": id_})), outcome)


def test_failures_are_grouped_by_workflow_step_and_text(world: World) -> None:
    for number in range(3):
        fail(world, f"a-{number}", "no money")
    fail(world, "b", "no such card")
    fail(world, "c", "no money", step="refund")
    fail(world, "d", "no money", step=None)
    fail(world, "e", "no money", workflow="ship")
    fail(world, "f", "x" * 300)
    world.create("open")
    found = world.store.read(lambda tx: overview.group_failures(tx, WORKFLOWS))
    assert [(each.workflow, each.step, each.error, each.count, each.newest_id) for each in found] == [
        ("order", "charge", ErrorInfo("CardDeclined", "no money"), 3, "a-2"),
        ("order", "charge", ErrorInfo("CardDeclined", "x" * 200), 1, "f"),
        ("ship", "charge", ErrorInfo("CardDeclined", "no money"), 1, "e"),
        ("order", None, ErrorInfo("CardDeclined", "no money"), 1, "d"),
        ("order", "refund", ErrorInfo("CardDeclined", "no money"), 1, "c"),
        ("order", "charge", ErrorInfo("CardDeclined", "no such card"), 1, "b"),
    ]
    assert all(each.is_exact for each in found)
    assert found[0].newest_at == world.now


def test_groups_of_a_scope_have_its_instances_only(world: World) -> None:
    fail(world, "a-1", "no money")
    fail(world, "b-1", "no money")
    for scope in (Scope(id_prefix="a-"), Scope({"n": "a-1"})):
        (found,) = world.store.read(lambda tx, scope=scope: overview.group_failures(tx, WORKFLOWS, scope=scope))
        assert (found.count, found.newest_id) == (1, "a-1")


def test_a_group_says_that_its_workflow_has_more_than_were_examined(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 16)
    for number in range(3):
        fail(world, f"a-{number}", "no money")
    fail(world, "e", "no money", workflow="ship")
    found = world.store.read(lambda tx: overview.group_failures(tx, WORKFLOWS))
    assert [(each.workflow, str(each)) for each in found] == [("order", "2+"), ("ship", "1")]


def test_a_list_names_the_step_whose_failure_ended_the_run(world: World) -> None:
    fail(world, "a", "no money")
    fail(world, "b", "no money", step=None)
    world.create("c")
    page = world.store.read(lambda tx: lists.read_page(tx, InstanceFilter(), before_pk=None, limit=5))
    assert [(each.id, each.failed_step) for each in page.items] == [("c", None), ("b", None), ("a", "charge")]
