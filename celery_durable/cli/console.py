"""What people see: aligned tables and colours on a terminal, tab-separated records in a pipe.

Nothing that comes from a workflow reaches the terminal with its control characters (escape sequences move
cursors, retitle windows and hide text).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

_ESCAPE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LINE_BREAKS = re.compile(r"[\t\r\n\u2028\u2029]+")


def strip_control_characters(text: object) -> str:
    """Text on one line, without control characters and without what turns the direction of writing."""
    return _strip_control(_LINE_BREAKS.sub(" ", str(text))).strip()


def _strip_control(text: str) -> str:
    return _CONTROL.sub("", _ESCAPE.sub("", text))


@dataclass(frozen=True, slots=True)
class Styled:
    """Text with a look of its own, such as a status; on a terminal at least ``width`` wide."""

    text: str
    style: str = ""
    width: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar.

    ``fraction``: the share that is done, from 0 to 1. ``label``: the text beside the bar. ``text``: the text that a
    pipe gets instead of the bar.
    """

    text: str
    fraction: float
    label: str

    @property
    def for_terminal(self) -> str:
        """For people, in letters that every terminal has."""
        return f"[{'#' * int(self.fraction * _BAR_WIDTH):-<{_BAR_WIDTH}}] {self.label}"


_BAR_WIDTH = 30

Cell = str | Styled | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    ``keeps_full_text``: the text is never shortened, because ids must stay complete. ``is_optional``: a terminal does
    not show the column if all its cells are empty.
    """

    title: str
    keeps_full_text: bool = True
    is_optional: bool = False


class Console:
    """Standard output, once known what it is."""

    def __init__(self, *, is_terminal: bool, has_color: bool) -> None:
        self.is_terminal, self.has_color = is_terminal, has_color
        self._bars: dict[tuple[str, ...], str] = {}

    @classmethod
    def from_context(cls, ctx: click.Context) -> Console:
        """The screen of this process, as Celery's --no-color and NO_COLOR want it."""
        is_terminal = sys.stdout.isatty()
        return cls(is_terminal=is_terminal, has_color=is_terminal and not getattr(ctx.obj, "no_color", False))

    def print_line(self, *cells: Cell, indent: int = 0) -> None:
        """One line for people, its parts apart, empty ones left out."""
        text = "   ".join(self._render(cell) for cell in cells if _text(cell))
        click.echo(" " * indent + text.rstrip(), color=self.has_color)

    def print_record(self, *cells: Cell) -> None:
        """One line for programs."""
        click.echo("\t".join(strip_control_characters(_text(cell)) for cell in cells))

    def print_entry(self, cells: Sequence[Cell]) -> None:
        """One line of many that come one by one: for people or for programs, as the screen is."""
        (self.print_line if self.is_terminal else self.print_record)(*cells)

    def print_event(self, at: Cell, cells: Sequence[Cell]) -> None:
        """An entry about what is followed. On a terminal the newest of each bar stays below all others."""
        if not self.is_terminal or os.environ.get("TERM") == "dumb":
            self.print_entry([at, *cells])
            return
        size, name = shutil.get_terminal_size(), tuple(_text(cell) for cell in cells[:-1])
        if self._bars:
            click.echo(f"\x1b[{len(self._bars)}A\x1b[J", nl=False, color=True)  # up to the first, and all of it gone
        if isinstance(cells[-1], Bar) and (name in self._bars or len(self._bars) < size.lines - 2):
            text = "   ".join(_pad(cell) for cell in (at, *cells))
            self._bars[name] = text[: size.columns - 1]  # one that breaks would be two lines
        else:
            self._bars.pop(name, None)
            self.print_line(at, *cells)
        for bar in self._bars.values():
            click.echo(bar, color=self.has_color)

    def print_block(self, title: str, lines: Sequence[str]) -> None:
        """Lines with an indentation of their own under a head, for people."""
        if title:
            self.print_line(title, indent=2)
        for text in lines:
            click.echo(" " * (4 if title else 2) + _strip_control(text), color=self.has_color)

    def print_blank_line(self) -> None:
        """An empty line between parts."""
        click.echo()

    def print_heading(self, text: str) -> None:
        """The head of a part, apart from what is above it."""
        self.print_blank_line()
        self.print_line(Styled(text, "dim"))

    def print_note(self, text: str) -> None:
        """A remark on standard error, where it spoils no pipe."""
        click.echo(strip_control_characters(text), err=True)

    def print_table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows under their heads on a terminal; tab-separated without heads in a pipe."""
        if not self.is_terminal:
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
            table.add_row(
                *(rich.text.Text(strip_control_characters(_displayed(cell)), style=_style_of(cell)) for cell in row)
            )
        color_system: Literal["auto"] | None = "auto" if self.has_color else None
        console = rich.console.Console(
            file=sys.stdout, highlight=False, color_system=color_system, width=sum(widths) + _COLUMN_GAP * len(widths)
        )
        console.print(table)

    def _render(self, cell: Cell) -> str:
        padded_text, style = _pad(cell), _style_of(cell)
        text = padded_text.rstrip()
        return (click.style(text, **_CLICK_STYLES[style]) if self.has_color and style else text) + padded_text[
            len(text) :
        ]


def _pad(cell: Cell) -> str:
    text = strip_control_characters(_displayed(cell))
    return text.ljust(cell.width) if isinstance(cell, Styled) else text


_COLUMN_GAP = 3
_MIN_COLUMN_WIDTH = 24
"""How narrow a column may become that may be shortened; then lines grow longer than the terminal, which breaks them."""


def _column_widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], available: int) -> list[int]:
    """How wide each column is: the whole ones as wide as they need, the last that is not gets what is left."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(text) for text in (column.title, *(strip_control_characters(_displayed(row[i])) for row in rows)))
        for i, column in enumerate(columns)
    ]
    for i in reversed([i for i, column in enumerate(columns) if not column.keeps_full_text]):
        excess = sum(widths) + _COLUMN_GAP * len(widths) - available
        widths[i] = min(widths[i], max(_MIN_COLUMN_WIDTH, widths[i] - excess))
    return widths


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _displayed(cell: Cell) -> str:
    """As people see it."""
    return cell.for_terminal if isinstance(cell, Bar) else _text(cell)


def _style_of(cell: Cell) -> str:
    return cell.style if isinstance(cell, Styled) else ""


# Looks are rich's names; click writes them this way.
_CLICK_STYLES: dict[str, dict[str, Any]] = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    "red": {"fg": "red"},
    "green": {"fg": "green"},
    "yellow": {"fg": "yellow"},
    "blue": {"fg": "blue"},
    "magenta": {"fg": "magenta"},
    "cyan": {"fg": "cyan"},
}
