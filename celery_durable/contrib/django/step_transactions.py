"""The ``atomic()`` block of a step's body, which the commit of the step's record ends (LAW 3).

Django's connections belong to threads. The thread of the pass borrows the connection of a branch to commit it, as
Django's LiveServerThread does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from sqlalchemy import exc

from celery_durable import signals
from celery_durable.contrib.django.engines import to_database_error
from celery_durable.errors import StepTxMisuse
from celery_durable.store.engine.drivers import roll_back_and_block_writes
from celery_durable.store.engine.faults import CommitInDoubt, Fault, classify_fault, log_commit_in_doubt
from celery_durable.store.engine.sessions import UserWrite

# Closes the connections that Django opened for bodies, as Celery's own fixup does for tasks.
#
# The fixup closes the connections of the thread that runs a task. The bodies of branches run on other threads, whose
# connections it does not close.


class _Passes(threading.local):
    count = 0


_passes = _Passes()
"""How many passes this thread runs: more than one if eager tasks run inside a step."""


def connect() -> None:
    """Close connections after passes and after the bodies of branches, from now on."""
    signals.around_pass.connect(_around_pass)
    signals.around_step.connect(_around_body)


def is_branch_thread() -> bool:
    """Whether this thread runs the body of a branch, and not a pass. Its connections are closed after each body."""
    return not _passes.count


@contextmanager
def _around_pass(**_: Any) -> Iterator[None]:
    _passes.count += 1
    _close_old()
    try:
        yield
    finally:
        _passes.count -= 1
        _close_old()


@contextmanager
def _around_body(**_: Any) -> Iterator[None]:
    try:
        yield
    finally:
        if is_branch_thread():
            _close_all()


def _close_old() -> None:
    """Close connections that have failed or are older than CONN_MAX_AGE, as at the end of a request."""
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:  # the block of a test would end with its connection
            wrapper.close_if_unusable_or_obsolete()


def _close_all() -> None:
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:  # the block of this step; the pass commits it and closes the connection
            wrapper.close()


logger = logging.getLogger("celery_durable.django")

_READ_COMMITTED = 2


class _NotCommitted(Exception): ...


class OrmTransactions:
    """Opens steps' transactions on one alias. ``connect``: returns the thread's Django connection for SQLAlchemy."""

    opens_before_body = True

    def __init__(self, alias: str, connect: Callable[[], sa.Connection]) -> None:
        self.alias, self.connect = alias, connect
        self.threads_with_write_lock: set[int] = set()
        self._open: set[int] = set()

    def begin(self, step: str) -> OrmTransaction:
        """Enter ``atomic()`` on the calling thread."""
        return OrmTransaction(self, step)

    @staticmethod
    def run_writes(_: sa.Connection, writes: Sequence[UserWrite]) -> None:
        """Call the functions of `StepTx.mutate`: the ORM is in the transaction already."""
        for write in writes:
            write.fn()

    def is_open(self, wrapper: BaseDatabaseWrapper) -> bool:
        """Whether the connection is in the transaction of a step."""
        return id(wrapper) in self._open

    def note_open(self, wrapper: BaseDatabaseWrapper, thread: int) -> None:
        """Remember that a step's transaction is open."""
        self._open.add(id(wrapper))
        if wrapper.vendor == "sqlite":
            self.threads_with_write_lock.add(thread)

    def note_closed(self, wrapper: BaseDatabaseWrapper, thread: int) -> None:
        """Forget a step's transaction, which has ended."""
        self._open.discard(id(wrapper))
        self.threads_with_write_lock.discard(thread)


class OrmTransaction:
    """The ``atomic()`` block of one attempt (`StepTransaction`)."""

    def __init__(self, transactions: OrmTransactions, step: str) -> None:
        self._transactions, self._alias, self._step = transactions, transactions.alias, step
        self._wrapper, self._thread = connections[self._alias], threading.get_ident()
        self._is_outermost = not self._wrapper.in_atomic_block  # else it is a savepoint in the block of a test
        self._is_committed = self._is_abandoned = False
        self._closes_connection = is_branch_thread()
        if self._is_outermost:
            _close_if_broken(self._wrapper)
        self._block = transaction.atomic(using=self._alias)
        self._block.__enter__()
        self._is_open = True
        if self._is_outermost:
            transactions.note_open(self._wrapper, self._thread)
            try:
                # The first hook: a commit has happened if it ran, whatever the hooks of the author raise.
                transaction.on_commit(self._note_commit, using=self._alias)
                _set_isolation(self._wrapper)
            except BaseException:
                self.close()
                raise

    def _note_commit(self) -> None:
        self._is_committed = True

    @property
    def session(self) -> Any:
        """Refuse: Django's ORM is in the transaction already."""
        raise StepTxMisuse(
            f"tx.session in step {self._step!r}: this project's steps use Django's ORM, which is in the step's "
            "transaction already. Write with your models, or with tx.mutate(function)."
        )

    @contextmanager
    def use(self) -> Iterator[sa.Connection]:
        """Make the body's connection the calling thread's own; yields it for SQLAlchemy."""
        with self._borrow(), _faults_of_drivers(), self._transactions.connect() as connection:
            yield connection

    @contextmanager
    def _borrow(self) -> Iterator[None]:
        if threading.get_ident() == self._thread:
            yield
            return
        before = next((c for c in connections.all(initialized_only=True) if c.alias == self._alias), None)
        self._wrapper.inc_thread_sharing()
        connections[self._alias] = self._wrapper
        try:
            yield
        finally:
            if before is None:
                del connections[self._alias]
            else:
                connections[self._alias] = before
            self._wrapper.dec_thread_sharing()

    def run_writes(self, writes: Sequence[UserWrite]) -> None:
        """Call the functions of `StepTx.mutate` inside the block."""
        for write in writes:
            write.fn()

    def commit(self) -> None:
        """Leave the block, which commits it and calls its hooks; raises CommitInDoubt."""
        self._is_open = False
        try:
            self._block.__exit__(None, None, None)
        except Exception as error:
            if self._is_committed:
                logger.exception("A hook of transaction.on_commit failed after step %r was committed", self._step)
                return
            known = to_database_error(error)
            if isinstance(known, exc.DBAPIError) and classify_fault(known) is Fault.CONNECTION_LOST:
                log_commit_in_doubt(known)
                raise CommitInDoubt(known) from error
            raise known from error
        finally:
            self._transactions.note_closed(self._wrapper, self._thread)
        if self._is_outermost and not self._is_committed:  # Django does not commit a connection that was closed
            lost = exc.OperationalError("COMMIT", None, Error("the connection was closed inside the step"))
            raise CommitInDoubt(lost)

    def abandon(self) -> None:
        """Take SQLite's write lock away from a body that still runs. Other databases roll back in `close`."""
        if self._wrapper.vendor == "sqlite" and self._is_outermost and self._is_open:
            self._is_abandoned = True
            roll_back_and_block_writes(self._wrapper.connection)

    def close(self) -> None:
        """Roll back a block that is still open. A branch's connection is closed: its thread may end at any time."""
        with self._borrow():
            try:
                if self._is_open:
                    self._is_open = False
                    self._block.__exit__(_NotCommitted, _NotCommitted(), None)
            except Error as error:
                logger.info("A step's transaction was closed after its connection was lost: %s", error)
            finally:
                self._transactions.note_closed(self._wrapper, self._thread)
            if self._is_outermost:
                if self._is_abandoned or self._closes_connection:
                    self._wrapper.close()
                else:
                    _close_if_broken(self._wrapper)


def _close_if_broken(wrapper: BaseDatabaseWrapper) -> None:
    if wrapper.errors_occurred:
        wrapper.close_if_unusable_or_obsolete()


def _set_isolation(wrapper: BaseDatabaseWrapper) -> None:
    """Make the transaction READ COMMITTED on PostgreSQL, and take SQLite's write lock.

    REPEATABLE READ would fail as soon as the lease is renewed while the body runs. SQLite fails at once, instead of
    waiting, if a transaction that has read wants to write.
    """
    if wrapper.vendor == "postgresql":
        if wrapper.settings_dict["OPTIONS"].get("isolation_level", _READ_COMMITTED) != _READ_COMMITTED:
            with wrapper.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    elif wrapper.vendor == "sqlite":
        with wrapper.cursor() as cursor:
            cursor.execute("ROLLBACK")
            cursor.execute("BEGIN IMMEDIATE")


@contextmanager
def _faults_of_drivers() -> Iterator[None]:
    """Raise errors of the record's statements as the store's own connections do."""
    try:
        yield
    except exc.DBAPIError as error:
        if isinstance(error.orig, TransactionManagementError):  # the body ignored an error: the step fails
            raise exc.PendingRollbackError(str(error.orig)) from error.orig
        raise to_database_error(error) from error.__cause__
