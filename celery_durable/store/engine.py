"""The store: connections, transactions with bounded retries, and statements that are compiled once."""

from __future__ import annotations

import copy
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.orm import Session, SessionTransaction

from celery_durable.errors import (
    ConfigInvalid,
    SchemaOutdated,
    StepTxMisuse,
    StoreMismatch,
    StoreUnavailable,
    Superseded,
)
from celery_durable.runtime import Runtime
from celery_durable.store import dialects
from celery_durable.store.connections import Connections
from celery_durable.store.dialects import CLOCK_PARAM, Database, Fault, fault_of
from celery_durable.store.schema import REVISION, Tables, build_tables
from celery_durable.store.watchdog import LOOP, ORDINARY, Bound, Window

T = TypeVar("T")
logger = logging.getLogger("celery_durable.store")

_TRIES = 8
_PARAM = "p_"


class Statement:
    """An internal statement: built from a store's tables, compiled once, then run through the driver.

    Measured: 83 us of client time per statement on a kept connection. Core's execute takes 111 us, and a connection
    from the pool for every statement 213 us.
    """

    def __init__(self, build: Callable[[Store], Any]) -> None:
        self.build = build
        self.name = build.__name__


def statement(build: Callable[[Store], Any]) -> Statement:
    """Make a Statement of a function from store to SQLAlchemy statement. Its `param`s are keywords of `Tx.run`."""
    return Statement(build)


def param(name: str, type_: Any = None) -> sa.BindParameter[Any]:
    """Return a parameter of a Statement. Its prefix avoids the names that SQLAlchemy gives to column values."""
    return sa.bindparam(_PARAM + name, type_=type_)


class _Compiled:
    def __init__(self, store: Store, built: Any, dialect: sa.Dialect) -> None:
        compiled = built.compile(dialect=dialect)
        self.sql: str = compiled.string
        # Only parameters with a value. If a caller forgets a keyword, the driver reports an error instead of writing
        # NULL.
        self._defaults: dict[str, Any] = {
            name: bound.effective_value for bound, name in compiled.bind_names.items() if not bound.required
        }
        self._order: Sequence[str] | None = compiled.positiontup if compiled.positional else None
        self.clock = store.runtime.clock if CLOCK_PARAM in self._defaults else None

    def bind(self, params: dict[str, Any]) -> Any:
        values = self._defaults.copy()
        for name, value in params.items():
            values[_PARAM + name] = value
        if self.clock is not None:
            values[CLOCK_PARAM] = self.clock()
        return values if self._order is None else tuple([values[name] for name in self._order])

    def under(self, clock: Callable[[], int] | None) -> _Compiled:
        """Return the same statement with another clock."""
        other = copy.copy(self)
        other.clock = clock if CLOCK_PARAM in self._defaults else None
        return other


Lent = dict[tuple[Statement, str, str], _Compiled]


class Tx:
    """A connection in a transaction (or in autocommit, for a single statement), with the store's statements."""

    __slots__ = ("conn", "store")

    def __init__(self, conn: sa.Connection, store: Store) -> None:
        self.conn, self.store = conn, store

    @property
    def t(self) -> Tables:
        """The store's tables."""
        return self.store.tables

    def run(self, what: Statement, /, **params: Any) -> sa.CursorResult[Any]:
        """Run a Statement."""
        compiled = self.store.compiled(what, self.conn.dialect)
        return self.conn.exec_driver_sql(compiled.sql, compiled.bind(params))

    def run_many(self, what: Statement, rows: Sequence[dict[str, Any]], /) -> None:
        """Run a Statement once for each row of parameters."""
        if rows:
            compiled = self.store.compiled(what, self.conn.dialect)
            self.conn.exec_driver_sql(compiled.sql, [compiled.bind(row) for row in rows])

    def execute(self, built: Any, /, **params: Any) -> sa.CursorResult[Any]:
        """Run a statement whose shape depends on its arguments (lists, IN)."""
        return self.conn.execute(built, {_PARAM + name: value for name, value in params.items()})


class Store:
    """One database that holds workflows. Threads may share it, and forked processes may inherit it."""

    def __init__(
        self,
        url: str | sa.URL | None = None,
        *,
        engine: sa.Engine | None = None,
        session_factory: Callable[[], Session] | None = None,
        schema: str | None = None,
        prefix: str = "",
        prepared_statements: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        if engine is None:
            if url is None:
                raise ConfigInvalid(
                    "durable_database_url",
                    None,
                    "set it to your database, for example postgresql+psycopg://user@host/db",
                )
            where = sa.make_url(url)
            if where.get_backend_name() == "sqlite" and where.database in (None, "", ":memory:"):
                raise ConfigInvalid(
                    "durable_database_url", str(url), "in memory each thread has a database of its own; name a file"
                )
            engine = dialects.make_engine(where, prepared_statements=prepared_statements)
            self._owns_engine = True
        else:
            self._owns_engine = False
        self.database: Database = dialects.database_of(engine.url)
        self.engine = dialects.for_writing(engine, is_ours=self._owns_engine)
        self.session_factory = session_factory
        self.schema, self.prefix = schema, prefix
        self.tables = build_tables(schema, prefix)
        self.runtime = runtime or Runtime()
        self._statements: Lent = {}
        self._connections = Connections(
            self.engine,
            is_ours=self._owns_engine,
            has_sockets=not self.database.has_one_writer,
            shares=self.database.fuses_writes,
        )
        self._is_checked = False
        self.id: str | None = None
        """The id of the database, after `database_identity.store_id` has read it."""
        self._session_threads: set[int] = set()

    # --- statements -----------------------------------------------------------------------------

    def clock(self) -> sa.ColumnElement[int]:
        """Return the current time, which advances within a transaction. Tests replace it with their own clock."""
        return self._clock_or(dialects.clock())

    def statement_clock(self) -> sa.ColumnElement[int]:
        """Return the current time, fixed for a statement: for conditions that search an index."""
        return self._clock_or(dialects.statement_clock())

    def _clock_or(self, real: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        if self.runtime.clock is None:
            return real
        return sa.bindparam(CLOCK_PARAM, callable_=self.runtime.clock, type_=sa.BigInteger)

    def compiled(self, what: Statement, dialect: sa.Dialect | None = None) -> _Compiled:
        """Compile ``what`` for a connection's dialect. A joined session may use another driver than the store."""
        dialect = dialect or self.engine.dialect
        key = (what, dialect.driver, dialect.paramstyle)
        found = self._statements.get(key)
        if found is None:
            found = self._statements[key] = _Compiled(self, what.build(self), dialect)
        return found

    def lend_statements(self) -> Lent:
        """Return the statements compiled so far, for `borrow_statements` of another store."""
        return dict(self._statements)

    def borrow_statements(self, lent: Lent) -> None:
        """Take over the statements of a store with the same schema, prefix and kind of clock.

        For tests: compiling takes a third of the time of a store that serves one test.
        """
        self._statements = {key: compiled.under(self.runtime.clock) for key, compiled in lent.items()}

    # --- transactions ---------------------------------------------------------------------------

    def transact(
        self,
        work: Callable[[Tx], T],
        *,
        resolve: Callable[[Tx], T | None] | None = None,
        single: bool = False,
        bound: Bound | None = ORDINARY,
    ) -> T:
        """Run ``work`` in one transaction, and again if the database reports that nothing was applied.

        ``work`` may run several times. If the connection is lost during the commit, the commit is in doubt. Then
        ``resolve`` runs in a new transaction: its return value is the result, and None means that nothing was
        applied.

        ``single`` says that ``work`` is one statement if the database can fuse writes. It then runs in autocommit on
        the kept connection, in one round trip. ``bound`` is how long the database may take, or None if ``work`` runs
        an author's statements too.
        """
        return self._transact(work, resolve, Window(bound), single=single)

    def _transact(
        self, work: Callable[[Tx], T], resolve: Callable[[Tx], T | None] | None, window: Window, *, single: bool
    ) -> T:
        if threading.get_ident() in self._session_threads:
            raise StepTxMisuse(
                "tx.session holds SQLite's only write lock until its step ends, so this thread cannot write anything "
                "else durable meanwhile. Use tx.create(), tx.send_event() or session=tx.session."
            )
        for left in reversed(range(_TRIES)):
            try:
                return self._once(work, self._deadline(window), single=single)
            except _Unknown as unknown:
                _tell_unknown(unknown.cause)
                if resolve is not None and not window.is_over:
                    found = self._transact(resolve, None, window, single=False)
                    if found is not None:
                        return found
                if left == 0 or window.is_over:
                    raise unknown.cause from None
            except exc.DBAPIError as error:
                self._explain(error)
                fault = fault_of(error)
                if fault is Fault.NO_WRITES:  # another server may be the writable one now
                    self._connections.renew()
                    logger.warning("The database takes no writes now: %s", str(error.orig).strip())
                    raise
                if left == 0 or window.is_over or fault not in (Fault.RETRY, Fault.LOST):
                    raise
                logger.info("A transaction is repeated: %s", error.orig)
            self.runtime.back_off(_TRIES - left)
        raise AssertionError("unreachable")

    @property
    def is_held_by_a_step(self) -> bool:
        """Whether a step's session of this process holds SQLite's only write lock, so that a write would wait."""
        return bool(self._session_threads)

    def attempt(self, work: Callable[[Tx], T], *, bound: Bound | None = LOOP) -> T:
        """Run ``work`` in one transaction, without retries, for work that may be skipped. Raises any error."""
        return self._once(work, self._deadline(Window(bound)), single=False)

    @staticmethod
    def _deadline(window: Window) -> float:
        """Return the deadline of the next try; raises StoreUnavailable if the caller's time limit is used up."""
        if window.is_over:
            raise StoreUnavailable
        return window.next()

    def _once(self, work: Callable[[Tx], T], deadline: float, *, single: bool) -> T:
        if single and self.database.fuses_writes:
            with self.kept(deadline) as tx:
                return work(tx)
        self._check_once(deadline)
        with self._connections.for_transaction(deadline) as conn:
            transaction = conn.begin()
            try:
                result = work(Tx(conn, self))
            except BaseException:
                _roll_back(transaction)
                raise
            self.runtime.checkpoint("before-commit")
            try:
                transaction.commit()
            except exc.DBAPIError as error:
                if fault_of(error) is Fault.LOST:
                    raise _Unknown(error) from error
                raise
            self.runtime.checkpoint("after-commit")
            return result

    @contextmanager
    def kept(self, deadline: float = math.inf) -> Iterator[Tx]:
        """Yield the calling thread's own autocommit connection. It is dropped after any error.

        Raises _Unknown for a lost connection: a single statement may or may not have been applied.
        """
        self._check_once(deadline)
        kept = self._connections.take(deadline)
        try:
            self.runtime.checkpoint("before-commit")
            yield Tx(kept.conn, self)
            self.runtime.checkpoint("after-commit")
        except exc.DBAPIError as error:
            self._connections.drop(kept)
            if fault_of(error) is Fault.LOST:
                raise _Unknown(error) from error
            raise
        except BaseException:
            self._connections.drop(kept)  # It may be in the middle of a statement. The pool finds out.
            raise
        self._connections.keep(kept)

    def read(self, work: Callable[[Tx], T], *, bound: Bound | None = ORDINARY) -> T:
        """Run ``work``, which only reads. Retries once if the connection was lost or the file was locked."""
        window = Window(bound)

        def once() -> T:
            deadline = self._deadline(window)
            self._check_once(deadline)
            with self._connections.for_reading(deadline) as conn:
                return work(Tx(conn, self))

        try:
            return once()
        except exc.DBAPIError as error:
            self._explain(error)
            if window.is_over or not self.is_transient(error):
                raise
            return once()

    def _explain(self, error: exc.DBAPIError) -> None:
        """Raise SchemaOutdated if a table of the store is missing. Errors about an author's tables stay as they are."""
        if fault_of(error) is Fault.NO_TABLE:
            names = [table.name for table in self.tables.metadata.tables.values()]
            if any(re.search(rf"\b{re.escape(name)}\b", str(error.orig)) for name in names):
                raise SchemaOutdated(None, REVISION) from error

    def join(self, session: Session) -> Tx:
        """Join the caller's own transaction, for `create(session=)` and the like; raises StoreMismatch."""
        self._check_place(session)
        return Tx(session.connection(), self)

    def after_commit(self, session: Session, tell: Callable[[], None]) -> None:
        """Call ``tell`` once after the caller's own transaction has committed, but not if it rolls back."""
        if _TELL not in session.info:
            # For the life of the session: a listener cannot be removed while it is being called.
            event.listen(session, "after_commit", _tell)
            event.listen(session, "after_transaction_end", _forget)  # a rollback, or close() without one
        session.info.setdefault(_TELL, []).append(tell)

    def open_session(self) -> Session:
        """Open a session for a step's own transaction, at the store's isolation level even from a shared factory."""
        self._connections.release()  # the session's connection is the second, next to the one that renews the lease
        if self.session_factory is None:
            session = Session(self.engine, expire_on_commit=False)
        else:
            session = self.session_factory()
            self._check_place(session)
        if self.database.has_one_writer:
            connection = session.connection()
            dialects.begin_immediate(connection)
            session.info[_DRIVER] = connection.connection.driver_connection
            session.info[_THREAD] = threading.get_ident()
            self._session_threads.add(threading.get_ident())
        elif self.session_factory is not None:
            with self._connections.wrapping():
                session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        return session

    def _check_place(self, session: Session) -> None:
        url = session.get_bind().engine.url
        if _place(url) != _place(self.engine.url):
            raise StoreMismatch(url.render_as_string(), self.engine.url.render_as_string())

    def transact_session(self, session: Session, work: Callable[[Tx], T]) -> T:
        """Run ``work`` in a step's own transaction and commit it, once. See `is_unknown` for a commit in doubt."""
        result = work(Tx(session.connection(), self))
        self.runtime.checkpoint("before-commit")
        try:
            type(session).commit(session)
        except exc.DBAPIError as error:
            if fault_of(error) is Fault.LOST:
                _tell_unknown(error)
                self._session_threads.discard(session.info.pop(_THREAD, 0))  # the lock ended with the connection
                raise _Unknown(error) from error
            raise
        self.runtime.checkpoint("after-commit")
        return result

    def abandon_session(self, session: Session) -> None:
        """Roll back a session that an abandoned body still holds, if it keeps all others from writing (SQLite).

        The body's thread may be using the session, and gets an error at its next write. For other databases this does
        nothing: `close_session` rolls back.
        """
        if (driver := session.info.pop(_DRIVER, None)) is not None:
            session.info[_ABANDONED] = True
            dialects.disarm(driver)

    def close_session(self, session: Session) -> None:
        """Close a step's session and roll back what it has not committed."""
        self._session_threads.discard(session.info.pop(_THREAD, 0))
        session.info.pop(_DRIVER, None)
        # Authors cannot use the session's own close() and invalidate(), so they are called through its type. A
        # connection that cannot write must not be used again.
        end = type(session).invalidate if session.info.pop(_ABANDONED, False) else type(session).close
        try:
            with self._connections.wrapping():
                end(session)
        except exc.DBAPIError as error:
            logger.info("A step's session was closed after its connection was lost: %s", error.orig)

    def run_author_writes(self, tx: Tx, writes: Sequence[Callable[[Session], object]], session: Session | None) -> None:
        """Run the writes that a body buffered with `StepTx.mutate`, in the boundary's transaction."""
        own = session or Session(tx.conn, join_transaction_mode="rollback_only", expire_on_commit=False)
        for write in writes:
            write(own)
        own.flush()
        if session is None:
            own.close()  # leaves the transaction open, which belongs to the boundary

    # --- faults ---------------------------------------------------------------------------------

    @contextmanager
    def conflict_as_superseded(self) -> Iterator[None]:
        """Raise Superseded if a constraint of the store's tables is violated: another worker wrote the row first."""
        try:
            yield
        except exc.IntegrityError as error:
            raise Superseded(str(error.orig)) from error

    @staticmethod
    def is_transient(error: BaseException) -> bool:
        """Whether nothing was applied and a retry may succeed, as after a deadlock or a lost connection."""
        if isinstance(error, exc.TimeoutError):  # of the application's pool
            return True
        return isinstance(error, exc.DBAPIError) and fault_of(error) in (Fault.RETRY, Fault.LOST, Fault.NO_WRITES)

    @staticmethod
    def is_unique_violation(error: BaseException) -> bool:
        """Whether a unique constraint was violated."""
        return isinstance(error, exc.DBAPIError) and fault_of(error) is Fault.UNIQUE

    @staticmethod
    def is_refusal(error: BaseException) -> bool:
        """Whether the database rejects the transaction: a constraint, or an earlier error that was ignored in it."""
        if isinstance(error, exc.DBAPIError):
            return fault_of(error) in (Fault.UNIQUE, Fault.CONSTRAINT)
        return isinstance(error, exc.PendingRollbackError)

    @staticmethod
    def is_unknown(error: BaseException) -> bool:
        """Whether the connection was lost during a commit."""
        return isinstance(error, _Unknown)

    def close(self) -> None:
        """Close the connections of the store's own engine. No other thread may be using the store.

        A connection that an abandoned body still holds is closed when the body gives it back.
        """
        self._connections.close()
        if self._owns_engine:
            event.listen(self.engine.pool, "checkin", lambda _, record: record.invalidate())
            self.engine.dispose()

    def _check_once(self, deadline: float) -> None:
        if not self._is_checked:
            with self._connections.borrowed(deadline) as conn:
                dialects.check_server(conn)
            self._is_checked = True


_THREAD = "celery_durable.thread"
_DRIVER = "celery_durable.driver_connection"
_ABANDONED = "celery_durable.is_abandoned"
_TELL = "celery_durable.after_commit"


def _tell(session: Session) -> None:
    if not session.in_nested_transaction():  # releasing a savepoint is not a commit
        tells, session.info[_TELL] = session.info[_TELL], []
        for tell in tells:
            tell()


def _forget(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is None:
        session.info[_TELL] = []


class _Unknown(Exception):
    """The connection was lost during a commit."""

    def __init__(self, cause: exc.DBAPIError) -> None:
        self.cause = cause
        super().__init__(str(cause.orig))


def _tell_unknown(cause: exc.DBAPIError) -> None:
    logger.warning("The outcome of a commit is unknown, looking it up: %s", cause)


def _roll_back(transaction: sa.RootTransaction) -> None:
    try:
        transaction.rollback()
    except exc.DBAPIError as error:
        # The connection is gone, and so is the transaction. The original error is being raised.
        logger.info("A rollback found the connection lost: %s", error.orig)


_PORTS = {"postgresql": 5432, "mysql": 3306}


def _place(url: sa.URL) -> tuple[Any, ...]:
    """Return which database a URL names, whatever the driver and the credentials."""
    backend = "mysql" if url.get_backend_name() == "mariadb" else url.get_backend_name()
    if backend == "sqlite":
        return backend, Path(url.database or "").resolve()
    return backend, url.host, url.port or _PORTS.get(backend), url.database
