"""The forms of the commands on one instance."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable import NonRetryableError, Step, WorkflowEvent
from celery_durable.http import Access, Authorize, Permission
from celery_durable.model import Status
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop

ORDER = "/workflows/order/instances/o-0"
BAD = "/workflows/bad/instances/b-0"


def send(pages: Browser, path: str, **fields: str) -> Any:
    """Send the form of a page."""
    page = pages.open(path)
    action = html.unescape(re.search(r'class="action" method="post" action="([^"]*)"', page)[1])
    return pages.submit(page.replace("&#39;", "'").replace("&amp;", "&"), action, **fields)


@pytest.fixture
def eve(orders: Shop, open_pages: Callable[..., Browser]) -> Browser:
    """The pages, for a user whose name is known."""
    return open_pages(authorize=Authorize(lambda access: True, actor=lambda access: "eve"))


def test_a_rewind_says_what_runs_again(orders: Shop, eve: Browser) -> None:
    page = eve.open(f"{ORDER}?step=charge")
    path = html.unescape(re.search(r'href="([^"]*/rewind\?[^"]*)"', page)[1])
    asked = eve.open(path)
    assert re.findall("<li>(.*?)</li>", asked) == ["charge", "await approval"]
    assert re.findall("<li>(.*?)</li>", eve.open(f"{ORDER}/rewind?step=await+approval")) == ["await approval"]
    assert "celery -A shop durable rewind order o-0 charge --reason REASON" in asked
    assert orders.durable.workflows["order"].get("o-0").history().run_number == 1
    assert send(eve, path, reason="the price was wrong").headers["location"] == ORDER
    run = orders.durable.workflows["order"].get("o-0").history()
    assert (run.run_number, run.reason) == (2, "the price was wrong (by eve)")


def test_a_fork_needs_the_permission_to_create(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    asked: list[str | None] = []

    def allow(access: Access) -> bool:
        if access.permission is Permission.CREATION:
            asked.append(access.instance_id)
        return access.permission is not Permission.CREATION or access.instance_id == "o-trial"

    pages = open_pages(authorize=allow)
    assert send(pages, f"{ORDER}/fork?step=charge", id="o-other").status_code == 403
    made = send(pages, f"{ORDER}/fork?step=charge", id="o-trial")
    assert made.headers["location"] == "/workflows/order/instances/o-trial"
    assert asked == ["o-other", "o-trial"]
    assert orders.durable.workflows["order"].get("o-trial").status().status is Status.ACTIVE


def test_a_result_set_by_hand_names_the_person(orders: Shop, eve: Browser) -> None:
    assert send(eve, f"{BAD}/set_result?step=print", result='"by hand"', reason="printed").status_code == 303
    (change,) = orders.durable.workflows["bad"].get("b-0").history().audit
    assert (change.action, change.step_key, change.by, change.reason) == ("set_result", "print", "eve", "printed")
    assert orders.durable.workflows["bad"].get("b-0").history().steps[0].result == "by hand"


def test_a_result_that_is_no_json_is_asked_again(orders: Shop, eve: Browser) -> None:
    refused = send(eve, f"{BAD}/set_result?step=print", result="<b>by hand", reason="printed")
    assert refused.status_code == 400
    assert "The result is not JSON" in refused.text
    assert "&lt;b&gt;by hand</textarea>" in refused.text
    assert 'value="printed"' in refused.text
    assert orders.durable.workflows["bad"].get("b-0").history().run_number == 1


def test_without_a_hook_for_names_the_form_asks_for_one(orders: Shop, pages: Browser) -> None:
    path = f"{ORDER}/skip?step=await+approval"
    assert 'name="by"' in pages.open(path)
    unnamed = send(pages, path)
    assert unnamed.status_code == 400
    assert "Say who does it" in unnamed.text
    assert send(pages, path, by="ada").status_code == 303
    assert [each.by for each in orders.durable.workflows["order"].get("o-0").history().audit] == ["ada"]


def test_a_name_from_the_hook_is_not_asked(orders: Shop, eve: Browser) -> None:
    path = f"{ORDER}/skip?step=await+approval"
    assert 'name="by"' not in eve.open(path)
    send(eve, path, by="mallory")
    assert [each.by for each in orders.durable.workflows["order"].get("o-0").history().audit] == ["eve"]


def test_a_family_is_retried_together(shop: Shop, pages: Browser) -> None:
    def part(event: WorkflowEvent[None], step: Step) -> None:
        raise NonRetryableError("no paper", name="NoPaper")

    child = shop.durable.workflow(name="part")(part)

    @shop.durable.workflow(name="whole")
    def whole(event: WorkflowEvent[None], step: Step) -> None:
        step.child("part", child, None, id="p-1")

    whole.create(None, id="w-1")
    for _ in range(3):
        shop.work()
    page = pages.open("/workflows/whole/instances/w-1")
    path = html.unescape(re.search(r'href="([^"]*/retry\?family=yes)"', page)[1])
    asked = pages.open(path)
    assert re.findall("<li><a [^>]*>(.*?)</a>", asked) == ["part/p-1", "whole/w-1"]
    assert "durable retry whole w-1 --family" in asked
    send(pages, path, family="yes")
    assert shop.durable.workflows["part"].get("p-1").history().run_number == 2


def test_children_may_outlive_a_terminated_parent(shop: Shop, pages: Browser) -> None:
    @shop.durable.workflow(name="part")
    def part(event: WorkflowEvent[None], step: Step) -> None:
        step.sleep("long", "1 day")

    @shop.durable.workflow(name="whole")
    def whole(event: WorkflowEvent[None], step: Step) -> None:
        step.child("part", part, None, id=f"p-{event.instance_id}")

    for number in range(2):
        whole.create(None, id=str(number))
    for _ in range(3):
        shop.work()
    send(pages, "/workflows/whole/instances/0/terminate")
    send(pages, "/workflows/whole/instances/1/terminate", **{"no-children": "yes"})
    shop.clock.advance(seconds=60)
    shop.work()
    assert part.get("p-0").status().status is Status.TERMINATED
    assert part.get("p-1").status().status is Status.WAITING


@pytest.mark.parametrize("path", ["rewind", "rewind?step=nothing", "explode", "create"])
def test_a_form_that_is_not_there_is_refused(orders: Shop, pages: Browser, path: str) -> None:
    assert pages.get(f"{ORDER}/{path}").status_code in (400, 404)


def test_a_form_that_the_hooks_refuse_is_not_shown(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    pages = open_pages(authorize=lambda access: access.permission is Permission.READING)
    assert pages.get(f"{ORDER}/rewind?step=charge").status_code == 403
    assert "/rewind" not in pages.open(f"{ORDER}?step=charge")
    read_only = open_pages(allow_anonymous=True, read_only=True)
    assert read_only.get(f"{ORDER}/rewind?step=charge").status_code == 403
