"""Tests of a Django project: harnesses and crash tests on the database of Django's tests."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, models

from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.database import DjangoDatabase
from celery_durable.testing import CrashReport, DurableHarness, HarnessMisuse
from celery_durable.testing import assert_crash_safe as _assert_crash_safe
from celery_durable.testing.code import Code, Codes
from celery_durable.testing.databases import MakeStore

__all__ = ["assert_crash_safe", "make_harness"]


def make_harness(workflows: Codes | None = None, *, using: str | None = None, **options: Any) -> DurableHarness:
    """Make a `DurableHarness` on the database of Django's tests.

    In a ``TestCase`` everything that it does is part of the test's transaction. The instances that an earlier
    ``TransactionTestCase`` has left are deleted: Django empties only the tables of its models. In a test that may not
    use the database, this raises the error of Django or pytest-django.

    Args:
        workflows: As for `DurableHarness`.
        using: The alias. None: that of ``CELERY_DURABLE_DATABASE``.
        options: The other options of `DurableHarness`.
    """
    alias = using or wiring.get_alias()
    _check_access(alias)
    options.setdefault("wipe", wiring.is_test_database(alias))
    harness = DurableHarness(workflows, make_store=_store_factory(alias), **options)
    wiring.join_calls(harness.durable, alias)
    return harness


def assert_crash_safe(
    workflow: Code,
    params: Any = None,
    *,
    side_effects: Sequence[type[models.Model]],
    using: str | None = None,
    setup: Callable[[DurableHarness], object] | None = None,
    **options: Any,
) -> CrashReport:
    """Fail with NotCrashSafe unless the models have the same rows wherever the workers of a workflow die.

    Use it in a ``TransactionTestCase``: it deletes all instances, and all rows of the models, before each run.

    Args:
        workflow: The workflow to test.
        params: Its parameters.
        side_effects: The models whose rows are compared, without their primary keys.
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

    def prepare(harness: DurableHarness) -> None:
        wiring.join_calls(harness.durable, alias)
        for model in reversed(side_effects):
            _manager(model).using(alias).all().delete()
        if setup is not None:
            setup(harness)

    def read_rows(_: object) -> Any:
        return {str(model): _read_rows(model, alias) for model in side_effects}

    return _assert_crash_safe(
        workflow,
        params,
        side_effects=read_rows,
        setup=prepare,
        make_store=_store_factory(alias),
        **options,
    )


def _check_access(alias: str) -> None:
    """Raise Django's or pytest-django's error if this test may not use the database.

    Such a test may run before the test runner has replaced the database, and a harness has connections of its own. So
    without this check, the harness would write to the project's own database.
    """
    connection = connections[alias]
    # pytest-django replaces the first method, and Django's SimpleTestCase the second one. In an async test, the
    # original methods raise SynchronousOnlyOperation, so access is allowed.
    with contextlib.suppress(SynchronousOnlyOperation):
        connection.ensure_connection()
    with contextlib.suppress(SynchronousOnlyOperation):
        connection.cursor().close()


def _store_factory(alias: str) -> MakeStore:
    return functools.partial(wiring.make_store, _TestedDatabase(alias))


class _TestedDatabase(DjangoDatabase):
    """The database of a test. The block of a ``TestCase`` around the test does not count as the application's."""

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` now, unless the test or the application has opened a block."""
        blocks = connections[self.alias].atomic_blocks
        if blocks and all(getattr(block, "_from_testcase", False) for block in blocks):
            callback()
        else:
            super().after_commit(callback)


def _manager(model: type[models.Model]) -> models.Manager[Any]:
    return model._default_manager  # noqa: SLF001  # documented by Django


def _read_rows(model: type[models.Model], alias: str) -> list[tuple[Any, ...]]:
    fields = [field.attname for field in model._meta.concrete_fields if not field.primary_key]  # noqa: SLF001
    return sorted(_manager(model).using(alias).values_list(*fields), key=repr)
