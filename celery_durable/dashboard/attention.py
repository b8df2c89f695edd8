"""The first page: what needs somebody, each with its cause and its remedy; below it, what is there.

It shows the findings of `doctor`, the diagnoses of `explain`, and groups of failed instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from starlette.responses import Response

from celery_durable.dashboard.changes import CHANGES, Remedy, read_remedies
from celery_durable.dashboard.checkups import Checkup
from celery_durable.dashboard.surveys import Problem, Survey
from celery_durable.dashboard.visits import Endpoint, Visit
from celery_durable.doctor import Finding, Level, Servers, check_health, check_workers
from celery_durable.errors import StoreUnavailable
from celery_durable.insight.explain import Code
from celery_durable.insight.explain.codes import MEANINGS
from celery_durable.insight.explain.phrases import inspect_worker_command, show_limit_command
from celery_durable.model import Status, format_duration

_NEEDED_NOW = ("backlog", "dispatcher", "outbox", "switches", "task queue", "workers")
"""What a WARN is about that concerns work of today, and not the installation."""
_LATE = frozenset({"backlog", "stuck"})
_CONSEQUENCES = {
    "database": _LATE | {"dispatcher", "queue", "task queue", "worker", "workers"},
    "broker": _LATE | {"broker"},
    "switches": _LATE,
    "dispatcher": _LATE | {"dispatcher"},
    "workers": _LATE | {"queue", "task queue", "worker"},
    "queue": _LATE,
    "full": _LATE,
    "workflows": _LATE,
}
"""What a FAIL probably causes. Problems come in the order in which they should be fixed, so causes come first."""
_SILENT_SINCE = timedelta(minutes=10)
"""A process that has been silent for longer is in the table of processes only."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, its length if the broker knows it, and the workers that consume it."""

    name: str
    length: int | None
    consumers: Sequence[str]


def _show(visit: Visit) -> Response:
    # What processes and servers do is not of one scope.
    sees_all = not visit.operations.scope_text
    checkup = visit.site.checkups.read() if sees_all else None
    findings = [] if checkup is None else [*checkup.findings]
    survey: Survey | None = None
    if checkup is None or checkup.servers.can_read:
        try:
            survey = visit.site.surveys.read(visit.operations)
        except StoreUnavailable as exc:
            findings.append(Finding(Level.FAIL, "database", str(exc)))
    if sees_all and survey is not None:
        findings += check_health(visit.site.durable, survey.health)
        if visit.site.checkups.has_broker:
            servers = Servers() if checkup is None else checkup.servers
            findings += check_workers(visit.site.durable, survey.health, servers)
    problems = [*_describe(each for each in findings if each.level is Level.FAIL)]
    problems += _describe(each for each in findings if each.level is Level.WARN and each.about in _NEEDED_NOW)
    if survey is not None:
        problems += survey.stuck
        problems += _find_silent(survey) if sees_all else []
    return visit.show(
        "attention.html",
        problems=_group(problems),
        survey=survey,
        warnings=_describe(each for each in findings if each.level is Level.WARN and each.about not in _NEEDED_NOW),
        is_checking=sees_all and checkup is None,
        sees_all=sees_all,
        queues=_list_queues(checkup, survey) if sees_all else [],
        statuses=list(Status),
        retry=CHANGES["retry"],
        show_limit=show_limit_command,
        outcome_unknown=MEANINGS[Code.OUTCOME_UNKNOWN].remedy.replace("`", ""),
    )


def _describe(findings: Iterable[Finding]) -> list[Problem]:
    return [
        Problem(each.level, each.about, each.about, each.sentence, [Remedy(each.remedy, None)] if each.remedy else [])
        for each in findings
    ]


def _group(problems: Sequence[Problem]) -> list[tuple[Problem, list[Problem]]]:
    """Return the problems, each with those that it probably causes."""
    found: list[tuple[Problem, list[Problem]]] = []
    for each in problems:
        causes = (
            consequences
            for cause, consequences in found
            if cause.level is Level.FAIL and each.about in _CONSEQUENCES.get(cause.about, ())
        )
        if (of_first := next(causes, None)) is not None:
            of_first.append(each)
        else:
            found.append((each, []))
    return found


def _find_silent(survey: Survey) -> list[Problem]:
    """Return the processes that are silent, without those that another one has replaced."""
    working = {beat.node for beat in survey.working}
    return [
        Problem(
            Level.WARN,
            beat.kind,
            f"{beat.kind} {beat.node}",
            f"It has been silent for {format_duration(survey.now - beat.seen_at, units=1)}: it is frozen or dead, or "
            "cannot reach the database.",
            read_remedies(inspect_worker_command(beat.node)) if beat.kind == "worker" else (),
        )
        for beat in survey.health.heartbeats
        if beat.is_silent(survey.now) and survey.now - beat.seen_at < _SILENT_SINCE and beat.node not in working
    ]


def _list_queues(checkup: Checkup | None, survey: Survey | None) -> list[Queue]:
    """Return the queues with their lengths and consumers."""
    lengths = {} if checkup is None else checkup.queues
    beats = [] if survey is None else survey.working
    names = sorted({*lengths, *(queue for beat in beats for queue in beat.queues)})
    return [
        Queue(name, lengths.get(name), sorted({beat.node for beat in beats if name in beat.queues})) for name in names
    ]


SHOW = Endpoint(_show, "stats", offers=tuple(CHANGES))
