"""Transactions that the store does not begin itself: of a step's body (`StepTx.session`), and of a web framework."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.util import await_only

from celery_durable.errors import StepTxMisuse, StoreMismatch, ValueRefused
from celery_durable.store.engine import drivers
from celery_durable.store.engine.connections import Connections
from celery_durable.store.engine.faults import CommitInDoubt, Fault, classify_fault, log_commit_in_doubt
from celery_durable.store.schema.dialects import Database

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session, SessionTransaction


@dataclass(frozen=True, slots=True)
class UserWrite:
    """A function that writes in the commit of a step, from `StepTx.mutate`. ``step``: the step's name."""

    step: str
    fn: Callable[..., object]


class StepTransaction(Protocol):
    """The transaction of one attempt. Its body writes in it."""

    @property
    def session(self) -> Session:
        """What `StepTx.session` returns; raises StepTxMisuse if bodies write in another way."""

    def use(self) -> AbstractContextManager[sa.Connection]:
        """Make it the transaction of the calling thread, which may not be the body's. Yields its connection."""

    def run_writes(self, writes: Sequence[UserWrite]) -> None:
        """Send what the body has written to the database, then run these writes. Called inside `use`."""

    def commit(self) -> None:
        """Commit it; raises CommitInDoubt if the connection is lost meanwhile. Called inside `use`."""

    def abandon(self) -> None:
        """Make sure that a body which did not end in time keeps no lock. Another thread may use the transaction."""

    def close(self) -> None:
        """Roll back what is not committed, and give back the connection."""


class StepTransactions(Protocol):
    """Opens the transactions of steps."""

    opens_before_body: bool
    """Whether a body that takes `StepTx` runs inside its transaction. Otherwise the body opens it when it needs it."""
    threads_with_write_lock: set[int]
    """The threads whose open transaction holds SQLite's only write lock."""

    def begin(self, step: str) -> StepTransaction:
        """Begin a transaction on the thread of a body. ``step`` is the step's name, for errors."""

    def run_writes(self, connection: sa.Connection, writes: Sequence[UserWrite]) -> None:
        """Run writes in a transaction of the store, for a body that has opened none."""


class Framework(Protocol):
    """The web framework whose database the store uses."""

    step_transactions: StepTransactions

    def is_in_transaction(self) -> bool:
        """Whether the calling thread is in a transaction of the framework. The store's work then becomes part of it."""

    def is_in_step(self) -> bool:
        """Whether that transaction is a step's. What the engine writes for itself stays out of it."""

    def join(self) -> AbstractContextManager[sa.Connection]:
        """Yield the connection of that transaction. Errors of the database leave it as the framework's exceptions."""

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once what the calling thread has written is committed, never if it is rolled back."""

    def to_database_error(self, error: BaseException) -> BaseException:
        """Return an exception of the framework as SQLAlchemy's, with the driver's own in ``orig``; others unchanged."""


logger = logging.getLogger("celery_durable.store")

_THREAD = "celery_durable.thread"
_DRIVER = "celery_durable.driver_connection"
_ABANDONED = "celery_durable.is_abandoned"
_CALLBACKS = "celery_durable.after_commit"


class StepSessions:
    """The sessions of steps that are open in this process, by the application's ``factory`` or plain."""

    opens_before_body = False

    def __init__(
        self, engine: sa.Engine, factory: Callable[[], Session] | None, database: Database, connections: Connections
    ) -> None:
        self._engine, self.factory, self._database, self._connections = engine, factory, database, connections
        self.threads_with_write_lock: set[int] = set()
        """The threads whose session holds SQLite's only write lock: another write of theirs would never end."""

    def begin(self, step: str) -> StepSession:
        return StepSession(self, self.open(), step)

    @staticmethod
    def run_writes(connection: sa.Connection, writes: Sequence[UserWrite]) -> None:
        session = make_session(connection, join_transaction_mode="rollback_only")
        for write in writes:
            _block_transaction_control(session, write.step)
            try:
                write.fn(session)
            finally:
                _restore_transaction_control(session)
        session.flush()
        session.close()  # does not end the transaction, which belongs to the step's commit

    def open(self) -> Session:
        """Open a session for a step's own transaction, with the store's isolation level."""
        # Keeps the process at two connections: the one of this session, and the one that renews leases.
        self._connections.release_idle()
        if self.factory is None:
            session = make_session(self._engine)
        else:
            session = self.factory()
            self.check_same_database(session)
        if self._database.has_one_writer:
            connection = session.connection()
            drivers.begin_immediate(connection)
            session.info[_DRIVER] = connection.connection.driver_connection
            session.info[_THREAD] = threading.get_ident()
            self.threads_with_write_lock.add(threading.get_ident())
        elif self.factory is not None:
            with self._connections.wrap_driver_errors():
                session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        return session

    def check_same_database(self, session: Session) -> None:
        """Raise StoreMismatch if a session has another database, ValueRefused if it cannot be used."""
        if hasattr(session, "sync_session"):
            raise ValueRefused("session= is an AsyncSession: pass it to the async method, such as `await acreate()`.")
        if not hasattr(session, "get_bind"):
            raise ValueRefused(
                f"session={session!r} is no session: pass an SQLAlchemy Session, such as Session(engine)."
            )
        try:
            url = session.get_bind().engine.url
        except exc.UnboundExecutionError as error:
            raise ValueRefused(
                "session= is bound to no single engine: pass a session of the database of the workflows, such as "
                "Session(engine)."
            ) from error
        if _identify_database(url) != _identify_database(self._engine.url):
            raise StoreMismatch(url.render_as_string(), self._engine.url.render_as_string())

    def close(self, session: Session) -> None:
        self.threads_with_write_lock.discard(session.info.pop(_THREAD, 0))
        session.info.pop(_DRIVER, None)
        # The session's own close() and invalidate() are blocked for authors, so they are called through its type. A
        # connection whose writes were blocked must not go back to the pool.
        end = type(session).invalidate if session.info.pop(_ABANDONED, False) else type(session).close
        try:
            with self._connections.wrap_driver_errors():
                end(session)
        except exc.DBAPIError as error:
            logger.info("A step's session was closed after its connection was lost: %s", error.orig)


class StepSession:
    def __init__(self, sessions: StepSessions, session: Session, step: str) -> None:
        self._sessions, self.session = sessions, _block_transaction_control(session, step)

    @contextmanager
    def use(self) -> Iterator[sa.Connection]:
        """Yield the session's connection, which any thread may use."""
        yield self.session.connection()

    def run_writes(self, writes: Sequence[UserWrite]) -> None:
        """Flush what the body has written, then run these writes in its session."""
        self.session.flush()
        for write in writes:
            write.fn(self.session)
        self.session.flush()

    def commit(self) -> None:
        session = self.session
        try:
            type(session).commit(session)  # the session's own commit() is blocked for the step's body
        except exc.DBAPIError as error:
            if classify_fault(error) is Fault.CONNECTION_LOST:
                log_commit_in_doubt(error)
                # The lock ended with the connection.
                self._sessions.threads_with_write_lock.discard(session.info.pop(_THREAD, 0))
                raise CommitInDoubt(error) from error
            raise

    def abandon(self) -> None:
        """Take SQLite's write lock from a session whose body did not end in time. Its next write fails."""
        if (driver := self.session.info.pop(_DRIVER, None)) is not None:
            self.session.info[_ABANDONED] = True
            drivers.roll_back_and_block_writes(driver)

    def close(self) -> None:
        """Roll back what is not committed. A shared factory may then return the same session to the application."""
        self._sessions.close(self.session)
        _restore_transaction_control(self.session)


def make_session(bind: sa.Engine | sa.Connection, **options: Any) -> Session:
    """Make a plain session. The ORM is imported here: it takes a tenth of a second, and most processes need none."""
    from sqlalchemy.orm import Session  # noqa: PLC0415

    return Session(bind, expire_on_commit=False, **options)


_BLOCKED_METHODS = ("commit", "rollback", "close", "reset", "invalidate", "prepare")


def _block_transaction_control(session: Session, step: str) -> Session:
    """Make the methods that begin or end a transaction raise StepTxMisuse."""
    for method in _BLOCKED_METHODS:
        setattr(session, method, _make_blocked_method(step, method))

    def begin(*, nested: bool = False) -> Any:
        # Leaving `with session.begin():` would commit. begin_nested() calls this too, and savepoints are allowed.
        return type(session).begin(session, nested=True) if nested else _make_blocked_method(step, "begin")()

    vars(session)["begin"] = begin
    return session


def _restore_transaction_control(session: Session) -> None:
    """Undo `_block_transaction_control`."""
    for method in (*_BLOCKED_METHODS, "begin"):
        vars(session).pop(method, None)


def _make_blocked_method(step: str, method: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise StepTxMisuse(
            f"tx.session.{method}() in step {step!r}: the session commits with the step's record. "
            "Return to commit, raise to roll back, use tx.session.begin_nested() for a savepoint."
        )

    return refuse


def after_commit(session: Session, callback: Callable[[], object]) -> None:
    """Call ``callback`` once after the session's transaction has committed. Discard it if that rolls back."""
    session = session.registry() if hasattr(session, "registry") else session
    if _CALLBACKS not in session.info:
        # The listeners stay for the life of the session: one cannot be removed while it is being called.
        event.listen(session, "after_commit", _run_callbacks)
        event.listen(session, "after_transaction_end", _discard_callbacks)  # a rollback, or close() without one
    session.info.setdefault(_CALLBACKS, []).append(callback)


def _run_callbacks(session: Session) -> None:
    if not session.in_nested_transaction():  # releasing a savepoint is not a commit
        callbacks, session.info[_CALLBACKS] = session.info[_CALLBACKS], []
        for callback in callbacks:
            if session.get_bind().dialect.is_async:  # the event loop does not wait for the broker
                await_only(asyncio.to_thread(callback))
            else:
                callback()


def _discard_callbacks(session: Session, ended: SessionTransaction) -> None:
    if ended.parent is None:
        session.info[_CALLBACKS] = []


_PORTS = {"postgresql": 5432, "mysql": 3306}


def _identify_database(url: sa.URL) -> tuple[Any, ...]:
    """Return the parts of a URL that name the database: not the driver, not the credentials."""
    backend = "mysql" if url.get_backend_name() == "mariadb" else url.get_backend_name()
    if backend == "sqlite":
        return backend, Path(url.database or "").resolve()
    return backend, url.host, url.port or _PORTS.get(backend), url.database
