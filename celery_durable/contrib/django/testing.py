"""Tests of a Django project: harnesses and crash tests on the database of Django's tests."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from django.apps import apps
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, models, transaction

from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.database import DjangoDatabase
from celery_durable.testing import CrashReport, DurableHarness, HarnessMisuse, PendingHooks
from celery_durable.testing import assert_crash_safe as _assert_crash_safe
from celery_durable.testing.code import Code, Codes
from celery_durable.testing.crash_safety import ComparedTables

__all__ = ["assert_crash_safe", "make_harness"]


def make_harness(workflows: Codes | None = None, *, using: str | None = None, **options: Any) -> DurableHarness:
    """Make a `DurableHarness` on the database of Django's tests.

    In a ``TestCase`` everything that it does is part of the test's transaction. The instances that an earlier
    ``TransactionTestCase`` has left are deleted: Django empties only the tables of its models. In a test that may not
    use the database, this raises the error of Django or pytest-django. ``run_until_idle()`` warns with PendingHooks if
    messages wait in hooks of ``on_commit``.

    Args:
        workflows: As for `DurableHarness`.
        using: The alias. None: that of ``CELERY_DURABLE_DATABASE``.
        options: The other options of `DurableHarness`.
    """
    alias = using or wiring.get_alias()
    _check_access(alias)
    options.setdefault("wipe", wiring.is_test_database(alias))
    database = _TestedDatabase(alias)
    harness = _DjangoHarness(workflows, make_store=functools.partial(wiring.make_store, database), **options)
    harness.database = database
    wiring.join_calls(harness.durable, alias)
    return harness


def assert_crash_safe(
    workflow: Code,
    params: Any = None,
    *,
    side_effects: Sequence[type[models.Model]] | Literal["all"],
    using: str | None = None,
    setup: Callable[[DurableHarness], object] | None = None,
    **options: Any,
) -> CrashReport:
    """Fail with NotCrashSafe unless the models have the same rows wherever the workers of a workflow die.

    Use it in a ``TransactionTestCase``: it deletes all instances, and all rows of the models, before each run. So
    create the rows that the workflow needs in ``setup``.

    Args:
        workflow: The workflow to test.
        params: Its parameters.
        side_effects: The models whose rows are compared, without their primary keys. "all": all models of the
            project, except those that ``migrate`` fills. UncheckedTables warns about other tables that the workflow
            writes to.
        using: As for `make_harness`.
        setup: As for `celery_durable.testing.assert_crash_safe`. It may also create rows.
        options: The other options of `celery_durable.testing.assert_crash_safe`.

    Raises:
        HarnessMisuse: The database is not that of Django's tests, or the test is inside a transaction.
    """
    alias = using or wiring.get_alias()
    _check_access(alias)
    if not wiring.is_test_database(alias):
        raise HarnessMisuse(
            f"The database {alias!r} is not a test database, and assert_crash_safe() deletes all instances in its "
            "database. Run the test with Django's test runner or pytest-django, on a database with another name."
        )
    if connections[alias].in_atomic_block:
        raise HarnessMisuse(
            "assert_crash_safe() cannot run in a transaction: use a TransactionTestCase, or with pytest-django "
            "@pytest.mark.django_db(transaction=True)."
        )

    compared = _project_models() if side_effects == "all" else list(side_effects)

    def prepare(harness: DurableHarness) -> None:
        wiring.join_calls(harness.durable, alias)
        if side_effects == "all":
            _empty_tables(compared, alias)
        else:
            for model in reversed(compared):
                _manager(model).using(alias).all().delete()
        if setup is not None:
            setup(harness)

    def read_rows(_: object) -> Any:
        return {str(model): _read_rows(model, alias) for model in compared}

    return _assert_crash_safe(
        workflow,
        params,
        side_effects=ComparedTables(frozenset(model._meta.db_table for model in compared), read_rows),  # noqa: SLF001
        setup=prepare,
        make_store=functools.partial(wiring.make_store, _TestedDatabase(alias), is_closed=True),
        **options,
    )


def _check_access(alias: str) -> None:
    """Raise Django's or pytest-django's error if this test may not use the database.

    It may run before the test runner has replaced the database: the harness would write to the project's own.
    """
    connection = connections[alias]
    # pytest-django replaces the first method, and Django's SimpleTestCase the second one. In an async test, the
    # original methods raise SynchronousOnlyOperation, so access is allowed.
    with contextlib.suppress(SynchronousOnlyOperation):
        connection.ensure_connection()
    with contextlib.suppress(SynchronousOnlyOperation):
        connection.cursor().close()


class _TestedDatabase(DjangoDatabase):
    """The database of a test. The block of a ``TestCase`` around the test does not count as the application's."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._pending: list[tuple[Callable[[], object], str]] = []

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` now, unless the test or the application has opened a block."""
        blocks = connections[self.alias].atomic_blocks
        if blocks and all(getattr(block, "_from_testcase", False) for block in blocks):
            callback()
            return

        def call() -> None:
            self._pending[:] = [each for each in self._pending if each[0] is not call]
            callback()

        if blocks:
            self._pending.append((call, _find_caller()))
        super().after_commit(call)

    def find_pending(self) -> list[str]:
        """Return the lines of the application whose hooks have been neither called nor rolled back."""
        registered = [entry[1] for entry in connections[self.alias].run_on_commit]
        return [line for call, line in self._pending if call in registered]


class _DjangoHarness(DurableHarness):
    database: _TestedDatabase

    def run_until_idle(self, max_ticks: int = 1000) -> int:
        ticks = super().run_until_idle(max_ticks)
        if lines := self.database.find_pending():
            text = f"Messages wait in hooks of transaction.on_commit, which nothing has called: {', '.join(lines)}."
            remedy = (
                "A TestCase never commits: make the call inside self.captureOnCommitCallbacks(execute=True), or with "
                "pytest-django inside django_capture_on_commit_callbacks(execute=True)."
            )
            warnings.warn(PendingHooks(f"{text} {remedy}"), stacklevel=2)
        return ticks


def _find_caller() -> str:
    frame = sys._getframe(1)  # noqa: SLF001  # as warnings and logging do
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("celery_durable."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _project_models() -> list[type[models.Model]]:
    """Return the models of the project, without those whose rows `migrate` makes and those of workflows."""
    made = ("contenttypes.contenttype", "auth.permission", "sites.site")
    found = [model for model in apps.get_models(include_auto_created=True) if model._meta.managed]  # noqa: SLF001
    return [model for model in found if not (model._meta.proxy or model._meta.label_lower in made)]  # noqa: SLF001


def _manager(model: type[models.Model]) -> models.Manager[Any]:
    return model._default_manager  # noqa: SLF001  # documented by Django


def _empty_tables(emptied: list[type[models.Model]], alias: str) -> None:
    """Delete all rows of all models, whatever refers to them: also what ``PROTECT`` protects."""
    connection = connections[alias]
    with connection.constraint_checks_disabled(), transaction.atomic(using=alias), connection.cursor() as cursor:
        for model in emptied:
            cursor.execute(f"DELETE FROM {connection.ops.quote_name(model._meta.db_table)}")  # noqa: S608, SLF001


def _read_rows(model: type[models.Model], alias: str) -> list[tuple[Any, ...]]:
    fields = [field.attname for field in model._meta.concrete_fields if not field.primary_key]  # noqa: SLF001
    return sorted(_manager(model).using(alias).values_list(*fields), key=repr)
