"""The pages in a real browser: the chromium of the system, driven by Playwright."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from celery_durable import Step, WorkflowEvent
from celery_durable.dashboard import dashboard, instances
from tests.http.conftest import Shop
from tests.support.services import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGES = [
    "/",
    "/instances",
    "/instances?where=status%3Derrored",
    "/instances?where=nonsense",
    "/instances/change?where=status%3Derrored&command=retry",
    "/workflows/order/instances/o-0",
    "/workflows/bad/instances/b-0",
    "/workflows/bad/instances/b-0?view=attempts",
    "/workflows/bad/instances/b-0/set_result?step=print",
    "/workflows/asks/instances/a-1?step=ok",
    "/workflows/asks/instances/a-1?view=events",
    "/workflows/asks/instances/a-1?view=log",
    "/workflows/asks/instances/a-1?view=run",
    "/workflows/asks/instances/a-1/answer?step=ok",
    "/waits",
]
EVIL = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">" + "W" * 150


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        missing("a browser", "there is no chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("a browser", "playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def address(orders: Shop) -> Iterator[str]:
    """The address of a server of the pages. Names and labels are as long as people make them."""
    orders.durable.workflows["echo"].create(1, id="a" * 100, labels={"note": "word " * 30})

    @orders.durable.workflow(name="asks")
    def asks(event: WorkflowEvent[str], step: Step) -> None:
        step.log.info(EVIL, data=EVIL)
        step.do(EVIL, lambda: EVIL)
        step.wait_for_event("ok", "ok", ask={"Who": EVIL, "What": "pay"}, to="finance")

    asks.create(EVIL, id="a-1")
    orders.work()
    asks.get("a-1").send_event("early", {"text": EVIL})
    listening = socket.create_server(("127.0.0.1", 0))
    pages = dashboard(orders.durable, allow_anonymous=True)
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


@pytest.mark.parametrize("width", [320, 1200, 3840])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_any_width_and_load_nothing_from_elsewhere(
    chromium: Any, address: str, width: int, scheme: str
) -> None:
    page, flaws = open_page(chromium, viewport={"width": width, "height": 800}, color_scheme=scheme)
    for path in PAGES:
        page.goto(address + path)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{path} is {over} px too wide"
        assert "pwned" not in page.title(), path
    assert [flaw for flaw in flaws if "400 (Bad Request)" not in flaw] == []


def test_reading_needs_no_javascript(chromium: Any, address: str) -> None:
    page, _ = open_page(chromium, java_script_enabled=False)
    page.goto(address)
    page.get_by_role("link", name="Retry all 2").click()
    assert page.get_by_role("heading", name="Retry 2 instances").is_visible()
    page.goto(address)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Instances").click()
    page.get_by_role("link", name="order/o-0").click()
    assert page.get_by_role("heading", level=1).inner_text().startswith("order/o-0")
    assert page.get_by_role("button", name="Copy").count() == 0


def test_failures_are_retried_from_the_first_page(
    chromium: Any, address: str, orders: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_EXAMINED_ROWS", 1)
    monkeypatch.setattr(instances, "_BATCH_SECONDS", -1.0)
    page, flaws = open_page(chromium)
    page.goto(address)
    page.get_by_role("link", name="Retry all 2").click()
    page.get_by_label("Reason").fill("new paper")
    page.get_by_role("button", name="Retry 2").click()
    page.get_by_role("heading", name="Retried 2", exact=True).wait_for()  # it has sent the second form by itself
    assert orders.durable.workflows["bad"].get("b-0").history().reason == "new paper"
    page.get_by_role("link", name="Back to the list").click()
    assert page.get_by_text("No instance matches.").is_visible()
    assert flaws == []


def test_a_list_refreshes_while_it_is_visible(chromium: Any, address: str, orders: Shop) -> None:
    page, flaws = open_page(chromium)
    page.clock.install()
    page.goto(f"{address}/instances")
    orders.durable.workflows["echo"].create(1, id="later")
    assert page.get_by_role("link", name="echo/later").count() == 0
    page.clock.run_for(11_000)
    page.get_by_role("link", name="echo/later").wait_for()
    assert flaws == []


def test_an_instance_is_followed_while_it_is_visible(chromium: Any, address: str, orders: Shop) -> None:
    page, flaws = open_page(chromium)
    page.clock.install()  # it would refresh without a stream, too, but after ten seconds
    with page.expect_request("**/stream"):
        page.goto(f"{address}/workflows/order/instances/o-0")
    page.clock.run_for(1_500)
    orders.durable.workflows["order"].get("o-0").terminate()
    for _ in range(100):
        page.wait_for_timeout(100)
        page.clock.run_for(50)
        if page.get_by_role("heading", level=1).inner_text().endswith("terminated"):
            break
    assert page.get_by_role("heading", level=1).inner_text().endswith("terminated")
    assert page.locator("[data-stream]").count() == 0
    assert flaws == []


def test_a_command_is_copied(chromium: Any, address: str) -> None:
    page, flaws = open_page(chromium, permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"{address}/workflows/bad/instances/b-0")
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("celery -A shop durable show bad b-0")
    assert flaws == []


def test_the_keyboard_reaches_everything(chromium: Any, address: str) -> None:
    page, _ = open_page(chromium)
    page.goto(f"{address}/instances")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "where"
    page.keyboard.type("status=errored")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="bad/b-1").wait_for()
