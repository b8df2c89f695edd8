"""The message: exactly a reference to a run, whatever the application's global task options are."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Exchange, Queue

from celery_durable import CreateOptions, Durable, NonRetryableError, Step, WorkflowEvent
from celery_durable.tasks import ADVANCE, SWEEP
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, worker

GLOBALS: dict[str, Any] = {
    "task_acks_late": True,
    "task_always_eager": False,
    "task_annotations": {"*": {"rate_limit": "1/h", "acks_late": True, "time_limit": 3, "ignore_result": False}},
    "task_default_priority": 7,
    "task_default_rate_limit": "1/h",
    "task_ignore_result": False,
    "task_inherit_parent_priority": True,
    "task_publish_retry": False,
    "task_reject_on_worker_lost": True,
    "task_retry_on_worker_lost": True,
    "task_routes": {
        "*": {"queue": "elsewhere", "exchange": "elsewhere", "routing_key": "else", "priority": 9, "expires": 1}
    },
    "task_serializer": "pickle",
    "task_soft_time_limit": 1,
    "task_store_errors_even_if_ignored": True,
    "task_time_limit": 2,
    "task_track_started": True,
}
A_DAY = 86_400


def one_step(durable: Durable, **options: Any) -> Any:
    durable.app.finalize()  # from celery 5.7 on, the options of a registered task are those of its messages

    @durable.workflow(name="one", **options)
    def one(event: WorkflowEvent[Any], step: Step) -> int:
        return step.do("one", lambda: 1)

    return one


@pytest.mark.parametrize("settings", [{}, GLOBALS], ids=["plain", "global options"])
def test_a_message_carries_exactly_workflow_instance_and_run(make_app: MakeApp, settings: dict[str, Any]) -> None:
    app = make_app(**settings)
    workflow = one_step(Durable(app))
    workflow.create({"secret": "not in the broker"}, id="i-1")
    (message,) = messages(app)
    args, kwargs, embed = json.loads(message.body)
    assert (args, kwargs) == (["one", "i-1", 1], {})
    assert embed == {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    assert "secret" not in str(message.body) + str(message.headers)


@pytest.mark.parametrize("settings", [{}, GLOBALS], ids=["plain", "global options"])
def test_a_message_has_no_eta_no_retries_no_priority_and_no_expiry(make_app: MakeApp, settings: dict[str, Any]) -> None:
    app = make_app(**settings)
    one_step(Durable(app)).create(id="i-1")
    (message,) = messages(app)
    headers = message.headers
    assert {name: headers[name] for name in ("task", "eta", "expires", "retries", "group", "ignore_result")} == {
        "task": ADVANCE,
        "eta": None,
        "expires": None,
        "retries": 0,
        "group": None,
        "ignore_result": True,
    }
    assert headers["timelimit"] in ([None, None], [A_DAY, A_DAY])  # the second from celery 5.7
    assert message.properties["priority"] == 0
    assert "expiration" not in message.properties
    assert message.content_type == "application/json"


def test_people_see_workflow_and_instance(app: Celery, durable: Durable) -> None:
    one_step(durable).create(id="i-1")
    (message,) = messages(app)
    headers = message.headers
    assert headers["shadow"] == "durable:one"
    assert headers["argsrepr"] == "('one', 'i-1', 1)"
    assert headers["kwargsrepr"] == "{}"
    assert headers["id"].startswith("one:i-1:1:")
    assert len(headers["id"]) == len("one:i-1:1:") + 8


def test_each_message_has_an_id_of_its_own(app: Celery, durable: Durable) -> None:
    """A revoke is remembered by its id: one that revoked the first message must not silence the next."""
    instance = one_step(durable).create()
    instance.restart()
    instance.restart()
    assert len({message.headers["id"] for message in messages(app)}) == 3


def test_the_longest_names_fit_into_a_message(make_app: MakeApp) -> None:
    app = make_app(durable_max_workflow_name=255, durable_max_instance_id=255)
    durable = Durable(app)

    @durable.workflow(name="w" * 255)
    def wordy(event: WorkflowEvent[Any], step: Step) -> None: ...

    wordy.create(id="i" * 255)
    (message,) = messages(app)
    assert message.payload[0] == ["w" * 255, "i" * 255, 1]
    assert len(message.headers["id"]) <= 255


def test_a_workflow_may_have_a_queue_of_its_own(app: Celery, durable: Durable) -> None:
    heavy = f"heavy-{app.main}"
    one_step(durable, queue=heavy).create(id="i-1")
    assert messages(app) == []
    (message,) = messages(app, heavy)
    assert message.payload[0] == ["one", "i-1", 1]


def test_a_message_takes_the_exchange_that_the_application_gave_the_queue(make_app: MakeApp) -> None:
    topic = Exchange("flows", "topic")
    app = make_app(durable_queue="flows", task_queues=[Queue("flows", topic, routing_key="flow.advance")])
    one_step(Durable(app)).create()
    (message,) = messages(app)
    assert (message.delivery_info["exchange"], message.delivery_info["routing_key"]) == ("flows", "flow.advance")


def test_a_batch_is_one_message_for_each_new_instance(app: Celery, durable: Durable) -> None:
    workflow = one_step(durable)
    workflow.create(id="i-1")
    workflow.create_batch([CreateOptions(id=f"i-{n}") for n in (1, 2, 3, 3)])
    assert [message.payload[0][1] for message in messages(app)] == ["i-1", "i-2", "i-3"]


@pytest.mark.parametrize("name", [ADVANCE, SWEEP])
def test_global_options_do_not_reach_our_tasks(make_app: MakeApp, name: str) -> None:
    class Strict(Task):
        acks_late = True
        autoretry_for = (Exception,)
        max_retries = 9
        rate_limit = "1/h"
        time_limit = 4

    app = make_app(**GLOBALS)
    app.task_cls = Strict
    Durable(app)
    task = app.tasks[name]
    assert isinstance(task, Strict)  # what the application's class does around a task, it does around ours
    expected = {
        "acks_late": False,
        "autoretry_for": (),
        "ignore_result": True,
        "max_retries": 0,
        "rate_limit": 0,
        "reject_on_worker_lost": False,
        "retry_on_worker_lost": False,
        "serializer": "json",
        "soft_time_limit": A_DAY,
        "store_errors_even_if_ignored": False,
        "time_limit": A_DAY,
        "track_started": False,
    }
    assert {option: getattr(task, option) for option in expected} == expected


def test_a_workflow_runs_under_global_options_that_would_stop_it(make_app: MakeApp) -> None:
    app = make_app(**{**GLOBALS, "task_serializer": "json"})  # the tests stop a worker by a message of Celery's own
    workflow = one_step(Durable(app))
    with worker(app):
        # Two, since a rate limit lets the first one pass.
        assert [workflow.create().result("20 seconds") for _ in range(2)] == [1, 1]


def test_the_task_of_a_step_may_travel_as_yaml(make_app: MakeApp) -> None:
    app = make_app(accept_content=["json", "yaml"])
    durable = Durable(app)

    @app.task(name="double", serializer="yaml")
    def double(number: int) -> int:
        return 2 * number

    @durable.workflow(name="doubling")
    def doubling(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.task("double", double.s(event.payload))

    with worker(app):
        assert doubling.create(21).result("20 seconds") == 42


def test_a_message_that_makes_no_sense_changes_nothing(app: Celery, durable: Durable) -> None:
    workflow = one_step(durable)
    instance = workflow.create(id="i-1")
    advance = app.tasks[ADVANCE]
    assert advance.apply(args=("one", 7, "x")).get() == "noop: malformed message"
    assert advance.apply(args=("one", "i-1", 2)).get() == "noop: not due, or claimed by another worker"
    assert advance.apply(args=("one", "nobody", 1)).get() == "noop: not due, or claimed by another worker"
    assert advance.apply(args=("two", "i-1", 1)).get() == "noop: workflow 'two' is unknown to this worker"
    assert instance.status().status == "active"
    assert advance.apply(args=("one", "i-1", 1)).get() == "complete"
    assert advance.apply(args=("one", "i-1", 1)).get() == "noop: not due, or claimed by another worker"


def test_a_pass_outside_of_a_worker_names_its_machine(app: Celery, durable: Durable) -> None:
    """Celery sets no hostname where its task is called as a function."""

    @durable.workflow(name="failing")
    def failing(event: WorkflowEvent[Any], step: Step) -> None:
        raise NonRetryableError("no such order")

    failing.create(id="i-1")
    app.tasks[ADVANCE]("failing", "i-1", 1)
    (attempt,) = durable.internals.operations.history.read("failing", "i-1").attempts
    assert attempt.worker == socket.gethostname()
