"""What the stores of a process share: the statements, and nothing of another store."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, statements
from celery_durable.store.migrations import migrate
from tests.conftest import MovableRuntime

MakeStore = Callable[..., Store]


@pytest.fixture
def make(store_url: str) -> Iterator[MakeStore]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Store(store_url, **options)))


@pytest.fixture
def built() -> list[Store]:
    """The stores for which `read_clock` was built."""
    return []


@pytest.fixture
def read_clock(built: list[Store]) -> statements.Statement:
    def build(store: Any) -> Any:
        built.append(store)
        count = sa.select(sa.func.count()).select_from(store.tables.run)
        return sa.select(store.clock().label("now"), count.scalar_subquery().label("runs"))

    return statements.Statement(build, "read_clock")


def read(store: Store, statement: statements.Statement) -> int:
    return int(store.read(lambda tx: tx.run(statement)).one().now)


def test_stores_share_a_statement_and_not_its_clock(
    make: MakeStore, read_clock: statements.Statement, built: list[Store]
) -> None:
    early, late = MovableRuntime(), MovableRuntime()
    late.advance(60)
    first, second = make(runtime=early), make(runtime=late)
    assert read(second, read_clock) - read(first, read_clock) == 60_000_000
    early.advance(90)
    assert read(first, read_clock) - read(second, read_clock) == 30_000_000
    assert built == [second]


def test_a_store_with_a_test_clock_shares_nothing_with_one_that_asks_the_database(
    make: MakeStore, read_clock: statements.Statement, built: list[Store]
) -> None:
    movable = MovableRuntime()
    stores = [make(runtime=movable), make(runtime=Runtime())]
    assert read(stores[0], read_clock) == movable.now_us
    assert read(stores[1], read_clock) < movable.now_us  # which is in 2030
    assert built == stores


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_stores_with_other_tables_share_nothing(
    make: MakeStore, read_clock: statements.Statement, built: list[Store]
) -> None:
    stores = [make(), make(prefix="other_")]
    migrate.upgrade(stores[1])
    for store in stores:
        read(store, read_clock)
    assert built == stores
    assert [" other_workflow_run" in store.compiled(read_clock).sql for store in stores] == [False, True]


def test_what_is_shared_keeps_no_clock(store_url: str, read_clock: statements.Statement, built: list[Store]) -> None:
    with closing(Store(store_url, runtime=MovableRuntime())) as store:
        read(store, read_clock)
    runtime = weakref.ref(store.runtime)
    built.clear()
    del store
    gc.collect()
    assert runtime() is None
