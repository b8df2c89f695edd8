"""Bodies leave no connection behind, on whatever thread they run, and lost connections heal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from celery_durable import Durable, Step, StepTx, WorkflowEvent, durable_workflow
from celery_durable.contrib.django.engines import make_own_engine
from celery_durable.testing.databases import MakeStore
from tests.contrib.django.booking.models import Booking
from tests.contrib.django.workflows import book, booked
from tests.smoke.proc import until


@durable_workflow(name="wide")
def wide(event: WorkflowEvent[Any], step: Step) -> None:
    """Branches that write with their step, and branches that write at once."""
    alias, branches = event.payload["alias"], event.payload["branches"]

    def joined(tx: StepTx, number: int) -> None:
        book(alias, event.instance_id, f"joined {number}")

    def alone(number: int) -> None:
        book(alias, event.instance_id, f"alone {number}")

    futures = [step.submit(f"joined {number}", joined, number) for number in range(branches)]
    step.gather(*futures, *(step.submit(f"alone {number}", alone, number) for number in range(branches)))


@pytest.fixture
def shop(make_store: MakeStore, make_app: Any) -> Iterator[Durable]:
    """A Durable of production on the alias: real threads, real time."""
    durable = Durable(make_app(durable_database_url=None))
    durable.internals.make_store = make_store
    durable.internals.registry.add(wide.definition)
    yield durable
    durable.close()


def run_wide(shop: Durable, alias: str, id: str, branches: int = 10) -> str:
    handle = shop.workflows["wide"].create({"alias": alias, "branches": branches}, id=id)
    while not handle.status().status.is_terminal:
        assert shop.tick()
    return str(handle.status().status)


def count_connections(alias: str) -> int:
    """Count the connections to the database of the alias, except the one that counts."""
    other = connections.create_connection(alias)
    with other.cursor() as cursor:
        if other.vendor == "postgresql":
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        else:
            cursor.execute("SELECT count(*) FROM information_schema.processlist WHERE db = database()")
        count = cursor.fetchone()[0]
    other.close()
    return int(count) - 1


def kill_all(alias: str) -> None:
    other = connections.create_connection(alias)
    with other.cursor() as cursor:
        if other.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        else:
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            )
            for (id_,) in cursor.fetchall():
                cursor.execute(f"KILL {id_}")
    other.close()


@pytest.mark.parametrize(
    ("database", "rounds"),
    [
        ("postgresql", 5),
        pytest.param("mariadb", 4, marks=pytest.mark.gate),
        pytest.param("postgresql", 500, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="10000-branches"),
    ],
    indirect=["database"],
)
def test_branches_leave_no_connection_behind(shop: Durable, alias: str, rounds: int) -> None:
    assert run_wide(shop, alias, "first") == "complete"
    before, counts = count_connections(alias), []
    for number in range(rounds):
        assert run_wide(shop, alias, f"w-{number}") == "complete"
        counts.append(count_connections(alias))
    # MariaDB lists a connection for a moment after it was closed.
    assert max(counts) <= before + 20
    until("as few connections as before", lambda: count_connections(alias) <= before)
    assert Booking.objects.using(alias).count() == 20 * (rounds + 1)


def test_the_rows_of_branches_on_threads_are_committed_with_their_steps(shop: Durable, alias: str) -> None:
    assert run_wide(shop, alias, "w-1", branches=3) == "complete"
    assert booked(alias) == [f"{kind} {number}" for kind in ("alone", "joined") for number in range(3)]


@pytest.mark.parametrize(("database", "max_age"), [("postgresql", None), ("mariadb", 0)], indirect=["database"])
def test_a_restart_of_the_database_heals(
    shop: Durable,
    alias: str,
    max_age: int | None,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setitem(connections[alias].settings_dict, "CONN_MAX_AGE", max_age)
    for number in range(3):
        assert run_wide(shop, alias, f"w-{number}", branches=2) == "complete"
        kill_all(alias)
    assert run_wide(shop, alias, "last", branches=2) == "complete"
    connections[alias].close()
    assert len(booked(alias)) == 16
    request.getfixturevalue(f"{alias}_database").engine.dispose()  # its connections were killed, too


@pytest.mark.parametrize(
    ("database", "options", "query", "seen"),
    [
        (
            "postgresql",
            {"options": "-c statement_timeout=70s -c lock_timeout=2s"},
            "SELECT current_setting('statement_timeout'), current_setting('lock_timeout')",
            ("70s", "2s"),
        ),
        (
            "mariadb",
            {"init_command": "SET SESSION sql_mode='ANSI_QUOTES', innodb_lock_wait_timeout=3"},
            "SELECT @@sql_mode, @@innodb_lock_wait_timeout, @@time_zone, @@character_set_client",
            ("ANSI_QUOTES", 3, "+00:00", "utf8mb4"),
        ),
    ],
    indirect=["database"],
)
def test_the_engines_own_connections_have_the_options_of_the_settings(
    alias: str, options: dict[str, str], query: str, seen: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connections[alias].settings_dict
    monkeypatch.setitem(settings, "OPTIONS", settings["OPTIONS"] | options)
    monkeypatch.setitem(connections.settings, alias, settings)
    engine = make_own_engine(alias, prepared_statements=True)
    try:
        with engine.connect() as connection:
            assert tuple(connection.exec_driver_sql(query).one()) == seen
    finally:
        engine.dispose()
