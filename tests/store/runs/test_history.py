"""What people read."""

from __future__ import annotations

from typing import Any

from celery_durable.model import (
    ErrorInfo,
    EventRecord,
    InstanceStatus,
    InstanceSummary,
    LogLevel,
    LogLine,
    RunOutcome,
    Status,
    StepRecord,
    StepStatus,
    StepType,
)
from celery_durable.store.instances import lists
from celery_durable.store.instances.lists import InstanceFilter, InstanceList
from celery_durable.store.runs import claims, history, outputs
from tests.store.world import LEASE, World, seconds, step


def _list(world: World, *, before_pk: int | None = None, limit: int = 100, **given: Any) -> InstanceList:
    chosen = InstanceFilter(**given)
    return world.store.read(lambda tx: lists.read_page(tx, chosen, before_pk=before_pk, limit=limit))


def _ids(found: InstanceList) -> list[str]:
    return [summary.id for summary in found.items]


def test_lists_go_from_the_newest_page_by_page(world: World) -> None:
    for n in range(5):
        world.create(f"o-{n}")
    first = _list(world, limit=2)
    second = _list(world, limit=2, before_pk=first.next_pk)
    world.create("o-5")  # what comes in meanwhile moves no page
    third = _list(world, limit=2, before_pk=second.next_pk)
    assert [_ids(page) for page in (first, second, third)] == [["o-4", "o-3"], ["o-2", "o-1"], ["o-0"]]


def test_lists_can_be_narrowed_by_workflow_and_status(world: World) -> None:
    world.create("o-1", workflow="order")
    world.pause(world.create("o-2", workflow="order"))
    world.pause(world.create("r-1", workflow="refund"))
    assert _ids(_list(world, workflow="order")) == ["o-2", "o-1"]
    assert _ids(_list(world, status=Status.PAUSED)) == ["r-1", "o-2"]
    assert _ids(_list(world, workflow="order", status=Status.PAUSED)) == ["o-2"]
    assert _ids(_list(world, workflow="Order")) == []


def test_a_list_shows_the_current_run(world: World) -> None:
    ref = world.create()
    began = world.now
    world.advance(1)
    world.end_run(world.claim(ref), RunOutcome(Status.ERRORED, error_name="ValueError", error_message="no"))
    (summary,) = _list(world).items
    assert summary == InstanceSummary(
        id="o-1",
        workflow="order",
        run_number=1,
        details=InstanceStatus(Status.ERRORED, ErrorInfo("ValueError", "no")),
        created_at=began,
        updated_at=world.now,
    )
    world.restart(ref)
    (summary,) = _list(world).items
    assert (summary.run_number, summary.status, summary.error) == (2, Status.ACTIVE, None)


def test_a_run_that_does_not_exist_is_none(world: World) -> None:
    pk = world.row(world.create()).pk
    assert world.store.read(lambda tx: history.read_run(tx, pk, 2)) is None


def test_the_status_of_a_prior_run_is_what_became_of_it(world: World) -> None:
    ref = world.create()
    endings = [RunOutcome(Status.COMPLETE, output="null"), RunOutcome(Status.ERRORED, error_name="E", error_message="")]
    for run_outcome in endings:
        world.end_run(world.claim(ref), run_outcome)
        ref = world.restart(ref).ref
    ref = world.restart(ref).ref
    row = world.row(ref)
    runs = [world.store.read(lambda tx, n=n: history.read_run(tx, row.pk, n)) for n in (1, 2, 3, 4)]
    assert [history.derive_run_status(row, run) for run in runs] == ["complete", "errored", "terminated", "active"]
    assert history.build_status(Status.COMPLETE, runs[0]) == InstanceStatus(Status.COMPLETE, None, None)
    assert history.build_status(Status.ERRORED, runs[1]) == InstanceStatus(Status.ERRORED, ErrorInfo("E", ""), None)


def test_steps_show_values_and_errors_in_call_order(world: World) -> None:
    claim = world.claim(world.create())
    world.advance(10)
    failed = step("fails", StepStatus.ERRORED, seq=2, attempts=3, max_attempts=3, error_name="E", error_message="no")
    world.commit(claim, failed)
    world.commit(claim, step("works", seq=1, attempts=1, timeout=seconds(60), result='{"n":[1]}', ran_for=seconds(4)))
    works, fails = world.store.read(lambda tx: history.read_steps(tx, claim.pk, 1))
    assert works == StepRecord(
        step_key="works",
        name="works",
        type=StepType.DO,
        status=StepStatus.COMPLETED,
        attempts=1,
        timeout=seconds(60),
        result={"n": [1]},
        created_at=world.now,
        started_at=world.now - seconds(4),
        finished_at=world.now,
    )
    assert (fails.step_key, fails.error, fails.max_attempts) == ("fails", ErrorInfo("E", "no"), 3)


def test_events_show_their_payload_and_who_consumed_them(world: World) -> None:
    ref = world.create()
    world.send(ref, "approval", '{"by":"Zoë"}', id="e-1")
    (event,) = world.store.read(lambda tx: history.read_events(tx, world.row(ref).pk, 1))
    assert event == EventRecord(
        seq=event.seq, event_id="e-1", type="approval", payload={"by": "Zoë"}, created_at=world.now
    )


def test_logs_go_from_the_oldest_page_by_page_and_can_be_narrowed(world: World) -> None:
    claim = world.claim(world.create())
    levels = [LogLevel.INFO, LogLevel.ERROR, LogLevel.INFO, LogLevel.WARNING]
    lines = [
        LogLine(level, "odd" if n % 2 else "even", f"{n}", None, None, None, is_replay=False)
        for n, level in enumerate(levels, start=1)
    ]
    world.store.transact(
        lambda tx: outputs.write_logs(tx, claim, claims.guard(tx, claim, lease=LEASE), lines, remaining=10)
    )

    def read(**given: Any) -> list[Any]:
        given = {"after_id": 0, "limit": 100} | given
        return world.store.read(lambda tx: history.read_logs(tx, claim.pk, 1, **given))

    def messages(**given: Any) -> list[str]:
        return [line.message for line in read(**given)]

    first = read(limit=3)
    assert [line.message for line in first] == ["1", "2", "3"]
    assert messages(limit=3, after_id=first[-1].id) == ["4"]
    assert messages(levels=[LogLevel.ERROR, LogLevel.WARNING]) == ["2", "4"]
    assert messages(category="odd") == ["1", "3"]
    assert messages(category="Odd") == []
