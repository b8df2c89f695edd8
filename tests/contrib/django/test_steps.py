"""A step's body that takes StepTx runs inside atomic(), which commits with the step's record or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from django.db import IntegrityError, connections, transaction

from celery_durable import (
    NonRetryableError,
    Step,
    StepConfig,
    StepTx,
    WorkflowEvent,
    durable_step,
)
from celery_durable.contrib.django import testing, wiring
from celery_durable.testing import DurableHarness, HarnessMisuse, UncheckedTables
from tests.contrib.django.booking.models import Booking, Name
from tests.contrib.django.workflows import book, booked, trip, wait

Body = Callable[[StepTx], Any]
ONCE = StepConfig(retries=0)

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def run(harness: DurableHarness, body: Callable[..., Any], config: StepConfig = ONCE) -> Any:
    """Run a workflow of one step, with this body; returns the instance."""

    @harness.durable.workflow(name="single")
    def single(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.do("body", config, body)

    instance = harness.create(single)
    harness.run_until_idle()
    return instance


def test_the_rows_of_a_body_are_committed_with_its_step(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> str:
        assert connections[alias].in_atomic_block
        book(alias, tx.idempotency_key, "row")
        return "done"

    instance = run(harness, body)
    assert instance.result() == "done"
    assert booked(alias) == ["row"]
    assert not connections[alias].in_atomic_block


def test_the_rows_of_a_body_that_raises_are_rolled_back(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> None:
        book(alias, "i", "row")
        raise ValueError("no seats")

    assert run(harness, body).error.message == "no seats"
    assert booked(alias) == []


def test_an_ignored_error_of_the_database_fails_the_step(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> None:
        Name.objects.using(alias).create(name="taken")
        try:
            with transaction.atomic(using=alias, savepoint=False):
                Name.objects.using(alias).create(name="taken")
        except IntegrityError:
            pass

    assert run(harness, body).error.name == "PendingRollbackError"
    assert Name.objects.using(alias).count() == 0


def test_an_error_inside_a_savepoint_may_be_caught(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> None:
        Name.objects.using(alias).create(name="taken")
        try:
            with transaction.atomic(using=alias):
                Name.objects.using(alias).create(name="taken")
        except IntegrityError:
            book(alias, "i", "caught")

    assert run(harness, body).status().status == "complete"
    assert booked(alias) == ["caught"]


def test_a_violated_unique_key_is_named_as_a_conflict(alias: str, harness: DurableHarness) -> None:
    Name.objects.using(alias).create(name="taken")

    def body(tx: StepTx) -> None:
        Name.objects.using(alias).create(name="taken")

    assert run(harness, body).error.name == "StepCommitConflict"


@on_sqlite
def test_a_failing_hook_of_on_commit_does_not_undo_the_step(
    alias: str, harness: DurableHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def notify() -> None:
        raise RuntimeError("mail server is down")

    def body(tx: StepTx) -> None:
        book(alias, "i", "row")
        transaction.on_commit(notify, using=alias)

    assert run(harness, body).status().status == "complete"
    assert booked(alias) == ["row"]
    assert caplog.messages == ["A hook of transaction.on_commit failed after step 'body' was committed"]


def test_an_instance_that_a_body_creates_is_created_with_the_step(alias: str, harness: DurableHarness) -> None:
    def fail(tx: StepTx) -> None:
        wait.create(alias, id="undone")
        raise NonRetryableError("no")

    def succeed(tx: StepTx) -> None:
        wait.create(alias, id="kept")

    run(harness, fail)
    assert [each.id for each in wait.list().items] == []

    @harness.durable.workflow(name="second")
    def second(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("body", succeed)

    harness.create(second)
    harness.run_until_idle()
    assert wait.get("kept").status().status == "waiting"


@on_sqlite
def test_mutate_calls_its_function_in_the_steps_transaction(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> None:
        tx.mutate(lambda: book(alias, "i", "mutated"))
        assert booked(alias) == []

    assert run(harness, body).status().status == "complete"
    assert booked(alias) == ["mutated"]


@on_sqlite
@pytest.mark.parametrize("orm", [True, False])
def test_on_terminal_error_writes_with_the_record_of_the_failure(
    alias: str, harness: DurableHarness, orm: bool
) -> None:
    @durable_step(orm=orm)
    def body(tx: StepTx) -> None:
        tx.on_terminal_error(lambda: book(alias, "i", "refunded"))
        raise NonRetryableError("no seats")

    assert run(harness, body).status().status == "errored"
    assert booked(alias) == ["refunded"]


@on_sqlite
def test_a_body_may_opt_out_of_the_transaction(alias: str, harness: DurableHarness) -> None:
    @durable_step(orm=False)
    def body(tx: StepTx) -> None:
        assert not connections[alias].in_atomic_block
        book(alias, "i", "at once")
        tx.mutate(lambda: book(alias, "i", "with the step"))
        raise NonRetryableError("no")

    run(harness, body)
    assert booked(alias) == ["at once"]


def test_a_body_without_tx_runs_in_autocommit(alias: str, harness: DurableHarness) -> None:
    def body() -> None:
        assert not connections[alias].in_atomic_block
        book(alias, "i", "at once")
        raise NonRetryableError("no")

    run(harness, body)
    assert booked(alias) == ["at once"]


@on_sqlite
def test_a_session_is_refused_with_the_remedy(alias: str, harness: DurableHarness) -> None:
    def body(tx: StepTx) -> None:
        tx.session.flush()

    assert run(harness, body).error.message == (
        "tx.session in step 'body': this project's steps use Django's ORM, which is in the step's transaction already. "
        "Write with your models, or with tx.mutate(function)."
    )


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_block_costs_nothing_until_its_first_query(alias: str, harness: DurableHarness) -> None:
    """So a body may call an HTTP API and then write, without an open transaction during the call."""
    states: list[str] = []

    def body(tx: StepTx) -> None:
        pid = connections[alias].connection.info.backend_pid
        other = connections.create_connection(alias)
        with other.cursor() as cursor:
            cursor.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [pid])
            states.append(cursor.fetchone()[0])
        other.close()

    run(harness, body)
    assert states == ["idle"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_stricter_isolation_level_of_the_project_is_overridden(
    alias: str, harness: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", {"isolation_level": 3})  # REPEATABLE READ
    connections[alias].close()

    def body(tx: StepTx) -> None:
        book(alias, "i", "row")
        with connections[alias].cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone()[0] == "read committed"

    assert run(harness, body).status().status == "complete"
    connections[alias].close()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("sees_it", [True, False])
def test_a_body_runs_again_after_its_connection_was_lost(alias: str, harness: DurableHarness, sees_it: bool) -> None:
    """The body notices it with its next query, or the commit of the step does."""
    runs: list[int] = []

    def body(tx: StepTx) -> None:
        book(alias, "i", "row")
        runs.append(1)
        if len(runs) == 1:
            kill_connection(alias)
            assert not sees_it or booked(alias)

    assert run(harness, body).status().status == "complete"
    assert (booked(alias), len(runs)) == (["row"], 2)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_in_doubt_is_looked_up(
    alias: str, harness: DurableHarness, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body runs again only if the commit did not happen."""
    runs: list[int] = []
    wrapper = type(connections[alias])
    commit = wrapper._commit

    def lose(self: Any) -> None:
        if when == "after":
            commit(self)
        kill_connection(alias)
        monkeypatch.setattr(wrapper, "_commit", commit)
        self.connection.cursor().execute("SELECT 1")  # raises as a lost COMMIT does

    def lose_as_django(self: Any) -> None:
        with self.wrap_database_errors:
            lose(self)

    def body(tx: StepTx) -> None:
        book(alias, "i", "row")
        runs.append(1)
        if len(runs) == 1:
            monkeypatch.setattr(wrapper, "_commit", lose_as_django)

    assert run(harness, body).status().status == "complete"
    assert booked(alias) == ["row"]
    assert len(runs) == (1 if when == "after" else 2)


def kill_connection(alias: str) -> None:
    """End the connection of this thread at the server."""
    wrapper, other = connections[alias], connections.create_connection(alias)
    with other.cursor() as cursor:
        if wrapper.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [wrapper.connection.info.backend_pid])
        else:
            cursor.execute(f"KILL {wrapper.connection.thread_id()}")
    other.close()


@pytest.fixture
def replaced_alias(alias: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The alias, as if a test runner had replaced its database: assert_crash_safe() refuses any other."""
    monkeypatch.setitem(wiring._names_at_start, alias, "the project's own database")
    assert wiring.is_test_database(alias)
    return alias


@pytest.mark.parametrize(
    "database",
    ["sqlite", *(pytest.param(server, marks=pytest.mark.gate) for server in ("postgresql", "mariadb"))],
    indirect=True,
)
def test_rows_are_never_doubled_or_lost_wherever_a_worker_dies(replaced_alias: str) -> None:
    alias = replaced_alias
    report = testing.assert_crash_safe(trip, alias, side_effects=[Booking], using=alias, schedules=20)
    assert report.crashes >= 10
    assert booked(alias) == sorted(f"{step}/{part}" for step in ("flight", "hotel", "car", "invoice") for part in "ab")


@on_sqlite
def test_the_setup_of_a_crash_test_may_name_the_alias(replaced_alias: str) -> None:
    alias = replaced_alias

    def name_the_alias(harness: DurableHarness) -> None:
        harness.durable.internals.check_using(alias)

    testing.assert_crash_safe(trip, alias, side_effects=[Booking], using=alias, setup=name_the_alias, schedules=2)


@on_sqlite
def test_a_crash_test_that_misses_its_rows_is_told_to_create_them_in_setup(replaced_alias: str) -> None:
    alias = replaced_alias

    def rename(event, step):
        step.do("rename", lambda tx: Name.objects.using(alias).get(pk=1).delete() and None)

    rename.__name__ = "rename"
    Name.objects.using(alias).create(pk=1, name="ada")
    with pytest.raises(HarnessMisuse) as refused:
        testing.assert_crash_safe(rename, alias, side_effects=[Name], using=alias)
    assert str(refused.value).endswith(
        " Each run begins with empty tables: create the rows that the workflow needs in setup=. If it is meant to "
        "fail, pass expect_error='DoesNotExist'."
    )


@on_sqlite
def test_a_crash_test_names_the_tables_that_it_does_not_compare(replaced_alias: str) -> None:
    alias = replaced_alias
    with pytest.warns(UncheckedTables) as seen:
        testing.assert_crash_safe(trip, alias, side_effects=[Name], using=alias, schedules=1)
    assert [str(each.message) for each in seen] == [
        f"Workflow 'trip' also writes to {Booking._meta.db_table}, which side_effects= does not name. A doubled row "
        'there is not found. Name these tables too, or pass side_effects="all".'
    ]


@on_sqlite
def test_a_crash_test_compares_all_models(replaced_alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = replaced_alias
    monkeypatch.setattr(testing.apps, "get_models", lambda **_: [Booking, Name])  # only these have tables here
    seen: list[int] = []

    def count_rows(_: DurableHarness) -> None:
        seen.append(Booking.objects.using(alias).count())

    testing.assert_crash_safe(trip, alias, side_effects="all", using=alias, setup=count_rows, schedules=2)
    assert seen == [0, 0, 0]


@on_sqlite
def test_the_runs_of_a_crash_test_connect_once_for_each_process_and_thread(replaced_alias: str) -> None:
    opened: list[object] = []

    def listen(harness: DurableHarness) -> None:
        sa.event.listen(harness.engine, "connect", lambda connection, _: opened.append(connection))

    alias = replaced_alias
    testing.assert_crash_safe(trip, alias, side_effects=[Booking], using=alias, setup=listen, schedules=1)
    assert len(opened) <= 2


@on_sqlite
def test_crash_safety_is_not_tested_in_a_transaction(replaced_alias: str) -> None:
    with transaction.atomic(using=replaced_alias), pytest.raises(HarnessMisuse) as refused:
        testing.assert_crash_safe(trip, replaced_alias, side_effects=[Booking], using=replaced_alias)
    assert str(refused.value) == (
        "assert_crash_safe() cannot run in a transaction: use a TransactionTestCase, or with pytest-django "
        "@pytest.mark.django_db(transaction=True)."
    )
