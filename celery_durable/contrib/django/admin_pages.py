"""What the pages of Django's admin show. Values have passed the `redact` hook, and each read is bounded (LAW 10)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote

from celery_durable import values
from celery_durable.app.internals import Internals
from celery_durable.contrib.django import wiring
from celery_durable.contrib.django.models import join_key, split_key
from celery_durable.explain import YOUR_APP, Diagnosis, explain
from celery_durable.model import AttemptRecord, HistoryPage, InstanceRow, InstanceSummary, Status, StepRecord
from celery_durable.operations.context import read_status

_ROWS = 50
_HISTORY_ROWS = 25
_MAX_SHOWN = 2000
"""How many characters of a value a page shows."""
_MAX_RUNS = 20

Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The filter and the position of a list, as its address has them."""

    workflow: str = ""
    status: str = ""
    text: str = ""
    cursor: str = ""

    @classmethod
    def read(cls, query: Query) -> ListQuery:
        """Read the query of an address."""
        text = query.get("q", "").strip()
        return cls(query.get("workflow", ""), query.get("status", ""), text, query.get("cursor", ""))

    def to_address(self, **changes: str) -> str:
        """Return the address of the same list with these changes, from its first row unless a cursor is given."""
        changed = dataclasses.replace(self, **({"cursor": ""} | changes))
        pairs = {
            "workflow": changed.workflow, "status": changed.status, "q": changed.text, "cursor": changed.cursor,
        }  # fmt: skip
        return "?" + urlencode({name: value for name, value in pairs.items() if value})

    @property
    def labels(self) -> dict[str, str] | None:
        """The labels of a search such as ``tenant=acme region=eu``; None if it is not one."""
        words = self.text.split()
        if not all("=" in word[1:] for word in words):
            return None
        return dict(word.split("=", 1) for word in words)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a filter, with its address."""

    label: str
    address: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Row:
    """An instance of the list. ``key``: its key in the admin; ``address``: the key as a part of an address."""

    key: str
    address: str
    summary: InstanceSummary

    @classmethod
    def make(cls, internals: Internals, found: InstanceSummary) -> Row:
        """Return the row of an instance, redacted."""
        key = join_key(found.workflow, found.id)
        return cls(key, quote(key), internals.redaction(found.workflow, found.id).redact_summary(found))


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of the list."""

    query: ListQuery
    rows: Sequence[Row]
    total: str
    next_address: str | None
    filters: Sequence[tuple[str, Sequence[Choice]]]

    @property
    def first_address(self) -> str:
        """The address of the first page of this list."""
        return self.query.to_address()

    @classmethod
    def read(cls, internals: Internals, query: ListQuery) -> ListPage:
        """Read a page; raises a DurableError if the status, the search or the cursor cannot be used."""
        status = read_status(query.status) if query.status else None
        labels = query.labels
        if labels is None:
            found = _find_by_id(internals, query)
            return cls._make(internals, query, found, str(len(found)), None)
        chosen: dict[str, Any] = {"status": status, "labels": values.check_labels(labels)}
        queries = internals.operations.queries
        page = queries.list(query.workflow or None, cursor=query.cursor or None, limit=_ROWS, **chosen)
        count = queries.count(query.workflow or None, **chosen)
        more = None if page.cursor is None else query.to_address(cursor=page.cursor)
        return cls._make(internals, query, page.items, str(count), more)

    @classmethod
    def make_empty(cls, internals: Internals, query: ListQuery) -> ListPage:
        """Return a page without rows."""
        return cls._make(internals, query, (), "0", None)

    @classmethod
    def _make(
        cls,
        internals: Internals,
        query: ListQuery,
        found: Sequence[InstanceSummary],
        total: str,
        next_address: str | None,
    ) -> ListPage:
        names = sorted({*internals.registry, query.workflow} - {""})
        filters = [
            ("status", _make_choices(query, "status", [each.value for each in Status])),
            ("workflow", _make_choices(query, "workflow", names)),
        ]
        return cls(query, [Row.make(internals, each) for each in found], total, next_address, filters)


def _make_choices(query: ListQuery, name: str, options: Sequence[str]) -> list[Choice]:
    chosen = getattr(query, name)
    return [Choice(option or "All", query.to_address(**{name: option}), option == chosen) for option in ("", *options)]


def _find_by_id(internals: Internals, query: ListQuery) -> Sequence[InstanceSummary]:
    """Return the instances whose id is the text of the search, or the one that it names with its workflow."""
    workflow, instance_id = split_key(query.text)
    names = [workflow or query.workflow] if workflow or query.workflow else sorted(internals.registry)
    found = internals.operations.queries.find(instance_id, names)
    return [each for each in found if not query.status or each.status == query.status]


@dataclass(frozen=True, slots=True)
class InstancePage:
    """The page of an instance: why it is where it is, and a page of what happened in one of its runs."""

    row: InstanceRow
    diagnosis: Diagnosis
    commands: Sequence[str]
    history: HistoryPage
    params: str
    output: str | None
    steps: Sequence[tuple[StepRecord, str | None]]
    events: Sequence[tuple[Any, str | None]]
    logs: Sequence[tuple[Any, str | None]]
    attempts: Sequence[AttemptRecord]
    older: Mapping[str, str]
    """The addresses that continue the lists, by their names."""
    runs: Sequence[int]

    @classmethod
    def read(cls, internals: Internals, workflow: str, instance_id: str, query: Query) -> InstancePage:
        """Read the page; raises InstanceNotFound, and RunNotFound or CursorInvalid for a query that cannot be used."""
        redaction = internals.redaction(workflow, instance_id)
        facts = redaction.redact_facts(internals.operations.queries.facts(workflow, instance_id))
        diagnosis = explain(facts)
        run = query.get("run", "")
        history = redaction.redact_page(
            internals.operations.history.page(
                workflow,
                instance_id,
                run=int(run) if run.isdecimal() else None,
                limit=_HISTORY_ROWS,
                steps_cursor=query.get("steps") or None,
                events_cursor=query.get("events") or None,
                logs_cursor=query.get("logs") or None,
                attempts_cursor=query.get("attempts") or None,
                with_logs=True,
                with_attempts=True,
                with_audit=True,
            )
        )
        assert history.logs is not None
        assert history.attempts is not None
        status, newest = history.status, facts.instance.run_number
        lists = {
            "steps": history.steps, "attempts": history.attempts, "events": history.events, "logs": history.logs,
        }  # fmt: skip
        return cls(
            row=facts.instance,
            diagnosis=diagnosis,
            commands=[_name_program(each, wiring.find_app().main) for each in diagnosis.actions],
            history=history,
            params=_format(history.params) or "null",
            output=(_format(status.output) or "null") if status.status is Status.COMPLETE else None,
            steps=[(each, _format(each.result)) for each in history.steps.items],
            events=[(each, _format(each.payload)) for each in history.events.items],
            logs=[(each, _format(each.data)) for each in history.logs.items],
            attempts=history.attempts.items,
            older={
                name: "?" + urlencode({"run": history.run_number, name: page.cursor})
                for name, page in lists.items()
                if page.cursor is not None
            },
            runs=range(newest, max(newest - _MAX_RUNS, 0), -1),
        )


def _name_program(command: str, app: str | None) -> str:
    command = command.replace(f"celery -A {YOUR_APP} durable", "python manage.py durable")
    return command.replace(YOUR_APP, app or YOUR_APP)


def _format(value: Any) -> str | None:
    """Return a value as JSON text for people, cut; None stays None."""
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ... ({len(text)} characters)"
