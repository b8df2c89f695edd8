"""A column of workflow_step is declared once: the table, the statements and the rows come from `STEP_COLUMNS`."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import sqlalchemy as sa

from celery_durable.model import StepRow, StepStatus, StepType, StepWrite, to_us
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS
from tests.store.world import World, commit_in


def test_the_database_and_the_declaration_agree_on_every_time(world: World) -> None:
    """Only statements that can return what they wrote leave the times to the database."""
    claim = world.claim(world.create())
    times = {"retry_in": timedelta(seconds=3), "wake_in": timedelta(seconds=4), "ran_for": timedelta(seconds=5)}
    write = StepWrite(
        "a", 1, "a", StepType.DO, StepStatus.COMPLETED, replaces=None, commit_id="c-1", result="1", **times
    )
    written = world.store.transact(lambda tx: commit_in(tx, claim, write)).row
    now = written.created_at
    assert now is not None
    assert (written.next_retry_at, written.wake_at) == (now + times["retry_in"], now + times["wake_in"])
    assert (written.started_at, written.finished_at) == (now - times["ran_for"], now)
    assert all(getattr(written, column.field) is not None for column in STEP_COLUMNS if column.is_time)


def test_a_row_that_is_encoded_and_read_again_is_the_same(world: World) -> None:
    at = world.now
    row = StepRow(
        step_key="a", seq=2, name="a", type=StepType.TASK, status=StepStatus.WAITING, attempts=3, max_attempts=4,
        timeout=timedelta(milliseconds=1500), next_retry_at=at, wake_at=at, wait_event_type="t", event_seq=5,
        result="{}", error_name="E", error_message="m", commit_id="c", created_at=at, started_at=at, finished_at=at,
        payload_type="shop:Approval", ask="{}",
    )  # fmt: skip
    assert all(value is not None for value in dataclasses.astuple(row))
    encoded = STEPS.encode_row(row)
    assert (encoded["timeout_ms"], encoded["status"], encoded["wake_at"]) == (1500, "waiting", to_us(at))
    step = world.store.tables.step
    with world.store.engine.begin() as connection:
        connection.execute(sa.insert(step).values(instance_pk=1, run_number=1, **encoded))
        [found] = connection.execute(sa.select(*STEPS.select(step)))
    assert STEPS.read(found) == row
