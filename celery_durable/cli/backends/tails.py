"""Readers that return what is new since their last call, for `--follow`. A record has an ``id`` that only grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar


class Numbered(Protocol):
    """A log line or an attempt."""

    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=Numbered)


def tail_by_id(read_page: Callable[[int], Sequence[R]], *, page_size: int) -> Callable[[], Iterator[R]]:
    """Return a reader for pages of the records behind an id."""
    last_id = 0

    def read_new() -> Iterator[R]:
        nonlocal last_id
        while True:
            page = read_page(last_id)
            for record in page:
                last_id = record.id
                yield record
            if len(page) < page_size:
                return

    return read_new


def tail_by_cursor(read_page: Callable[[str | None], tuple[Iterable[R], str | None]]) -> Callable[[], Iterator[R]]:
    """Return a reader for pages with the cursor of the next one, None on the last.

    The last page has no cursor behind it, so it is read again: records may have been added to it.
    """
    cursor: str | None = None
    last_id = 0

    def read_new() -> Iterator[R]:
        nonlocal cursor, last_id
        while True:
            page, next_cursor = read_page(cursor)
            for record in page:
                if record.id > last_id:
                    last_id = record.id
                    yield record
            if next_cursor is None:
                return
            cursor = next_cursor

    return read_new
