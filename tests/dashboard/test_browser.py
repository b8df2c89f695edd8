"""The pages in a real browser: the chromium of the system, driven by Playwright.

``DURABLE_SCREENSHOTS=folder`` keeps a picture of each page, at each width, light and dark.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from celery import Signature

from celery_durable import Limit, NonRetryableError, Step, StepFailed, WorkflowEvent
from celery_durable.dashboard import dashboard, instances
from celery_durable.model import OUTCOME_UNKNOWN, Outage
from tests.dashboard.conftest import beat
from tests.http.conftest import Shop

pytestmark = [pytest.mark.gate, pytest.mark.timeout(600)]

PAGES = [
    "/",
    "/instances",
    "/instances?where=status%3Derrored",
    "/instances?where=workflow%3Dnobody",
    "/instances?where=nonsense",
    "/instances/change?where=status%3Derrored&command=retry",
    "/workflows/order/instances/o-0",
    "/workflows/bad/instances/b-0",
    "/workflows/bad/instances/b-0?view=attempts",
    "/workflows/bad/instances/b-0/retry",
    "/workflows/bad/instances/b-0/set_result?step=print",
    "/workflows/bad/instances/b-0/rewind?step=print",
    "/workflows/album/instances/al-1",
    "/workflows/album/instances/al-1?step=resize",
    "/workflows/asks/instances/a-1?step=ok",
    "/workflows/asks/instances/a-1?view=events",
    "/workflows/asks/instances/a-1?view=log",
    "/workflows/asks/instances/a-1?view=run",
    "/workflows/asks/instances/a-1/answer?step=ok",
    "/workflows/asks/instances/nobody",
    "/waits",
    "/waits?show=all",
    "/waits?to=nobody",
]
EVIL = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">" + "W" * 150


def _charge() -> None:
    raise NonRetryableError("Its worker died.", name=OUTCOME_UNKNOWN)


@pytest.fixture
def troubled(orders: Shop) -> Shop:
    """A shop with troubles of many kinds. Names and labels are as long as people make them."""
    durable = orders.durable

    @durable.workflow(name="asks")
    def asks(event: WorkflowEvent[str], step: Step) -> None:
        step.log.info(EVIL, data=EVIL)
        step.do(EVIL, lambda: EVIL)
        step.wait_for_event("ok", "ok", ask={"Who": EVIL, "What": "pay"}, to="finance")

    @durable.workflow(name="album")
    def album(event: WorkflowEvent[int], step: Step) -> None:
        found = step.map("resize", durable.workflows["bad"], [None] * event.payload, return_exceptions=True)
        assert all(isinstance(each, StepFailed) for each in found)
        step.map("print", durable.workflows["order"], [{"order_id": "1"}])

    @durable.workflow(name="charge")
    def charge(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge", _charge)

    @durable.workflow(name="pay")
    def pay(event: WorkflowEvent[None], step: Step) -> None:
        step.task("pay", Signature("bank.pay"), limits=[Limit("bank", at_once=1)])

    durable.workflows["echo"].create(1, id="a" * 100, labels={"note": "word " * 30})
    asks.create(EVIL, id="a-1")
    album.create(3, id="al-1")
    charge.create(None, id="c-1")
    for number in range(2):
        pay.create(None, id=f"p-{number}")
    for _ in range(3):  # children run after their parents
        orders.work()
    asks.get("a-1").send_event("early", {"text": EVIL})
    durable.workflows["echo"].create(1, id="late")
    beat(orders, "worker", id="w2", node="frozen@vm")
    orders.clock.advance(seconds=40)
    beat(orders, "worker")
    outage = Outage("broker", "redis://redis", orders.clock.wall_clock(), "Connection refused", 3)
    beat(orders, "dispatcher", outages=[(outage, timedelta(minutes=2))])
    return orders


@pytest.fixture
def address(troubled: Shop) -> Iterator[str]:
    """The address of a server of the pages."""
    listening = socket.create_server(("127.0.0.1", 0))
    pages = dashboard(troubled.durable, allow_anonymous=True)
    config = uvicorn.Config(pages, log_level="warning", timeout_graceful_shutdown=1)  # tabs follow runs
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def open_page(chromium: Any, **options: Any) -> tuple[Any, list[str]]:
    """A tab, and a list to which it adds what a browser complains of, and requests that leave the origin."""
    page = chromium.new_context(**options).new_page()
    flaws: list[str] = []
    page.on("console", lambda message: flaws.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: flaws.append(str(error)))
    page.on("request", lambda request: flaws.append(request.url) if "//127.0.0.1:" not in request.url else None)
    return page, flaws


def keep_picture(page: Any, path: str, name: str) -> None:
    if folder := os.environ.get("DURABLE_SCREENSHOTS"):
        slug = re.sub(r"\W+", "-", path).strip("-") or "attention"
        page.screenshot(path=Path(folder) / f"{slug}-{name}.png", full_page=True)


@pytest.mark.parametrize("width", [320, 1280, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_anybody_can_use_the_pages_at_any_width(chromium: Any, address: str, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page, flaws = open_page(chromium, viewport={"width": width, "height": 800}, color_scheme=scheme)
    axe, found = Axe(), []
    for path in PAGES:
        page.goto(address + path)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{path} is {over} px too wide"
        assert "pwned" not in page.title(), path
        keep_picture(page, path, f"{scheme}-{width}")
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for each in axe.run(page).response["violations"]:
            if each["impact"] in ("serious", "critical"):
                found.append((path, each["id"], [node["html"] for node in each["nodes"]][:3]))
    assert found == []
    assert [flaw for flaw in flaws if "400 (Bad Request)" not in flaw and "404 (Not Found)" not in flaw] == []


_FOCUSABLE = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']"
_MARK = """
(wanted) => [...document.querySelectorAll(wanted)].filter((each) => each.checkVisibility() && !each.hidden).map(
  (each, number) => { each.dataset.number = number; return each.outerHTML.slice(0, 100); })
"""
_FOCUSED = """
() => {
  const focused = document.activeElement, style = getComputedStyle(focused);
  const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [focused.dataset.number === undefined ? null : Number(focused.dataset.number), isSeen];
}
"""


def test_the_keyboard_reaches_every_action_and_shows_where_it_is(chromium: Any, address: str) -> None:
    page, _ = open_page(chromium)
    for path in PAGES:
        page.goto(address + path)
        wanted = page.evaluate(_MARK, _FOCUSABLE)
        reached = set()
        for _ in range(len(wanted)):
            page.keyboard.press("Tab")
            number, is_seen = page.evaluate(_FOCUSED)
            assert is_seen, f"{path}: no ring around {wanted[number]}"
            reached.add(number)
        assert [each for number, each in enumerate(wanted) if number not in reached] == [], path


def test_the_keyboard_skips_the_menu_and_sends_a_filter(chromium: Any, address: str) -> None:
    page, _ = open_page(chromium)
    page.goto(f"{address}/instances")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "where"
    page.keyboard.type("status=errored workflow=bad")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="bad/b-1").wait_for()


def test_reading_needs_no_javascript(chromium: Any, address: str) -> None:
    page, _ = open_page(chromium, java_script_enabled=False)
    page.goto(address)
    page.get_by_role("link", name="Retry all 5").click()
    page.get_by_role("heading", name="Retry 5 instances").wait_for()
    page.goto(address)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Instances").click()
    page.get_by_role("link", name="order/o-0").click()
    page.get_by_role("heading", name="order/o-0", level=1).wait_for()
    assert page.get_by_role("button", name="Copy").count() == 0


def test_failures_are_retried_from_the_first_page(
    chromium: Any, address: str, troubled: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_EXAMINED_ROWS", 1)
    monkeypatch.setattr(instances, "_BATCH_SECONDS", -1.0)
    page, flaws = open_page(chromium)
    page.goto(address)
    page.get_by_role("link", name="Retry all 5").click()
    page.get_by_label("Reason").fill("new paper")
    page.get_by_role("button", name="Retry 5").click()
    page.get_by_role("heading", name="Retried 5", exact=True).wait_for()  # it has sent the other forms by itself
    assert troubled.durable.workflows["bad"].get("b-0").history().reason == "new paper"
    page.get_by_role("link", name="Back to the list").click()
    page.get_by_text("No instance matches.").wait_for()
    assert flaws == []


def test_a_list_refreshes_while_it_is_visible(chromium: Any, address: str, troubled: Shop) -> None:
    page, flaws = open_page(chromium)
    page.clock.install()
    page.goto(f"{address}/instances")
    troubled.durable.workflows["echo"].create(1, id="later")
    assert page.get_by_role("link", name="echo/later").count() == 0
    page.clock.run_for(11_000)
    page.get_by_role("link", name="echo/later").wait_for()
    assert flaws == []


def test_an_instance_is_followed_while_it_is_visible(chromium: Any, address: str, troubled: Shop) -> None:
    page, flaws = open_page(chromium)
    page.clock.install()  # it would refresh without a stream, too, but after ten seconds
    with page.expect_request("**/stream"):
        page.goto(f"{address}/workflows/order/instances/o-0")
    page.clock.run_for(1_500)
    troubled.durable.workflows["order"].get("o-0").terminate()
    for _ in range(100):
        page.wait_for_timeout(100)
        page.clock.run_for(50)
        if page.get_by_role("heading", level=1).inner_text().endswith("terminated"):
            break
    assert page.get_by_role("heading", level=1).inner_text().endswith("terminated")
    assert page.locator("[data-stream]").count() == 0
    assert flaws == []


def test_eight_tabs_of_an_instance_stay_usable(chromium: Any, address: str, troubled: Shop) -> None:
    """A browser has six connections to an origin, so hidden tabs may hold none. A headless one says when it hides."""
    context = chromium.new_context()
    context.add_init_script("""
        let state = "visible";
        Object.defineProperty(document, "visibilityState", { get: () => state });
        window.turn = (to) => { state = to; document.dispatchEvent(new Event("visibilitychange")); };
    """)
    tabs = [context.new_page() for _ in range(8)]
    open_streams: set[Any] = set()
    context.on("request", lambda request: open_streams.add(request) if request.url.endswith("/stream") else None)
    for name in ("requestfailed", "requestfinished"):
        context.on(name, lambda request: open_streams.discard(request))
    before = None
    for tab in tabs:
        if before is not None:
            before.evaluate("turn('hidden')")
        with context.expect_event("request", lambda request: request.url.endswith("/stream")):
            tab.goto(f"{address}/workflows/order/instances/o-0")
        before = tab
    assert len(open_streams) == 1
    tabs[-1].evaluate("turn('hidden')")
    troubled.durable.workflows["order"].get("o-0").terminate()
    tabs[0].evaluate("turn('visible')")
    tabs[0].get_by_role("heading", name="order/o-0 terminated").wait_for()
    assert tabs[1].get_by_role("heading", name="order/o-0 waiting").is_visible()


def test_a_command_is_copied(chromium: Any, address: str) -> None:
    page, flaws = open_page(chromium, permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"{address}/workflows/bad/instances/b-0")
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("celery -A shop durable show bad b-0")
    assert flaws == []
