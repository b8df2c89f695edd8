"""Who may see and change what, over the pages: as over the HTTP API, with the same hooks."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import RedirectResponse
from starlette.testclient import TestClient

from celery_durable.dashboard import dashboard
from celery_durable.http import Access, Authorize, NoAuthorization, Permission, Scope, Unauthenticated, asgi
from celery_durable.model import Status
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop

INSTANCE = "/workflows/order/instances/o-0"
ALIKE = [
    ("/", "/stats"),
    ("/instances", "/instances"),
    ("/waits", "/waits"),
    (INSTANCE, INSTANCE),
    (INSTANCE, f"{INSTANCE}/explain"),
]
"""A page, and a route of the API that shows the same."""


def with_key(access: Access) -> bool:
    if access.request.headers.get("X-Api-Key") != "sesame":
        raise Unauthenticated("Send the header X-Api-Key.", challenge="ApiKey")
    return True


HOOKS: dict[str, Any] = {
    "everybody": lambda access: True,
    "nobody": lambda access: False,
    "with a key": with_key,
    "one workflow": lambda access: access.workflow == "order",
    "another workflow": lambda access: access.workflow == "bad",
    "one operation": lambda access: access.operation == "get",
    "a tenant": lambda access: Scope({"tenant": "acme"}),
    "another tenant": lambda access: Scope({"tenant": "globex"}),
    "readers": Authorize(reading=lambda access: True),
    "managers": Authorize(management=lambda access: True),
    "to a login": lambda access: RedirectResponse("/login"),
    "broken": lambda access: 1 / 0,
}


@pytest.mark.parametrize("name", HOOKS)
def test_pages_and_api_obey_the_same_hooks(orders: Shop, name: str) -> None:
    hooks = HOOKS[name]
    page, api = (
        TestClient(made(orders.durable, authorize=hooks), follow_redirects=False) for made in (dashboard, asgi)
    )
    for of_page, of_api in ALIKE:
        if (name, of_api) == ("one operation", f"{INSTANCE}/explain"):
            continue  # the page shows what both operations show
        shown, answered = page.get(of_page), api.get(of_api)
        assert shown.status_code == answered.status_code, of_page
        assert shown.headers.get("www-authenticate") == answered.headers.get("www-authenticate")
        if answered.status_code in (401, 403, 404):
            assert answered.json()["message"] in html.unescape(shown.text)
    ids = {each["id"] for each in api.get("/instances").json()["instances"]} if name == "a tenant" else set()
    assert all(f"/{id_}</a>" in page.get("/instances").text for id_ in ids)
    token = page.cookies.get("durable_form", "")
    sent = page.post(f"{INSTANCE}/pause", data={"token": token}, headers={"Sec-Fetch-Site": "same-origin"})
    answered = api.post(f"{INSTANCE}/pause")
    if token or answered.status_code != 200:
        assert sent.status_code == (303 if answered.status_code == 200 else answered.status_code)


def test_pages_without_hooks_cannot_be_made(shop: Shop) -> None:
    with pytest.raises(NoAuthorization):
        dashboard(shop.durable)


def test_every_page_asks_the_hooks(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    pages = open_pages(authorize=lambda access: False)
    tried = 0
    for route in pages.app.routes:
        path = re.sub(r"\{\w+\}", "o-0", route.path.replace("{command}", "pause"))
        if not path.startswith("/static/"):
            for method in route.methods:
                assert pages.request(method, path).status_code == 403, (method, path)
                tried += 1
    assert tried >= 6


def test_a_filter_of_a_workflow_asks_the_hooks_for_that_workflow(orders: Shop, open_pages: Any) -> None:
    asked: list[tuple[str, str | None]] = []

    def note(access: Access) -> bool:
        if access.permission is Permission.READING:
            asked.append((access.operation, access.workflow))
        return True

    pages = open_pages(authorize=note)
    pages.open("/instances")
    pages.open("/instances?where=workflow%3Dorder")
    assert asked == [("list_all_instances", None), ("list_instances", "order")]


# --- changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, None),
        ({"Sec-Fetch-Site": "cross-site"}, None),
        ({"Sec-Fetch-Site": "same-site"}, None),
        ({"Sec-Fetch-Site": "none"}, None),
        ({"Origin": "https://evil.example"}, None),
        ({"Origin": "null"}, None),
        ({"Host": ""}, None),
        ({"Sec-Fetch-Site": "same-origin"}, "0" * 32),
        ({"Sec-Fetch-Site": "same-origin"}, ""),
    ],
)
def test_a_change_that_no_form_sent_is_refused(
    orders: Shop, pages: Browser, headers: dict[str, str], token: str | None
) -> None:
    pages.open(INSTANCE)
    given = pages.cookies["durable_form"] if token is None else token
    refused = pages.post(f"{INSTANCE}/pause", data={"token": given}, headers=headers)
    assert refused.status_code == 403
    assert "This change was not sent by a form of this page." in refused.text
    assert orders.durable.workflows["order"].get("o-0").status().status is Status.WAITING


def test_a_token_without_its_cookie_is_refused(orders: Shop, pages: Browser) -> None:
    pages.open(INSTANCE)
    token = pages.cookies["durable_form"]
    pages.cookies.clear()
    refused = pages.post(f"{INSTANCE}/pause", data={"token": token}, headers={"Sec-Fetch-Site": "same-origin"})
    assert refused.status_code == 403


@pytest.mark.parametrize(("scheme", "more"), [("http", ""), ("https", "; Secure")])
def test_the_cookie_of_the_forms_is_for_these_pages_alone(shop: Shop, pages: Browser, scheme: str, more: str) -> None:
    browser = Browser(pages.app, base_url=f"{scheme}://testserver")
    given = browser.get("/instances").headers["set-cookie"]
    assert given == f"durable_form={browser.cookies['durable_form']}; HttpOnly; Path=/; SameSite=lax{more}"


def test_an_old_browser_says_its_origin(orders: Shop, pages: Browser) -> None:
    pages.open(INSTANCE)
    form = {"token": pages.cookies["durable_form"]}
    sent = pages.post(f"{INSTANCE}/pause", data=form, headers={"Origin": "http://testserver"}, follow_redirects=False)
    assert sent.status_code == 303
    assert orders.durable.workflows["order"].get("o-0").status().status is Status.PAUSED


def test_nothing_changes_read_only(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    pages = open_pages(allow_anonymous=True, read_only=True)
    page = pages.open(INSTANCE) + pages.open("/instances?where=status%3Derrored")
    assert 'method="post"' not in page
    assert "Retry" not in page
    form = {"token": pages.cookies["durable_form"]}
    refused = pages.post(f"{INSTANCE}/pause", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert refused.status_code == 403
    assert "This dashboard only reads." in refused.text


def test_only_commands_that_the_hooks_allow_have_buttons(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    def allow(access: Access) -> bool:
        return access.permission is Permission.READING or access.operation == "pause"

    page = open_pages(authorize=allow).open(INSTANCE)
    assert f'action="{INSTANCE}/pause"' in page
    assert f'action="{INSTANCE}/terminate"' not in page


def test_the_reason_names_the_user(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    pages = open_pages(authorize=Authorize(lambda access: True, actor=lambda access: "eve"))
    page = pages.open(INSTANCE)
    assert pages.submit(page, f"{INSTANCE}/terminate", reason="sold twice").headers["location"] == INSTANCE
    assert orders.durable.workflows["order"].get("o-0").history().reason == "sold twice"


# --- what a browser gets ----------------------------------------------------------------------------


def read_every_page(pages: Browser) -> dict[str, str]:
    paths = [
        "/",
        "/instances",
        "/waits",
        "/waits?show=all",
        "/instances?where=status%3Derrored",
        "/instances/change?where=status%3Derrored&command=retry",
        INSTANCE,
        *(f"{INSTANCE}?view={view}" for view in ("attempts", "events", "log", "run")),
        f"{INSTANCE}?step=charge",
        "/workflows/bad/instances/b-0?view=attempts",
        f"{INSTANCE}/rewind?step=charge",
        "/workflows/bad/instances/b-0/set_result?step=print",
    ]
    return {path: pages.open(path) for path in paths}


def test_pages_need_no_inline_code_and_no_other_origin(orders: Shop, pages: Browser) -> None:
    for path, page in read_every_page(pages).items():
        policy = pages.get(path).headers["content-security-policy"]
        assert "'unsafe-" not in policy
        assert "default-src 'none'" in policy
        assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", page), path
        assert not re.search(r"""(?:src|href|action|hx-get)=["'](?:https?:)?//""", page), path
        files = re.findall(r'(?:src|href)="(/static/[^"]*)"', page)
        assert len(files) == 4
        for each in files:
            served = pages.get(each)
            assert served.status_code == 200
            assert "immutable" in served.headers["cache-control"]


def test_what_people_wrote_is_text(shop: Shop, open_pages: Callable[..., Browser]) -> None:
    evil = "<script>alert(1)</script>'\"<img src=x>"
    shop.durable.workflows["order"].create({"order_id": evil}, id="e-1", labels={"note": evil})
    shop.work()
    shop.durable.workflows["order"].get("e-1").send_event("early", evil)
    pages = open_pages(authorize=Authorize(lambda access: True, actor=lambda access: evil))
    path = "/workflows/order/instances/e-1"
    pages.submit(pages.open(path), "e-1/terminate", reason=evil)
    for each in ("/instances", path, f"{path}?view=events", f"{path}?view=run"):
        page = pages.open(each)
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "&lt;script&gt;alert(1)" in page
    refused = pages.get("/instances", params={"where": evil})
    assert refused.status_code == 400
    assert "<script>alert" not in refused.text


def test_values_pass_the_redaction_of_the_application(orders: Shop, pages: Browser) -> None:
    orders.durable.internals.redact = lambda value, context: "###" if context.kind in ("error", "label") else value
    page = pages.open("/instances") + pages.open("/workflows/bad/instances/b-0")
    assert "###" in page
    assert "paper jam" not in page
    assert "acme" not in page


def test_what_is_not_there_is_a_page_with_its_status(orders: Shop, pages: Browser) -> None:
    for path, sentence in {
        "/nothing": "Not Found",
        "/workflows/order/instances/o-99": "o-99",
        "/instances?cursor=stale": "cursor",
    }.items():
        missing = pages.get(path)
        assert missing.status_code in (400, 404)
        assert sentence in missing.text
        assert "<nav" in missing.text
    assert pages.post(INSTANCE).status_code == 405


def test_links_keep_the_prefix_of_a_mount(orders: Shop) -> None:
    from fastapi import FastAPI

    site = FastAPI()
    site.mount("/durable", dashboard(orders.durable, allow_anonymous=True))
    browser = Browser(site)
    page = browser.open("/durable/")
    links = re.findall(r'(?:src|href|action|hx-get)="([^"#?][^"]*)"', page)
    assert links
    assert all(each.startswith("/durable/") for each in links), links
    assert browser.submit(browser.open(f"/durable{INSTANCE}"), "/pause").headers["location"] == f"/durable{INSTANCE}"
