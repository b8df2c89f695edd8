"""Signals: each is sent once, after the commit that made it true, with exactly the arguments that are documented."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from sqlalchemy.orm import Session

from celery_durable import CreateOptions, InstanceAlreadyExists, Step, StepTx, WorkflowEvent, signals
from celery_durable.errors import StepNotFound
from celery_durable.testing import START
from tests.docs.blocks import ROOT
from tests.signals.conftest import ALL, Ear
from tests.signals.flows import (
    RUN,
    actions,
    failing,
    listed,
    on_sqlite,
    order,
    shipping,
    slow,
    stuck,
    to_step_row,
    told,
)

# --- the life of an instance --------------------------------------------------------------------


def test_a_run_is_told_from_its_creation_to_its_end(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, store_url=store_url, wipe=True)
    instance = harness.create(order, id="o-1")
    harness.run_until_idle()
    harness.advance("10 seconds")
    harness.advance("1 minute")
    instance.send_event("approved", id="mail-1")
    harness.run_until_idle()
    assert instance.result() == "TooExpensive"

    zero, retry_at, rest_until = timedelta(0), START + timedelta(seconds=10), START + timedelta(seconds=70)
    resumed = ("workflow_resumed", {**RUN, "latency": zero, "crash_count": 0})

    def suspended(until: Any) -> tuple[str, dict[str, Any]]:
        return "workflow_suspended", {**RUN, "status": "waiting", "until": until}

    error = {"error_name": "OSError", "error_message": "the bank is closed", "exception": ANY}
    refusal = {"error_name": "TooExpensive", "error_message": "over the limit", "exception": ANY}
    assert [(name, told) for name, _, told in ear.heard if name != "sweep_done"] == [
        ("workflow_created", {**RUN, "run_at": None}),
        ("workflow_started", {**RUN, "latency": zero}),
        ("step_started", to_step_row("charge")),
        ("step_retrying", {**to_step_row("charge"), "duration": zero, "delay": timedelta(seconds=10), **error}),
        suspended(retry_at),
        resumed,
        ("step_started", to_step_row("charge", attempt=2)),
        ("step_completed", {**to_step_row("charge", attempt=2), "duration": zero}),
        ("step_started", to_step_row("rest", "sleep")),
        suspended(rest_until),
        resumed,
        ("step_completed", {**to_step_row("rest", "sleep"), "duration": None}),
        ("step_started", to_step_row("approval", "waitForEvent")),
        suspended(rest_until + timedelta(hours=1)),
        ("event_received", {**RUN, "event_type": "approved", "event_id": "mail-1"}),
        resumed,
        ("step_completed", {**to_step_row("approval", "waitForEvent"), "duration": None}),
        ("step_started", to_step_row("refuse")),
        ("step_failed", {**to_step_row("refuse"), "duration": zero, **refusal}),
        ("workflow_completed", {**RUN, "duration": timedelta(seconds=70)}),
    ]
    exceptions = [told["exception"] for name in ("step_retrying", "step_failed") for told in ear.told(name)]
    assert [repr(each) for each in exceptions] == [
        "OSError('the bank is closed')",
        "NonRetryableError('over the limit')",
    ]
    assert all(each.__traceback__ is not None for each in exceptions)
    assert {sender for name, sender, _ in ear.heard if name != "sweep_done"} == {"order"}
    assert [sender for name, sender, _ in ear.heard if name == "sweep_done"].count(None) == len(ear.told("sweep_done"))
    assert all(isinstance(told["published"], int) for told in ear.told("sweep_done"))


@on_sqlite
def test_a_linear_run_is_told_step_by_step(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(listed, store_url=store_url, wipe=True)
    harness.create(listed, id="l-1")
    harness.run_until_idle()
    harness.advance("10 seconds")
    harness.advance("1 hour")

    run = {"workflow": "listed", "instance_id": "l-1", "run_number": 1}
    zero, retry_at = timedelta(0), START + timedelta(seconds=10)
    resumed = ("workflow_resumed", {**run, "latency": zero, "crash_count": 0})

    def step(name: str, attempt: int = 1) -> dict[str, Any]:
        key = {"CHECK": "0", "PAY": "1"}[name]
        return {**run, "step": name, "step_key": key, "type": "linear", "attempt": attempt}

    def suspended(until: Any) -> tuple[str, dict[str, Any]]:
        return "workflow_suspended", {**run, "status": "waiting", "until": until}

    not_yet = {"error_name": "Retry", "error_message": "not yet", "exception": None}
    dead = {"error_name": "Dead", "error_message": "nobody has paid", "exception": None}
    assert [(name, told) for name, _, told in ear.heard if name != "sweep_done"] == [
        ("workflow_created", {**run, "run_at": None}),
        ("workflow_started", {**run, "latency": zero}),
        ("step_started", step("CHECK")),
        ("step_retrying", {**step("CHECK"), "duration": zero, "delay": timedelta(seconds=10), **not_yet}),
        suspended(retry_at),
        resumed,
        ("step_started", step("CHECK", 2)),
        ("step_completed", {**step("CHECK", 2), "duration": zero}),
        ("step_started", step("PAY")),
        suspended(retry_at + timedelta(hours=1)),
        resumed,
        ("step_started", step("PAY")),
        ("step_failed", {**step("PAY"), "duration": zero, **dead}),
        ("workflow_failed", {**run, "duration": timedelta(seconds=3610), **dead}),
    ]


@on_sqlite
def test_what_people_do_is_told(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, failing, store_url=store_url, wipe=True)
    later = START + timedelta(days=1)
    instance = harness.create(order, id="o-1", run_at=later)
    instance.pause()
    instance.pause()
    instance.resume()
    assert instance.restart(reason="again") == 2
    instance.terminate(reason="sold out")
    harness.create(failing, id="f-1")
    harness.run_until_idle()
    second, other = {**RUN, "run_number": 2}, {"workflow": "failing", "instance_id": "f-1", "run_number": 1}
    error = {"error_name": "LookupError", "error_message": "no such order", "exception": ANY}
    assert [(name, told) for name, _, told in ear.heard if name != "sweep_done"] == [
        ("workflow_created", {**RUN, "run_at": later}),
        ("workflow_suspended", {**RUN, "status": "paused", "until": None}),
        ("workflow_restarted", {**second, "reason": "again"}),
        ("workflow_terminated", {**second, "reason": "sold out"}),
        ("workflow_created", {**other, "run_at": None}),
        ("workflow_started", {**other, "latency": timedelta(0)}),
        ("workflow_failed", {**other, "duration": timedelta(0), **error}),
    ]


@on_sqlite
def test_what_people_do_to_steps_is_told(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(stuck, store_url=store_url, wipe=True)
    instance = harness.create(stuck, id="o-1")
    harness.run_until_idle()
    ear.heard.clear()
    with pytest.raises(StepNotFound):
        instance.skip("nothing", by="eve")
    instance.set_result("approval", "yes", by="eve", reason="ticket 42")
    assert ear.heard == [
        (
            "step_intervened",
            "stuck",
            {
                **to_step_row("approval", "waitForEvent"),
                "workflow": "stuck",
                "action": "set_result",
                "by": "eve",
                "reason": "ticket 42",
            },
        )
    ]
    harness.run_until_idle()
    ear.heard.clear()
    assert instance.skip("refuse", by="adam") == 2
    run = {"workflow": "stuck", "instance_id": "o-1", "run_number": 2}
    about = {**to_step_row("refuse"), "action": "skip", "by": "adam", "reason": None}
    assert [(name, told) for name, _, told in ear.heard] == [
        ("workflow_restarted", {**run, "reason": None}),
        ("step_intervened", {**about, **run}),
    ]


@on_sqlite
def test_what_a_step_makes_is_told_with_its_commit(store_url: str, make_harness: Any, ear: Ear) -> None:
    def bear(tx: StepTx) -> None:
        tx.create(harness.workflow(failing), id="child")
        tx.send_event(harness.workflow(order), "o-1", "approved", id="mail-1")

    def mother(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("bear", bear)

    harness = make_harness(order, failing, mother, store_url=store_url, wipe=True)
    harness.create(order, id="o-1")
    ear.heard.clear()
    harness.messages.clear()
    harness.create(mother, id="m-1")
    harness.tick()
    assert ear.names == [
        "workflow_created", "workflow_started", "step_started", "step_completed", "workflow_created", "event_received",
        "workflow_completed",
    ]  # fmt: skip
    assert ear.told("workflow_created")[1]["instance_id"] == "child"
    assert ear.told("event_received") == [{**RUN, "event_type": "approved", "event_id": "mail-1"}]


@on_sqlite
def test_a_signal_is_sent_only_if_the_run_is_created(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(failing, store_url=store_url, wipe=True)
    begin = harness.durable.internals.operations.create.restart_or_create
    for _ in range(2):  # created, then left as it is
        begin("failing", id="f-1")
    harness.run_until_idle()
    begin("failing", id="f-1", reason="again")
    assert ear.names == ["workflow_created", "workflow_started", "workflow_failed", "workflow_restarted"]
    assert ear.told("workflow_restarted") == [
        {"workflow": "failing", "instance_id": "f-1", "run_number": 2, "reason": "again"}
    ]


@on_sqlite
def test_what_a_topic_hands_out_is_an_event_for_each(store_url: str, make_harness: Any, ear: Ear) -> None:
    def watch(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_topic("next price", "prices/eur.usd", timeout="1 hour").payload

    harness = make_harness(watch, store_url=store_url, wipe=True)
    instances = [harness.create(watch, id=f"w-{n}") for n in range(2)]
    harness.run_until_idle()
    assert harness.durable.internals.operations.topics.emit("prices/eur.usd", 108, id="tick-1") == 2
    assert ear.told("event_received") == [
        {
            "workflow": "watch",
            "instance_id": instance.id,
            "run_number": 1,
            "event_type": "prices/eur.usd",
            "event_id": "tick-1",
        }
        for instance in instances
    ]
    harness.run_until_idle()
    assert [instance.result() for instance in instances] == [108, 108]


# --- never what is not so, and never twice ------------------------------------------------------


@on_sqlite
def test_what_is_skipped_or_refused_is_not_told(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, store_url=store_url, wipe=True)
    instance = harness.create(order, id="o-1")
    harness.create(order, id="o-1", if_exists="return")
    with pytest.raises(InstanceAlreadyExists):
        harness.create(order, id="o-1")
    harness.workflow(order).create_batch([CreateOptions("o-1"), CreateOptions("o-2"), CreateOptions("o-2")])
    assert instance.send_event("approved", id="mail-1")
    assert not instance.send_event("approved", id="mail-1")
    assert ear.names == ["workflow_created", "workflow_created", "event_received"]


def test_a_caller_s_own_transaction_is_told_of_when_it_commits(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, store_url=store_url, wipe=True)
    with Session(harness.engine) as session:
        harness.create(order, id="o-1", session=session)
        session.rollback()
        harness.create(order, id="o-2", session=session)
        assert ear.names == []
        session.commit()
    assert [told["instance_id"] for told in ear.told("workflow_created")] == ["o-2"]
    with Session(harness.engine) as session:
        harness.instance(order, "o-2").send_event("approved", session=session)
        assert ear.names == ["workflow_created"]
        session.commit()
    assert ear.names == ["workflow_created", "event_received"]


@on_sqlite
def test_a_start_is_told_once_though_its_worker_dies(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, store_url=store_url, wipe=True)
    harness.create(order, id="o-1")
    harness.faults.crash_at("after-body")
    harness.run_until_idle()
    harness.advance("5 minutes")
    assert ear.names.count("workflow_started") == 1
    assert ear.told("workflow_resumed")[0]["crash_count"] == 1
    # The attempt that died is nobody's to tell; the next one counts it.
    assert [told["attempt"] for told in ear.told("step_started") if told["step"] == "charge"] == [1, 2]
    assert [told["attempt"] for told in ear.told("step_completed") if told["step"] == "charge"] == [2]


def test_a_worker_that_was_superseded_tells_nothing(store_url: str, make_harness: Any, ear: Ear) -> None:
    harness = make_harness(slow, store_url=store_url, wipe=True)
    instance = harness.create(slow, id="s-1")
    actions.append(lambda: instance.restart())
    harness.deliver(harness.messages.pop(0))
    assert harness.journal[-1].endswith("superseded: the instance was taken over, restarted or ended meanwhile")
    assert ear.names == ["workflow_created", "workflow_started", "step_started", "workflow_restarted"]


@on_sqlite
def test_branches_and_races_are_told_step_by_step(store_url: str, make_harness: Any, ear: Ear) -> None:
    def race(event: WorkflowEvent[Any], step: Step) -> None:
        step.gather(step.submit("a", lambda: 1), step.submit("b", lambda: 2))
        step.first("which", step.submit("quick", lambda: 1), step.submit_sleep("long", "1 day"))

    harness = make_harness(race, store_url=store_url, wipe=True)
    harness.create(race)
    harness.run_until_idle()
    started = [told["step"] for told in ear.told("step_started")]
    assert sorted(started) == ["a", "b", "long", "quick"]
    assert sorted(told["step"] for told in ear.told("step_completed")) == ["a", "b", "quick", "which"]
    assert [told["duration"] for told in ear.told("step_completed") if told["step"] == "which"] == [None]
    assert ear.told("step_failed") == ear.told("step_retrying") == []


# --- the page -----------------------------------------------------------------------------------


def test_the_table_of_signals_is_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "signals.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.+?) \|$", page, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", arguments)) - {"None"} for name, arguments in rows}
    run, step = {"workflow", "instance_id", "run_number"}, {"step", "step_key", "type", "attempt"}
    for name, arguments in documented.items():
        if name.startswith(("workflow_", "event_", "around_", "answer_", "task_", "pass_")):
            arguments |= run
        if name.startswith("step_"):
            arguments |= run | step
    everything = {**ALL, "around_pass": signals.around_pass, "around_step": signals.around_step}
    assert documented == {name: set(each.providing_args) for name, each in everything.items()}
    assert {*everything, "Around"} == set(signals.__all__)


def test_every_signal_that_is_told_carries_what_it_says(make_harness: Any, ear: Ear) -> None:
    harness = make_harness(order, failing, shipping)
    told(harness)
    # These report faults. The tests that provoke the faults hear them.
    faults = {"task_lost", "pass_stalled", "connections_cut", "consuming_resumed"}
    assert {name for name, _, _ in ear.heard} == set(ALL) - faults
    for name, _, arguments in ear.heard:
        assert set(arguments) == set(ALL[name].providing_args), name
