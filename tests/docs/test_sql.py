"""The SQL in the documentation runs on the database that its first line names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from tests.docs.blocks import ROOT, Block, all_blocks

NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite"}
TABLES = ["workflow_instance", "workflow_run", "workflow_step", "workflow_event", "workflow_log", "workflow_label"]


def busy(event: WorkflowEvent[str], step: Step) -> str:
    step.log.info("started")
    step.do("work", lambda: {"done": True})
    if event.payload == "fails":
        raise ValueError("no")
    if event.payload == "retries":
        step.do("try", lambda: 1 / 0)
    step.wait_for_event("wait", "go")
    return "gone"


@pytest.fixture
def app(store_url: str) -> Iterator[Durable]:
    """A database in which one instance has completed, one has failed, one waits and one retries."""
    celery = Celery("sql", broker="memory://", set_as_current=False)
    celery.conf.task_always_eager = True
    celery.conf.durable_database_url = store_url
    durable = Durable(celery)
    workflow = durable.workflow(name="busy")(busy)
    for what in ("waits", "fails", "retries", "completes"):
        workflow.create(what, id=what, labels={"ends": what})
    workflow.get("completes").send_event("go")
    workflow.get("waits").send_event("other")
    yield durable
    durable.close()


def statements(block: Block) -> list[str]:
    lines = [line for line in block.text.splitlines() if not line.startswith("--")]
    return [each.strip() for each in "\n".join(lines).split(";") if each.strip()]


def sql_for(database: str, verb: str) -> list[str]:
    chosen = [block for block in all_blocks("sql") if NAMES[database] in names(block)]
    return [each for block in chosen if kind(block) == verb for each in statements(block)]


def names(block: Block) -> list[str]:
    return block.text.splitlines()[0].removeprefix("-- ").split(", ")


def kind(block: Block) -> str:
    return next((verb for verb in ("DELETE", "UPDATE") if verb in block.text), "SELECT")


def run(durable: Durable, code: list[str]) -> list[Any]:
    """The rows of each statement. The database's own driver, as an operator's shell would."""
    connection = durable.internals.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connection:
        found = [connection.exec_driver_sql(each) for each in code]
        return [each.fetchall() if each.returns_rows else [] for each in found]


def test_every_block_names_its_database() -> None:
    for block in all_blocks("sql"):
        assert set(names(block)) <= set(NAMES.values()), str(block)


def test_the_queries_run(app: Durable, database: str) -> None:
    results = run(app, sql_for(database, "SELECT"))
    assert len(results) >= 1
    assert len(results[-1]) >= 4  # the steps, with their times
    assert all(row.ended.year >= 2025 for row in results[-1] if hasattr(row.ended, "year"))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_queries_for_monitoring_find_what_they_are_for(app: Durable) -> None:
    with app.internals.store.engine.begin() as connection:  # a dispatcher has been away for two minutes
        connection.exec_driver_sql(
            "UPDATE workflow_instance SET run_at = run_at - 86520 * 1000000::bigint WHERE instance_id = 'waits'"
        )
    overdue, failed, retried, _ = run(app, sql_for("postgresql", "SELECT"))
    assert [row.instance_id for row in overdue] == ["waits"]
    assert [(row.instance_id, row.error_name) for row in failed] == [("fails", "ValueError")]
    assert [(row.instance_id, row.attempts, row.error_name) for row in retried] == [("retries", 1, "ZeroDivisionError")]


def tables_of_instances(app: Durable) -> list[str]:
    """The tables with rows of instances. A message of the outbox outlives its instance."""
    tables = app.internals.store.tables.metadata.sorted_tables
    return [table.name for table in tables if "instance_pk" in table.c and table.name != "workflow_outbox"]


def count_orphans(app: Durable, table: str) -> int:
    query = f"SELECT count(*) FROM {table} WHERE instance_pk NOT IN (SELECT id FROM workflow_instance)"
    with app.internals.store.engine.connect() as connection:
        return int(connection.exec_driver_sql(query).scalar_one())


def test_deleting_removes_what_ended_long_ago_and_nothing_else(app: Durable, database: str) -> None:
    code = sql_for(database, "DELETE")
    assert code
    run(app, code)
    assert count(app)["workflow_instance"] == 4  # nothing is that old

    with app.internals.store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE workflow_instance SET updated_at = updated_at - 7776001000000")
    run(app, code)
    assert [item.id for item in app.internals.operations.queries.list().items] == ["retries", "waits"]
    assert count(app) == {
        "workflow_instance": 2, "workflow_run": 2, "workflow_step": 4, "workflow_event": 1, "workflow_log": 2,
        "workflow_label": 2,
    }  # fmt: skip
    assert [name for name in tables_of_instances(app) if count_orphans(app, name)] == []


@pytest.mark.parametrize(("instance", "left"), [("completes", 3), ("waits", 4), ("missing", 4)])
def test_a_single_ended_instance_is_deleted_with_the_condition_that_the_page_gives(
    app: Durable, database: str, instance: str, left: int
) -> None:
    page = (ROOT / "docs" / "how-to" / "retention.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"by `(workflow = 'order' AND instance_id = 'order-42')`", page)
    condition = given.replace("'order'", "'busy'").replace("'order-42'", f"'{instance}'")
    run(app, [re.sub(r"updated_at < .*", condition, each) for each in sql_for(database, "DELETE")])
    ids = [item.id for item in app.internals.operations.queries.list().items]
    assert len(ids) == count(app)["workflow_instance"] == left
    assert ("completes" in ids) is (instance != "completes")
    assert [name for name in tables_of_instances(app) if count_orphans(app, name)] == []


def test_what_was_published_in_vain_is_due_again_and_nothing_else_changes(app: Durable, database: str) -> None:
    (again,) = [code for code in sql_for(database, "UPDATE") if "queue" not in code]
    i = app.internals.store.tables.instance
    with app.internals.store.engine.begin() as connection:
        connection.execute(
            sa.update(i)
            .where(i.c.instance_id == "waits")
            .values(dispatch_count=7, next_check_at=i.c.run_at + 99, sent_at=i.c.run_at)
        )
        before = rows(connection, i)
    run(app, [again])
    with app.internals.store.engine.begin() as connection:
        after = rows(connection, i)
    assert (after["waits"].next_check_at, after["waits"].dispatch_count, after["waits"].sent_at) == (
        after["waits"].run_at,
        0,
        None,
    )
    assert {name for name in after if after[name] != before[name]} == {"waits"}


def test_instances_can_be_moved_to_another_queue(app: Durable, database: str) -> None:
    (move,) = [code for code in sql_for(database, "UPDATE") if "queue" in code]
    i = app.internals.store.tables.instance
    with app.internals.store.engine.begin() as connection:
        connection.execute(sa.update(i).where(i.c.instance_id == "fails").values(queue="slow"))
        connection.execute(sa.update(i).where(i.c.instance_id == "waits").values(next_check_at=i.c.run_at + 99))
        connection.execute(sa.update(i).where(i.c.instance_id == "retries").values(claim_token="t", next_check_at=99))
    run(app, [move])
    with app.internals.store.engine.begin() as connection:
        after = rows(connection, i)
    assert {name: row.queue for name, row in after.items()} == {
        "waits": "shop-durable", "fails": "slow", "retries": "shop-durable", "completes": "shop-durable",
    }  # fmt: skip
    assert after["waits"].next_check_at == after["waits"].run_at
    assert (after["retries"].next_check_at, after["completes"].next_check_at) == (99, None)


def rows(connection: sa.Connection, instance: sa.Table) -> dict[str, sa.Row[Any]]:
    return {row.instance_id: row for row in connection.execute(sa.select(instance))}


def count(durable: Durable) -> dict[str, int]:
    with durable.internals.store.engine.connect() as connection:
        return {
            name: connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar_one()
            for name in TABLES
        }
