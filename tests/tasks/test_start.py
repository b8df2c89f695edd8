"""`celery_durable.start`: workflows in Celery's canvas, with countdowns, and by the task's name."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.result import AsyncResult
from pydantic import BaseModel

from celery_durable import Durable, Status, Step, Workflow, WorkflowEvent
from celery_durable.errors import (
    DurationInvalid,
    NotSerializable,
    ValueRefused,
    WorkflowParamsInvalid,
)
from celery_durable.tasks.start import START
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, until, worker


class OrderIn(BaseModel):
    number: int


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app(result_backend="cache+memory://")


@pytest.fixture
def order(durable: Durable) -> Workflow[OrderIn, int]:
    @durable.workflow
    def order(event: WorkflowEvent[OrderIn], step: Step) -> int:
        return step.do("double", lambda: event.payload.number * 2)

    return order


@pytest.fixture
def fetch(app: Celery) -> Task:
    @app.task(name="fetch", shared=False)
    def fetch(number: int) -> dict[str, int]:
        return {"number": number}

    return fetch


@pytest.fixture
def collect(app: Celery) -> Task:
    @app.task(name="collect", shared=False)
    def collect(ids: Any) -> Any:
        return ids

    return collect


def started(app: Celery, sent: AsyncResult) -> str:
    """The id of the instance that a message has started."""
    return sent.get(timeout=20)


def send_as_other_languages_do(app: Celery, queue: str, args: list[Any], kwargs: dict[str, Any], **headers: Any) -> str:
    """Publish a message of Celery's protocol with kombu alone."""
    task_id = str(uuid.uuid4())
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            json.dumps([args, kwargs, {}]),
            routing_key=queue,
            content_type="application/json",
            content_encoding="utf-8",
            headers={"lang": "go", "task": START, "id": task_id, "root_id": task_id, **headers},
            correlation_id=task_id,
        )
    return task_id


# --- canvas -------------------------------------------------------------------------------------


def test_a_signature_starts_an_instance_under_the_id_of_its_task(app: Celery, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        sent = order.s(OrderIn(number=21)).delay()
        assert started(app, sent) == sent.id
        assert order.get(sent.id).result("20 seconds") == 42


def test_in_a_chain_a_workflow_gets_the_result_before_it_and_hands_on_the_id(
    app: Celery, order: Workflow[OrderIn, int], fetch: Task, collect: Task
) -> None:
    with worker(app):
        sent = chain(fetch.s(5), order.s(), collect.s()).apply_async()
        assert order.get(started(app, sent)).result("20 seconds") == 10


def test_an_immutable_signature_ignores_the_result_before_it(
    app: Celery, order: Workflow[OrderIn, int], fetch: Task
) -> None:
    with worker(app):
        sent = chain(fetch.s(5), order.si(OrderIn(number=7), id="o-7", labels={"tenant": "acme"})).apply_async()
        assert started(app, sent) == "o-7"
        assert order.get("o-7").result("20 seconds") == 14
        assert [found.id for found in order.list(labels={"tenant": "acme"}).items] == ["o-7"]


def test_a_chord_collects_the_ids_of_the_instances_that_its_header_started(
    app: Celery, order: Workflow[OrderIn, int], collect: Task
) -> None:
    with worker(app):
        sent = chord([order.s(OrderIn(number=n), id=f"o-{n}") for n in range(3)], collect.s()).apply_async()
        assert sorted(started(app, sent)) == ["o-0", "o-1", "o-2"]
        assert [order.get(f"o-{n}").result("20 seconds") for n in range(3)] == [0, 2, 4]


def test_a_group_starts_one_instance_for_each_signature(app: Celery, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        ids = group(order.s(OrderIn(number=n)) for n in range(2)).apply_async().get(timeout=20)
        assert [order.get(each).result("20 seconds") for each in ids] == [0, 2]


def test_a_workflow_that_gets_parameters_and_a_result_is_not_started(
    app: Celery, order: Workflow[OrderIn, int], fetch: Task
) -> None:
    with worker(app), pytest.raises(ValueRefused) as refused:
        chain(fetch.s(5), order.s(OrderIn(number=7))).apply_async().get(timeout=20)
    assert str(refused.value) == (
        "Workflow 'order' got parameters and the result of the task before it. Write .si(params) to start it with the "
        "parameters, or .s() to start it with the result."
    )
    assert order.list().items == ()


def test_parameters_are_checked_where_the_signature_is_made(order: Workflow[Any, int]) -> None:
    with pytest.raises(WorkflowParamsInvalid):
        order.s({"number": "many"})
    assert order.s({"number": "3"}).args == ({"number": 3},)


def test_a_value_without_a_json_form_is_refused_where_the_signature_is_made(durable: Durable) -> None:
    @durable.workflow
    def untyped(event: WorkflowEvent[Any], step: Step) -> None: ...

    with pytest.raises(NotSerializable):
        untyped.s(object())


# --- countdown, queue, repetition ---------------------------------------------------------------


def test_a_countdown_is_a_start_time_in_the_database_and_no_message_waits(
    app: Celery, order: Workflow[OrderIn, int]
) -> None:
    before = datetime.now(UTC)
    with worker(app):
        instance = order.get(started(app, order.s(OrderIn(number=1)).apply_async(countdown=3 * 86400)))
    assert instance.status().status is Status.WAITING
    run_at = order.list().items[0].run_at
    assert run_at is not None
    assert timedelta(days=3) <= run_at - before < timedelta(days=3, minutes=1)


def test_an_eta_without_a_time_zone_is_in_utc_as_celery_reads_it(make_app: MakeApp) -> None:
    app = make_app(timezone="Europe/Berlin", result_backend="cache+memory://")

    @Durable(app).workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    eta = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)
    with worker(app):
        started(app, order.s().apply_async(eta=eta.replace(tzinfo=None)))
    assert order.list().items[0].run_at == eta


def test_a_message_goes_to_the_workflows_queue_whatever_the_applications_routes_say(make_app: MakeApp) -> None:
    app = make_app(task_routes={"*": {"queue": "elsewhere", "routing_key": "x", "exchange": "y"}})
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    @durable.workflow(queue=f"own-{app.main}")
    def special(event: WorkflowEvent[Any], step: Step) -> None: ...

    order.s(1).delay()
    special.s(2).delay()
    app.tasks[START].apply_async((3,), {"workflow": "special"})
    special.s(4).apply_async(queue=app.conf.durable_queue)
    app.amqp.queues.select_add(f"own-{app.main}")
    assert [json.loads(each.body)[0] for each in messages(app)] == [[1], [4]]
    assert [json.loads(each.body)[0] for each in messages(app, f"own-{app.main}")] == [[2], [3]]


def test_a_message_that_is_delivered_twice_starts_one_instance(app: Celery, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        sent = order.s(OrderIn(number=1)).delay()
        started(app, sent)
        again = order.s(OrderIn(number=1)).apply_async(task_id=sent.id)
        assert again.id == sent.id
        second = order.s(OrderIn(number=2), id=sent.id).delay()
        assert started(app, second) == sent.id
    assert [found.id for found in order.list().items] == [sent.id]


def test_a_signature_debounces_by_its_countdown(app: Celery, durable: Durable, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        for number in (1, 2):
            signature = order.s(OrderIn(number=number), id="o-1", if_exists="postpone", at_latest="5 min")
            started(app, signature.apply_async(countdown=3600))
    history = order.get("o-1").history()
    assert (history.params, str(history.status.status)) == ({"number": 2}, "waiting")
    start = durable.internals.operations.queries.read("order", "o-1").run_at
    assert start == history.created_at + timedelta(minutes=5)


def test_a_message_that_is_delivered_twice_has_one_more_run_follow(app: Celery, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        for number, task_id in ((1, "first"), (2, "second"), (2, "second")):
            signature = order.s(OrderIn(number=number), id="o-1", if_running="queue")
            started(app, signature.apply_async(task_id=task_id))
            order.get("o-1").result(timeout=20)
            app.backend.delete(app.backend.get_key_for_task(task_id))
    assert order.get("o-1").history().run_number == 2


def test_runs_can_overlap_only_under_one_id(app: Celery, order: Workflow[OrderIn, int]) -> None:
    with worker(app):
        sent = order.s(OrderIn(number=1), if_running="skip").delay()
        with pytest.raises(ValueRefused, match=r'^if_running="skip" needs an id: a random one never exists.$'):
            started(app, sent)


def test_a_task_id_that_no_instance_may_have_still_names_one_instance(
    app: Celery, order: Workflow[OrderIn, int]
) -> None:
    with worker(app):
        ids = {order.s(OrderIn(number=1)).apply_async(task_id="/nightly/2026.11.24").get(timeout=20) for _ in range(2)}
    assert {found.id for found in order.list().items} == ids
    assert len(ids) == 1


# --- the limit of runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "max_run"), [("s", "2 hours"), ("s", 7200), ("si", timedelta(hours=2))])
def test_a_signature_limits_the_runs_of_its_instance(
    app: Celery, order: Workflow[OrderIn, int], method: str, max_run: Any
) -> None:
    with worker(app):
        id_ = started(app, getattr(order, method)(OrderIn(number=1), max_run=max_run).delay())
    assert order.get(id_).history().max_run == timedelta(hours=2)


def test_a_limit_is_checked_where_the_signature_is_made(order: Workflow[OrderIn, int]) -> None:
    with pytest.raises(DurationInvalid, match="soon"):
        order.s(OrderIn(number=1), max_run="soon")


# --- by name ------------------------------------------------------------------------------------


def test_a_program_in_another_language_starts_an_instance_by_the_tasks_name(
    app: Celery, order: Workflow[OrderIn, int]
) -> None:
    options = {
        "workflow": "order",
        "id": "o-1",
        "labels": {"from": "go"},
        "max_run": "1 day",
        "run_at": "2020-01-01T00:00:00Z",
    }
    with worker(app):
        send_as_other_languages_do(app, app.conf.durable_queue, [{"number": 4}], options)
        until(lambda: order.list().items)
        assert order.get("o-1").result("20 seconds") == 8
    assert order.get("o-1").history().max_run == timedelta(days=1)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"number": "x"}, {}, "WorkflowParamsInvalid"),
    ({"number": 1}, {"id": "a b"}, "InvalidInstanceId"),
    ({"number": 1}, {"run_at": "tomorrow"}, "InstantInvalid"),
    ({"number": 1}, {"run_at": "2030-01-01T00:00:00"}, "InstantInvalid"),
    ({"number": 1}, {"labels": ["a"]}, "InvalidLabel"),
    ({"number": 1}, {"max_run": "soon"}, "DurationInvalid"),
    ({"number": 1}, {"max_run": [1]}, "DurationInvalid"),
]


def test_a_message_that_cannot_be_accepted_fails_its_task_and_starts_nothing(
    app: Celery, order: Workflow[OrderIn, int]
) -> None:
    with worker(app):
        for params, options, error in REFUSED:
            kwargs = {"workflow": "order", **options}
            result = AsyncResult(send_as_other_languages_do(app, app.conf.durable_queue, [params], kwargs), app=app)
            until(result.ready)
            assert (result.state, error in repr(result.result)) == ("FAILURE", True), error
    assert order.list().items == ()
