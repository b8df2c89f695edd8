"""Steps that others do, in a harness: mocks answer for Celery tasks, children run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task, current_app
from celery._state import _set_current_app

from celery_durable import NonRetryableError, Retries, Step, StepFailed, StepTx, WorkflowEvent, durable_workflow
from celery_durable.testing import (
    DurableHarness,
    HarnessMisuse,
    NotCrashSafe,
    NotEnded,
    NotReplayed,
    assert_crash_safe,
    assert_replays,
)
from celery_durable.testing.scenario import (
    advance_time_and_run_until_idle,
    assert_,
    define_scenario,
    event_and_run_until_idle,
    initialize_and_run_until_idle,
    read,
    run_scenario,
)

MakeHarness = Callable[..., DurableHarness]

rows = sa.MetaData()
books = sa.Table("delegation_books", rows, sa.Column("what", sa.String(50)))


def media(event: WorkflowEvent[Any], step: Step) -> Any:
    """A task that is sent twice at most."""
    try:
        return step.task("thumb", "media.resize", timeout="1 hour", retries=Retries(limit=1, delay=30))
    except StepFailed as exc:
        return [type(exc).__name__, exc.error_name, exc.error_message, exc.attempts]


@durable_workflow(name="delegated-billing")
def billing(event: WorkflowEvent[int], step: Step) -> int:
    """A child."""
    paid = step.wait_for_event("payment", "paid", timeout="1 day").payload
    step.do("book", book, f"bill of {event.payload}")
    return event.payload + paid


def book(tx: StepTx, what: str) -> None:
    tx.session.execute(sa.insert(books).values(what=what))


def order(event: WorkflowEvent[int], step: Step) -> Any:
    """A task and a child."""
    checked = step.task("check", "stock.check", timeout="1 hour", retries=2)
    bill = step.child("bill", billing, event.payload, id=f"bill-{event.instance_id}")
    step.do("book", book, "order")
    return {"checked": checked, "bill": bill}


def booked(session: Any) -> list[str]:
    return list(session.scalars(sa.select(books.c.what)))


# --- mocks of tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"width": 7}, None, 0, "", [], False])
def test_a_double_answers_for_the_task(make_harness: MakeHarness, value: Any) -> None:
    harness = make_harness(media)
    mock = harness.mocks.mock_step_result("thumb", value)
    instance = harness.create(media)
    harness.run_until_idle()
    assert instance.result() == value
    assert type(instance.result()) is type(value)
    step = instance.step("thumb")
    assert (step.status, step.result, step.attempts, mock.calls) == ("completed", value, 1, 1)
    [message] = harness.outbox
    assert (message.id, message.name) == (step.task_id, "media.resize")


def test_a_task_fails_as_often_as_its_double_says(make_harness: MakeHarness) -> None:
    harness = make_harness(media)
    failing = harness.mocks.mock_step_error("thumb", OSError("disk full"), times=1)
    harness.mocks.mock_step_result("thumb", "small")
    instance = harness.create(media)
    harness.run_until_idle()
    step = instance.step("thumb")
    assert (step.error.name, step.error.message) == ("OSError", "disk full")
    assert step.next_retry_at == harness.clock.now + timedelta(seconds=30)
    harness.advance("30 s")
    assert (instance.result(), instance.step("thumb").attempts, failing.calls) == ("small", 2, 1)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("disk full"), ["StepFailed", "OSError", "disk full", 2]),
        (NonRetryableError("no such picture"), ["StepFailed", "NonRetryableError", "no such picture", 1]),
    ],
)
def test_a_task_that_always_fails_fails_its_step(make_harness: MakeHarness, error: Exception, told: list[Any]) -> None:
    harness = make_harness(media)
    harness.mocks.mock_step_error("thumb", error)
    harness.mocks.disable_retry_delays()
    instance = harness.create(media)
    harness.run_until_idle()
    assert instance.result() == told


def test_a_task_times_out_at_once_where_a_double_says_so(make_harness: MakeHarness) -> None:
    harness = make_harness(media)
    late = harness.mocks.force_step_timeout("thumb", times=1)
    instance, started = harness.create(media), harness.clock.now
    harness.run_until_idle()
    step = instance.step("thumb")
    assert (step.error.name, step.error.message) == (
        "StepTimeout", "Celery task 'media.resize' did not answer in time",
    )  # fmt: skip
    assert (step.next_retry_at, late.calls) == (started + timedelta(seconds=30), 1)
    harness.mocks.mock_step_result("thumb", "small")
    harness.advance("30 s")
    assert instance.result() == "small"


def test_a_result_that_is_no_json_is_the_error_of_the_step(make_harness: MakeHarness) -> None:
    harness = make_harness(media)
    harness.mocks.mock_step_result("thumb", object())
    harness.mocks.disable_retry_delays()
    instance = harness.create(media)
    harness.run_until_idle()
    assert instance.result()[:2] == ["StepFailed", "NotSerializable"]


def test_a_double_may_be_of_one_workflow_alone(make_harness: MakeHarness) -> None:
    def other(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.task("thumb", "media.resize")

    harness = make_harness(media, other)
    harness.mocks.mock_step_result("thumb", 1, workflow="other")
    one, two = harness.create(media), harness.create(other)
    harness.run_until_idle()
    assert (one.is_waiting, two.result()) == (True, 1)


def test_a_task_without_a_double_is_told_by_what_waits_for_it(make_harness: MakeHarness) -> None:
    harness = make_harness(media)
    instance = harness.create(media, id="m-1")
    harness.run_until_idle()
    with pytest.raises(NotEnded) as caught:
        instance.result()
    assert "step 'thumb' is waiting for Celery task 'media.resize' until 2030-01-01 01:00:00 UTC" in str(caught.value)
    harness.advance("3 hours")
    assert instance.result()[:2] == ["StepTimeout", "StepTimeout"]


def test_no_runner_is_in_a_task_that_could_be_killed(make_harness: MakeHarness) -> None:
    harness = make_harness(media)
    harness.faults.crash_in_step("thumb")
    harness.create(media)
    with pytest.raises(HarnessMisuse) as caught:
        harness.run_until_idle()
    assert str(caught.value) == "A Celery task does this step: no runner is in it that could be killed."


def test_tasks_side_by_side_answer_all_also_behind_a_pause(make_harness: MakeHarness) -> None:
    def album(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.gather(*(step.submit_task(f"page {n}", "media.resize") for n in range(3)))

    harness = make_harness(album)
    instance = harness.create(album)
    harness.run_until_idle()
    instance.pause()
    for n in range(3):
        harness.mocks.mock_step_result(f"page {n}", n)
    harness.run_until_idle()
    assert (instance.status().status, len(instance.events())) == ("paused", 3)
    instance.resume()
    harness.run_until_idle()
    assert instance.result() == [0, 1, 2]


@pytest.mark.parametrize("what", ["terminated", "deleted", "settled by hand", "restarted"])
def test_what_nobody_waits_for_any_more_is_not_answered(make_harness: MakeHarness, what: str) -> None:
    harness = make_harness(media)
    instance = harness.create(media, id="m-1")
    harness.run_until_idle()
    match what:
        case "settled by hand":
            harness.durable.internals.operations.interventions.set_result("media", "m-1", "thumb", "by hand", by="eve")
        case "restarted":
            instance.restart()
            harness.run_until_idle()
        case _:
            instance.terminate()
    if what == "deleted":
        harness.durable.internals.operations.retention.prune(older_than=timedelta(0))
    mock = harness.mocks.mock_step_result("thumb", "small")
    harness.run_until_idle()
    assert mock.calls == (1 if what == "restarted" else 0)  # the task of the run that goes on


@pytest.mark.parametrize(("ends", "calls"), [("terminate", 0), ("restart", 2)])
def test_items_of_a_run_that_has_ended_are_not_answered(make_harness: MakeHarness, ends: str, calls: int) -> None:
    def album(event: WorkflowEvent[None], step: Step) -> list[Any]:
        return step.map("thumb", "media.resize", [1, 2], timeout="1 hour")

    harness = make_harness(album)
    instance = harness.create(album)
    harness.run_until_idle()
    getattr(instance, ends)()
    harness.run_until_idle()
    mock = harness.mocks.mock_step_result("thumb", "small")
    harness.run_until_idle()
    assert mock.calls == calls


# --- children -----------------------------------------------------------------------------------


def test_a_child_runs_for_real(make_harness: MakeHarness) -> None:
    harness = make_harness(order, billing)
    harness.create_tables(rows)
    harness.mocks.mock_step_result("check", True)
    instance = harness.create(order, 100, id="o-1")
    harness.run_until_idle()
    with pytest.raises(NotEnded) as caught:
        instance.result()
    assert "step 'bill' is waiting for instance 'bill-o-1' of workflow 'delegated-billing' until" in str(caught.value)
    child = harness.instance(billing, "bill-o-1")
    child.send_event("paid", 7)
    harness.run_until_idle()
    assert (child.result(), instance.result()) == (107, {"checked": True, "bill": 107})
    with harness.session() as session:
        assert booked(session) == ["bill of 100", "order"]


def test_mocks_stand_in_for_the_steps_of_a_child_too(make_harness: MakeHarness) -> None:
    harness = make_harness(order, billing)
    harness.mocks.mock_step_result("check", True)
    harness.mocks.mock_event("paid", 7)
    harness.mocks.mock_step_result("book", None)
    instance = harness.create(order, 100)
    harness.run_until_idle()
    assert instance.result() == {"checked": True, "bill": 107}


def test_a_run_replays_wherever_it_stands(make_harness: MakeHarness) -> None:
    harness = make_harness(order, billing)
    harness.create_tables(rows)
    instance = harness.create(order, 100, id="o-1")
    harness.run_until_idle()
    assert_replays(order, instance.history())  # open at the task
    harness.mocks.mock_step_error("check", OSError("the stock is closed"), times=1)
    harness.run_until_idle()
    assert instance.step("check").next_retry_at is not None
    assert_replays(order, instance.history())  # to be sent again
    harness.mocks.mock_step_result("check", True)
    harness.advance("1 minute")
    assert_replays(order, instance.history())  # open at the child
    harness.instance(billing, "bill-o-1").send_event("paid", 7)
    harness.run_until_idle()
    assert instance.result() == {"checked": True, "bill": 107}
    assert_replays(order, instance.history())


def test_a_step_that_another_one_does_now_does_not_replay(make_harness: MakeHarness) -> None:
    def today(event: WorkflowEvent[int], step: Step) -> Any:
        return step.child("check", billing, 1)

    today.__name__ = today.__qualname__ = "order"
    harness = make_harness(order, billing)
    instance = harness.create(order, 100, id="o-1")
    harness.run_until_idle()
    with pytest.raises(NotReplayed, match="Step 'check' is recorded as 'task', but the code now calls it as 'child'"):
        assert_replays(today, instance.history())


# --- scenarios and crashes ----------------------------------------------------------------------


def prepared(harness: DurableHarness) -> None:
    harness.mocks.mock_step_error("check", OSError("the stock is closed"), times=1)
    harness.mocks.mock_step_result("check", True)
    harness.mocks.mock_event("paid", 7)


def test_a_scenario_with_a_task_and_a_child() -> None:
    def setup(ctx: Any) -> None:
        ctx.harness.create_tables(rows)
        ctx.harness.mocks.mock_step_result("check", "enough")

    run_scenario(
        define_scenario(
            "an order is checked and billed",
            workflows=[order, billing],
            setup=setup,
            steps=[
                initialize_and_run_until_idle(order, 100, id="o-1"),
                read(lambda ctx: ctx.instance().statuses(), store_as="seen"),
                assert_(lambda ctx: ctx["seen"] == {"check": "completed", "bill": "waiting"}),
                advance_time_and_run_until_idle(by="1 hour"),
                initialize_and_run_until_idle(billing, 1, id="b-2"),
                event_and_run_until_idle("paid", 5, id="b-2"),
                assert_(lambda ctx: ctx.instance("o-1").is_waiting),
                assert_(lambda ctx: ctx.harness.instance(billing, "bill-o-1").send_event("paid", 7)),
                advance_time_and_run_until_idle(by="1 s"),
                assert_(lambda ctx: ctx.instance("o-1").result() == {"checked": "enough", "bill": 107}),
            ],
        )
    )


@pytest.mark.slow
def test_what_others_do_is_crash_safe() -> None:
    report = assert_crash_safe(order, 100, workflows=[billing], setup=prepared, side_effects=rows, schedules=60)
    assert report.crashes > 30


@pytest.mark.gate
def test_a_child_that_commits_beside_its_step_is_found_through_its_parent() -> None:
    harnesses: list[DurableHarness] = []

    def setup(harness: DurableHarness) -> None:
        prepared(harness)
        harness.create_tables(rows)
        harnesses.append(harness)

    @durable_workflow(name="delegated-careless")
    def careless(event: WorkflowEvent[Any], step: Step) -> None:
        def work() -> None:
            with harnesses[-1].session() as session:
                session.execute(sa.insert(books).values(what="work"))
                session.commit()

        step.do("work", work)

    def parent(event: WorkflowEvent[Any], step: Step) -> Any:
        step.task("check", "stock.check", retries=1)
        step.child("careful?", careless)

    with pytest.raises(NotCrashSafe, match=r"The side effects are \['work', 'work'\], and undisturbed \['work'\]"):
        assert_crash_safe(parent, workflows=[careless], setup=setup, side_effects=booked)


def test_a_function_does_the_tasks_of_a_map() -> None:
    @durable_workflow(name="album-of-pages")
    def album(event: WorkflowEvent[int], step: Step) -> list[Any]:
        got = step.map("convert", "pages.convert", range(event.payload), max_concurrency=2, return_exceptions=True)
        return [each if isinstance(each, int) else each.error_name for each in got]

    def convert(page: int) -> int:
        if page == 3:
            raise LookupError("no page")
        return page * page

    with DurableHarness([album]) as harness:
        mock = harness.mocks.mock_task("convert", convert)
        handle = harness.create(album, 5)
        harness.run_until_idle()
        assert handle.result() == [0, 1, 4, "LookupError", 16]
        assert (mock.calls, handle.step("convert").items.failed) == (5, 1)


def test_the_tasks_of_a_map_may_be_lost() -> None:
    @durable_workflow(name="album-that-waits")
    def album(event: WorkflowEvent[int], step: Step) -> list[Any]:
        return step.map("convert", "pages.convert", range(event.payload), timeout="1 hour", retries=1)

    with DurableHarness([album]) as harness:
        handle = harness.create(album, 2)
        harness.run_until_idle()
        assert handle.explain().sentence.startswith(
            'Waits for Celery tasks pages.convert, 0 of 2 have answered, at step "convert"'
        )
        harness.mocks.mock_task("convert", lambda page: page)
        harness.advance("1 minute")
        assert handle.result() == [0, 1]


# --- calls that the task refuses ----------------------------------------------------------------


@pytest.fixture
def mailer() -> Iterator[Celery]:
    """An application, as Celery's current one."""
    before = current_app._get_current_object()
    app = Celery("mailer", broker="redis://127.0.0.1:1/0")
    yield app
    app.close()
    _set_current_app(before)


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_call_that_its_task_does_not_take_fails_the_step_and_keeps_what_no_step_waits_for(
    make_harness: MakeHarness, mailer: Celery, is_eager: bool
) -> None:
    @mailer.task(name="mailer.mail", shared=False)
    def mail(to: str, text: str) -> None: ...

    def send(event: WorkflowEvent[Any], step: Step) -> Any:
        step.do("announce", lambda tx: [tx.send_task(mail, "ada"), tx.send_task(mail, "ada", "hello")])
        try:
            return step.task("mail", mail.s("ada"), timeout="1 hour", retries=3)
        except StepFailed as exc:
            return [exc.error_name, exc.error_message, exc.attempts]

    mailer.conf.task_always_eager = is_eager
    harness = make_harness(send)
    harness.mocks.mock_task("mail", lambda to, text="": "sent")
    instance = harness.create(send)
    harness.run_until_idle()
    assert instance.result() == ["TypeError", "mail() missing 1 required positional argument: 'text'", 1]
    assert [message.content["args"] for message in harness.outbox] == [["ada", "hello"]]
    (kept,) = harness.durable.internals.operations.outbox.read(given_up=True)
    assert kept.error == "TypeError: mail() missing 1 required positional argument: 'text'"


def test_a_task_whose_class_refuses_to_send_fails_the_step(make_harness: MakeHarness, mailer: Celery) -> None:
    class Closed(Task):
        def apply_async(self, *args: Any, **options: Any) -> Any:
            raise LookupError("no tenant")

    @mailer.task(name="stock.check", shared=False, base=Closed)
    def check() -> None: ...

    harness = make_harness(order, billing)
    instance = harness.create(order, 7)
    harness.run_until_idle()
    error = instance.status().error
    assert error is not None
    assert (error.name, error.message) == ("LookupError", "no tenant")
