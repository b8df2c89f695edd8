"""The same seed does the same, to the last byte; and it is fast."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import sqlalchemy as sa

from celery_durable import EventTimeout, Retries, StepConfig
from celery_durable.testing import START, DurableHarness


def busy(event, step):
    def flaky(number: int) -> int:
        if chance[event.instance_id].random() < 0.3:
            raise ValueError("bad luck")
        return number

    retries = StepConfig(retries=Retries(limit=9, delay="10 seconds"))
    parts = step.gather(*(step.submit(f"part {n}", retries, flaky, n) for n in range(4)))
    step.log.info("parts are done", parts=parts)
    step.sleep("nap", "1 day")
    try:
        step.wait_for_event("wait", "go", timeout="1 hour")
    except EventTimeout:
        return [step.uuid(), step.random()]
    return parts


chance: dict[str, random.Random] = {}


def told(seed: int) -> tuple[list[str], dict[str, list[tuple]]]:
    with DurableHarness([busy], seed=seed) as harness:
        dice = random.Random(seed)
        for number in range(4):
            handle = harness.create(busy)
            chance[handle.id] = random.Random(number)
            if dice.random() < 0.5:
                handle.send_event("go", number)
        harness.messages.duplicate()
        harness.messages.shuffle()
        harness.run_concurrently()
        harness.faults.crash_at(dice.randrange(60))
        harness.advance("3 days")
        tables = harness.durable.internals.store.tables.metadata.sorted_tables
        with harness.session() as session:
            dump = {
                t.name: [tuple(row) for row in session.execute(sa.select(t).order_by(*t.primary_key))] for t in tables
            }
        return harness.journal, dump


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_gives_the_same_rows_and_the_same_story(seed) -> None:
    journal, dump = told(seed)
    assert (journal, dump) == told(seed)
    assert [row for row in dump["workflow_instance"] if "complete" not in row] == []


def test_another_seed_gives_another_story() -> None:
    assert told(1)[0] != told(2)[0]
    assert told(1)[1] != told(2)[1]


def subscription(event, step):
    paid = []
    for month in range(5):
        step.sleep(f"month {month}", "18 days")
        paid.append(step.wait_for_event(f"payment {month}", "payment", timeout="2 days").payload)
        step.do(f"thank {month}", str, month)
    return paid


def test_ninety_days_and_five_events_take_the_time_of_a_blink(capsys) -> None:
    spent = []
    for _ in range(5):
        started = time.perf_counter()
        with DurableHarness([subscription]) as harness:
            handle = harness.create(subscription)
            for month in range(5):
                harness.advance("18 days")
                handle.send_event("payment", month)
                harness.run_until_idle()
            assert handle.result() == [0, 1, 2, 3, 4]
            assert harness.clock.now == START + timedelta(days=90)
        spent.append(time.perf_counter() - started)
    with capsys.disabled():
        print(f"\n90 days, 5 events: first {spent[0] * 1000:.0f} ms, then {min(spent[1:]) * 1000:.0f} ms")
