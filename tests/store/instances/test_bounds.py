"""Reads of people and monitors stay bounded, however many instances there are (LAW 10)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import values
from celery_durable.model import Count, Scope, Status, StatusCount, StepStatus, StepType, WaitFilter
from celery_durable.store.engine import Tx, bounds
from celery_durable.store.instances import instances, lifecycle, limit_reads, limit_waits, lists, overview, retention
from celery_durable.store.instances.lists import InstanceFilter
from celery_durable.store.instances.retention import EndedFilter
from celery_durable.store.runs import holds, limits, outbox, schedule
from celery_durable.store.runs.holds import LimitKey
from tests.store.crowd import Crowd
from tests.store.world import LEASE, World, step

LISTS: dict[str, InstanceFilter] = {
    "all": InstanceFilter(),
    "workflow": InstanceFilter("order"),
    "rare workflow": InstanceFilter("refund"),
    "status": InstanceFilter(status=Status.COMPLETE),
    "rare status": InstanceFilter(status=Status.PAUSED),
    "workflow and status": InstanceFilter("order", Status.WAITING),
    "workflow and rare status": InstanceFilter("order", Status.PAUSED),
    "label": InstanceFilter(labels={"tenant": "acme"}),
    "rare label": InstanceFilter(labels={"tenant": "rare"}),
    "rare and common label": InstanceFilter(labels={"tenant": "rare", "stage": "new"}),
    "label and workflow": InstanceFilter("refund", labels={"tenant": "acme"}),
    "label and status": InstanceFilter(status=Status.PAUSED, labels={"tenant": "acme"}),
    "label, workflow and status": InstanceFilter("order", Status.WAITING, {"tenant": "rare"}),
    "scope of a label": InstanceFilter(scope=Scope(labels={"tenant": "rare"})),
    "scope of a prefix": InstanceFilter(scope=Scope(id_prefix="s-77")),
    "scope of a prefix, workflow and status": InstanceFilter("order", Status.WAITING, scope=Scope(id_prefix="s-77")),
    "scope of a prefix and status": InstanceFilter(status=Status.WAITING, scope=Scope(id_prefix="s-77")),
    "scope of a prefix and a label": InstanceFilter(scope=Scope(id_prefix="s-77", labels={"tenant": "acme"})),
}
BANK = LimitKey("bank", "")
WORKFLOWS = ("order", "refund", "ship")
READS: dict[str, Callable[[Tx], Any]] = {
    **{
        f"list: {name}": lambda tx, chosen=chosen: lists.read_page(tx, chosen, before_pk=None, limit=25)
        for name, chosen in LISTS.items()
    },
    **{f"count: {name}": lambda tx, chosen=chosen: lists.count(tx, chosen) for name, chosen in LISTS.items()},
    "an id in many workflows": lambda tx: lists.read_named(
        tx, ["order", "refund", *(f"other-{n}" for n in range(198))], "s-777", None
    ),
    "counts": overview.count_instances,
    "counts in a scope": lambda tx: overview.count_instances(tx, scope=Scope(labels={"tenant": "acme"})),
    "overdue": overview.count_overdue,
    "overdue in a scope": lambda tx: overview.count_overdue(tx, scope=Scope(id_prefix="s-77")),
    "failures": lambda tx: overview.group_failures(tx, WORKFLOWS),
    "failures in a scope": lambda tx: overview.group_failures(tx, WORKFLOWS, scope=Scope(labels={"tenant": "rare"})),
    "leases": lambda tx: overview.read_leases(tx, limit=100, lease=LEASE),
    "waits": lambda tx: _read_waits(tx, None, None),
    "waits of a type": lambda tx: _read_waits(tx, None, "approval"),
    "waits of an unknown type": lambda tx: _read_waits(tx, None, "unknown"),
    "waits of a workflow": lambda tx: _read_waits(tx, "order", None),
    "waits of both": lambda tx: _read_waits(tx, "refund", "approval"),
    "waits that ask": lambda tx: _read_waits(tx, None, None, is_asking=True),
    "waits that ask a team": lambda tx: _read_waits(tx, None, None, to="finance"),
    "waits that have used half of their time": lambda tx: overview.read_late_waits(tx, limit=20),
    "events of other types than those that are awaited": lambda tx: overview.read_other_events(tx, limit=20),
    "limits": lambda tx: limit_reads.read_limits(tx, limit=20),
    "limits that something waits for": lambda tx: limit_reads.read_limits(tx, is_awaited=True, limit=20),
    "metrics": lambda tx: overview.count_by_status(tx, ["order", "refund"]),
    "given-up events": outbox.count_given_up,
    "outbox": lambda tx: outbox.read_entries(tx, given_up=False, limit=100),
    "ended": lambda tx: retention.count_ended(tx, EndedFilter(timedelta(0))),
    "ended of a workflow": lambda tx: retention.count_ended(tx, EndedFilter(timedelta(0), "refund")),
    "nothing old to prune": lambda tx: retention.delete_ended(tx, EndedFilter(timedelta(days=36500)), limit=25),
    "nothing to prune of a workflow": lambda tx: retention.delete_ended(
        tx, EndedFilter(timedelta(0), "unknown"), limit=25
    ),
    "nothing expired": lambda tx: retention.delete_expired(tx, limit=25),
    "agenda": schedule.read,
    "a limit": lambda tx: limit_reads.read_details(tx, BANK),
}


ASK = values.encode_ask('"Refund?"', "finance", None)


def _read_waits(tx: Tx, workflow: str | None, event_type: str | None, **asking: Any) -> None:
    overview.read_waits(tx, WaitFilter(workflow=workflow, event_type=event_type, **asking), limit=100)


_FACTOR = 8
"""Rows that a read meets for each examined one: in its index, and of the instance, the run, the steps, the labels."""

_MANY_BOUNDS = {"counts": 4}
"""Reads with several bounds: counts have one for each workflow and status, so that each is exact up to it."""


@pytest.fixture
def crowd(live: World) -> Crowd:
    return Crowd(live.store)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_read_meets_more_rows_than_the_bound_however_many_there_are(crowd: Crowd) -> None:
    crowd.fill(1_000_000 if crowd.name == "postgresql" else 100_000)
    limits = {name: _FACTOR * _MANY_BOUNDS.get(name, 1) * bounds.MAX_EXAMINED for name in READS}
    met = {name: crowd.count_met_rows(read) for name, read in READS.items()}
    assert {name: number for name, number in met.items() if number > limits[name]} == {}


def test_no_read_scans_a_table(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound of 50 rows, a read meets less than a third of them: some examine each workflow and status."""
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 50)
    crowd.fill(15_000)
    met = {name: crowd.count_met_rows(read) for name, read in READS.items()}
    assert {name: number for name, number in met.items() if number > 90 * bounds.MAX_EXAMINED} == {}


def test_a_limit_is_served_by_a_few_rows_however_many_wait(crowd: Crowd) -> None:
    """Also before the tables are analyzed: a connection keeps its plans until then.

    PostgreSQL reads a table of few pages from end to end, so 2,000 steps wait here. The 300 limits are such a table.
    """
    crowd.fill(60_000, is_analyzed=False)
    work: dict[str, Callable[[Tx], Any]] = {
        "serve": lambda tx: limits.serve(tx, BANK),
        "give back": lambda tx: holds.release(tx, instances.find_pk(tx, "order", "s-14973"), 1, "charge"),
        "find what waits": lambda tx: limit_waits.find_keys(tx, after=None, limit=100),
    }
    met = {name: crowd.count_met_rows(do) for name, do in work.items()}
    assert {name: number for name, number in met.items() if number > 1_000} == {}


# --- what a bounded read returns ------------------------------------------------------------------


COUNTS = [
    (InstanceFilter(), Count(4, is_exact=False)),
    (InstanceFilter("order"), Count(4, is_exact=False)),
    (InstanceFilter("other"), Count(0)),
    (InstanceFilter(status=Status.PAUSED), Count(0)),
    (InstanceFilter(scope=Scope(id_prefix="a")), Count(0, is_exact=False)),
    (InstanceFilter(labels={"tenant": "acme", "stage": "new"}), Count(0)),
]


def test_a_count_of_a_filter_ends_at_the_bound(few: World) -> None:
    found = [(chosen, few.store.read(lambda tx, chosen=chosen: lists.count(tx, chosen))) for chosen, _ in COUNTS]
    assert found == COUNTS


def test_a_count_over_several_workflows_shares_the_bound(few: World) -> None:
    for n in range(3):
        few.create(f"r-{n}", workflow="refund")
    active = InstanceFilter(status=Status.ACTIVE)
    assert few.store.read(lambda tx: lists.count(tx, active)) == Count(4, is_exact=False)
    by_workflow = few.store.read(lambda tx: lists.count_examined(tx, active, "workflow"))
    assert by_workflow == {("order",): Count(2, is_exact=False), ("refund",): Count(2, is_exact=False)}
    assert few.store.read(lambda tx: lists.count(tx, InstanceFilter("refund"))) == Count(3)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_count_over_many_workflows_meets_no_more_rows_than_the_bound(
    live: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(live.store)
    crowd.fill(30_000)
    with live.store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE workflow_instance SET workflow = concat('w-', mod(id, 40))")
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 100)
    met = crowd.count_met_rows(lambda tx: lists.count(tx, LISTS["status"]))
    assert met < 3_000  # with a bound for each workflow it would be over 8,000


@pytest.fixture
def few(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Six instances, of which a read examines at most four."""
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 4)
    for n in range(6):
        world.create(f"{'a' if n == 0 else 'b'}-{n}", initial_labels={"tenant": "acme"})
    return world


def test_a_list_that_finds_too_few_among_the_examined_instances_continues_behind_them(few: World) -> None:
    for scope in (Scope(id_prefix="a"), Scope(id_prefix="a", labels={"tenant": "acme"})):

        def page(before: int | None, scope: Scope = scope) -> lists.InstanceList:
            chosen = InstanceFilter(scope=scope)
            return few.store.read(lambda tx: lists.read_page(tx, chosen, before_pk=before, limit=2))

        first = page(None)
        assert first.items == []
        second = page(first.next_pk)
        assert ([each.id for each in second.items], second.next_pk) == (["a-0"], None)


def test_a_count_ends_at_the_bound_and_says_so(few: World) -> None:
    def count(**given: Any) -> Any:
        return few.store.read(lambda tx: overview.count_instances(tx, **given))

    active = StatusCount(4, is_exact=False, workflow="order", status=Status.ACTIVE)
    assert count() == [active]
    assert [str(n) for n in count()] == ["4+"]
    assert count(scope=Scope(labels={"tenant": "acme"})) == [active]
    few.terminate(few.create("c-1", workflow="refund"))
    assert count()[-1] == StatusCount(1, workflow="refund", status=Status.TERMINATED)


def test_overdue_runs_beyond_the_bound_are_a_minimum(few: World) -> None:
    few.advance(5)
    found = few.store.read(overview.count_overdue)
    assert (found.is_exact, 0 < found.count <= 4) == (False, True)


def read_all_waits(world: World, chosen: WaitFilter, *, limit: int) -> list[list[str]]:
    """The steps of each page, by instance and key."""
    pages, position = list[list[str]](), None
    while not pages or position is not None:
        page = functools.partial(overview.read_waits, chosen=chosen, after=position, limit=limit)
        found, position = world.store.read(page)
        pages.append([f"{each.instance_id} {each.step_key}" for each in found])
    return pages


def wait_at(world: World, id: str, *keys: str, workflow: str = "order", **columns: Any) -> None:
    """Let an instance wait at steps with these keys."""
    claim = world.claim(world.create(id, workflow=workflow))
    wait: dict[str, Any] = {"type": StepType.WAIT, "event_type": "approval", "wake_in": LEASE} | columns
    for seq, key in enumerate(keys, 1):
        world.write(claim, step(key, StepStatus.WAITING, seq=seq, **wait))


ANY_WAIT, OF_TYPE, FOR_FINANCE = WaitFilter(), WaitFilter(event_type="approval"), WaitFilter(to="finance")


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("chosen", [ANY_WAIT, OF_TYPE, FOR_FINANCE, WaitFilter(workflow="order")])
def test_pages_of_waits_have_each_once_also_where_an_instance_has_more_than_are_examined(
    world: World, monkeypatch: pytest.MonkeyPatch, chosen: WaitFilter, limit: int
) -> None:
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 4)
    wait_at(world, "a", "x", ask=ASK)
    wait_at(world, "b", *"zyxwvut", ask=ASK)
    for n in range(5):
        world.create(f"idle-{n}")
    wait_at(world, "c", "y", "x", ask=ASK)
    pages = read_all_waits(world, chosen, limit=limit)
    assert list(itertools.chain(*pages)) == [*("c x", "c y"), *(f"b {key}" for key in "tuvwxyz"), "a x"]
    assert max(map(len, pages)) <= limit


def test_pages_of_waits_keep_the_order_over_workflows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each workflow and status, two instances are examined."""
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 12)
    for n in range(4):
        wait_at(world, f"old-{n}", "x", workflow="refund")
    for n in range(4):
        wait_at(world, f"new-{n}", "x")
    found = itertools.chain(*read_all_waits(world, ANY_WAIT, limit=3))
    assert list(found) == [*(f"new-{n} x" for n in (3, 2, 1, 0)), *(f"old-{n} x" for n in (3, 2, 1, 0))]


@pytest.mark.parametrize("database", ["postgresql", "sqlite"], indirect=True)
@pytest.mark.parametrize("chosen", [OF_TYPE, FOR_FINANCE])
def test_waits_of_one_type_or_with_questions_are_found_among_any_number_of_instances(
    few: World, chosen: WaitFilter
) -> None:
    wait_at(few, "c-1", "x", ask=ASK)
    for n in range(6):
        wait_at(few, f"d-{n}", "x", event_type="other")
    assert read_all_waits(few, chosen, limit=10) == [["c-1 x"]]


def test_a_wait_of_an_earlier_run_hides_none_of_the_current_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_EXAMINED", 1)
    wait_at(world, "a", "x", ask=ASK)
    world.change(world.ref("a"), lambda tx, row: lifecycle.restart(tx, row, grace=LEASE, commit_id="c", reason=None))
    wait: dict[str, Any] = {"type": StepType.WAIT, "event_type": "approval", "wake_in": LEASE, "ask": ASK}
    world.write(world.claim(world.ref("a")), step("x", StepStatus.WAITING, **wait))
    assert list(itertools.chain(*read_all_waits(world, FOR_FINANCE, limit=5))) == ["a x"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_short_list_of_waits_looks_up_few_instances(crowd: Crowd) -> None:
    crowd.fill(15_000)  # fifty of which wait for an approval

    def count_met_rows(limit: int) -> int:
        return crowd.count_met_rows(functools.partial(overview.read_waits, chosen=OF_TYPE, limit=limit))

    assert count_met_rows(2) * 2 < count_met_rows(100)  # which looks up all of them


def test_prune_continues_behind_the_examined_instances(few: World) -> None:
    for row in few.store.read(lambda tx: tx.execute(sa.select(tx.t.instance.c.instance_id)).scalars().all()):
        few.terminate(few.ref(row))
        few.advance(1)
    few.terminate(few.create("c-1", workflow="refund"))
    few.advance(1)
    ended, position, deleted = EndedFilter(timedelta(0), "refund"), None, []
    while not deleted or position is not None:
        batch = few.store.transact(lambda tx, after=position: retention.delete_ended(tx, ended, limit=2, after=after))
        position = batch.next_position
        deleted.append(batch.deleted)
    assert deleted == [0, 1]


def test_ended_instances_beyond_the_bound_are_a_minimum(few: World) -> None:
    for row in few.store.read(lambda tx: tx.execute(sa.select(tx.t.instance.c.instance_id)).scalars().all()):
        few.terminate(few.ref(row))
    few.advance(1)

    def count(*given: Any) -> Count:
        return few.store.read(lambda tx: retention.count_ended(tx, EndedFilter(timedelta(0), *given)))

    assert count() == Count(4, is_exact=False)
    assert count("order", {Status.TERMINATED}) == Count(4, is_exact=False)
    assert count("refund") == Count(0)
