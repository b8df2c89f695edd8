"""The page of one instance: its diagnosis, and the lists of its runs."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Signature

from celery_durable import Limit, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.dashboard import instance
from celery_durable.model import RunningStep, RunRef
from celery_durable.store.runs import claims, leases
from celery_durable.store.runs.claims import ClaimRequest
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop

INSTANCE = "/workflows/order/instances/o-0"


def words(page: str) -> str:
    """The text of a page, as people read it."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)))


def rows(page: str) -> list[str]:
    return [words(each) for each in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)][1:]


def bars(page: str, step: str) -> list[str]:
    """What the bars of a step say, in their order."""
    (row,) = [each for each in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if f">{step}</a>" in each]
    return re.findall(r"<title>([^<]*)</title>", row)


@pytest.fixture
def flaky(shop: Shop) -> str:
    """The page of an instance that has tried twice, slept and now waits."""

    def charge() -> str:
        shop.clock.advance(seconds=3)
        if shop.ran.append("charge") or len(shop.ran) < 2:
            raise ValueError("the bank is away")
        return "receipt 17"

    @shop.durable.workflow(name="flaky")
    def flaky(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge", StepConfig(retries=Retries(limit=3, delay=20)), charge)
        step.sleep("cool off", "1 hour")
        step.wait_for_event("approve", "approval")

    flaky.create(None, id="f-1")
    shop.work()
    shop.clock.advance(seconds=25)
    shop.work()
    shop.clock.advance(seconds=3600)
    shop.work()
    return "/workflows/flaky/instances/f-1"


def test_what_a_parent_waits_for_is_a_link(orders: Shop, pages: Browser) -> None:
    @orders.durable.workflow(name="parent")
    def parent(event: WorkflowEvent[None], step: Step) -> None:
        step.child("order", orders.durable.workflows["order"], {"order_id": "1"}, id="its-order")

    parent.create(None, id="p-1")
    orders.work()
    page = pages.open("/workflows/parent/instances/p-1")
    assert '<a class="button" href="/workflows/order/instances/its-order">Open order/its-order</a>' in page


def test_the_diagnosis_comes_with_its_remedies(orders: Shop, pages: Browser) -> None:
    page = pages.open("/workflows/bad/instances/b-0")
    assert "paper jam in tray 7" in words(re.search(r'class="diagnosis".*?</section>', page, re.DOTALL)[0])
    assert 'action="/workflows/bad/instances/b-0/retry"' in page
    assert "celery -A shop durable retry bad b-0" in page


def test_the_times_of_a_step_are_bars(flaky: str, pages: Browser) -> None:
    page = pages.open(flaky)
    failed, backoff, *queued, runs = bars(page, "charge")
    assert failed.startswith("failed attempt")
    assert re.match(r"backoff 2\d s", backoff)
    assert runs.startswith("runs")
    assert bars(page, "cool off")[0].startswith("waits 1 h")
    assert bars(page, "approve")[0].startswith("waits")
    assert "Times in which nothing runs are drawn shorter." in page
    assert all(0 <= float(x) <= 1000 for x in re.findall(r'<rect class="\S+" x="([\d.]+)"', page))


def test_the_wait_for_a_limit_is_a_bar_and_the_longest_holder_a_link(shop: Shop, pages: Browser) -> None:
    bank = Limit("bank", at_once=1)

    @shop.durable.workflow(name="pay")
    def pay(event: WorkflowEvent[None], step: Step) -> None:
        step.task("pay", Signature("bank.pay"), limits=[bank])

    for number in range(2):
        pay.create(None, id=f"p-{number}")
        shop.work()
    shop.clock.advance(seconds=300)
    page = pages.open("/workflows/pay/instances/p-1")
    assert bars(page, "pay") == ["waits for limit bank 5 min"]
    assert '<a class="button" href="/workflows/pay/instances/p-0">Open pay/p-0</a>' in page
    assert bars(pages.open("/workflows/pay/instances/p-0"), "pay") == ["waits 5 min"]


def test_an_attempt_shows_its_traceback_and_its_worker(flaky: str, pages: Browser) -> None:
    for page in (pages.open(f"{flaky}?view=attempts"), pages.open(f"{flaky}?step=charge")):
        assert "the bank is away" in page
        assert "Traceback" in page
        assert "test_instance.py" in page
    assert "receipt 17" in page


def test_a_step_that_is_not_there_is_named(flaky: str, pages: Browser) -> None:
    missing = pages.get(f"{flaky}?step=nothing")
    assert missing.status_code == 404
    assert "nothing" in missing.text


def test_steps_are_found_by_name_and_by_failure(flaky: str, pages: Browser) -> None:
    assert [each.split()[0] for each in rows(pages.open(f"{flaky}?find=OO"))] == ["cool"]
    assert rows(pages.open(f"{flaky}?find=%25")) == []
    assert rows(pages.open(f"{flaky}?only=failed")) == []


def test_only_failed_steps(orders: Shop, pages: Browser) -> None:
    assert [each.split()[0] for each in rows(pages.open("/workflows/bad/instances/b-0?only=failed"))] == ["print"]
    assert rows(pages.open(f"{INSTANCE}?only=failed")) == []


def test_steps_come_in_pages(shop: Shop, pages: Browser, monkeypatch: Any) -> None:
    monkeypatch.setattr(instance, "_STEPS", 3)
    shop.durable.workflows["count"].create(7, id="c-1")
    shop.work()
    path, found = "/workflows/count/instances/c-1", list[str]()
    while path:
        page = pages.open(path)
        found += re.findall(r">(step \d)</a>", page)
        more = re.search(r'href="([^"]*)">More steps', page)
        path = html.unescape(more[1]) if more else ""
    assert found == [f"step {number}" for number in range(7)]


@pytest.mark.parametrize("cursor", ["x", "1", ".", "9999999999.a", "-1.a"])
def test_a_position_that_cannot_be_read_is_refused(orders: Shop, pages: Browser, cursor: str) -> None:
    assert pages.get(INSTANCE, params={"cursor": cursor}).status_code == 400


def test_events_and_log_lines(orders: Shop, pages: Browser) -> None:
    orders.durable.workflows["order"].get("o-0").send_event("early", {"cents": 5}, id="click-7")
    events = pages.open(f"{INSTANCE}?view=events")
    assert "early click-7" in words(events)
    assert "no wait yet" in events
    log = pages.open(f"{INSTANCE}?view=log")
    assert "order received" in log
    assert "1999" in log


def test_the_lists_continue(orders: Shop, pages: Browser, monkeypatch: Any) -> None:
    monkeypatch.setattr(instance, "_ROWS", 2)
    for number in range(5):
        orders.durable.workflows["order"].get("o-0").send_event(f"e{number}", number)
    path, found = f"{INSTANCE}?view=events", list[str]()
    while path:
        page = pages.open(path)
        found += re.findall(r'<td class="name">(e\d)<br>', page)
        older = re.search(r'href="([^"]*)">Older', page)
        path = html.unescape(older[1]) if older else ""
    assert found == ["e4", "e3", "e2", "e1", "e0"]


def test_values_of_a_run_and_what_people_did(orders: Shop, pages: Browser) -> None:
    orders.durable.workflows["order"].get("o-0").skip("await approval", by="eve", reason="she called")
    page = words(pages.open(f"{INSTANCE}?view=run"))
    assert '"order_id": "0"' in page
    assert "skip await approval by eve: she called" in page


def test_earlier_runs_can_be_read(orders: Shop, pages: Browser) -> None:
    orders.durable.workflows["bad"].get("b-0").restart(reason="new paper")
    path = "/workflows/bad/instances/b-0"
    page = pages.open(path)
    assert "Reason: new paper" in page
    earlier = html.unescape(re.search(r'href="([^"]*)">Run 1</a>', page)[1])
    assert "paper jam in tray 7" in words(pages.open(earlier).partition("Run 1")[2])
    assert pages.get(f"{path}?run=99").status_code == 404


def test_a_map_is_one_bar_with_its_failed_items(shop: Shop, pages: Browser) -> None:
    def half(event: WorkflowEvent[int], step: Step) -> int:
        if event.payload % 2:
            raise NonRetryableError(f"picture {event.payload} is torn", name="Torn")
        return event.payload

    made = shop.durable.workflow(name="half")(half)

    @shop.durable.workflow(name="album")
    def album(event: WorkflowEvent[None], step: Step) -> None:
        step.map("print", made, [0, 1, 2, 3])

    album.create(None, id="a-1")
    for _ in range(4):
        shop.work()
    page = pages.open("/workflows/album/instances/a-1")
    assert "2 of 4 done, 2 failed" in words(page)
    step = words(pages.open("/workflows/album/instances/a-1?step=print"))
    assert "picture 1 is torn" in step
    assert "picture 3 is torn" in step


def test_the_lists_are_redacted(orders: Shop, pages: Browser) -> None:
    orders.durable.workflows["order"].get("o-0").send_event("early", "secret")
    orders.durable.internals.redact = lambda value, context: "###"
    paths = [INSTANCE, *(f"{INSTANCE}?view={view}" for view in ("events", "log", "run", "attempts"))]
    paths += [f"{INSTANCE}?step=charge", "/workflows/bad/instances/b-0?view=attempts"]
    for path in paths:
        page = pages.open(path)
        assert not re.search("secret|4242|order received|paper jam|1999", page), path


def test_a_page_follows_a_run_until_it_ends(orders: Shop, pages: Browser) -> None:
    page = pages.open(INSTANCE)
    stream = re.search(r'data-stream="([^"]*)"', page)[1]
    assert "data-stream" not in pages.open("/workflows/bad/instances/b-0")
    orders.durable.workflows["order"].get("o-0").terminate()
    followed = pages.get(stream)
    assert followed.headers["content-type"].startswith("text/event-stream")
    assert "event: end" in followed.text
    assert pages.head(stream).status_code == 405


STATES = {"order/o-0": 5, "bad/b-0": 6, "echo/e-1": 4, "order/new": 4}
"""Instances that wait for an event, have failed, have ended and are due, with the statements of their pages."""


def test_a_page_makes_few_statements(orders: Shop, pages: Browser) -> None:
    orders.durable.workflows["echo"].create(1, id="e-1")
    orders.work()
    orders.durable.workflows["order"].create({"order_id": "9"}, id="new")
    made = dict.fromkeys(STATES, 0)
    for name in STATES:
        path = "/workflows/{}/instances/{}".format(*name.split("/"))
        pages.open(path)  # the first one also connects

        def count(*_: Any, name: str = name) -> None:
            made[name] += 1

        engine = orders.durable.internals.store.engine
        sa.event.listen(engine, "before_cursor_execute", count)
        pages.open(path)
        sa.event.remove(engine, "before_cursor_execute", count)
    assert {name: number for name, number in made.items() if number > STATES[name]} == {}


def test_a_crash_loop_names_the_step_that_ran(shop: Shop, pages: Browser) -> None:
    shop.app.conf.durable_max_crashes = 3
    shop.durable.workflows["bad"].create(None, id="b-1")
    pages_seen = []
    for token in ("first", "second", "third"):
        _die(shop, token)
        while shop.durable.internals.operations.queries.read("bad", "b-1").claim_token is not None:
            shop.clock.advance(seconds=5)
            shop.durable.internals.sweeper.sweep()
        pages_seen.append(words(pages.open("/workflows/bad/instances/b-1")))
        shop.clock.advance(seconds=5)
    shop.work()
    last = words(pages.open("/workflows/bad/instances/b-1"))
    assert re.search("CRASHING .* 2 workers .* Last: .* it ran step 'print', attempt 1[.]", pages_seen[1])
    assert re.search("FAILED .* WorkerCrashLoop: 3 workers .* Last: .* it ran step 'print', attempt 1[.]", last)


def _die(shop: Shop, token: str) -> None:
    """Claim the instance as a worker that renews its lease once, in its first step, and dies."""
    store, lease = shop.durable.internals.store, timedelta(seconds=30)
    request = ClaimRequest(RunRef("bad", "b-1", 1), token, "task", "worker@vm", lease)
    claim = store.run_statement(lambda tx: claims.claim(tx, request))
    running = {token: RunningStep("print", 1, shop.clock.wall_clock())}
    store.transact(lambda tx: leases.renew(tx, [claim], lease=lease, running=running))
