"""The format of workflow_step: parameters from what a commit writes, and rows from what the database returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from celery_durable.model import StepRow, StepWrite
from celery_durable.store.step_columns import STEP_COLUMNS, Source, StepColumn, Written


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
        encoders = {source.field: column.encoder(source) for column in columns for source in column.sources}
        self._sources = tuple(encoders)
        self._get_sources = attrgetter(*encoders)
        self._converted = tuple((name, encode) for name, encode in encoders.items() if encode is not None)
        self._decoders = tuple(column.decode for column in columns)
        self._find_plan = functools.cache(self._plan_row)

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
        """Return the parameters of a write, each named as its field, without those that mean NULL."""
        parameters = {
            field: value
            for field, value in zip(self._sources, self._get_sources(write), strict=True)
            if value is not None and value is not False  # False: not the time of the commit (`Written.IF`)
        }
        for name, encode in self._converted:
            if name in parameters:
                parameters[name] = encode(parameters[name])
        return parameters

    def to_written_row(self, write: StepWrite, fields: tuple[str, ...], now: datetime) -> StepRow:
        """Return the row that a write has written at the time ``now``, as `read` returns it.

        ``fields``: those of `encode_write`. In a row that is overwritten, a time that keeps its old value is None.
        """
        get_values, times = self._find_plan(fields, is_new=write.replaces is None)
        values = list(get_values(write))
        for index, written in times:
            match written:
                case Written.IF:
                    values[index] = now
                case Written.AFTER:
                    values[index] = now + values[index]
                case Written.BEFORE:
                    values[index] = now - values[index]
                case None:
                    values[index] = None
        return self._row(*values)

    def _plan_row(
        self, fields: tuple[str, ...], *, is_new: bool
    ) -> tuple[Callable[[StepWrite], tuple[Any, ...]], list[tuple[int, Written | None]]]:
        """Return what reads a field of a write for each column, and how to compute the times from that: by index."""
        names: list[str] = []
        times: list[tuple[int, Written | None]] = []
        for index, column in enumerate(self.columns):
            given = [source for source in column.sources if source.field in fields]
            source = (given or [*column.sources, Source("key", Written.IF)])[0]
            names.append(source.field)
            if column.is_time and source.written is not Written.VALUE:
                is_written = (given or not column.sources) and (is_new or column.is_updated)
                times.append((index, source.written if is_written else None))
        return attrgetter(*names), times


STEPS = StepFormat(STEP_COLUMNS)
