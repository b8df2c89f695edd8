"""A column of workflow_step is declared once: the table, the statements and the rows come from `STEP_COLUMNS`."""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime, timedelta

import sqlalchemy as sa

from celery_durable.model import StepRow, StepStatus, StepType, StepWrite, from_us, hot_dataclass, to_us
from celery_durable.store.engine import Store
from celery_durable.store.engine.statements import Statement, param
from celery_durable.store.runs import runs, step_rows
from celery_durable.store.schema.step_format import STEP_COLUMNS, STEPS, Source, StepColumn, StepFormat, Written
from tests.store.world import World

DECLARED = [column.name for column in STEP_COLUMNS]


def sql(store: Store, statement: Statement) -> str:
    return str(statement.build(store).compile(dialect=store.engine.dialect))


def test_the_table_has_the_declared_columns_and_the_key_of_its_run(world: World) -> None:
    assert [column.name for column in world.store.tables.step.columns] == ["instance_pk", "run_number", *DECLARED]


def test_a_row_has_a_field_for_each_column_in_the_same_order() -> None:
    assert [field.name for field in dataclasses.fields(StepRow)] == [column.field for column in STEP_COLUMNS]


def test_every_insert_and_update_writes_every_column_that_it_may(world: World) -> None:
    fields = tuple(source.field for column in STEP_COLUMNS for source in column.sources)
    guarded = [step_rows._guard_and_insert(fields, 0), step_rows._lock_and_insert(fields, 0)]
    for insert in (step_rows._insert(fields), *guarded, runs._insert_step):
        [names] = re.findall(r"INSERT INTO \S*workflow_step \(([^)]*)\)", sql(world.store, insert))
        assert names.split(", ") == ["instance_pk", "run_number", *DECLARED], insert.name
    for update in (step_rows._update(fields), step_rows._guard_and_update(fields, 0)):
        _, _, text = sql(world.store, update).rpartition(" SET ")
        written = [name for name in DECLARED if re.search(rf"\b{name}\s*=", text.partition(" WHERE ")[0])]
        assert written == [column.name for column in STEP_COLUMNS if column.is_updated], update.name


def test_a_commit_reads_each_field_of_a_write_that_some_column_names() -> None:
    sources = {source.field for column in STEP_COLUMNS for source in column.sources}
    not_columns = {"replaces"}  # the condition on the row to overwrite
    fields = {field.name for field in dataclasses.fields(StepWrite)} | {"is_finished"}
    assert sources == fields - not_columns


def test_the_database_and_the_declaration_agree_on_every_time(world: World) -> None:
    """Only statements that can return what they wrote leave the times to the database."""
    claim = world.claim(world.create())
    times = {"retry_in": timedelta(seconds=3), "wake_in": timedelta(seconds=4), "ran_for": timedelta(seconds=5)}
    write = StepWrite(
        "a", 1, "a", StepType.DO, StepStatus.COMPLETED, replaces=None, commit_id="c-1", result="1", **times
    )
    lease = timedelta(seconds=30)
    written = world.store.transact(lambda tx: step_rows.guard_and_write_step(tx, claim, write, lease=lease)).row
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
        payload_type="shop:Approval",
    )  # fmt: skip
    assert all(value is not None for value in dataclasses.astuple(row))
    encoded = STEPS.encode_row(row)
    assert (encoded["timeout_ms"], encoded["status"], encoded["wake_at"]) == (1500, "waiting", to_us(at))
    step = world.store.tables.step
    with world.store.engine.begin() as connection:
        connection.execute(sa.insert(step).values(instance_pk=1, run_number=1, **encoded))
        [found] = connection.execute(sa.select(*STEPS.select(step)))
    assert STEPS.read(found) == row


# --- a new column -------------------------------------------------------------------------------


@hot_dataclass()
class LongerRow(StepRow):
    region: tuple[str, ...] | None = None
    reviewed_at: datetime | None = None


@hot_dataclass()
class LongerWrite(StepWrite):
    region: tuple[str, ...] | None = None
    review_in: timedelta | None = None


LONGER = (
    *STEP_COLUMNS,
    StepColumn(
        "region_text", sa.String(32), (Source("region"),), "region", encode=",".join, decode=lambda v: (*v.split(","),)
    ),
    StepColumn(
        "reviewed_at",
        sa.BigInteger(),
        (Source("review_in", Written.AFTER),),
        "reviewed_at",
        encode=to_us,
        decode=from_us,
    ),
)


def test_a_column_that_is_added_to_the_table_is_created_written_and_read(world: World) -> None:
    """Nothing else names the two columns: not the table, the statements, the parameters or the rows."""
    steps = StepFormat(LONGER, LongerRow)
    table = sa.Table(
        "longer_step",
        sa.MetaData(),
        sa.Column("instance_pk", sa.BigInteger, primary_key=True),
        sa.Column("run_number", sa.Integer),
        *(column.build() for column in LONGER),
    )
    now = to_us(world.now)
    at = param("now_us", sa.BigInteger)
    given = {"key": "a", "seq": 1, "name": "a", "type": StepType.DO, "commit_id": "c"}
    first = LongerWrite(status=StepStatus.WAITING, replaces=None, region=("eu", "us"), **given)
    second = LongerWrite(status=StepStatus.COMPLETED, replaces="c", review_in=timedelta(seconds=5), **given)
    table.create(world.store.engine)
    try:
        with world.store.engine.begin() as connection:
            for write in (first, second):
                parameters = steps.encode_write(write)
                if write is first:
                    statement = sa.insert(table).values(step_rows.insert_values(LONGER, parameters, 1, 1, at))
                else:
                    statement = sa.update(table).values(step_rows.update_values(LONGER, parameters, at))
                bound = {"now_us": now, **parameters}
                connection.execute(statement, {f"p_{name}": value for name, value in bound.items()})
                [values] = connection.execute(sa.select(*steps.select(table)))
                row = steps.read(values)
                assert isinstance(row, LongerRow)
                assert row == steps.to_written_row(
                    dataclasses.replace(write, replaces=None), tuple(parameters), world.now
                )
                reviewed_at = None if write.review_in is None else world.now + write.review_in
                assert (row.region, row.reviewed_at) == (write.region, reviewed_at)
            assert steps.encode_row(row)["reviewed_at"] == now + 5_000_000
    finally:
        table.drop(world.store.engine)
