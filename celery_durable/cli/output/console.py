"""Output of the commands: tables for people on a terminal, tab-separated records in a pipe, or JSON.

Control characters are removed from stored text: escape sequences could move the cursor or hide text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import click

_ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LINE_BREAKS = re.compile(r"[\t\r\n\u2028\u2029]+")


def strip_control_characters(text: object) -> str:
    """Return the text on one line, without control characters and marks that change the direction of writing."""
    return _strip_control(_LINE_BREAKS.sub(" ", str(text))).strip()


def _strip_control(text: str) -> str:
    return _CONTROL.sub("", _ESCAPE.sub("", text))


@dataclass(frozen=True, slots=True)
class Styled:
    """Text with a style, such as a status. A terminal pads it to ``width`` characters."""

    text: str
    style: str = ""
    width: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar: a pipe gets ``text`` instead. ``fraction``: the share that is done, from 0 to 1."""

    text: str
    fraction: float
    label: str

    @property
    def for_terminal(self) -> str:
        return f"[{'#' * int(self.fraction * _BAR_WIDTH):-<{_BAR_WIDTH}}] {self.label}"


_BAR_WIDTH = 30

Cell = str | Styled | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: never cut if it ``keeps_full_text``, as for ids; hidden if it ``is_optional`` and empty."""

    title: str
    keeps_full_text: bool = True
    is_optional: bool = False


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    TSV = "tsv"


class Console:
    """Writes to standard output in one format. The default is a table on a terminal, and TSV in a pipe."""

    FORMAT = "celery_durable.format"
    """The key in ``ctx.meta`` of the format that the user chose."""

    def __init__(self, chosen: Format, *, is_terminal: bool, has_color: bool) -> None:
        self.has_color, self._is_terminal = has_color, is_terminal
        self.is_for_people, self.is_json = chosen is Format.TABLE, chosen is Format.JSON
        self._bars: dict[tuple[str, ...], str] = {}

    @classmethod
    def from_context(cls, ctx: click.Context) -> Console:
        """Return the console of this process. It respects Celery's --no-color and NO_COLOR."""
        is_terminal = sys.stdout.isatty()
        chosen = ctx.meta.get(cls.FORMAT) or (Format.TABLE if is_terminal else Format.TSV)
        has_color = is_terminal and not _is_dumb_terminal() and not getattr(ctx.obj, "no_color", False)
        return cls(chosen, is_terminal=is_terminal, has_color=has_color)

    def print_json(self, document: Any, *, is_line: bool = False) -> None:
        """Print a document, or with ``is_line`` one of several, each on its own line."""
        click.echo(json.dumps(document, default=_encode, ensure_ascii=False, indent=None if is_line else 2))

    def print_line(self, *cells: Cell, indent: int = 0) -> None:
        """Print one line for people: the cells that are not empty, with gaps between them."""
        text = "   ".join(self._render(cell) for cell in cells if _text(cell))
        click.echo(" " * indent + text.rstrip(), color=self.has_color)

    def print_record(self, *cells: Cell) -> None:
        """Print one line for programs: the cells, separated by tabs."""
        click.echo("\t".join(strip_control_characters(_text(cell)) for cell in cells))

    def print_entry(self, cells: Sequence[Cell]) -> None:
        """Print one line of a stream: for people on a terminal, for programs in a pipe."""
        (self.print_line if self.is_for_people else self.print_record)(*cells)

    def print_event(self, at: Cell, cells: Sequence[Cell]) -> None:
        """Print one update of a followed instance. A terminal keeps the newest state of each bar below all lines."""
        if not (self.is_for_people and self._is_terminal) or _is_dumb_terminal():
            self.print_entry([at, *cells])
            return
        size, name = shutil.get_terminal_size(), tuple(_text(cell) for cell in cells[:-1])
        if self._bars:
            # Move up to the first bar and clear all bars.
            click.echo(f"\x1b[{len(self._bars)}A\x1b[J", nl=False, color=True)
        if isinstance(cells[-1], Bar) and (name in self._bars or len(self._bars) < size.lines - 2):
            text = "   ".join(_displayed(cell) for cell in (at, *cells))
            self._bars[name] = text[: size.columns - 1]  # a wrapped bar would take two lines
        else:
            self._bars.pop(name, None)
            self.print_line(at, *cells)
        for bar in self._bars.values():
            click.echo(bar, color=self.has_color)

    def print_section(
        self,
        kind: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        values: Sequence[tuple[str | None, Any]] = (),
        *,
        heading: str = "",
    ) -> None:
        """Print a table for people, for programs a record of this kind for each row.

        ``values``: a title and a stored value for each row. People see those with a title below the heading.
        """
        if not self.is_for_people:
            for index, row in enumerate(rows):
                self.print_record(kind, *row, *(to_compact_json(value) for _, value in values[index : index + 1]))
        elif rows:
            click.echo()
            self.print_table(columns, rows)
            titled = [(title, value) for title, value in values if title is not None]
            if titled:
                self.print_heading(heading)
            for title, value in titled:
                self.print_block(title, value)

    def print_value(self, kind: str, value: Any) -> None:
        if self.is_for_people:
            self.print_heading(kind.upper())
            self.print_block("", value)
        else:
            self.print_record(kind, to_compact_json(value))

    def print_block(self, title: str, value: Any) -> None:
        if title:
            self.print_line(title, indent=2)
        for text in json.dumps(value, ensure_ascii=False, indent=2).splitlines():
            click.echo(" " * (4 if title else 2) + _strip_control(text), color=self.has_color)

    def print_text(self, text: str) -> None:
        for line in text.splitlines():
            click.echo("  " + _strip_control(line), color=self.has_color)

    def print_heading(self, text: str) -> None:
        click.echo()
        self.print_line(Styled(text, "dim"))

    def print_note(self, text: str) -> None:
        """Print a remark to standard error, so that it does not get into a pipe."""
        click.echo(strip_control_characters(text), err=True)

    def print_list(
        self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, document: Callable[[], Any], if_empty: str
    ) -> None:
        """Print the rows, or the document if the user wants JSON: building it may import the API's models."""
        if self.is_json:
            self.print_json(document())
        elif rows:
            self.print_table(columns, rows)
        else:
            self.print_note(if_empty)

    def print_more(self, cursor: str | None) -> None:
        """Say how to read the next page. JSON has the cursor in the document."""
        if cursor is not None and not self.is_json:
            self.print_note(f"There are more: --cursor {cursor}")

    def print_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Print rows under column titles on a terminal; in a pipe, tab-separated and without titles."""
        if not self.is_for_people:
            for row in rows:
                self.print_record(*row)
            return
        shown_columns = [
            i for i, column in enumerate(columns) if not column.is_optional or any(_text(row[i]) for row in rows)
        ]
        titled, body = [columns[i] for i in shown_columns], [[row[i] for i in shown_columns] for row in rows]
        try:
            import rich.console
            import rich.table
            import rich.text
        except ModuleNotFoundError:  # the extra [cli] is not installed
            self.print_record(*(column.title for column in titled))
            for row in body:
                self.print_record(*row)
            return
        widths = _column_widths(titled, body, shutil.get_terminal_size().columns)
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), header_style="dim")
        for column, width in zip(titled, widths, strict=True):
            table.add_column(column.title, no_wrap=True, overflow="ellipsis", width=width)
        for row in body:
            table.add_row(*(rich.text.Text(_displayed(cell), style=_style_of(cell)) for cell in row))
        console = rich.console.Console(
            file=sys.stdout,
            highlight=False,
            color_system="auto" if self.has_color else None,
            width=sum(widths) + _COLUMN_GAP * len(widths),
        )
        console.print(table)

    def _render(self, cell: Cell) -> str:
        padded_text, style = _displayed(cell), _style_of(cell)
        if not self.has_color or not style:
            return padded_text
        text = padded_text.rstrip()
        # Styles have the names that rich uses.
        options: dict[str, Any] = {style: True} if style in ("bold", "dim") else {"fg": style}
        return click.style(text, **options) + padded_text[len(text) :]


def _is_dumb_terminal() -> bool:
    """Whether the terminal shows escape sequences as text, such as that of an editor."""
    return os.environ.get("TERM") == "dumb"


def to_compact_json(value: Any) -> str:
    """Return a stored value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _encode(value: Any) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    raise TypeError(f"{type(value).__name__} is no JSON value")


_COLUMN_GAP = 3
_MIN_COLUMN_WIDTH = 24
"""Columns are not shortened below this width. Longer lines wrap at the end of the terminal."""


def _column_widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], available: int) -> list[int]:
    """Return the width of each column. If the terminal is too narrow, the last columns are shortened first."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(text) for text in (column.title, *(_displayed(row[i]) for row in rows)))
        for i, column in enumerate(columns)
    ]
    for i in reversed([i for i, column in enumerate(columns) if not column.keeps_full_text]):
        excess = sum(widths) + _COLUMN_GAP * len(widths) - available
        widths[i] = min(widths[i], max(_MIN_COLUMN_WIDTH, widths[i] - excess))
    return widths


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _displayed(cell: Cell) -> str:
    """The text that a terminal shows, padded to its width."""
    text = strip_control_characters(cell.for_terminal if isinstance(cell, Bar) else _text(cell))
    return text.ljust(cell.width) if isinstance(cell, Styled) else text


def _style_of(cell: Cell) -> str:
    return cell.style if isinstance(cell, Styled) else ""
