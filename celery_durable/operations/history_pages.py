"""The pages of a history: steps, events, log lines and failed attempts of one run, each list with its own cursor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from celery_durable.errors import CursorInvalid
from celery_durable.model import AttemptRecord, EventRecord, LogLevel, LogRecord, Page, StepRecord
from celery_durable.operations import links
from celery_durable.operations.context import OperationContext
from celery_durable.store.engine import Tx
from celery_durable.store.runs import attempts, history
from celery_durable.values import CursorPart, Cursors

T = TypeVar("T")


class HistoryLists:
    """The lists of a history, from the cursors of one request on.

    A cursor contains the number of its run, and it is valid only for the same order and filter."""

    def __init__(
        self,
        context: OperationContext,
        instance: tuple[str, str],
        *,
        run: int | None,
        limit: int,
        newest_first: bool,
        levels: Sequence[LogLevel] | None,
        category: str | None,
        given: Mapping[str, str | None],
    ) -> None:
        self.run = run
        """The number of the run to read; None means the current one."""
        self._context, self._limit = context, limit
        self._options: dict[str, Any] = {"newest_first": newest_first, "limit": limit + 1}
        self._log_filter: dict[str, Any] = {"levels": levels, "category": category}
        filters: dict[str, tuple[object, ...]] = {
            "steps": (),
            "events": (),
            "logs": (levels, category),
            "attempts": (),
        }
        self._cursors: dict[str, Cursors] = {
            kind: context.cursors(kind, *instance, newest_first, *list_filter) for kind, list_filter in filters.items()
        }
        self._after: dict[str, list[CursorPart]] = {}
        for kind, cursor in given.items():
            if cursor is not None:
                self._continue_at(kind, cursor)

    def _continue_at(self, kind: str, cursor: str) -> None:
        """Continue a list at a cursor. Raises CursorInvalid if the cursor belongs to another run."""
        number, *self._after[kind] = self._cursors[kind].read(cursor)
        if self.run is None:
            self.run = cast("int", number)
        elif number != self.run:
            raise CursorInvalid(cursor)

    def read_steps(self, tx: Tx, pk: int, run: int) -> Page[StepRecord]:
        """Return the page of the steps, in call order."""
        after = cast("tuple[int, str] | None", tuple(self._after["steps"]) if "steps" in self._after else None)
        found = history.read_step_page(tx, pk, run, after=after, **self._options)
        page = self._cut("steps", run, found, lambda item: (item[0], item[1].step_key))
        steps = [record for _, record in page.items]
        return Page(links.restrict_steps(tx, self._context.scope, steps), page.cursor)

    def read_events(self, tx: Tx, pk: int, run: int) -> Page[EventRecord]:
        """Return the page of the events, in the order of arrival."""
        found = history.read_events(tx, pk, run, after=self._last_id("events"), **self._options)
        events = links.restrict_events(tx, self._context.scope, found)
        return self._cut("events", run, events, lambda event: (event.seq,))

    def read_logs(self, tx: Tx, pk: int, run: int) -> Page[LogRecord]:
        """Return the page of the log lines, in the order in which they were written."""
        found = history.read_logs(tx, pk, run, after_id=self._last_id("logs"), **self._log_filter, **self._options)
        return self._cut("logs", run, found, lambda line: (line.id,))

    def read_attempts(self, tx: Tx, pk: int, run: int) -> Page[AttemptRecord]:
        """Return the page of the attempts that did not succeed, in the order of their ends."""
        found = attempts.read(tx, pk, run, after_id=self._last_id("attempts"), **self._options)
        return self._cut("attempts", run, found, lambda attempt: (attempt.id,))

    def _last_id(self, kind: str) -> int | None:
        return cast("int", self._after[kind][0]) if kind in self._after else None

    def _cut(self, kind: str, run: int, found: Sequence[T], key: Callable[[T], tuple[CursorPart, ...]]) -> Page[T]:
        """Return the first items as a page. ``found`` has one item more if the list continues."""
        items = tuple(found[: self._limit])
        more = self._cursors[kind].write(run, *key(items[-1])) if len(found) > self._limit else None
        return Page(items, more)
