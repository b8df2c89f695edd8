"""Connections to SQLite that are used again when they are closed: opening one, and compiling its statements, costs.

A schedule cuts connections and kills processes. The old user of such a connection finds it closed, and what it had not
committed is rolled back. The next one that connects gets the connection of SQLite behind it.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable
from typing import Any

_STATEMENTS = 500
"""How many compiled statements SQLite keeps of each: those of a runner, a dispatcher and a client are more than 128."""

_closed = sqlite3.connect(":memory:", check_same_thread=False)
_closed.close()


class _Cursor(sqlite3.Cursor):
    """A cursor that can be in a set of weak references."""


class _Real(sqlite3.Connection):
    """A connection that knows its open cursors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cursors: weakref.WeakSet[_Cursor] = weakref.WeakSet()

    def cursor(self, factory: Any = _Cursor) -> Any:
        found = super().cursor(factory)
        self.cursors.add(found)
        return found

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def forget(self) -> None:
        """Roll back, and discard unread rows: as long as a cursor has some, SQLite keeps its snapshot."""
        for cursor in list(self.cursors):
            cursor.close()
        self.cursors.clear()
        self.rollback()


class Lent:
    """A connection as its user has it. After `close` it raises what a closed connection of SQLite raises."""

    def __init__(self, real: _Real, give_back: Callable[[_Real], None], *, is_new: bool) -> None:
        self._give_back = give_back
        self._is_new = is_new
        self._use(real)

    def _use(self, real: sqlite3.Connection) -> None:
        self._real = real
        self.cursor, self.execute = real.cursor, real.execute
        self.commit, self.rollback = real.commit, real.rollback

    def create_function(self, *args: Any, **kwargs: Any) -> None:
        """Create it once: a second time SQLite would compile all its statements again."""
        if self._is_new:
            self._real.create_function(*args, **kwargs)

    @property
    def in_transaction(self) -> bool:
        return self._real.in_transaction

    @property
    def isolation_level(self) -> str | None:
        return self._real.isolation_level

    @isolation_level.setter
    def isolation_level(self, level: str | None) -> None:
        if level != self._real.isolation_level:
            self._real.isolation_level = level

    def close(self) -> None:
        real = self._real
        if isinstance(real, _Real):
            self._use(_closed)
            real.forget()
            self._give_back(real)


class Connector:
    """Connects the processes of a world to its database."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._free: list[_Real] = []
        self._all: list[_Real] = []

    def connect(self, *_: Any) -> Lent:
        """Return a connection, as SQLAlchemy's event "do_connect" wants it."""
        if self._free:
            return Lent(self._free.pop(), self._free.append, is_new=False)
        real = sqlite3.connect(
            self._path, check_same_thread=False, cached_statements=_STATEMENTS, timeout=30, factory=_Real
        )
        self._all.append(real)
        return Lent(real, self._free.append, is_new=True)

    def close(self) -> None:
        for each in self._all:
            each.close()
