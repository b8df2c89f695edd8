"""A replica serves lists and counts, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.app.workflows import Workflow
from celery_durable.contrib.prometheus import InstanceCounts
from celery_durable.errors import ConfigInvalid
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate


@pytest.fixture
def durable(store_url: str) -> Iterator[Durable]:
    app = Celery("replicated", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)
    yield durable
    durable.internals.close()


def add_order(durable: Durable) -> Workflow:
    @durable.workflow(name="order")
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.wait_for_event("paid", "paid")

    return order


def read_lists(durable: Durable) -> list[int]:
    """The number of instances in each list and count."""
    operations = durable.internals.operations
    gauge = next(iter(InstanceCounts(durable).collect()))
    return [
        len(operations.queries.list().items),
        sum(count.count for count in operations.stats.read().instances),
        len(operations.stats.leases()),
        len(operations.stats.waits().items),
        len(operations.outbox.read()),
        operations.retention.count_ended(older_than=0).count,
        len(operations.topics.waiters("news").items),
        sum(int(sample.value) for sample in gauge.samples),
    ]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_lists_and_counts_show_what_the_replica_has(durable: Durable, tmp_path: Path) -> None:
    replica = f"sqlite:///{tmp_path}/replica.sqlite3"
    store = Store(replica)
    migrate.upgrade(store)
    store.close()
    durable.internals.app.conf.durable_read_database_url = replica
    order = add_order(durable)
    order.create(id="o-1")
    assert order.get("o-1").status().status == "active"
    assert read_lists(durable) == [0] * 8


def test_without_a_replica_they_show_what_the_database_has(durable: Durable) -> None:
    add_order(durable).create(id="o-1")
    assert read_lists(durable) == [1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_they_write_nothing(durable: Durable, store_url: str) -> None:
    """As a hot standby, this replica takes no writes."""
    read_only = sa.make_url(store_url).update_query_dict({"options": "-c default_transaction_read_only=on"})
    durable.internals.app.conf.durable_read_database_url = read_only.render_as_string(hide_password=False)
    add_order(durable).create(id="o-1")
    assert read_lists(durable) == [1, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_wrong_url_is_that_of_the_replica(durable: Durable) -> None:
    durable.internals.app.conf.durable_read_database_url = "postgresql+asyncpg://replica/shop"
    with pytest.raises(ConfigInvalid, match="Setting durable_read_database_url="):
        add_order(durable).list()
