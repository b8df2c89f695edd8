"""The backend for Django's tasks: what is enqueued commits with the caller's rows, runs, and has a result."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import django
import pytest
from celery import Celery
from django.db import transaction

from celery_durable.contrib.django.task_backend import django_task, run_django_task
from celery_durable.testing import DurableHarness
from celery_durable.testing.databases import MakeStore
from tests.contrib.django.shop_tasks import (
    add,
    fail,
    fail_in_lines,
    resize,
    return_a_function,
    show_context,
    show_enqueued_at,
    urgent,
)
from tests.contrib.django.site import app

package = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
exceptions, signals = (import_module(f"{package}.{name}") for name in ("exceptions", "signals"))
InvalidTask = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError


class Undo(Exception):
    pass


@pytest.fixture
def tasks(alias: str, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[DurableHarness]:
    """A harness whose Celery tasks run at once."""
    from django.conf import settings

    monkeypatch.setattr(settings, "CELERY_DURABLE_APP", "tests.contrib.django.site:app", raising=False)
    monkeypatch.setattr(settings, "CELERY_DURABLE_DATABASE", alias, raising=False)
    with DurableHarness([django_task], make_store=make_store, unused_mocks=True) as harness:
        vars(app)["durable"] = harness.durable
        harness.mocks.mock_task("run", run_django_task.run)
        yield harness


def test_a_task_runs_and_has_a_result(tasks: DurableHarness) -> None:
    result = add.enqueue(1, b=2)
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    tasks.run_until_idle()
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", {"sum": 3}, 1)
    assert result.started_at <= result.finished_at
    again = add.get_result(result.id)
    assert (again.task, again.args, again.kwargs, again.backend) == (add, [1], {"b": 2}, "default")
    assert again.enqueued_at is not None


def test_a_coroutine_function_and_a_context_work(tasks: DurableHarness) -> None:
    resized, shown = resize.enqueue(7), show_context.enqueue()
    tasks.run_until_idle()
    assert resize.get_result(resized.id).return_value == 7
    assert show_context.get_result(shown.id).return_value == [shown.id, 1, "RUNNING"]


@pytest.mark.parametrize("how", ["ValueError", "SystemExit"])
def test_a_failed_task_has_its_error_and_traceback(tasks: DurableHarness, how: str) -> None:
    result = fail.enqueue(how)
    tasks.run_until_idle()
    result.refresh()
    [error] = result.errors
    assert result.status == "FAILED"
    assert error.exception_class.__name__ == how
    assert "raise {" in error.traceback
    assert error.traceback.endswith(f"{how}: no paper\n")
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    shown = django_task.get(result.id).status().error
    assert (shown.name, shown.message) == ("DjangoTaskFailed", f"{how}: no paper")


def test_a_message_of_several_lines_is_kept_as_the_database_takes_it(tasks: DurableHarness) -> None:
    result = fail_in_lines.enqueue()
    tasks.run_until_idle()
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", ValueError)
    error = django_task.get(result.id).status().error
    assert error is not None
    assert error.message == "ValueError: no paper \nFor more, see the manual."


def test_tracebacks_follow_the_setting_and_the_redaction(
    tasks: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    internals = tasks.durable.internals
    monkeypatch.setattr(internals, "settings", dataclasses.replace(internals.settings, tracebacks="none"))
    monkeypatch.setattr(internals, "redact", lambda value, context: "***" if context.kind == "error" else value)
    result = fail.enqueue("ValueError")
    tasks.run_until_idle()
    result.refresh()
    assert result.errors[0].traceback == "ValueError: ***"
    assert "no paper" not in repr(django_task.get(result.id).history())


def test_the_context_has_the_time_at_which_the_task_was_enqueued(tasks: DurableHarness) -> None:
    result = show_enqueued_at.enqueue()
    tasks.run_until_idle()
    assert show_enqueued_at.get_result(result.id).return_value == result.enqueued_at.isoformat()


def test_a_result_is_read_although_its_queue_has_left_the_settings(
    tasks: DurableHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = resize.enqueue(7)
    monkeypatch.setattr(resize.get_backend(), "queues", {"default"})
    tasks.run_until_idle()
    assert resize.get_result(result.id).return_value == 7


def test_a_value_that_is_not_json_fails_the_task(tasks: DurableHarness) -> None:
    result = return_a_function.enqueue()
    tasks.run_until_idle()
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", TypeError)


def test_a_terminated_task_has_failed(tasks: DurableHarness) -> None:
    result = add.enqueue(1)
    django_task.get(result.id).terminate("no longer wanted")
    result.refresh()
    assert (result.status, result.errors[0].traceback) == ("FAILED", "no longer wanted")
    assert result.errors[0].exception_class.__name__ == "WorkflowFailed"
    assert result.finished_at is not None


def test_an_unknown_id_has_no_result(tasks: DurableHarness) -> None:
    for result_id in ("nobody", "", "\x00", "a/b"):
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            add.get_result(result_id)
    other = fail.enqueue("ValueError")
    with pytest.raises(exceptions.TaskResultMismatch):
        add.get_result(other.id)


def test_a_rolled_back_block_leaves_no_task_and_no_signal(alias: str, tasks: DurableHarness) -> None:
    enqueued: list[str] = []

    def note(sender: Any, task_result: Any, **_: Any) -> None:
        enqueued.append(task_result.id)

    signals.task_enqueued.connect(note)
    try:
        with pytest.raises(Undo), transaction.atomic(using=alias):
            undone = add.enqueue(1)
            assert add.get_result(undone.id).status == "READY"
            raise Undo
        with transaction.atomic(using=alias):
            kept = add.enqueue(1)
            assert (enqueued, len(tasks.messages)) == ([], 0)
    finally:
        signals.task_enqueued.disconnect(note)
    assert (enqueued, len(tasks.messages)) == ([kept.id], 1)
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        add.get_result(undone.id)


def test_signals_name_the_start_and_the_end(tasks: DurableHarness) -> None:
    seen: list[tuple[str, str]] = []

    def started(sender: Any, task_result: Any, **_: Any) -> None:
        seen.append(("started", str(task_result.status)))

    def finished(sender: Any, task_result: Any, **_: Any) -> None:
        seen.append(("finished", str(task_result.status)))

    signals.task_started.connect(started)
    signals.task_finished.connect(finished)
    try:
        add.enqueue(1)
        fail.enqueue("ValueError")
        tasks.run_until_idle()
    finally:
        signals.task_started.disconnect(started)
        signals.task_finished.disconnect(finished)
    assert sorted(seen) == [("finished", "FAILED"), ("finished", "SUCCESSFUL"), *[("started", "RUNNING")] * 2]


def test_run_after_delays_the_start(tasks: DurableHarness) -> None:
    later = tasks.clock.now + dt.timedelta(hours=2)
    result = add.using(run_after=later).enqueue(1)
    tasks.advance("1 hour")
    assert add.get_result(result.id).status == "READY"
    tasks.advance("2 hours")
    done = add.get_result(result.id)
    assert (done.status, done.task.run_after) == ("SUCCESSFUL", later)


def read_options(result: Any) -> dict[str, Any]:
    return django_task.get(result.id).history().params["options"]


def test_the_queue_is_celerys(tasks: DurableHarness) -> None:
    assert read_options(add.enqueue(1)) == {}
    assert read_options(resize.enqueue(1)) == {"queue": "media"}
    with pytest.raises(InvalidTask, match="Queue 'other' is not valid for backend"):
        add.using(queue_name="other")


@pytest.mark.parametrize(
    ("broker", "levels"), [("redis://", {100: 0, 1: 4, -100: 9}), ("amqp://", {100: 9, 1: 5, -100: 0})]
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_priorities_become_those_of_the_broker(
    tasks: DurableHarness, broker: str, levels: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.contrib.django.site.app", Celery("shop", broker=broker, set_as_current=False))
    from tests.contrib.django import site

    vars(site.app)["durable"] = tasks.durable
    found = {level: read_options(urgent.using(priority=level).enqueue()) for level in levels}
    assert found == {level: {"priority": number} for level, number in levels.items()}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_priorities_are_refused_unless_they_are_switched_on(tasks: DurableHarness) -> None:
    with pytest.raises(InvalidTask, match="does not support setting priority"):
        add.using(priority=1)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_arguments_must_be_json(tasks: DurableHarness) -> None:
    with pytest.raises(TypeError):
        add.enqueue(object())
    assert django_task.list().items == ()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_async_code_enqueues_and_reads(tasks: DurableHarness) -> None:
    async def enqueue() -> Any:
        result = await add.aenqueue(1)
        return await add.aget_result(result.id)

    result = asyncio.run(enqueue())
    tasks.run_until_idle()
    result.refresh()
    assert result.return_value == {"sum": 1}
