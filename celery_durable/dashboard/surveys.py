"""What the database says about all instances, for the first page.

The reads are bounded (LAW 10), and viewers share them.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from celery_durable.all_operations import Operations
from celery_durable.app import Durable
from celery_durable.commands import Target
from celery_durable.conditions import first_line
from celery_durable.dashboard.changes import Remedy, read_remedies
from celery_durable.doctor import Level
from celery_durable.errors import InstanceNotFound
from celery_durable.insight.explain import Code, explain
from celery_durable.insight.stats import Health
from celery_durable.model import (
    OUTCOME_UNKNOWN,
    Count,
    EventWait,
    FailureText,
    Heartbeat,
    InstanceStatus,
    Status,
)
from celery_durable.redaction import Redaction

_FRESH_SECONDS = 5.0
_OVERDUE_AFTER = timedelta(seconds=5)
"""A run that is due for a shorter time is on its way."""
_MAX_EXPLAINED = 4
_MAX_GROUPS = 20
_MAX_SCOPES = 100
_MAX_WAITS = 20
_MAX_MISTYPED = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs somebody. ``about``: its kind; ``target``: the instance that it is about, if it is one."""

    level: Level
    about: str
    title: str
    sentence: str
    remedies: Sequence[Remedy] = ()
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Failures:
    """Errored instances that are alike, with the filter that finds them, and the newest of them."""

    count: int
    is_exact: bool
    workflow: str
    step: str | None
    error: str
    line: str
    newest_id: str
    newest_at: datetime
    where: str
    is_of_child: bool
    """Whether a child failed the newest of them, so that a retry keeps it."""

    @property
    def is_outcome_unknown(self) -> bool:
        """Whether a retry would call a function that may have done its work."""
        return self.error == OUTCOME_UNKNOWN


@dataclass(frozen=True, slots=True)
class Survey:
    """What the database says, at one moment, to the callers with one scope."""

    health: Health
    counts: Mapping[str, Mapping[Status, Count]]
    stuck: Sequence[Problem]
    failures: Sequence[Failures]
    others: int
    """How many different failures are not listed."""
    waits: Sequence[EventWait]
    """Those that have lasted for more than half of their time, earliest end first."""
    mistyped: Sequence[tuple[EventWait, str]]
    """Waits with an event whose type is nearly the one that they wait for."""

    @property
    def now(self) -> datetime:
        """The database's time."""
        return self.health.now

    @property
    def paused(self) -> Count:
        """The number of paused instances."""
        its = [each[Status.PAUSED] for each in self.counts.values() if Status.PAUSED in each]
        return Count(sum(each.count for each in its), all(each.is_exact for each in its))

    @property
    def working(self) -> list[Heartbeat]:
        """The processes that are not silent."""
        return [beat for beat in self.health.heartbeats if not beat.is_silent(self.now)]


class Surveys:
    """The last survey for each scope, which all viewers share. One of them reads the next."""

    def __init__(self, durable: Durable) -> None:
        self._durable, self._lock = durable, threading.Lock()
        self._taken: dict[str, tuple[float, Survey]] = {}

    def read(self, operations: Operations) -> Survey:
        """Return a survey that is at most five seconds old, or the one before while another viewer reads."""
        scope, monotonic = operations.scope_text, self._durable.internals.runtime.monotonic
        taken_at, survey = self._taken.get(scope, (0.0, None))
        if survey is not None and monotonic() - taken_at <= _FRESH_SECONDS:
            return survey
        if not self._lock.acquire(blocking=survey is None):
            assert survey is not None
            return survey  # another viewer reads the next one now
        try:
            survey = take_survey(operations, self._durable.internals.redaction)
            self._taken.pop(scope, None)
            self._taken[scope] = monotonic(), survey
            while len(self._taken) > _MAX_SCOPES:
                del self._taken[next(iter(self._taken))]
            return survey
        finally:
            self._lock.release()


MakeRedaction = Callable[[str, str], Redaction]


def take_survey(operations: Operations, make_redaction: MakeRedaction) -> Survey:
    """Read what the page shows of the database."""
    health = operations.stats.health()
    counts: dict[str, dict[Status, Count]] = {}
    for each in operations.stats.counts():
        counts.setdefault(each.workflow, {})[each.status] = each
    errored = [workflow for workflow, its in counts.items() if Status.ERRORED in its]
    failures, others = _group(make_redaction, operations.stats.failures(errored))
    waits = [
        make_redaction(each.workflow, each.instance_id).redact_wait(each)
        for each in operations.stats.late_waits(limit=_MAX_WAITS)
    ]
    mistyped = operations.stats.mistyped_events()[:_MAX_MISTYPED]
    return Survey(health, counts, _explain_stuck(operations, make_redaction, health), failures, others, waits, mistyped)


def _explain_stuck(operations: Operations, make_redaction: MakeRedaction, health: Health) -> list[Problem]:
    """Explain the runs that should move and do not; each code once."""
    found = dict[Code, Problem]()
    stuck = [each for each in health.stuck if health.now - each.since >= _OVERDUE_AFTER]
    for workflow, instance_id in [(each.workflow, each.instance_id) for each in stuck[:_MAX_EXPLAINED]]:
        try:
            facts = operations.queries.facts(workflow, instance_id, health)
        except InstanceNotFound:  # it was deleted meanwhile
            continue
        diagnosis = explain(facts.redacted(make_redaction(workflow, instance_id)))
        title = f"{diagnosis.code}: {workflow}/{instance_id}"
        remedies, target = read_remedies(diagnosis.actions), Target(workflow, instance_id)
        found.setdefault(diagnosis.code, Problem(Level.FAIL, "stuck", title, diagnosis.sentence, remedies, target))
    return list(found.values())


def _group(make_redaction: MakeRedaction, texts: Sequence[FailureText]) -> tuple[list[Failures], int]:
    """Return the largest groups of alike failures, and the number of the others.

    A group is what one filter finds. If the application redacts messages, they are no part of it.
    """
    groups: dict[str, Failures] = {}
    for each in texts:
        redaction = make_redaction(each.workflow, each.newest_id)
        name, line = _read_error(redaction, each)
        words = [f"workflow={each.workflow}", "status=errored", f"error={name}"]
        words += [f"step={each.step}"] if each.step else []
        words += [f"message={line}"] if line and not redaction.has_hook else []
        where = shlex.join(words)
        made = Failures(
            each.count,
            each.is_exact,
            each.workflow,
            each.step,
            name,
            line,
            each.newest_id,
            each.newest_at,
            where,
            each.is_of_child,
        )
        if (known := groups.get(where)) is not None:
            newest = max(known, made, key=lambda one: one.newest_at)
            made = replace(newest, count=known.count + made.count, is_exact=known.is_exact and made.is_exact)
        groups[where] = made
    ordered = sorted(groups.values(), key=lambda one: (one.count, one.newest_at), reverse=True)
    return ordered[:_MAX_GROUPS], len(ordered[_MAX_GROUPS:])


def _read_error(redaction: Redaction, text: FailureText) -> tuple[str, str]:
    error = redaction.redact_status(InstanceStatus(Status.ERRORED, text.error)).error
    return ("", "") if error is None else (error.name, first_line(error.message))
