"""Internal statements: built from the tables of a store, compiled once, and run through the driver (`compiled`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from celery_durable.store.compiled import PARAM_PREFIX, CompiledStatement
from celery_durable.store.dialects import MARIADB

_compiled: dict[tuple[object, ...], CompiledStatement] = {}
"""What the stores of this process have compiled, by everything that the text depends on."""


class Statement:
    """An internal statement. ``build``: returns it for a `Store`, as a SQLAlchemy statement."""

    def __init__(self, build: Callable[[Any], Any], name: str) -> None:
        self.build, self.name = build, name


def find_compiled(store: Any, statement: Statement, dialect: sa.Dialect) -> CompiledStatement:
    """Return a statement as compiled for the tables, the clock and the dialect of a `Store`."""
    # SQLAlchemy writes for MariaDB what its version takes. For the others the text needs no connection.
    version = dialect.server_version_info if store.database is MARIADB else None
    key = (statement, store.tables_key, store.runtime.clock is None, dialect.driver, dialect.paramstyle, version)
    found = _compiled.get(key)
    if found is None:
        found = _compiled[key] = CompiledStatement(statement.build(store), dialect)
    return found


def statement(build: Callable[[Any], Any]) -> Statement:
    """Decorate a function that takes a store and returns a SQLAlchemy statement. `Tx.run` passes its `param`s."""
    return Statement(build, build.__name__)


def statement_for(build: Callable[..., Any]) -> Callable[..., Statement]:
    """Decorate a function that builds variants of a statement. It takes a store, and arguments that can be hashed.

    The decorated function takes these arguments and returns the statement for them, always the same one. So a step's
    statement can be built without the columns that are NULL, which are most of them.
    """

    @functools.cache
    def choose(*args: Any) -> Statement:
        return Statement(lambda store: build(store, *args), build.__name__)

    return functools.update_wrapper(choose, build)


def param(name: str, type_: Any = None) -> sa.BindParameter[Any]:
    """Return a parameter of a Statement. A prefix keeps it apart from the names that SQLAlchemy gives to values."""
    return sa.bindparam(PARAM_PREFIX + name, type_=type_)
