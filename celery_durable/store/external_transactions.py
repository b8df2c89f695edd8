"""Transactions that the store does not begin itself: those of a step's body, and those of a web framework.

A step's transaction is opened by the step's body and ended by the commit that records the step (LAW 3). `StepSessions`
opens SQLAlchemy sessions for it. A store on the database of a web framework has a `Framework`, which opens the
framework's own transactions, and whose callers' open transactions the store's work joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import sqlalchemy as sa

if TYPE_CHECKING:  # the ORM takes a tenth of a second to import
    from sqlalchemy.orm import Session


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
