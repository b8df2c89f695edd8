"""Log lines in the statement that writes a step."""

from __future__ import annotations

import pytest

from celery_durable.errors import Superseded
from celery_durable.model import Claim, LogLevel, LogLine, LogRecord, StepStatus, StepWrite
from celery_durable.store.lanes import steps
from celery_durable.store.runs import history, outputs
from tests.store.world import LEASE, World, seconds, step

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
RETRY = step(status=StepStatus.WAITING, attempts=1, retry_in=seconds(1), commit_id="failed")


def line(message: str) -> LogLine:
    return LogLine(LogLevel.WARNING, "billing", message, '{"n":1}', "charge", 2, is_replay=True)


def commit(world: World, claim: Claim, write: StepWrite, *messages: str) -> None:
    lines = [line(message) for message in messages]
    world.store.run_statement(lambda tx: steps.guard_and_write_step(tx, claim, write, lease=LEASE, log_lines=lines))


def read(world: World, claim: Claim) -> list[LogRecord]:
    return world.store.read(lambda tx: history.read_logs(tx, claim.pk, 1, after_id=0, limit=100))


@pytest.mark.parametrize("count", range(1, outputs.MAX_WITH_STEP + 1))
def test_lines_are_written_in_order_with_a_new_row_and_with_a_changed_one(world: World, count: int) -> None:
    claim, messages = world.claim(world.create()), [f"späť {number}\n" for number in range(count)]
    commit(world, claim, RETRY, *messages)
    commit(world, claim, step(replaces="failed", commit_id="done", result="1"), *messages)
    found = read(world, claim)
    assert [each.message for each in found] == messages * 2
    assert {(each.level, each.category, each.step_key, each.attempt, each.is_replay) for each in found} == {
        (LogLevel.WARNING, "billing", "charge", 2, True)
    }
    assert all((each.data, each.created_at) == ({"n": 1}, world.now) for each in found)
    assert world.load(claim).log_count == 2 * count


def test_a_superseded_worker_logs_nothing(world: World) -> None:
    claim = world.claim(world.create())
    world.restart(claim.ref)
    with pytest.raises(Superseded):
        commit(world, claim, RETRY, "late")
    assert read(world, claim) == []


def test_a_delayed_statement_for_a_row_that_has_changed_logs_nothing(world: World) -> None:
    claim = world.claim(world.create())
    commit(world, claim, RETRY)
    commit(world, claim, step(replaces="failed", commit_id="done", result="1"))
    with pytest.raises(Superseded):
        commit(world, claim, step(replaces="failed", commit_id="failed again"), "late")
    with pytest.raises(Superseded):
        commit(world, claim, RETRY, "late")
    assert (read(world, claim), world.load(claim).log_count) == ([], 0)
