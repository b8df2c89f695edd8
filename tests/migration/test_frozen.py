"""What the frozen revision wrote is migrated, read and finished by today's code; see docs/how-to/upgrade.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_durable.model import ItemStatus, Status, StepStatus, StepType
from celery_durable.store import migrate
from celery_durable.store.engine import Store
from celery_durable.store.schema import REVISION
from tests.engine import invariants
from tests.engine.world import World
from tests.migration import states
from tests.migration.dump import FOLDER, load, write

REVISIONS = sorted({path.name.partition("-")[0] for path in FOLDER.glob("*.sql")})


def dump_of(revision: str, database: str) -> Path:
    return FOLDER / f"{revision}-{database}.sql"


@pytest.fixture(params=REVISIONS)
def frozen(request: pytest.FixtureRequest, database: str, empty_url: str) -> Iterator[World]:
    """A world on the rows that a frozen revision wrote, migrated."""
    engine = sa.create_engine(empty_url)
    load(engine, dump_of(request.param, database))
    engine.dispose()
    store = Store(empty_url)
    migrate.upgrade(store)
    migrate.check_tables(store)
    store.close()
    world = World(empty_url)
    world.clock.advance(timedelta(microseconds=_newest(world) - world.now_us))
    world.exempt["I4"] = "the branches of a gather end in any order"
    if request.param < "0004":
        world.exempt |= dict.fromkeys(("F1", "F4", "F5"), "failures were not recorded before revision 0004")
    yield world
    try:
        invariants.check(world)
    finally:
        world.close()


def _newest(world: World) -> int:
    i = world.store.tables.instance.c
    return int(world.rows(sa.select(sa.func.max(i.updated_at)))[0][0])


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    world = World(store_url)
    yield world
    world.close()


def found(world: World) -> dict[str, set[str]]:
    """The values in the columns that hold a state."""
    t = world.store.tables
    columns = {
        "instance": t.instance.c.status,
        "kind": t.instance.c.kind,
        "wake reason": t.instance.c.wake_reason,
        "step": t.step.c.status,
        "step type": t.step.c.type,
        "item": t.item.c.status,
        "outbox": t.outbox.c.kind,
        "heartbeat": t.heartbeat.c.kind,
        "intervention": t.audit.c.action,
    }
    return {name: {row[0] for row in world.rows(sa.select(column).distinct())} for name, column in columns.items()}


def test_rows_in_all_states_can_be_written(world: World, database: str) -> None:
    """With DURABLE_WRITE_DUMPS=1 they become the dump of this revision."""
    states.build(world)
    values = found(world)
    assert values["instance"] == {status.value for status in Status}
    assert values["kind"] == {"replay", "linear"}
    assert values["step"] == {status.value for status in StepStatus}
    assert values["step type"] == {type_.value for type_ in StepType}
    # The frozen revision has the states without "cancelled", which came later.
    assert values["item"] == {status.value for status in ItemStatus} - {ItemStatus.CANCELLED.value}
    assert values["outbox"] == {"task", "event"}
    assert values["heartbeat"] == {"dispatcher", "worker"}
    assert all(world.rows(sa.select(table).limit(1)) for table in world.store.tables.metadata.sorted_tables), "empty"
    if os.environ.get("DURABLE_WRITE_DUMPS"):
        write(world.store, dump_of(REVISION, database))


def test_rows_that_the_frozen_revision_wrote_are_finished(frozen: World) -> None:
    assert found(frozen)["instance"] == {status.value for status in Status}
    ended = states.finish(frozen)
    assert ended == states.ENDS


def test_a_frozen_migration_does_not_change(world: World, database: str) -> None:
    """A change of the tables is a migration of its own; see docs/how-to/upgrade.md."""
    rendered = migrate.render_sql(world.store)
    for revision in REVISIONS:
        frozen_sql = dump_of(revision, database).read_text(encoding="utf-8").partition("DELETE FROM")[0]
        assert rendered.startswith(frozen_sql), f"migration {revision} has changed"
