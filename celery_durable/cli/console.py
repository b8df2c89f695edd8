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
_LINE = re.compile(r"[\t\r\n\u2028\u2029]+")


def clean(text: object) -> str:
    """Text on one line, without control characters and without what turns the direction of writing."""
    return _stripped(_LINE.sub(" ", str(text))).strip()


def _stripped(text: str) -> str:
    return _CONTROL.sub("", _ESCAPE.sub("", text))


@dataclass(frozen=True, slots=True)
class Styled:
    """Text with a look of its own, such as a status; on a terminal at least ``width`` wide."""

    text: str
    look: str = ""
    width: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """How far something has come. ``share``: from 0 to 1; ``beside``: what it says; ``text``: all of it, in a pipe."""

    text: str
    share: float
    beside: str

    @property
    def drawn(self) -> str:
        """For people, in letters that every terminal has."""
        return f"[{'#' * int(self.share * _BAR):-<{_BAR}}] {self.beside}"


_BAR = 30

Cell = str | Styled | Bar


@dataclass(frozen=True, slots=True)
class Column:
    """``is_whole``: never shortened, as ids must not be. ``is_optional``: left out on a terminal where it is empty."""

    head: str
    is_whole: bool = True
    is_optional: bool = False


class Console:
    """Standard output, once known what it is."""

    def __init__(self, *, is_terminal: bool, has_color: bool) -> None:
        self.is_terminal, self.has_color = is_terminal, has_color
        self._bars: dict[tuple[str, ...], str] = {}

    @classmethod
    def of(cls, ctx: click.Context) -> Console:
        """The screen of this process, as Celery's --no-color and NO_COLOR want it."""
        is_terminal = sys.stdout.isatty()
        return cls(is_terminal=is_terminal, has_color=is_terminal and not getattr(ctx.obj, "no_color", False))

    def line(self, *cells: Cell, indent: int = 0) -> None:
        """One line for people, its parts apart, empty ones left out."""
        said = "   ".join(self._painted(cell) for cell in cells if _text(cell))
        click.echo(" " * indent + said.rstrip(), color=self.has_color)

    def record(self, *cells: Cell) -> None:
        """One line for programs."""
        click.echo("\t".join(clean(_text(cell)) for cell in cells))

    def entry(self, cells: Sequence[Cell]) -> None:
        """One line of many that come one by one: for people or for programs, as the screen is."""
        (self.line if self.is_terminal else self.record)(*cells)

    def tell(self, at: Cell, cells: Sequence[Cell]) -> None:
        """An entry about what is followed. On a terminal the newest of each bar stays below all others."""
        if not self.is_terminal or os.environ.get("TERM") == "dumb":
            self.entry([at, *cells])
            return
        size, name = shutil.get_terminal_size(), tuple(_text(cell) for cell in cells[:-1])
        if self._bars:
            click.echo(f"\x1b[{len(self._bars)}A\x1b[J", nl=False, color=True)  # up to the first, and all of it gone
        if isinstance(cells[-1], Bar) and (name in self._bars or len(self._bars) < size.lines - 2):
            said = "   ".join(_padded(cell) for cell in (at, *cells))
            self._bars[name] = said[: size.columns - 1]  # one that breaks would be two lines
        else:
            self._bars.pop(name, None)
            self.line(at, *cells)
        for bar in self._bars.values():
            click.echo(bar, color=self.has_color)

    def block(self, head: str, lines: Sequence[str]) -> None:
        """Lines with an indentation of their own under a head, for people."""
        if head:
            self.line(head, indent=2)
        for text in lines:
            click.echo(" " * (4 if head else 2) + _stripped(text), color=self.has_color)

    def gap(self) -> None:
        """An empty line between parts."""
        click.echo()

    def head(self, text: str) -> None:
        """The head of a part, apart from what is above it."""
        self.gap()
        self.line(Styled(text, "dim"))

    def aside(self, text: str) -> None:
        """A remark on standard error, where it spoils no pipe."""
        click.echo(clean(text), err=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows under their heads on a terminal; tab-separated without heads in a pipe."""
        if not self.is_terminal:
            for row in rows:
                self.record(*row)
            return
        kept = [i for i, column in enumerate(columns) if not column.is_optional or any(_text(row[i]) for row in rows)]
        heads, body = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
        try:
            import rich.console
            import rich.table
            import rich.text
        except ModuleNotFoundError:  # the extra [cli] is not installed
            self.record(*(column.head for column in heads))
            for row in body:
                self.record(*row)
            return
        widths = _widths(heads, body, shutil.get_terminal_size().columns)
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for column, width in zip(heads, widths, strict=True):
            table.add_column(column.head, no_wrap=True, overflow="ellipsis", width=width)
        for row in body:
            table.add_row(*(rich.text.Text(clean(_seen(cell)), style=_look(cell)) for cell in row))
        color_system: Literal["auto"] | None = "auto" if self.has_color else None
        console = rich.console.Console(
            file=sys.stdout, highlight=False, color_system=color_system, width=sum(widths) + _GAP * len(widths)
        )
        console.print(table)

    def _painted(self, cell: Cell) -> str:
        padded, look = _padded(cell), _look(cell)
        text = padded.rstrip()
        return (click.style(text, **_CLICK_LOOKS[look]) if self.has_color and look else text) + padded[len(text) :]


def _padded(cell: Cell) -> str:
    text = clean(_seen(cell))
    return text.ljust(cell.width) if isinstance(cell, Styled) else text


_GAP = 3
_NARROWEST = 24
"""How narrow a column may become that may be shortened; then lines grow longer than the terminal, which breaks them."""


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], available: int) -> list[int]:
    """How wide each column is: the whole ones as wide as they need, the last that is not gets what is left."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(text) for text in (column.head, *(clean(_seen(row[i])) for row in rows)))
        for i, column in enumerate(columns)
    ]
    for i in reversed([i for i, column in enumerate(columns) if not column.is_whole]):
        excess = sum(widths) + _GAP * len(widths) - available
        widths[i] = min(widths[i], max(_NARROWEST, widths[i] - excess))
    return widths


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _seen(cell: Cell) -> str:
    """As people see it."""
    return cell.drawn if isinstance(cell, Bar) else _text(cell)


def _look(cell: Cell) -> str:
    return cell.look if isinstance(cell, Styled) else ""


# Looks are rich's names; click writes them this way.
_CLICK_LOOKS: dict[str, dict[str, Any]] = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    "red": {"fg": "red"},
    "green": {"fg": "green"},
    "yellow": {"fg": "yellow"},
    "blue": {"fg": "blue"},
    "magenta": {"fg": "magenta"},
    "cyan": {"fg": "cyan"},
}
