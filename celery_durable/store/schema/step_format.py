"""The columns of workflow_step, declared once, and their format: parameters of a write, rows as returned.

A new column is one entry of `STEP_COLUMNS`, a migration, and a field of `model.StepRow`. If commits write it, it is
also a field of `model.StepWrite`. If users see it, it is also a field of `model.StepRecord`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from celery_durable.model import StepRow, StepStatus, StepType, StepWrite, duration_us, from_us, to_us
from celery_durable.store.schema.dialects import long_text


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
    """A column of workflow_step, and its field of `StepRow`, converted by ``encode`` and ``decode`` unless it is None.

    ``sources`` says what a commit writes: the first one that is not NULL, or the commit's time if there are none.
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
        return sa.Column(self.name, self.type, primary_key=self.is_key, nullable=self.is_nullable)

    @property
    def is_time(self) -> bool:
        """Whether the database's clock decides its value. A statement that writes a step returns it."""
        return self.decode is from_us

    def encoder(self, source: Source) -> Callable[[Any], Any] | None:
        """Return what converts a value of this source for the database. None: nothing does."""
        match source.written:
            case Written.VALUE:
                return self.encode
            case Written.AFTER | Written.BEFORE:
                return duration_us
            case Written.IF:
                return None

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
    _column("payload_type", sa.String(512), "payload_type"),
    _column("ask", long_text(), "ask"),
)
"""All columns but ``instance_pk`` and ``run_number``, which come from the claim."""


def is_of_step(other: sa.Table, step: sa.Table) -> sa.ColumnElement[bool]:
    """Join condition: a row of another table belongs to this step."""
    keys = ("instance_pk", "run_number", "step_key")
    return sa.and_(*[step.c[key] == other.c[key] for key in keys])


class StepFormat:
    """The format of a table with these columns, which are the fields of a `StepRow` in the same order.

    Its methods run once for each step of a pass, so what depends on the columns is computed here.
    """

    def __init__(self, columns: Sequence[StepColumn]) -> None:
        self.columns = columns
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
        return StepRow(
            *[
                value if decode is None or value is None else decode(value)
                for decode, value in zip(self._decoders, values, strict=True)
            ]
        )

    def encode_row(self, row: StepRow) -> dict[str, Any]:
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
        return StepRow(*values)

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
