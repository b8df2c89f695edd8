"""Instances that beat starts: one for each scheduled time, however many beats there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, signals
from celery.beat import Scheduler, Service
from celery.schedules import BaseSchedule, crontab, schedule

from celery_durable import Durable, Step, Workflow, WorkflowEvent
from celery_durable.tasks.beat_schedules import find_last_due
from celery_durable.tasks.start import START
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages

BERLIN = ZoneInfo("Europe/Berlin")


def a_beat(app: Celery) -> Scheduler:
    """The scheduler of a beat that has started, as far as Durable is concerned."""
    service = Service(app, scheduler_cls=Scheduler)
    signals.beat_init.send(sender=service)
    return service.scheduler


def send(beat: Scheduler, name: str) -> None:
    """Have a beat find that an entry is due."""
    beat.apply_entry(beat.schedule[name])


def ids(app: Celery, queue: str | None = None) -> list[str | None]:
    """The ids of instances that waiting messages name."""
    return [json.loads(message.body)[1].get("id") for message in messages(app, queue)]


def scheduled(app: Celery, schedule: Any, **kwargs: Any) -> None:
    app.conf.beat_schedule = {
        "report": {
            "task": START,
            "schedule": schedule,
            "args": [{"kind": "short"}],
            "kwargs": {"workflow": "report", **kwargs},
        }
    }


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app(timezone="Europe/Berlin", durable_dispatcher="none")


@pytest.fixture
def report(durable: Durable) -> Workflow[Any, Any]:
    @durable.workflow
    def report(event: WorkflowEvent[Any], step: Step) -> Any:
        return event.payload

    return report


@pytest.fixture
def at(app: Celery) -> Callable[..., None]:
    """Set the clock of the app's schedules."""

    def set_clock(*when: int, tz: Any = BERLIN) -> None:
        app.now = lambda: datetime(*when, tzinfo=tz)

    return set_clock


def test_two_beats_give_the_instance_of_a_scheduled_time_the_same_id(
    app: Celery, report: Workflow[Any, Any], at: Callable[..., None]
) -> None:
    scheduled(app, crontab(minute=30, hour=2), id="report-{scheduled:%Y-%m-%d}")
    first, second = a_beat(app), a_beat(app)
    at(2026, 11, 24, 2, 30, 0)
    send(first, "report")
    at(2026, 11, 25, 1, 15, 0)  # it was down, and catches up after midnight
    send(second, "report")
    at(2026, 11, 25, 2, 30, 4)
    send(first, "report")
    assert ids(app) == ["report-2026-11-24", "report-2026-11-24", "report-2026-11-25"]


def test_without_an_id_it_is_made_of_the_entry_and_the_scheduled_time(
    app: Celery, report: Workflow[Any, Any], at: Callable[..., None]
) -> None:
    scheduled(app, 300.0)
    app.conf.beat_schedule["other"] = app.conf.beat_schedule["report"]
    first, second = a_beat(app), a_beat(app)
    at(2026, 11, 24, 2, 31, 0)
    send(first, "report")
    send(first, "other")
    at(2026, 11, 24, 2, 34, 59)
    send(second, "report")
    at(2026, 11, 24, 2, 36, 0)
    send(first, "report")
    one, other, same, next_ = ids(app)
    assert one == same
    assert len({one, other, next_}) == 3
    assert uuid.UUID(str(one)).version == 5


def test_two_beats_ask_once_for_a_run_of_an_instance_that_does_not_overlap(
    app: Celery, durable: Durable, report: Workflow[Any, Any], at: Callable[..., None]
) -> None:
    scheduled(app, 300.0, id="report", if_running="queue", max_run=timedelta(hours=1))
    first, second = a_beat(app), a_beat(app)
    at(2026, 11, 24, 2, 31, 0)
    send(first, "report")
    send(second, "report")
    at(2026, 11, 24, 2, 36, 0)
    send(second, "report")
    one, same, next_ = [json.loads(message.body)[1] for message in messages(app)]
    assert one == same
    assert {one["id"], next_["id"]} == {"report"}
    assert one["request_id"] != next_["request_id"]


def test_the_parameters_and_the_queue_are_those_of_the_entry(
    app: Celery, durable: Durable, at: Callable[..., None]
) -> None:
    @durable.workflow(queue=f"own-{app.main}")
    def report(event: WorkflowEvent[Any], step: Step) -> Any:
        return event.payload

    scheduled(app, crontab(), id="r-{scheduled}", max_run=timedelta(hours=2))
    at(2026, 11, 24, 2, 31, 59)
    send(a_beat(app), "report")
    app.amqp.queues.select_add(f"own-{app.main}")
    (message,) = messages(app, f"own-{app.main}")
    assert json.loads(message.body)[:2] == [
        [{"kind": "short"}],
        {"workflow": "report", "id": "r-20261124T013100Z", "max_run": 7200},
    ]


def test_the_entries_of_other_tasks_are_sent_as_ever(app: Celery, report: Workflow[Any, Any]) -> None:
    scheduled(app, 60.0)
    app.conf.beat_schedule["mine"] = {"task": "mine", "schedule": 60.0, "kwargs": {"id": "a-{scheduled}"}}
    send(a_beat(app), "mine")
    assert ids(app, app.conf.task_default_queue) == ["a-{scheduled}"]


def test_outside_of_beat_the_time_of_sending_takes_the_place_of_the_scheduled_time(
    app: Celery, report: Workflow[Any, Any]
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    report.s(id="r-{scheduled}").delay()
    (named,) = ids(app)
    assert before <= datetime.strptime(str(named), "r-%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("schedule_", "now", "due"),
    [
        (crontab(), (2026, 11, 24, 2, 31, 59), (2026, 11, 24, 2, 31)),
        (crontab(minute=0, hour="*/6"), (2026, 11, 24, 5, 59), (2026, 11, 24, 0, 0)),
        (crontab(minute="5,35", hour=23), (2026, 11, 24, 23, 4), (2026, 11, 23, 23, 35)),
        (crontab(minute=0, hour=8, day_of_week="sun"), (2026, 11, 24, 2, 31), (2026, 11, 22, 8, 0)),
        (crontab(minute=0, hour=8, day_of_month=1), (2026, 11, 1, 7, 59), (2026, 10, 1, 8, 0)),
        (crontab(0, 0, day_of_month=29, month_of_year=2), (2026, 11, 24, 2, 31), (2024, 2, 29, 0, 0)),
        (crontab(minute=30, hour=23), (2026, 3, 30, 1, 0), (2026, 3, 29, 23, 30)),  # 29 March has 23 hours there
        (schedule(timedelta(hours=1)), (2026, 11, 24, 2, 31), (2026, 11, 24, 2, 0)),
    ],
)
def test_a_schedule_was_last_due(
    app: Celery, at: Callable[..., None], schedule_: Any, now: tuple[int, ...], due: tuple[int, ...]
) -> None:
    schedule_.app = app
    at(*now)
    assert find_last_due(schedule_) == datetime(*due, tzinfo=BERLIN)


def test_in_a_repeated_hour_each_scheduled_time_is_one_of_its_own(app: Celery, at: Callable[..., None]) -> None:
    every_half_hour = crontab(minute="*/30", app=app)
    dues = []
    for hour, minute in [(0, 0), (0, 30), (1, 0), (1, 30)]:  # 02:00 to 02:30 twice, in Berlin
        at(2026, 10, 25, hour, minute, tz=UTC)
        dues.append(find_last_due(every_half_hour).astimezone(UTC).time().isoformat())
    assert dues == ["00:00:00", "00:30:00", "01:00:00", "01:30:00"]


def test_a_schedule_of_another_kind_does_not_tell_when_it_was_due(app: Celery) -> None:
    class Tides(BaseSchedule):
        """The application's own class."""

    assert find_last_due(Tides(app=app)) is None


def test_a_time_zone_of_the_schedule_itself_is_its_time_zone(app: Celery, at: Callable[..., None]) -> None:
    noon = crontab(minute=0, hour=12, app=app)
    vars(noon)["tz"] = timezone(timedelta(hours=9))  # as django-celery-beat has it
    at(2026, 11, 24, 4, 30)
    due = find_last_due(noon)
    assert due is not None
    assert due.isoformat() == "2026-11-24T12:00:00+09:00"


@pytest.mark.gate
def test_entries_of_django_celery_beat_are_filled_in_as_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.django_beat", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    dated, other, dated_again, other_again = (json.loads(line) for line in done.stdout.splitlines())
    assert (dated, other) == (dated_again, other_again)
    assert dated[0] == [1]
    assert re.fullmatch(r"r-2330-20\d\d-01-01", dated[1]["id"])
    assert uuid.UUID(other[1]["id"]).version == 5
