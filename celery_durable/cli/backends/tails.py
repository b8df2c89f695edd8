"""Readers that return what is new since their last call, for `--follow`. A record has an ``id`` that only grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar


class Numbered(Protocol):
    """A log line or an attempt."""

    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=Numbered)
C = TypeVar("C")


def make_tail(read_page: Callable[[C | None], tuple[Iterable[R], C | None, bool]]) -> Callable[[], Iterator[R]]:
    """Return a reader of pages.

    ``read_page``: takes a cursor, None at first. Returns the records behind it, the cursor at which to continue, and
    whether there are more now. A page may be read twice and grow meanwhile: each record is returned once.
    """
    cursor: C | None = None
    last_id = 0

    def read_new() -> Iterator[R]:
        nonlocal cursor, last_id
        has_more = True
        while has_more:
            page, cursor, has_more = read_page(cursor)
            for record in page:
                if record.id > last_id:
                    last_id = record.id
                    yield record

    return read_new
