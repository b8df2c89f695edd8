"""`--where`: selects instances, as in ``workflow=order status=errored error=CardDeclined since=2h``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import click

from celery_durable import values
from celery_durable.cli.backends.backend import Backend
from celery_durable.cli.inputs import DurationInput
from celery_durable.errors import ValueRefused
from celery_durable.model import InstanceSummary, Status

_PAGE = 100


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on instances. All fields that are set must match.

    ``older``: the last change is at least this long ago. ``since``: at most this long ago. ``labels``: all must match.
    """

    workflow: str | None = None
    status: Status | None = None
    error: str | None = None
    older: timedelta | None = None
    since: timedelta | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


_LABEL = "label."
_KEYS = [each.name for each in fields(Condition) if each.name != "labels"]
_ALLOWED_KEYS = ", ".join(f"{each}=" for each in [*_KEYS, f"{_LABEL}NAME"])


class WhereInput(click.ParamType[Condition]):
    """``key=value`` pairs, separated by spaces."""

    name = "CONDITION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        """Parse the condition; fails if it is empty, or a key is unknown or given twice."""
        if isinstance(value, Condition):
            return value
        given: dict[str, Any] = {}
        labels: list[str] = []
        try:
            words = shlex.split(value)
        except ValueError as exc:
            self.fail(f"{value!r} cannot be read: {exc}", param, ctx)
        for word in words:
            key, equals, text = word.partition("=")
            is_label = key.startswith(_LABEL)
            if not equals or not text or not (is_label or key in _KEYS) or key in given:
                self.fail(f"{word!r} is not one of {_ALLOWED_KEYS}, each once", param, ctx)
            match key:
                case _ if is_label:
                    labels.append(word.removeprefix(_LABEL))
                case "status":
                    given[key] = Status(click.Choice([str(each) for each in Status]).convert(text, param, ctx))
                case "older" | "since":
                    given[key] = DurationInput().convert(text, param, ctx)
                case _:
                    given[key] = text
        if not given and not labels:
            self.fail("the condition is empty", param, ctx)
        try:
            return Condition(**given, labels=values.parse_labels(labels))
        except ValueRefused as exc:
            self.fail(str(exc), param, ctx)


def find_matching(backend: Backend, where: Condition) -> Iterator[InstanceSummary]:
    """Yield the instances that match, newest first. They are read page by page."""
    now, cursor = backend.now(), None
    while True:
        page = backend.list(where.workflow, status=where.status, cursor=cursor, limit=_PAGE, labels=where.labels)
        for item in page.items:
            age = now - item.updated_at
            if where.error is not None and (item.error is None or item.error.name != where.error):
                continue
            if (where.older is not None and age < where.older) or (where.since is not None and age > where.since):
                continue
            yield item
        cursor = page.cursor
        if cursor is None:
            return
