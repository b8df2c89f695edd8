"""DurableHarness: instances, time, messages, settings and databases."""

from __future__ import annotations

import gc
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import (
    Durable,
    InstanceNotFound,
    InstanceTerminal,
    NonRetryableError,
    Step,
    StepTx,
    WorkflowEvent,
    WorkflowFailed,
    WorkflowNotFound,
    durable_workflow,
)
from celery_durable.definitions import define
from celery_durable.errors import AnswerTooLate, SettingUnknown, WorkflowNameTaken
from celery_durable.testing import (
    START,
    DurableHarness,
    HarnessBusy,
    HarnessMisuse,
    NotEnded,
    NothingDue,
    StoreNotEmpty,
    databases,
)
from celery_durable.testing.processes import SharedCache

rows = sa.MetaData()
orders = sa.Table("orders", rows, sa.Column("id", sa.String(20)), sa.Column("payment", sa.String(20)))


@durable_workflow
def purchase(event: WorkflowEvent[dict], step: Step) -> str:
    step.log.info("an order", category="shop")
    payment = step.do("charge", lambda: f"paid {event.payload['cents']}")
    step.sleep("wait for stock", "3 days")
    approval = step.wait_for_event("wait for approval", "approval", timeout="24 hours")
    return f"{payment}, approved by {approval.payload}"


@durable_workflow
def booking(event: WorkflowEvent[None], step: Step) -> None:
    step.do("book", book, event.instance_id)


def book(tx: StepTx, id: str) -> None:
    tx.session.execute(sa.insert(orders).values(id=id, payment="card"))


def test_an_instance_is_created_run_and_read(make_harness) -> None:
    harness = make_harness(purchase)
    handle = harness.create(purchase, {"cents": 5}, id="o-1")
    assert handle.status().status == "active"
    assert harness.run_until_idle() == 1
    assert handle.is_waiting
    assert handle.statuses() == {"charge": "completed", "wait for stock": "waiting"}
    harness.clock.advance("3 days")
    assert handle.is_waiting  # moving the clock runs nothing
    harness.run_until_idle()
    assert handle.step("wait for approval").wait_event_type == "approval"
    assert handle.send_event("approval", "eve", id="mail-1")
    assert not handle.send_event("approval", "eve", id="mail-1")
    harness.run_until_idle()
    assert handle.result() == "paid 5, approved by eve"
    assert handle.has_ended
    assert [(event.type, event.consumed_by_step_key) for event in handle.events()] == [
        ("approval", "wait for approval")
    ]
    assert handle.lines()[0] == "an order"
    assert handle.history().completed_at == START + timedelta(days=3)
    assert [attempt.step for attempt in harness.attempts] == ["charge"]


def test_time_that_goes_by_runs_each_instance_when_it_is_due(make_harness) -> None:
    def chain(event, step):
        seen = []
        for day in range(5):
            step.sleep(f"day {day}", "1 day")
            seen.append(step.now().day)
        return seen

    harness = make_harness(chain)
    handle = harness.create(chain)
    harness.advance("5 days")
    assert handle.result() == [2, 3, 4, 5, 6]
    again = harness.create("chain")
    harness.advance_to(datetime(2030, 2, 1, tzinfo=UTC))
    assert harness.clock.now == datetime(2030, 2, 1, tzinfo=UTC)
    assert again.result()[-1] == 11
    assert harness.next_due() is None


def test_the_result_of_what_has_not_ended_says_what_is_open(make_harness) -> None:
    harness = make_harness(purchase)
    handle = harness.create(purchase, {"cents": 5}, id="o-1")
    with pytest.raises(NotEnded) as caught:
        handle.result()
    assert str(caught.value) == (
        "Instance 'o-1' of workflow 'purchase' is active. Open: nothing; call run_until_idle()."
    )
    harness.advance("3 days")
    with pytest.raises(NotEnded) as caught:
        handle.result()
    assert str(caught.value) == (
        "Instance 'o-1' of workflow 'purchase' is waiting. Open: step 'wait for approval' is waiting for event "
        "'approval' until 2030-01-05 00:00:00 UTC."
    )
    harness.advance("24 hours")
    with pytest.raises(WorkflowFailed):
        handle.result()
    assert handle.error.name == "EventTimeout"


def test_a_step_that_is_not_there_is_told_with_those_that_are(make_harness) -> None:
    harness = make_harness(purchase)
    handle = harness.create(purchase, {"cents": 5}, id="o-1")
    harness.run_until_idle()
    with pytest.raises(HarnessMisuse) as caught:
        handle.step("change")
    assert str(caught.value) == ("Instance 'o-1' has no step 'change' in this run. It has: 'charge', 'wait for stock'.")


def test_a_step_that_a_failed_run_has_not_reached_is_told_with_the_error(make_harness) -> None:
    harness = make_harness(purchase)
    harness.mocks.mock_step_error("charge", NonRetryableError("no money"))
    handle = harness.create(purchase, {"cents": 5}, id="o-1")
    harness.run_until_idle()
    with pytest.raises(HarnessMisuse) as caught:
        handle.step("change")
    assert "errored with NonRetryableError: no money" in str(caught.value)
    with pytest.raises(AnswerTooLate, match="errored"):
        handle.answer("change", None, by="ada")


def test_an_instance_is_paused_resumed_restarted_and_terminated(make_harness) -> None:
    harness = make_harness(purchase)
    handle = harness.create(purchase, {"cents": 5})
    handle.pause()
    harness.advance("1 day")
    assert str(handle.status().status) == "paused"
    assert harness.next_due() is None
    handle.resume()
    harness.run_until_idle()
    assert handle.restart() == 2
    assert handle.ref.run_number == 2
    harness.run_until_idle()
    assert [attempt.step for attempt in harness.attempts] == ["charge", "charge"]
    assert handle.steps(run=1)[0].status == "completed"
    handle.terminate("sold twice")
    with pytest.raises(InstanceTerminal):
        handle.send_event("approval")


# --- messages -----------------------------------------------------------------------------------


def test_a_lost_message_costs_five_seconds(make_harness) -> None:
    harness = make_harness(booking)
    harness.create_tables(rows)
    handle = harness.create(booking, id="b-1")
    assert [str(message.ref) for message in harness.messages] == ["booking/b-1#1"]
    assert harness.messages.drop() == 1
    assert harness.tick() is None
    harness.advance(4.9)
    assert not handle.has_ended
    harness.advance(0.1)
    assert handle.has_ended
    assert harness.journal == ["2030-01-01 00:00:05 runner-1 booking/b-1#1: complete"]


def test_doubled_and_mixed_messages_change_nothing(make_harness) -> None:
    harness = make_harness(booking)
    harness.create_tables(rows)
    for number in range(5):
        harness.create(booking, id=f"b-{number}")
    harness.messages.duplicate(3)
    harness.messages.shuffle()
    assert len(harness.messages) == 15
    harness.run_until_idle()
    with harness.session() as session:
        assert sorted(session.scalars(sa.select(orders.c.id))) == [f"b-{number}" for number in range(5)]
    assert sum(line.endswith("noop: not due, or claimed by another worker") for line in harness.journal) == 10


def test_a_tick_is_a_delivery_or_a_sweep(make_harness) -> None:
    harness = make_harness(purchase)
    harness.create(purchase, {"cents": 1})
    assert harness.tick() == "waiting until 2030-01-04 00:00:00 UTC"
    assert harness.tick() is None
    harness.clock.advance("3 days")
    assert harness.tick() == "swept: 1 due"
    assert harness.tick() == "waiting until 2030-01-05 00:00:00 UTC"


def test_what_never_comes_to_rest_is_named(make_harness) -> None:
    def restless(event, step):
        number = 0
        while True:
            step.sleep(f"nap {number}", 1)
            number += 1

    harness = make_harness(restless)
    harness.mocks.disable_sleeps()
    harness.create(restless, id="r-1")
    harness.runner.should_stop = True  # releases the run at each step call
    with pytest.raises(HarnessBusy) as caught:
        harness.run_until_idle(max_ticks=5)
    assert str(caught.value) == (
        "Still busy after 5 ticks: restless/r-1#1. A workflow that never comes to rest? "
        "If it only has that much to do, raise max_ticks."
    )


# --- workflows and settings ---------------------------------------------------------------------


def test_workflows_may_be_named_by_handle_function_or_name(make_harness) -> None:
    def plain(event, step):
        return "plain"

    harness = make_harness(plain, purchase)
    assert harness.create(plain).workflow.name == "plain"
    assert harness.create("plain", id="p-1").id == "p-1"
    assert harness.instance(plain, "p-1").id == "p-1"
    with pytest.raises(InstanceNotFound):
        harness.instance(plain, "p-2")
    with pytest.raises(WorkflowNotFound):
        harness.create(booking)
    with pytest.raises(WorkflowNameTaken):
        make_harness(plain, define(lambda event, step: 1, name="plain"))


def test_without_workflows_all_that_are_registered_are_known() -> None:
    with DurableHarness() as harness:
        assert "purchase" in harness.durable.workflows
        assert "booking" in harness.durable.workflows


def test_handles_of_any_module_act_on_the_harness_inside_its_block() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    durable = Durable(app)
    bound = durable.workflow(name="bound")(lambda event, step: "done")
    with DurableHarness([purchase, bound]) as outer:
        made = purchase.create({"cents": 1}, id="o-1")
        assert bound.create().result(timeout=10) == "done"  # a wait lets the harness run
        assert outer.instance(purchase, "o-1").is_waiting
        made.terminate()
        outer.create(purchase, {"cents": 1}, id="o-2").pause()
        with pytest.raises(NothingDue):
            purchase.get("o-2").result(timeout="1 hour")
        with DurableHarness([purchase]) as inner:
            purchase.create({"cents": 2}, id="inside")
            outer.create(purchase, {"cents": 3}, id="outside")
            assert [item.id for item in inner.durable.internals.operations.queries.list().items] == ["inside"]
        assert outer.instance(purchase, "outside").id == "outside"
    assert bound.host is durable


def test_new_code_is_deployed_under_running_instances(make_harness) -> None:
    harness = make_harness(purchase)
    handle = harness.create(purchase, {"cents": 5})
    harness.run_until_idle()

    def newer(event, step):
        return f"{step.do('charge', lambda: 'again')}, and no approval"

    harness.deploy(define(newer, name="purchase"))
    harness.advance("3 days")
    assert handle.result() == "paid 5, and no approval"


def test_settings_are_those_of_the_app(make_harness) -> None:
    harness = make_harness(purchase, settings={"durable_lease_seconds": 10, "durable_table_prefix": "shop_"})
    assert harness.settings.lease == timedelta(seconds=10)
    assert {"shop_workflow_instance"} < set(sa.inspect(harness.engine).get_table_names())
    app = Celery("shop", set_as_current=False)
    app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    app.conf.durable_database_schema = "shop"
    harness = make_harness(purchase, settings=app.conf)
    harness.create(purchase, {"cents": 1})
    assert harness.engine.url.get_backend_name() == "sqlite"
    with pytest.raises(HarnessMisuse, match=r"Setting 'lease_seconds': write it as in app.conf, beginning with dur"):
        make_harness(purchase, settings={"lease_seconds": 10})
    with pytest.raises(SettingUnknown):
        make_harness(purchase, settings={"durable_lease": 10})


def test_time_begins_where_the_test_says(make_harness) -> None:
    harness = make_harness(purchase, start=datetime(1999, 12, 31, 23, tzinfo=UTC))
    handle = harness.create(purchase, {"cents": 1})
    assert handle.history().created_at == datetime(1999, 12, 31, 23, tzinfo=UTC)
    assert repr(harness) == "<DurableHarness at 1999-12-31 23:00:00, 1 messages>"


# --- databases ----------------------------------------------------------------------------------


def test_tables_of_the_application_are_written_by_steps(make_harness) -> None:
    harness = make_harness(booking)
    harness.create_tables(rows)
    harness.create(booking, id="b-1")
    harness.run_until_idle()
    with harness.session() as session:
        assert session.execute(sa.select(orders)).all() == [("b-1", "card")]


def test_a_database_of_the_test_is_migrated_and_must_be_empty(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/mine.sqlite3"
    with DurableHarness([purchase], store_url=url) as harness:
        harness.create(purchase, {"cents": 1}, id="o-1")
    with pytest.raises(StoreNotEmpty) as caught:
        DurableHarness([purchase], store_url=url)
    assert str(caught.value) == (
        f"{url} holds workflow instances, and a harness would run them. Give it a database of its own; "
        "if this is one, DurableHarness(..., wipe=True) deletes all instances in it first."
    )
    with DurableHarness([purchase], store_url=url, wipe=True) as harness:
        harness.create(purchase, {"cents": 1}, id="o-1")
    assert (tmp_path / "mine.sqlite3").exists()


def test_the_harness_runs_on_every_database(store_url: str) -> None:
    with DurableHarness([purchase, booking], store_url=store_url) as harness:
        harness.create_tables(rows)
        try:
            handle = harness.create(purchase, {"cents": 5})
            booked = harness.create(booking)
            harness.mocks.mock_event("approval", "eve")
            harness.advance("3 days")
            assert handle.result() == "paid 5, approved by eve"
            assert booked.has_ended
        finally:
            rows.drop_all(harness.engine)


def test_a_harness_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "_MEMORY", tmp_path)
    harness = DurableHarness([purchase])
    assert len(list(tmp_path.iterdir())) == 1
    harness.close()
    harness.close()
    forgotten = DurableHarness([purchase])
    forgotten.create(purchase, {"cents": 1})
    forgotten._processes.web.close()
    del forgotten
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_at_the_end_of_a_run_is_captured() -> None:
    def quote(event: WorkflowEvent[int], step: Step) -> int:
        return 100 // event.payload

    told = define(quote, on_complete="shop.quoted", on_failure="shop.failed")
    with DurableHarness([told]) as harness:
        for id_, divisor in (("q-1", 4), ("q-2", 0)):
            harness.create("quote", divisor, id=id_)
        harness.run_until_idle()
        sent = [(each.name, each.content["args"][0]["instanceId"]) for each in harness.drain_outbox()]
    assert sorted(sent) == [("shop.failed", "q-2"), ("shop.quoted", "q-1")]


def test_a_statement_of_an_author_is_compiled_once_for_all_harnesses(
    make_harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sa.MetaData()
    seats = sa.Table("seats", own, sa.Column("id", sa.String(20)))
    texts: list[str] = []
    keep = SharedCache.__setitem__

    def note(cache: SharedCache, key: tuple, compiled: object) -> None:
        texts.append(str(compiled))
        keep(cache, key, compiled)

    monkeypatch.setattr(SharedCache, "__setitem__", note)

    def take_seat(event: WorkflowEvent[None], step: Step) -> int:
        return step.do("take", lambda tx: tx.session.execute(sa.insert(seats)).rowcount)

    take = define(take_seat, name="seats")
    for _ in range(2):
        harness = make_harness(take)
        harness.create_tables(own)
        harness.create(take)
        harness.run_until_idle()
        with harness.session() as session:
            assert len(session.execute(sa.select(seats)).all()) == 1
    assert sum(text.startswith("INSERT INTO seats") for text in texts) == 1
