"""A store on the database of a web framework. Inside a transaction of the framework, its work is part of that one.

The engine's own connections stay separate: claims, leases and sweeps do not depend on the application's connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.sessions import Framework
from celery_durable.store.engine.time_limits import USER_WRITES

T = TypeVar("T")


class FrameworkStore(Store):
    """A `Store` that joins the transactions of a framework. ``engine`` makes connections to the same database."""

    def __init__(self, framework: Framework, engine: sa.Engine, **options: Any) -> None:
        super().__init__(engine=engine, **options)
        self._framework = framework
        self.step_transactions = framework.step_transactions

    # --- work of the calling thread -------------------------------------------------------------

    def transact(self, work: Callable[[Tx], T], **options: Any) -> T:
        return self._join(work) if self._framework.is_in_transaction() else super().transact(work, **options)

    def run_statement(self, work: Callable[[Tx], T], **options: Any) -> T:
        return self._join(work) if self._framework.is_in_transaction() else super().run_statement(work, **options)

    def transact_once(self, work: Callable[[Tx], T], **options: Any) -> T:
        # The engine's own writes, such as published values, do not wait for the body of a step.
        is_joined = self._framework.is_in_transaction() and not self._framework.is_in_step()
        return self._join(work) if is_joined else super().transact_once(work, **options)

    def read(self, work: Callable[[Tx], T], **options: Any) -> T:
        return self._join(work) if self._framework.is_in_transaction() else super().read(work, **options)

    def _join(self, work: Callable[[Tx], T]) -> T:
        """Run ``work`` in the open transaction. It is not repeated: the transaction is not the store's."""
        with self._framework.join() as conn:
            return work(self.tx_type(conn, self))

    def after_commit(self, callback: Callable[[], object]) -> None:
        self._framework.after_commit(callback)

    # --- the writes of steps --------------------------------------------------------------------

    def transact_user_writes(
        self, work: Callable[[Tx], T], *, find_committed: Callable[[Tx], T | None] | None = None
    ) -> T:
        """Run ``work`` in a transaction of the framework, so that the writes in it are part of that transaction."""
        if self._framework.is_in_transaction():
            return self._join(work)
        return self._run_with_retries(self._run_in_framework, work, find_committed, USER_WRITES)

    def _run_in_framework(self, work: Callable[[Tx], T], _: float) -> T:
        transaction = self.step_transactions.begin("")
        try:
            return self.transact_step(transaction, work)
        finally:
            transaction.close()

    # --- faults: bodies raise the framework's exceptions ----------------------------------------

    def to_database_error(self, error: BaseException) -> BaseException:
        return self._framework.to_database_error(error)
