"""The format of workflow_step: parameters from what a commit writes, and rows from what the database returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from celery_durable.model import StepRow, StepWrite, from_us
from celery_durable.store.step_columns import STEP_COLUMNS, StepColumn, Written


def is_of_step(other: sa.Table, step: sa.Table) -> sa.ColumnElement[bool]:
    """Join condition: a row of another table belongs to this step."""
    keys = ("instance_pk", "run_number", "step_key")
    return sa.and_(*[step.c[key] == other.c[key] for key in keys])


class StepFormat:
    """The format of a table with these columns. ``row`` has their fields, in the same order.

    Its methods run once for each step that a pass writes or loads, so what depends on the columns is computed here. An
    attrgetter reads all fields in one call.
    """

    def __init__(self, columns: Sequence[StepColumn], row: type[StepRow] = StepRow) -> None:
        self.columns, self._row = columns, row
        self.time_columns = tuple(column for column in columns if column.is_time)
        encoders = {source.field: column.encoder(source) for column in columns for source in column.sources}
        self._sources = tuple(encoders)
        self._get_sources = attrgetter(*encoders)
        self._converted = tuple((name, encode) for name, encode in encoders.items() if encode is not None)
        self._decoders = tuple(column.decode for column in columns)
        copied = {column.field: column.sources[0].field for column in columns if not column.is_time}
        self._copied = tuple(copied)
        self._get_copied = attrgetter(*copied.values())

    def select(self, table: sa.Table, *, with_results: bool = True) -> list[sa.ColumnElement[Any]]:
        """Return the columns of a query whose rows `read` takes. Results are large: without them they are NULL."""
        columns: list[sa.ColumnElement[Any]] = [table.c[column.name] for column in self.columns]
        return columns if with_results else [sa.null().label("result") if c.name == "result" else c for c in columns]

    def read(self, values: Sequence[Any]) -> StepRow:
        """Convert the values of the columns of `select` to a row."""
        return self._row(
            *[
                value if decode is None or value is None else decode(value)
                for decode, value in zip(self._decoders, values, strict=True)
            ]
        )

    def encode_row(self, row: StepRow) -> dict[str, Any]:
        """Return the values of a row for the database, by column."""
        values: dict[str, Any] = {}
        for column in self.columns:
            value = getattr(row, column.field)
            values[column.name] = value if column.encode is None or value is None else column.encode(value)
        return values

    def encode_write(self, write: StepWrite) -> dict[str, Any]:
        """Return the parameters of a write, each named as its field."""
        parameters = dict(zip(self._sources, self._get_sources(write), strict=True))
        for name, encode in self._converted:
            if (value := parameters[name]) is not None:
                parameters[name] = encode(value)
        return parameters

    def to_written_row(self, write: StepWrite, times: Iterable[int | None]) -> StepRow:
        """Return the row that a write has written, as `read` returns it. ``times``: those of ``time_columns``."""
        fields = dict(zip(self._copied, self._get_copied(write), strict=True))
        for column, us in zip(self.time_columns, times, strict=True):
            fields[column.name] = None if us is None else from_us(us)
        return self._row(**fields)

    def compute_times(self, parameters: dict[str, Any], now: int, *, is_new: bool) -> list[int | None]:
        """Return the values of ``time_columns`` as the database computes them from these parameters.

        For a row that is overwritten, times that keep their old value are None.
        """
        return [_time(c, now, parameters) if is_new or c.is_updated else None for c in self.time_columns]


def _time(column: StepColumn, now: int, parameters: dict[str, Any]) -> int | None:
    if not column.sources:
        return now
    for source in column.sources:
        value = parameters[source.field]
        match source.written:
            case Written.VALUE if value is not None:
                return int(value)
            case Written.AFTER if value is not None:
                return now + int(value)
            case Written.BEFORE if value is not None:
                return now - int(value)
            case Written.IF if value:
                return now
    return None


STEPS = StepFormat(STEP_COLUMNS)
