"""Reading what happened in the runs of an instance: steps, events, log lines, published values and the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, cast

from celery_durable import values
from celery_durable.errors import CursorInvalid, ValueRefused
from celery_durable.model import (
    AttemptRecord,
    EventRecord,
    History,
    HistoryPage,
    InstanceHead,
    InstanceStatus,
    LogLevel,
    LogRecord,
    Origin,
    Page,
    ParentStep,
    Published,
    StepRecord,
)
from celery_durable.operations import context
from celery_durable.operations.context import OperationContext, check_limit
from celery_durable.store.engine import Tx
from celery_durable.store.instances import interventions
from celery_durable.store.runs import attempts, history, outputs
from celery_durable.store.runs.history import StepFilter
from celery_durable.values import CursorPart, Cursors

# The pages of a history: steps, events, log lines and failed attempts of one run, each list with its own cursor.


T = TypeVar("T")


class HistoryLists:
    """The lists of a history, from the cursors of one request on: each is valid for its run, order and filter."""

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
        where: StepFilter,
        with_results: bool,
    ) -> None:
        self.run = run
        """The number of the run to read; None means the current one."""
        self._context, self._limit = context, limit
        self._options: dict[str, Any] = {"newest_first": newest_first, "limit": limit + 1}
        self._log_filter: dict[str, Any] = {"levels": levels, "category": category}
        self._step_filter: dict[str, Any] = {"where": where, "with_results": with_results}
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
        found = history.read_step_page(tx, pk, run, after=after, **self._step_filter, **self._options)
        page = self._cut("steps", run, found, lambda item: (item[0], item[1].step_key))
        steps = [record for _, record in page.items]
        return Page(context.restrict_steps(tx, self._context.scope, steps), page.cursor)

    def read_events(self, tx: Tx, pk: int, run: int) -> Page[EventRecord]:
        """Return the page of the events, in the order of arrival."""
        found = history.read_events(tx, pk, run, after=self._last_id("events"), **self._options)
        events = context.restrict_events(tx, self._context.scope, found)
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


_MAX_NUMBER = 2**63 - 1


class _RunFields(TypedDict):
    run_number: int
    status: InstanceStatus
    params: Any
    instance_created_at: datetime
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    cancel_requested_at: datetime | None
    reason: str | None
    origin: Origin | None
    labels: Mapping[str, str]
    parent: ParentStep | None
    max_run: timedelta | None


class HistoryOperations:
    """The operations that read runs."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def read(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Return one run with all its steps and events."""
        _check_run(run)

        def work(tx: Tx) -> History:
            head = self._context.read_head(tx, workflow, instance_id, run)
            row, record = head.instance, head.run
            return History(
                workflow=workflow,
                instance_id=instance_id,
                steps=context.restrict_steps(
                    tx, self._context.scope, history.read_steps(tx, row.pk, record.run_number)
                ),
                events=context.restrict_events(
                    tx, self._context.scope, history.read_events(tx, row.pk, record.run_number)
                ),
                audit=interventions.read_audit(tx, row.pk, record.run_number),
                attempts=tuple(attempts.read(tx, row.pk, record.run_number)),
                **self._describe_run(tx, head),
            )

        return self._context.store.read(work)

    def page(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int | None = None,
        limit: int = 25,
        newest_first: bool = False,
        steps_cursor: str | None = None,
        events_cursor: str | None = None,
        logs_cursor: str | None = None,
        with_steps: bool = True,
        with_events: bool = True,
        with_logs: bool = False,
        with_audit: bool = False,
        with_attempts: bool = False,
        attempts_cursor: str | None = None,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
        where: StepFilter | None = None,
        with_results: bool = True,
        head: InstanceHead | None = None,
    ) -> HistoryPage:
        """Return a page of a run's lists, each with a cursor, which continues with its own run even after a restart.

        ``head``: what the caller has read of the instance.
        """
        check_limit(limit)
        lists = HistoryLists(
            self._context,
            (workflow, instance_id),
            run=run,
            limit=limit,
            newest_first=newest_first,
            levels=levels,
            category=category,
            given={"steps": steps_cursor, "events": events_cursor, "logs": logs_cursor, "attempts": attempts_cursor},
            where=where or StepFilter(),
            with_results=with_results,
        )

        def work(tx: Tx) -> HistoryPage:
            found = self._read_head(tx, workflow, instance_id, lists.run, head)
            of_run = found.instance.pk, found.run.run_number
            return HistoryPage(
                steps=lists.read_steps(tx, *of_run) if with_steps else Page((), None),
                events=lists.read_events(tx, *of_run) if with_events else Page((), None),
                logs=lists.read_logs(tx, *of_run) if with_logs else None,
                audit=interventions.read_audit(tx, *of_run) if with_audit else (),
                attempts=lists.read_attempts(tx, *of_run) if with_attempts else None,
                **self._describe_run(tx, found),
            )

        return self._context.store.read(work)

    def steps(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int,
        after: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[tuple[int, StepRecord]]:
        """Return a page of the steps of a run, in call order."""

        def work(tx: Tx) -> list[tuple[int, StepRecord]]:
            pk = self._context.read_row(tx, workflow, instance_id).pk
            found = history.read_step_page(tx, pk, run, after=after, limit=limit)
            shown = context.restrict_steps(tx, self._context.scope, [record for _, record in found])
            return [(seq, record) for (seq, _), record in zip(found, shown, strict=True)]

        return self._context.store.read(work)

    def logs(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int | None = None,
        after_id: int = 0,
        limit: int = 1000,
        levels: Sequence[LogLevel] | None = None,
        category: str | None = None,
    ) -> list[LogRecord]:
        """Return the log lines of a run."""
        _check_run(run)
        _check_log_filter(after_id, limit, levels, category)

        def work(tx: Tx) -> list[LogRecord]:
            row = self._context.read_row(tx, workflow, instance_id)
            number = row.run_number if run is None else run
            return history.read_logs(
                tx, row.pk, number, after_id=after_id, limit=limit, levels=levels, category=category
            )

        return self._context.store.read(work)

    def attempts(
        self,
        workflow: str,
        instance_id: str,
        *,
        run: int,
        after_id: int = 0,
        limit: int = 1000,
        steps: Collection[str] | None = None,
        head: InstanceHead | None = None,
    ) -> list[AttemptRecord]:
        """Return the attempts of a run, or of some of its steps, that did not succeed. ``head``: as in `page`."""

        def work(tx: Tx) -> list[AttemptRecord]:
            found = self._read_head(tx, workflow, instance_id, run, head)
            return attempts.read(tx, found.instance.pk, run, after_id=after_id, limit=limit, steps=steps)

        return self._context.store.read(work)

    def published(
        self, workflow: str, instance_id: str, *, run: int | None = None, head: InstanceHead | None = None
    ) -> dict[str, Published]:
        """Return the values that a run has published. ``head``: what the caller has read of the instance."""

        def work(tx: Tx) -> dict[str, Published]:
            found = self._read_head(tx, workflow, instance_id, run, head)
            return outputs.read_published(tx, found.instance.pk, found.run.run_number)

        return self._context.store.read(work)

    def outcome(self, workflow: str, instance_id: str, *, run: int) -> InstanceStatus:
        """Return the status or the outcome of one run; raises InstanceNotFound, RunNotFound."""

        def work(tx: Tx) -> InstanceStatus:
            head = self._context.read_head(tx, workflow, instance_id, run)
            return history.build_status(history.derive_run_status(head.instance, head.run), head.run)

        return self._context.store.read(work)

    def stream_cursors(self, workflow: str, instance_id: str) -> values.Cursors:
        """Return the cursors that mark how far a client has followed an instance."""
        return self._context.cursors("stream", workflow, instance_id)

    def _read_head(
        self, tx: Tx, workflow: str, instance_id: str, run: int | None, known: InstanceHead | None
    ) -> InstanceHead:
        if known is not None and run in (None, known.run.run_number):
            return known
        return self._context.read_head(tx, workflow, instance_id, run)

    def _describe_run(self, tx: Tx, head: InstanceHead) -> _RunFields:
        """Return the fields of a run that do not depend on its lists."""
        row, record = head.instance, head.run
        return {
            "run_number": record.run_number,
            "status": history.build_status(history.derive_run_status(row, record), record),
            "params": json.loads(record.params),
            "instance_created_at": row.created_at,
            "created_at": record.created_at,
            "started_at": record.started_at,
            "completed_at": record.completed_at,
            "cancel_requested_at": record.cancel_requested_at,
            "reason": record.reason,
            "origin": context.restrict_origin(tx, self._context.scope, row, record.origin),
            "labels": head.labels,
            "parent": head.parent,
            "max_run": row.max_run,
        }


def _check_run(run: object) -> None:
    """Raise ValueRefused unless it is a number that a run could have, or None."""
    if run is not None and not _is_whole(run, least=-_MAX_NUMBER):
        raise ValueRefused(f"run={run!r} cannot be used: pass the number of a run, from 1, or None.")


def _check_log_filter(after_id: object, limit: object, levels: object, category: object) -> None:
    """Raise ValueRefused unless log lines can be filtered by these."""
    if not _is_whole(after_id, least=0):
        raise ValueRefused(f"after_id={after_id!r} cannot be used: pass the id of a log line, or 0.")
    if not _is_whole(limit, least=1):
        raise ValueRefused(f"limit={limit!r} cannot be used: pass a whole number above 0.")
    if levels is not None and not (isinstance(levels, Collection) and all(level in list(LogLevel) for level in levels)):
        raise ValueRefused(f"levels={levels!r} cannot be used: pass a list of {', '.join(LogLevel)}.")
    if category is not None:
        values.require_text("Category", category)


def _is_whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_NUMBER
