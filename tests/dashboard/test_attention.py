"""The first page: what needs somebody, with its cause and its remedy."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Signature

from celery_durable import Limit, NonRetryableError, Step, WorkflowEvent
from celery_durable.dashboard.app import make_pages
from celery_durable.dashboard.visits import Site
from celery_durable.http import Scope
from celery_durable.model import OUTCOME_UNKNOWN, Outage
from celery_durable.store.instances import overview
from tests.dashboard.conftest import Browser, beat
from tests.http.conftest import Shop


def words(page: str) -> str:
    """The text of a page, as people read it."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)))


def problems(page: str) -> list[str]:
    return [words(each) for each in re.findall(r"<article.*?</article>", page, re.DOTALL)]


def failures(page: str) -> list[str]:
    return [each for each in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "error-text" in each]


@pytest.fixture
def healthy(shop: Shop) -> Shop:
    """A shop with a worker and a dispatcher, as its database says."""
    shop.app.conf.worker_enable_remote_control = False
    beat(shop, "worker")
    beat(shop, "dispatcher")
    return shop


def test_nothing_needs_anybody(healthy: Shop, pages: Browser) -> None:
    healthy.durable.workflows["echo"].create(1, id="e-1")
    healthy.work()
    page = pages.open("/")
    assert "<h1>Nothing needs you</h1>" in page
    assert 'href="/instances?where=workflow%3Decho+status%3Dcomplete"' in page
    assert re.search(r"durable \d+ worker@vm", words(page))
    assert "1 warning about the installation" in page
    assert ["The broker is the memory of this process" in each for each in problems(page)] == [True]


def test_failures_are_grouped_and_retried_together(orders: Shop, pages: Browser) -> None:
    (row,) = failures(pages.open("/"))
    assert "2 failed bad print NoPaper: paper jam in tray 7 b-1" in words(row)
    where = "workflow=bad status=errored error=NoPaper step=print 'message=paper jam in tray 7'"
    assert f'celery -A shop durable retry --where "{where}" --yes' in words(row)
    preview = pages.open(html.unescape(re.search(r'class="button[^"]*" href="([^"]*)"', row)[1]))
    assert "<h1>Retry 2 instances</h1>" in preview
    action = html.unescape(re.search(r'method="post" action="([^"]*)"', preview)[1])
    assert "Retried 2" in pages.submit(preview.replace("&#39;", "'"), action, reason="new paper").text
    assert orders.durable.workflows["bad"].get("b-0").history().reason == "new paper"


def test_an_unknown_outcome_is_not_retried_without_a_warning(healthy: Shop, pages: Browser) -> None:
    def charge() -> None:
        raise NonRetryableError("Its worker died.", name=OUTCOME_UNKNOWN)

    @healthy.durable.workflow(name="charge")
    def charging(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge", charge)

    charging.create(None, id="c-1")
    healthy.work()
    (row,) = failures(pages.open("/"))
    assert "Retry" not in words(row)
    assert "Find out whether the function did its work." in words(row)
    preview = words(pages.open("/instances/change?where=status%3Derrored&command=retry"))
    assert "The outcome of 1 of them is unknown" in preview
    assert "may have done its work" in words(pages.open("/workflows/charge/instances/c-1/retry"))


def test_a_parent_whose_child_failed_is_offered_the_retry_of_its_family(healthy: Shop, pages: Browser) -> None:
    bad = healthy.durable.workflows["bad"]

    @healthy.durable.workflow(name="whole")
    def whole(event: WorkflowEvent[None], step: Step) -> None:
        step.child("part", bad, None, id="b-1")

    @healthy.durable.workflow(name="wholes")
    def wholes(event: WorkflowEvent[None], step: Step) -> None:
        step.map("parts", bad, [None])

    whole.create(None, id="w-1")
    wholes.create(None, id="w-2")
    for _ in range(3):
        healthy.work()
    rows = sorted(failures(pages.open("/")), key=lambda row: ("bad" in words(row), "w-2" in row))
    of_child, of_map, own = rows
    assert "Retry all 2 As a command" in words(own)
    assert "Retry it with its family As a command" in words(of_map)
    assert re.search("Retry it with its family As a command .* --family --yes", words(of_child))
    preview = pages.open(html.unescape(re.search(r'class="button[^"]*" href="([^"]*)"', of_child)[1]))
    assert "<h1>Retry 1 instance with its family</h1>" in preview
    assert "Retried 1" in pages.submit(preview, "family=yes").text
    assert bad.get("b-1").history().run_number == 2


def test_what_only_people_know_to_be_right_is_a_quiet_line(healthy: Shop, pages: Browser) -> None:
    order = healthy.durable.workflows["order"]
    for name in ("o-1", "o-2", "o-3"):
        order.create({"order_id": name}, id=name)
    healthy.work()
    order.get("o-1").send_event("aproval", {"by": "ada"})
    order.get("o-2").send_event("shipped")  # early, perhaps
    order.get("o-3").pause()
    page = pages.open("/")
    assert "<h1>Nothing needs you</h1>" in page
    assert 'order/o-1 got an event "aproval", but waits for "approval": a typing mistake?' in words(page)
    assert "shipped" not in page
    assert '<a href="/instances?where=status%3Dpaused">1 paused</a>' in page


def test_a_run_that_nobody_takes_is_explained(healthy: Shop, pages: Browser) -> None:
    healthy.durable.workflows["echo"].create(1, id="e-1")
    healthy.clock.advance(seconds=15)
    beat(healthy, "dispatcher")
    found = [each for each in problems(pages.open("/")) if "echo/e-1" in each]
    assert len(found) == 1
    assert "It has been due for 15 s" in found[0]


def test_findings_come_with_their_commands(shop: Shop, pages: Browser) -> None:
    page = pages.open("/")
    assert any("No worker has been seen" in each and "celery -A shop worker" in each for each in problems(page))
    assert any("No dispatcher has been seen" in each and "celery -A shop beat" in each for each in problems(page))
    assert "<h1>Attention</h1>" in page


def test_an_outage_says_since_when(healthy: Shop, pages: Browser) -> None:
    outage = Outage("broker", "redis://redis", healthy.clock.wall_clock(), "Connection refused", 3)
    beat(healthy, "dispatcher", outages=[(outage, timedelta(minutes=2))])
    (found,) = [each for each in problems(pages.open("/")) if "has taken no messages since" in each]
    assert "Connection refused" in found


def test_what_an_outage_causes_is_listed_below_it(healthy: Shop, pages: Browser) -> None:
    healthy.durable.workflows["echo"].create(1, id="e-1")
    healthy.clock.advance(seconds=90)
    outage = Outage("broker", "redis://redis", healthy.clock.wall_clock(), "Connection refused", 3)
    beat(healthy, "dispatcher", outages=[(outage, timedelta(minutes=2))])
    beat(healthy, "worker")
    (found,) = problems(pages.open("/"))[:-1]  # the last one is a warning about the installation
    assert re.search(
        "has taken no messages .* Probably because of this: .* oldest due work .* BROKER_UNAVAILABLE: echo/e-1", found
    )


def test_without_a_worker_its_queues_and_what_waits_for_it_are_no_problems_of_their_own(
    healthy: Shop, pages: Browser
) -> None:
    healthy.durable.workflows["echo"].create(1, id="e-1")
    healthy.clock.advance(seconds=40)
    beat(healthy, "dispatcher")
    (found,) = problems(pages.open("/"))[:-1]
    assert re.search(
        "No worker has been seen .* No worker consumes queue .* echo/e-1 .* worker@vm It has been silent", found
    )


def test_a_silent_worker_is_named(healthy: Shop, pages: Browser) -> None:
    beat(healthy, "worker", id="w2", node="frozen@vm")
    healthy.clock.advance(seconds=40)
    beat(healthy, "worker")
    beat(healthy, "dispatcher")
    (found,) = [each for each in problems(pages.open("/")) if "frozen@vm" in each]
    assert "It has been silent for 40 s" in found
    assert "celery -A shop inspect ping -d frozen@vm" in found


def test_tables_that_are_missing_are_a_finding(tmp_path: Any, open_pages: Callable[..., Browser], shop: Shop) -> None:
    shop.app.conf.durable_database_url = f"sqlite:///{tmp_path}/empty.sqlite3"
    page = open_pages().open("/")
    assert any("celery -A shop durable migrate" in each for each in problems(page))
    assert "Workflows" not in page


def test_without_the_app_only_the_database_is_checked(healthy: Shop) -> None:
    site = Site(healthy.durable, None, allow_anonymous=True, is_read_only=True, has_broker=False)
    page = Browser(make_pages(site)).open("/")
    assert "<h1>Nothing needs you</h1>" in page
    assert "broker" not in words(page)


def test_a_scope_sees_its_own_instances_and_no_servers(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    orders.durable.workflows["order"].create({"order_id": "9"}, id="o-9", labels={"tenant": "globex"})
    page = open_pages(authorize=lambda access: Scope({"tenant": "globex"})).open("/")
    assert not failures(page)
    assert not [each for each in problems(page) if "order/o-9" not in each]
    assert "Queues" not in page
    assert "bad" not in words(page)


def test_redacted_messages_are_no_part_of_a_group(orders: Shop, pages: Browser) -> None:
    orders.durable.internals.redact = lambda value, context: "###" if context.kind == "error" else value
    (row,) = failures(pages.open("/"))
    assert "NoPaper: ###" in words(row)
    assert "message%3D" not in row
    assert "paper jam" not in row


def test_limits_that_something_waits_for_are_listed(healthy: Shop, pages: Browser) -> None:
    bank = Limit("bank", at_once=1)

    @healthy.durable.workflow(name="pay")
    def pay(event: WorkflowEvent[None], step: Step) -> None:
        step.task("pay", Signature("bank.pay"), limits=[bank])

    for number in range(3):
        pay.create(None, id=f"p-{number}")
    healthy.work()
    assert re.search(r"bank 1 of 1 2 .*celery -A shop durable limits show bank", words(pages.open("/")))


def test_a_wait_that_has_used_half_of_its_time_is_listed(
    orders: Shop, open_pages: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_MAX_WAITS", 3)  # as many as wait for an event whose type comes before

    @orders.durable.workflow(name="ask")
    def ask(event: WorkflowEvent[None], step: Step) -> None:
        step.wait_for_event("approve", "refund", timeout="20 hours", ask="Refund 1999 cents?", to="finance")

    ask.create(None, id="a-1")
    orders.work()
    orders.clock.advance(seconds=9 * 3600)
    assert "half of their time" not in open_pages().open("/")
    orders.clock.advance(seconds=3600 + 60)
    (row,) = [each for each in re.findall(r"<tr>.*?</tr>", open_pages().open("/"), re.DOTALL) if "ask/a-1" in each]
    assert "An answer of finance: Refund 1999 cents? 10 h ago in 9 h 59 min" in words(row)
    assert 'href="/workflows/ask/instances/a-1/answer?step=approve"' in row
    orders.clock.advance(seconds=2 * 3600)
    assert "order/o-2 Event approval" in words(open_pages().open("/"))
