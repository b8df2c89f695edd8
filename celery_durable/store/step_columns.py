"""The columns of workflow_step, declared once.

The table (`schema`), the statements that write a step with their parameters (`step_rows`, `runs`), and the rows that
are read come from `STEP_COLUMNS`. A new column is one entry there and a field of `model.StepRow`; if commits write it,
also a field of `step_rows.StepWrite`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from celery_durable.model import StepRow, StepStatus, StepType, duration_us, from_us, to_us
from celery_durable.store.column_types import long_text


class Written(Enum):
    """How a commit writes a column from a field of its `StepWrite`."""

    VALUE = auto()  # the field itself
    AFTER = auto()  # the commit's time plus the field
    BEFORE = auto()  # the commit's time minus the field
    IF = auto()  # the commit's time if the field is true, else NULL


@dataclass(frozen=True, slots=True)
class Source:
    """A field of `StepWrite` from which a commit writes a column. None as its value means NULL."""

    field: str
    written: Written = Written.VALUE


@dataclass(frozen=True, slots=True)
class StepColumn:
    """A column of workflow_step.

    ``field`` is the field of `StepRow`. ``encode`` converts its value for the database, ``decode`` converts it back;
    neither is called for None. ``sources`` says what a commit writes: the first one that is not NULL, or the commit's
    time if there are none.
    """

    name: str
    type: sa.types.TypeEngine[Any]
    sources: tuple[Source, ...]
    field: str
    is_key: bool = False
    is_nullable: bool = True
    is_updated: bool = True
    """Whether a commit that overwrites a row writes it. The others keep the value of the first commit."""
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def build(self) -> sa.Column[Any]:
        """Build the column for the table."""
        return sa.Column(self.name, self.type, primary_key=self.is_key, nullable=self.is_nullable)

    @property
    def parameter_type(self) -> sa.types.TypeEngine[Any]:
        """The type of a parameter. It has no length: PostgreSQL cuts text that is cast to a type with one."""
        if isinstance(self.type, sa.Text):
            return sa.Text()
        return sa.String() if isinstance(self.type, sa.String) else self.type


def _column(
    name: str,
    type_: sa.types.TypeEngine[Any],
    *sources: Source | str,
    field: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> StepColumn:
    """A nullable column that each commit writes."""
    given = tuple(Source(each) if isinstance(each, str) else each for each in sources)
    return StepColumn(name, type_, given, field or name, encode=encode, decode=decode)


def _required(
    name: str,
    type_: sa.types.TypeEngine[Any],
    *sources: str,
    is_key: bool = False,
    is_updated: bool = False,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> StepColumn:
    """A column that is never NULL. By default only the first commit writes it."""
    given = tuple(Source(each) for each in sources)
    return StepColumn(name, type_, given, name, is_key, False, is_updated, encode, decode)


def _instant(name: str, *sources: Source) -> StepColumn:
    return _column(name, sa.BigInteger(), *sources, encode=to_us, decode=from_us)


def _to_ms(length: timedelta) -> int:
    return length // timedelta(milliseconds=1)


def _from_ms(ms: int) -> timedelta:
    return timedelta(milliseconds=ms)


STEP_COLUMNS = (
    _required("step_key", sa.String(280), "key", is_key=True),
    _required("seq", sa.Integer(), "seq"),
    _required("name", sa.String(256), "name"),
    _required("type", sa.String(16), "type", encode=str, decode=StepType),
    _required("status", sa.String(16), "status", is_updated=True, encode=str, decode=StepStatus),
    _required("attempts", sa.Integer(), "attempts", is_updated=True),
    _column("max_attempts", sa.Integer(), "max_attempts"),
    _column("timeout_ms", sa.BigInteger(), "timeout", field="timeout", encode=_to_ms, decode=_from_ms),
    _instant("next_retry_at", Source("retry_in", Written.AFTER)),
    _instant("wake_at", Source("wake_at"), Source("wake_in", Written.AFTER)),
    _column("wait_event_type", sa.String(255), "event_type"),
    _column("event_seq", sa.BigInteger(), "event_seq"),
    _column("result", long_text(), "result"),
    _column("error_name", sa.String(255), "error_name"),
    _column("error_message", long_text(), "error_message"),
    _required("commit_id", sa.String(36), "commit_id", is_updated=True),
    StepColumn(
        "created_at",
        sa.BigInteger(),
        (),
        "created_at",
        is_nullable=False,
        is_updated=False,
        encode=to_us,
        decode=from_us,
    ),
    _instant("started_at", Source("ran_for", Written.BEFORE)),
    _instant("finished_at", Source("is_finished", Written.IF)),
)
"""All columns but ``instance_pk`` and ``run_number``, which come from the claim."""

TIME_COLUMNS = tuple(column for column in STEP_COLUMNS if column.decode is from_us)
"""The columns whose values the database's clock decides. A statement that writes a step returns them."""


def columns_of(table: sa.Table, *, with_results: bool = True) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a query whose rows `to_step_row` reads. Results are large: without them they are NULL."""
    columns: list[sa.ColumnElement[Any]] = [table.c[column.name] for column in STEP_COLUMNS]
    return columns if with_results else [sa.null().label("result") if c.name == "result" else c for c in columns]


def encode_row(row: StepRow) -> dict[str, Any]:
    """Return the values of a `StepRow` for the database, by column."""
    values: dict[str, Any] = {}
    for column in STEP_COLUMNS:
        value = getattr(row, column.field)
        values[column.name] = value if column.encode is None or value is None else column.encode(value)
    return values


# The functions below run once for each step that a pass writes or loads, so what depends on the columns is computed
# here. An attrgetter reads all fields in one call.


def _encoder(column: StepColumn, source: Source) -> Callable[[Any], Any] | None:
    match source.written:
        case Written.VALUE:
            return column.encode
        case Written.AFTER | Written.BEFORE:
            return duration_us
        case Written.IF:
            return None


_ENCODERS = {source.field: _encoder(column, source) for column in STEP_COLUMNS for source in column.sources}
_CONVERTED = tuple((name, encode) for name, encode in _ENCODERS.items() if encode is not None)
_get_sources = attrgetter(*_ENCODERS)


def encode_write(write: Any) -> dict[str, Any]:
    """Return the parameters of a `StepWrite`, each named as its field."""
    parameters = dict(zip(_ENCODERS, _get_sources(write), strict=True))
    for name, encode in _CONVERTED:
        if (value := parameters[name]) is not None:
            parameters[name] = encode(value)
    return parameters


_DECODERS = tuple(column.decode for column in STEP_COLUMNS)


def to_step_row(values: Sequence[Any]) -> StepRow:
    """Convert the values of `columns_of` to a `StepRow`, whose fields have the same order."""
    return StepRow(
        *[
            value if decode is None or value is None else decode(value)
            for decode, value in zip(_DECODERS, values, strict=True)
        ]
    )


_COPIED = {column.field: column.sources[0].field for column in STEP_COLUMNS if column not in TIME_COLUMNS}
_get_copied = attrgetter(*_COPIED.values())


def to_written_row(write: Any, times: Iterable[int | None]) -> StepRow:
    """Return the row that a `StepWrite` has written, as `to_step_row` reads it. ``times``: those of `TIME_COLUMNS`."""
    fields = dict(zip(_COPIED, _get_copied(write), strict=True))
    for column, us in zip(TIME_COLUMNS, times, strict=True):
        fields[column.name] = None if us is None else from_us(us)
    return StepRow(**fields)
