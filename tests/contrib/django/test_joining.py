"""What an application does inside atomic() is part of that block, and workers are woken after its commit."""

from __future__ import annotations

import inspect

import pytest
from asgiref.sync import async_to_sync
from django.db import IntegrityError, connections, transaction
from django.test.utils import CaptureQueriesContext

from celery_durable import CreateOptions
from celery_durable.contrib.django import testing
from celery_durable.errors import AliasMismatch, InstanceAlreadyExists, InstanceNotFound
from celery_durable.signals import event_received, ignore, listen, workflow_created
from celery_durable.testing import DurableHarness, PendingHooks
from tests.contrib.django.booking.models import Name
from tests.contrib.django.workflows import book, booked, wait

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


class Undo(Exception):
    pass


def test_a_rolled_back_block_leaves_no_instance_and_wakes_nobody(alias: str, harness: DurableHarness) -> None:
    with pytest.raises(Undo), transaction.atomic(using=alias):
        book(alias, "w-1", "row")
        handle = wait.create(alias, id="w-1")
        assert handle.status().status == "active"
        raise Undo
    assert booked(alias) == []
    assert len(harness.messages) == 0
    with pytest.raises(InstanceNotFound):
        wait.get("w-1").status()


def test_workers_are_woken_once_the_block_has_committed(alias: str, harness: DurableHarness) -> None:
    with transaction.atomic(using=alias):
        wait.create(alias, id="w-1")
        assert len(harness.messages) == 0
        with transaction.atomic(using=alias):
            wait.create_batch([CreateOptions("w-2", alias), CreateOptions("w-3", alias)])
        assert len(harness.messages) == 0
    assert [due.ref.instance_id for due in harness.messages] == ["w-1", "w-2", "w-3"]


def test_a_savepoint_takes_back_what_was_created_in_it(alias: str, harness: DurableHarness) -> None:
    with transaction.atomic(using=alias):
        wait.create(alias, id="kept")
        with pytest.raises(Undo), transaction.atomic(using=alias):
            wait.create(alias, id="undone")
            raise Undo
    assert [due.ref.instance_id for due in harness.messages] == ["kept"]
    with pytest.raises(InstanceNotFound):
        wait.get("undone").status()


def test_a_taken_id_leaves_the_block_usable(alias: str, harness: DurableHarness) -> None:
    wait.create(alias, id="w-1")
    with transaction.atomic(using=alias):
        with pytest.raises(InstanceAlreadyExists):
            wait.create(alias, id="w-1")
        assert wait.create(alias, id="w-1", if_exists="return").id == "w-1"
        book(alias, "w-1", "row")
    assert booked(alias) == ["row"]


def test_every_change_of_an_instance_is_part_of_the_block(alias: str, harness: DurableHarness) -> None:
    instance = harness.create(wait, alias, id="w-1")
    harness.run_until_idle()
    handle = wait.get("w-1")
    with pytest.raises(Undo), transaction.atomic(using=alias):
        assert handle.send_event("answer", "100 % \u2603 é %s", id="e-1")
        handle.pause()
        handle.resume()
        assert handle.restart(reason="again") == 2
        handle.terminate("no longer wanted")
        assert handle.status().status == "terminated"
        raise Undo
    assert handle.status().status == "waiting"
    assert handle.history().run_number == 1
    with transaction.atomic(using=alias):
        assert handle.send_event("answer", "100 % \u2603 é %s", id="e-1")
        assert not handle.send_event("answer", "again", id="e-1")
    harness.run_until_idle()
    assert instance.status().output == "100 % \u2603 é %s"


@on_sqlite
def test_signals_are_sent_after_the_commit(alias: str, harness: DurableHarness) -> None:
    received: list[str] = []

    def note(sender: str, instance_id: str, signal: object, **_: object) -> None:
        received.append(instance_id)

    for signal in (workflow_created, event_received):
        listen(signal, note)
    try:
        with transaction.atomic(using=alias):
            handle = wait.create(alias, id="w-1")
            handle.send_event("answer", 1)
            assert received == []
        with pytest.raises(Undo), transaction.atomic(using=alias):
            wait.create(alias, id="w-2")
            raise Undo
    finally:
        for signal in (workflow_created, event_received):
            ignore(signal, note)
    assert received == ["w-1", "w-1"]


def test_a_joined_create_takes_two_queries_that_django_logs(alias: str, harness: DurableHarness) -> None:
    with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as queries:
        wait.create(alias)
    ours = [query["sql"] for query in queries if "INSERT" in query["sql"]]
    assert len(ours) == (1 if alias == "postgresql" else 2)


def test_a_block_that_must_roll_back_refuses_to_create(alias: str, harness: DurableHarness) -> None:
    """The driver's connection would accept it, and the block would roll back without an error."""
    with transaction.atomic(using=alias):
        Name.objects.using(alias).create(name="taken")
        with pytest.raises(IntegrityError), transaction.atomic(using=alias, savepoint=False):
            Name.objects.using(alias).create(name="taken")
        with pytest.raises(transaction.TransactionManagementError):
            wait.create(alias, id="w-1")
        transaction.set_rollback(True, using=alias)
    with pytest.raises(InstanceNotFound):
        wait.get("w-1").status()


def test_a_transaction_without_autocommit_is_joined_and_the_sweep_wakes(alias: str, harness: DurableHarness) -> None:
    transaction.set_autocommit(False, using=alias)
    try:
        wait.create(alias, id="undone")
        transaction.rollback(using=alias)
        wait.create(alias, id="kept")
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    assert len(harness.messages) == 0
    with pytest.raises(InstanceNotFound):
        wait.get("undone").status()
    harness.advance("10 seconds")
    assert wait.get("kept").status().status == "waiting"


@on_sqlite
def test_using_names_the_alias_of_the_block(alias: str, harness: DurableHarness) -> None:
    with pytest.raises(Undo), transaction.atomic(using=alias):
        wait.create(alias, id="w-1", using=alias).send_event("answer", 1, using=alias)
        wait.create_batch([CreateOptions("w-2", alias)], using=alias)
        raise Undo
    assert wait.list().items == ()
    assert wait.create(alias, id="w-3", using=alias).send_event("answer", 1, using=alias)


@on_sqlite
def test_using_another_alias_than_that_of_the_workflows_is_refused(alias: str, harness: DurableHarness) -> None:
    """The block on the other alias would roll back, and the instance would stay."""
    handle = wait.create(alias, id="w-1")
    calls = (
        lambda using: wait.create(alias, id="w-2", using=using),
        lambda using: wait.create_batch([CreateOptions("w-2", alias)], using=using),
        lambda using: handle.send_event("answer", 1, using=using),
        lambda using: async_to_sync(wait.acreate)(alias, id="w-2", using=using),
        lambda using: async_to_sync(wait.acreate_batch)([CreateOptions("w-2", alias)], using=using),
        lambda using: async_to_sync(handle.asend_event)("answer", 1, using=using),
    )
    remedy = f"put the call into transaction.atomic(using={alias!r}), and leave out using= or pass {alias!r}"
    for call in calls:
        with transaction.atomic(using="default"), pytest.raises(AliasMismatch) as refused:
            call("default")
        assert str(refused.value) == (
            f"using='default', but workflows are in the database {alias!r} (CELERY_DURABLE_DATABASE). One transaction "
            f"cannot span both: {remedy}. To start a workflow with rows in 'default', create it in "
            "transaction.on_commit(..., using='default')."
        )
        with pytest.raises(AliasMismatch) as refused:
            call("replica")
        assert str(refused.value) == f"using='replica' is not in DATABASES. Workflows are in {alias!r}: {remedy}."
    assert [each.id for each in wait.list().items] == ["w-1"]
    assert handle.history().events == ()


@on_sqlite
def test_the_harness_names_the_lines_whose_hooks_are_pending(alias: str) -> None:
    with testing.make_harness([wait], using=alias) as harness:
        harness.create(wait, alias, id="w")
        harness.run_until_idle()
        with transaction.atomic(using=alias):  # as the block of a TestCase, around a view under ATOMIC_REQUESTS
            with pytest.raises(Undo), transaction.atomic(using=alias):
                wait.get("w").send_event("answer", "lost")
                raise Undo
            harness.run_until_idle()
            wait.get("w").send_event("answer", "yes")
            line = inspect.currentframe().f_lineno - 1
            with pytest.warns(PendingHooks) as seen:
                harness.run_until_idle()
        assert [str(each.message) for each in seen] == [
            f"Messages wait in hooks of transaction.on_commit, which nothing has called: {__file__}:{line} "
            "(test_the_harness_names_the_lines_whose_hooks_are_pending). A TestCase never commits: make the call "
            "inside self.captureOnCommitCallbacks(execute=True), or with pytest-django inside "
            "django_capture_on_commit_callbacks(execute=True)."
        ]
        harness.run_until_idle()  # the block has been committed
        assert wait.get("w").result() == "yes"
