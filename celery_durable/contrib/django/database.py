"""A database of Django as the framework of a store: its open ``atomic()`` blocks, and those of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from django.db import connections, transaction

from celery_durable.contrib.django.engines import make_joined_engine, raise_as_django, to_database_error
from celery_durable.contrib.django.step_transactions import OrmTransactions
from celery_durable.store.engine.sessions import StepTransactions


class DjangoDatabase:
    """The database of one alias (`Framework`)."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._orm_transactions = OrmTransactions(alias, self.connect)
        self.step_transactions: StepTransactions = self._orm_transactions

    @functools.cached_property
    def _engine(self) -> sa.Engine:
        return make_joined_engine(self.alias)

    def connect(self) -> sa.Connection:
        """Return the calling thread's Django connection, in the transaction that is open there."""
        connection = self._engine.connect()
        connection.begin()
        return connection

    def is_in_transaction(self) -> bool:
        """Whether the calling thread is inside ``atomic()``, or manages its transactions without autocommit."""
        wrapper = connections[self.alias]
        if wrapper.in_atomic_block:
            return True
        return not (wrapper.settings_dict["AUTOCOMMIT"] if wrapper.connection is None else wrapper.autocommit)

    def is_in_step(self) -> bool:
        """Whether that block is a step's."""
        return self._orm_transactions.is_open(connections[self.alias])

    @contextmanager
    def join(self) -> Iterator[sa.Connection]:
        """Yield the connection of the open block. Errors of the database are Django's."""
        with raise_as_django(), self.connect() as connection:
            yield connection

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` after the commit of the open block; now if there is none.

        Under ``set_autocommit(False)`` nothing is called: Django has no hook there. The next sweep finds the work.
        """
        wrapper = connections[self.alias]
        if wrapper.in_atomic_block:
            # robust: a broker that is down must not raise after a commit.
            transaction.on_commit(callback, using=self.alias, robust=True)
        elif not self.is_in_transaction():
            callback()

    to_database_error = staticmethod(to_database_error)
