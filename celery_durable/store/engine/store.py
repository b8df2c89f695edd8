"""The store: connections, transactions with bounded retries, and statements that are compiled once."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc

from celery_durable.errors import DurableError, StepTxMisuse, StoreUnavailable, Superseded
from celery_durable.runtime import Runtime
from celery_durable.store.engine import drivers, faults
from celery_durable.store.engine.connections import Connections, roll_back
from celery_durable.store.engine.faults import CommitInDoubt, Fault, classify_fault, handle_driver_error
from celery_durable.store.engine.libpq import PreparedStatements, begin_prepared
from celery_durable.store.engine.sessions import StepSessions, StepTransaction, StepTransactions
from celery_durable.store.engine.statements import (
    PARAM_PREFIX,
    CompiledStatement,
    Rows,
    Statement,
    find_compiled,
    is_listened_to,
)
from celery_durable.store.engine.time_limits import LOOP, ORDINARY, USER_WRITES, TimeBudget, Timeouts
from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import CLOCK_PARAM, POSTGRESQL, Database
from celery_durable.store.schema.tables import REVISION, Tables, build_tables

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session

T = TypeVar("T")
logger = logging.getLogger("celery_durable.store")

_TRIES = 8
_TRIES_OF_PASSES = 32
"""Those of operations that wait for a server that is away: with their pauses, 20 s if it refuses connections."""


class Tx:
    """A connection in a transaction (or in autocommit, for a single statement), with the store's statements."""

    __slots__ = ("conn", "prepared_statements", "store")

    def __init__(
        self, conn: sa.Connection, store: Store, prepared_statements: PreparedStatements | None = None
    ) -> None:
        self.conn, self.store, self.prepared_statements = conn, store, prepared_statements

    @property
    def t(self) -> Tables:
        return self.store.tables

    def run(self, statement: Statement, /, **params: Any) -> Rows:
        """Run a Statement with the values of its parameters."""
        conn = self.conn
        compiled = self.store.compiled(statement, conn.dialect)
        values = compiled.bind(params, self.store.runtime.clock)
        if self.prepared_statements is None or is_listened_to(conn):
            return compiled.run(conn, values)
        try:
            result = self.prepared_statements.execute(compiled.sql, values)
        except BaseException as error:
            handle_driver_error(error, conn, compiled.sql, values)
            raise
        return compiled.load(result, self.prepared_statements.transformer)

    def run_combined(self, statement: Statement, /, **params: Any) -> Rows | None:
        """Run a Statement that does the work of several; returns None if the caller has to run these."""
        return self.run(statement, **params) if self.store.combines_writes else None

    def run_many(self, statement: Statement, rows: Sequence[dict[str, Any]], /) -> None:
        """Run a Statement once for each row of parameters."""
        if len(rows) == 1:  # without the result object that SQLAlchemy makes
            self.run(statement, **rows[0])
        elif rows:
            compiled = self.store.compiled(statement, self.conn.dialect)
            clock = self.store.runtime.clock
            self.conn.exec_driver_sql(compiled.sql, [compiled.bind(row, clock) for row in rows])

    def execute(self, expression: Any, /, **params: Any) -> sa.CursorResult[Any]:
        """Run a SQLAlchemy statement that is built for this call, for example one with a list of values (IN)."""
        return self.conn.execute(expression, {PARAM_PREFIX + name: value for name, value in params.items()})


class Store:
    """One database that holds workflows. Threads may share it, and forked processes may inherit it."""

    tx_type: type[Tx] = Tx
    """What `work` functions receive. Only tests set it."""

    def __init__(
        self,
        url: str | sa.URL | None = None,
        *,
        engine: sa.Engine | None = None,
        owns_engine: bool = False,
        session_factory: Callable[[], Session] | None = None,
        schema: str | None = None,
        prefix: str = "",
        prepared_statements: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        if engine is None:
            where = drivers.check_url(url)
            engine, owns_engine = drivers.make_engine(where, prepared_statements=prepared_statements), True
        drivers.check_is_sync(engine)
        self.owns_engine = owns_engine
        self.database: Database = dialects.database_from_url(engine.url)
        self.combines_writes = self.database is POSTGRESQL
        """Whether one statement may hold a guard and the writes that depend on it (a data-modifying CTE).

        The same is written without such statements. Tests turn them off.
        """
        self.engine = drivers.configure_transactions(engine, owns_engine=self.owns_engine)
        self.schema, self.prefix = schema, prefix
        self.keeps_session_settings = prepared_statements
        """False behind a pooler in transaction mode: a setting of a session would stay, for other clients."""
        self.tables = build_tables(schema, prefix, self.database)
        self.tables_key = (self.database.name, schema, prefix)
        self.runtime = runtime or Runtime()
        self._connections = Connections(self.engine, self.database, owns_engine=self.owns_engine)
        self._is_server_checked = False
        self.database_id: str | None = None
        """The id of the database, after `find_database_id` has read it."""
        self.inserted_database_id: str | None = None
        """The id that a transaction of this store has inserted; it may have been rolled back."""
        self.sessions = StepSessions(self.engine, session_factory, self.database, self._connections)
        self.step_transactions: StepTransactions = self.sessions

    # --- statements -----------------------------------------------------------------------------

    def clock(self) -> sa.ColumnElement[int]:
        """Return SQL for the current time, which advances within a transaction. Tests replace it by their own clock."""
        return self._test_clock_or(dialects.clock())

    def statement_clock(self) -> sa.ColumnElement[int]:
        """Return SQL for the time at which the statement started, for conditions that search an index."""
        return self._test_clock_or(dialects.statement_clock())

    def _test_clock_or(self, real: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        if self.runtime.clock is None:
            return real
        return sa.bindparam(CLOCK_PARAM, callable_=self.runtime.clock, type_=sa.BigInteger)

    def compiled(self, statement: Statement, dialect: sa.Dialect | None = None) -> CompiledStatement:
        """Return ``statement`` compiled for a dialect. A joined session may use another driver than the store."""
        return find_compiled(self, statement, dialect or self.engine.dialect)

    # --- transactions ---------------------------------------------------------------------------

    def transact(
        self,
        work: Callable[[Tx], T],
        *,
        find_committed: Callable[[Tx], T | None] | None = None,
        timeouts: Timeouts | TimeBudget | None = ORDINARY,
    ) -> T:
        """Run ``work`` in one transaction. Run it again if the database reports that nothing was applied.

        If a commit is in doubt, ``find_committed`` runs in a new transaction, and its return value becomes the result.
        If it is None, nothing was applied, and ``work`` runs again. Without it, ``work`` runs again in any case, and
        must do no harm by that. If it raises a DurableError then, the outcome stays in doubt. ``timeouts`` None: no
        limit, because ``work`` also runs an author's statements.
        """
        self._refuse_in_write_lock()
        run = self._run_transaction if timeouts is not None else self._run_with_user_statements
        return self._run_with_retries(run, work, find_committed, timeouts)

    def transact_user_writes(
        self, work: Callable[[Tx], T], *, find_committed: Callable[[Tx], T | None] | None = None
    ) -> T:
        """Like `transact`, for ``work`` that also calls `StepTransactions.run_writes`."""
        self._refuse_in_write_lock()
        return self._run_with_retries(self._run_with_user_statements, work, find_committed, USER_WRITES)

    def _run_with_retries(
        self,
        run: Callable[[Callable[[Tx], T], float], T],
        work: Callable[[Tx], T],
        find_committed: Callable[[Tx], T | None] | None,
        timeouts: Timeouts | TimeBudget | None,
    ) -> T:
        """Run a transaction with ``run``, which takes the work and its deadline, until its outcome is certain."""
        budget = timeouts if isinstance(timeouts, TimeBudget) else TimeBudget(timeouts)
        for tries in itertools.count(1):
            try:
                return run(work, budget.next_deadline())
            except (CommitInDoubt, exc.DBAPIError) as error:
                found = self._prepare_retry(error, find_committed, budget, tries)
                if found is not None:
                    return found
            except DurableError as refusal:
                if budget.is_in_doubt:  # it may be refused because the first try was applied
                    raise StoreUnavailable(str(refusal), is_in_doubt=True) from refusal
                raise
        raise AssertionError("unreachable")

    def run_statement(
        self,
        work: Callable[[Tx], T],
        *,
        find_committed: Callable[[Tx], T | None] | None = None,
        timeouts: Timeouts | TimeBudget | None = ORDINARY,
    ) -> T:
        """Like `transact`, but in autocommit and one round trip if the store combines writes."""
        if not self.combines_writes:
            return self.transact(work, find_committed=find_committed, timeouts=timeouts)
        return self._run_with_retries(self._run_autocommit, work, find_committed, timeouts)

    def _run_autocommit(self, work: Callable[[Tx], T], deadline: float) -> T:
        if not self._is_server_checked:
            self._check_server(deadline)
        kept = self._connections.take_or_open(deadline)
        try:
            self.runtime.checkpoint("before-commit")
            result = work(self.tx_type(kept.conn, self, kept.prepared_statements))
            self.runtime.checkpoint("after-commit")
        except exc.DBAPIError as error:
            self._connections.return_to_pool(kept)
            if classify_fault(error) is Fault.CONNECTION_LOST:  # the statement may have been applied
                raise CommitInDoubt(error) from error
            raise
        except BaseException:
            self._connections.return_to_pool(kept)  # a statement may be unfinished: the pool resets it
            raise
        self._connections.keep(kept)
        return result

    def _refuse_in_write_lock(self) -> None:
        if threading.get_ident() in self.step_transactions.threads_with_write_lock:
            raise StepTxMisuse(
                "tx.session holds SQLite's only write lock until its step ends, so this thread cannot write anything "
                "else durable meanwhile. Use tx.create(), tx.send_event() or session=tx.session."
            )

    def _prepare_retry(
        self,
        error: CommitInDoubt | exc.DBAPIError,
        find_committed: Callable[[Tx], T | None] | None,
        budget: TimeBudget,
        tries: int,
    ) -> T | None:
        """Return None before another try, or what a commit in doubt has done; otherwise raise the error."""
        is_last = budget.is_spent or tries >= (_TRIES_OF_PASSES if budget.waits_for_server else _TRIES)
        if isinstance(error, CommitInDoubt):
            faults.log_commit_in_doubt(error.cause)
            budget.is_in_doubt = True
            if find_committed is not None and not budget.is_spent:
                found = self.transact(find_committed, timeouts=budget)
                budget.is_in_doubt = False
                if found is not None:
                    return found
            if is_last or budget.is_spent:
                raise faults.build_unavailable(error.cause, is_in_doubt=budget.is_in_doubt) from error.cause
        else:
            faults.raise_if_table_missing(error, self.tables.names, revision=REVISION)
            fault = classify_fault(error)
            if fault is Fault.NO_WRITES:  # after a failover, a new connection may reach the writable server
                self._connections.reconnect()
                if tries == 1:
                    logger.warning("The database takes no writes now: %s", str(error.orig).strip())
                is_last = is_last or not budget.waits_for_server
            elif fault not in (Fault.RETRY, Fault.CONNECTION_LOST):
                raise error
            if is_last or (fault is Fault.RETRY and tries >= _TRIES):
                raise faults.build_unavailable(error, is_in_doubt=budget.is_in_doubt) from error
            logger.debug("A transaction is repeated: %s", error.orig)
        self.runtime.back_off(tries)
        return None

    @property
    def is_write_locked_by_step(self) -> bool:
        """Whether an author's session in this process holds SQLite's only write lock, so that a write would wait."""
        return bool(self.step_transactions.threads_with_write_lock)

    def transact_once(self, work: Callable[[Tx], T], *, timeouts: Timeouts | None = LOOP) -> T:
        """Run ``work`` in one transaction, without retries. For work that may fail or that the caller repeats."""
        return self._run_transaction(work, TimeBudget(timeouts).next_deadline())

    def _run_with_user_statements(self, work: Callable[[Tx], T], deadline: float) -> T:
        return self._run_transaction(work, deadline, has_user_statements=True)

    def _run_transaction(self, work: Callable[[Tx], T], deadline: float, *, has_user_statements: bool = False) -> T:
        self._check_server(deadline)
        with self._connections.for_transaction(deadline) as conn:
            transaction = conn.begin()
            try:
                # After a user's statement, psycopg may deallocate all prepared statements.
                prepared = begin_prepared(conn) if self.owns_engine and not has_user_statements else None
                result = work(self.tx_type(conn, self, prepared))
            except BaseException:
                roll_back(transaction)
                raise
            self.runtime.checkpoint("before-commit")
            try:
                transaction.commit()
            except exc.DBAPIError as error:
                if classify_fault(error) is Fault.CONNECTION_LOST:
                    raise CommitInDoubt(error) from error
                raise
            self.runtime.checkpoint("after-commit")
            return result

    def read(self, work: Callable[[Tx], T], *, timeouts: Timeouts | None = ORDINARY) -> T:
        """Run ``work``, which only reads, in autocommit, twice after a transient error; raises StoreUnavailable."""
        budget = TimeBudget(timeouts)
        for is_last in (False, True):
            deadline = budget.next_deadline()
            try:
                self._check_server(deadline)
                with self._connections.for_reading(deadline) as conn:
                    return work(self.tx_type(conn, self))
            except exc.DBAPIError as error:
                faults.raise_if_table_missing(error, self.tables.names, revision=REVISION)
                if not self.is_transient(error):
                    raise
                if is_last or budget.is_spent:
                    raise faults.build_unavailable(error) from error
        raise AssertionError("unreachable")

    def join(self, session: Session) -> Tx:
        """Return a Tx in the application's transaction, for operations with ``session=``; raises StoreMismatch."""
        self.sessions.check_same_database(session)
        return self.tx_type(session.connection(), self)

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once what this thread has written with the store is committed."""
        callback()

    def transact_step(self, transaction: StepTransaction, work: Callable[[Tx], T]) -> T:
        """Run ``work`` in a step's own transaction and commit it, without retries; the commit may be in doubt."""
        with transaction.use() as conn:
            result = work(self.tx_type(conn, self))
            self.runtime.checkpoint("before-commit")
            transaction.commit()
        self.runtime.checkpoint("after-commit")
        return result

    # --- faults ---------------------------------------------------------------------------------

    @contextmanager
    def conflict_as_superseded(self) -> Iterator[None]:
        """Raise Superseded if a constraint of the store's tables is violated: another worker wrote the row first."""
        try:
            yield
        except exc.IntegrityError as error:
            raise Superseded(str(error.orig)) from error

    def to_database_error(self, error: BaseException) -> BaseException:
        """Return what a body raised as SQLAlchemy's exception, if a framework has wrapped it."""
        return error

    def is_transient(self, error: BaseException) -> bool:
        return faults.is_transient(self.to_database_error(error))

    def is_unique_violation(self, error: BaseException) -> bool:
        return faults.is_unique_violation(self.to_database_error(error))

    def is_rejection(self, error: BaseException) -> bool:
        return faults.is_rejection(self.to_database_error(error))

    is_commit_in_doubt = staticmethod(faults.is_commit_in_doubt)

    def close(self) -> None:
        """Close all connections, which no other thread may use; those that a timed-out body still holds, later."""
        self._connections.close()
        if self.owns_engine:
            event.listen(self.engine.pool, "checkin", lambda _, record: record.invalidate())
            self.engine.dispose()

    def _check_server(self, deadline: float) -> None:
        if not self._is_server_checked:
            with self._connections.borrow(deadline) as conn:
                dialects.check_server(conn)
            self._is_server_checked = True
