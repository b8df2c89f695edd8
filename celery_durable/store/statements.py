"""Internal statements: built from the tables of a store, compiled once, and run through the driver (`compiled`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from celery_durable.store.compiled import PARAM_PREFIX, CompiledStatement

_shared: dict[tuple[object, ...], CompiledStatement] | None = None
"""What the stores of this process have compiled, by everything that the text depends on; None: nothing is shared."""


def share_compiled_statements() -> None:
    """From now on the stores of this process share what they compile.

    This is for tests: thousands of stores that serve one test each would spend a third of their time on compiling.
    """
    global _shared  # noqa: PLW0603  # one for the process
    if _shared is None:
        _shared = {}


class Statement:
    """An internal statement. ``build``: returns it for a `Store`, as a SQLAlchemy statement."""

    def __init__(self, build: Callable[[Any], Any], name: str) -> None:
        self.build, self.name = build, name


def compile_for_store(store: Any, statement: Statement, dialect: sa.Dialect) -> CompiledStatement:
    """Compile a statement for a `Store`, or return what another store has compiled if they share it."""
    clock = store.runtime.clock
    if _shared is None:
        return CompiledStatement(statement.build(store), dialect, clock)
    server = (type(dialect), dialect.driver, dialect.paramstyle, dialect.server_version_info)
    key = (statement, store.schema, store.prefix, store.database, *server, clock is None)
    found = _shared.get(key)
    if found is None:  # without the clock, which would keep its store alive
        found = _shared[key] = CompiledStatement(statement.build(store), dialect, clock).with_clock(None)
    return found.with_clock(clock)


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
