"""A statement as compiled for one driver: SQL text, and how the driver takes its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.store.dialects import CLOCK_PARAM

PARAM_PREFIX = "p_"
"""The prefix of parameters. It keeps them apart from the names that SQLAlchemy gives to values."""


class CompiledStatement:
    """A statement for one driver: its text, and the values of the parameters that a caller does not pass.

    ``clock`` is the test's clock; None if the statement shall read the database's.
    """

    def __init__(self, expression: Any, dialect: sa.Dialect, clock: Callable[[], int] | None) -> None:
        compiled = expression.compile(dialect=dialect)
        self.sql: str = compiled.string
        # Required parameters are left out. If a caller forgets one, the driver raises instead of writing NULL.
        self._defaults: dict[str, Any] = {
            name: bound.effective_value for bound, name in compiled.bind_names.items() if not bound.required
        }
        self._order: Sequence[str] | None = compiled.positiontup if compiled.positional else None
        self.clock = clock if CLOCK_PARAM in self._defaults else None

    def bind(self, params: dict[str, Any]) -> Any:
        """Return the values for the driver: those of a caller's parameters, and the others."""
        values = self._defaults.copy()
        for name, value in params.items():
            values[PARAM_PREFIX + name] = value
        if self.clock is not None:
            values[CLOCK_PARAM] = self.clock()
        return values if self._order is None else tuple([values[name] for name in self._order])

    def with_clock(self, clock: Callable[[], int] | None) -> CompiledStatement:
        """Return the same statement for a store with another clock."""
        other = copy.copy(self)
        other.clock = clock if CLOCK_PARAM in self._defaults else None
        return other
