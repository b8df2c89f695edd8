"""The list of instances, and the change of all that match its filter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable.conditions import SELECTED_STATUSES
from celery_durable.dashboard import instances
from celery_durable.http import Access, Authorize, Permission, Scope
from celery_durable.model import Status
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop


def names(page: str) -> list[str]:
    """The instances of a list."""
    return re.findall(r'<td class="name"><a [^>]*>([^<]*)</a>', page)


def test_the_filter_is_the_text_of_the_command_line(orders: Shop, pages: Browser) -> None:
    every = {"order/o-0", "order/o-1", "order/o-2", "bad/b-0", "bad/b-1"}
    wanted = {
        "": every,
        "workflow=order": {"order/o-0", "order/o-1", "order/o-2"},
        "workflow=order status=errored": set(),
        "status=errored": {"bad/b-0", "bad/b-1"},
        "error=NoPaper": {"bad/b-0", "bad/b-1"},
        "error=Other": set(),
        "label.tenant=acme": {"order/o-0", "order/o-1", "order/o-2"},
        "since=1h": every,
        "older=1h": set(),
    }
    for text, found in wanted.items():
        page = pages.get("/instances", params={"where": text}).text
        assert set(names(page)) == found, text


def test_the_name_of_an_instance_opens_it(orders: Shop, pages: Browser) -> None:
    assert "<h1>order/o-1" in pages.open("/instances?where=+order/o-1+")
    assert pages.get("/instances?where=order/nobody").status_code == 404


@pytest.mark.parametrize("text", ["state=errored", "status=sick", "older=soon", "'"])
def test_a_filter_that_cannot_be_read_is_named(pages: Browser, text: str) -> None:
    refused = pages.get("/instances", params={"where": text})
    assert refused.status_code == 400
    assert 'aria-invalid="true"' in refused.text
    assert 'role="alert"' in refused.text


def test_pages_go_on_where_the_last_one_ended(orders: Shop, pages: Browser, monkeypatch: Any) -> None:
    monkeypatch.setattr(instances, "_ROWS", 2)
    path, found = "/instances", list[str]()
    while path:
        page = pages.open(path)
        found += names(page)
        older = re.search(r'href="([^"]*)" rel="next"', page)
        path = older[1].replace("&amp;", "&") if older else ""
    assert found == ["bad/b-1", "bad/b-0", "order/o-2", "order/o-1", "order/o-0"]


def test_a_preview_changes_nothing(orders: Shop, pages: Browser) -> None:
    page = pages.submit(pages.open("/instances?where=workflow%3Dbad"), "/instances/change", command="retry").text
    assert "Retry 2 instances" in page
    assert "bad/b-0" in page
    assert "durable retry --where workflow=bad --yes" in page
    assert orders.durable.workflows["bad"].get("b-0").history().run_number == 1


def test_a_change_of_many_stores_the_reason(orders: Shop, open_pages: Callable[..., Browser], caplog: Any) -> None:
    caplog.set_level("INFO", "celery_durable.dashboard")
    pages = open_pages(authorize=Authorize(lambda access: True, actor=lambda access: "eve"))
    page = pages.open("/instances/change?where=workflow%3Dbad&command=retry")
    done = pages.submit(page, "/instances/change?where=workflow%3Dbad", reason="new paper")
    assert "Retried 2" in done.text
    for id_ in ("b-0", "b-1"):
        run = orders.durable.workflows["bad"].get(id_).history()
        assert (run.run_number, run.reason) == (2, "new paper (by eve)")
    assert "retry by eve: 2 instances where workflow=bad, 0 refused (new paper)" in caplog.text


def test_a_change_of_many_goes_on_with_the_next_request(orders: Shop, pages: Browser, monkeypatch: Any) -> None:
    monkeypatch.setattr(instances, "_BATCH_ROWS", 2)
    monkeypatch.setattr(instances, "_BATCH_SECONDS", -1.0)
    where = "/instances/change?where=workflow%3Dorder"
    page, seen = pages.open(f"{where}&command=pause"), list[str]()
    while f'action="{where}"' in page:
        page = pages.submit(page, where).text
        seen.append(re.search(r"<h1>(.*)</h1>", page)[1])
    assert seen == ["Paused 2 so far", "Paused 3"]
    statuses = {each.status for each in orders.durable.workflows["order"].list().items}
    assert statuses == {Status.PAUSED}


def test_one_that_is_refused_does_not_stop_the_others(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    def allow(access: Access) -> bool:
        return access.permission is Permission.READING or access.instance_id != "o-1"

    pages = open_pages(authorize=allow)
    where = "/instances/change?where=workflow%3Dorder"
    done = pages.submit(pages.open(f"{where}&command=pause"), where).text
    assert "Paused 2" in done
    assert "1 was not changed" in done
    assert "You may not do this." in done
    assert orders.durable.workflows["order"].get("o-1").status().status is Status.WAITING


def test_a_change_of_many_stays_in_the_scope(orders: Shop, open_pages: Callable[..., Browser]) -> None:
    orders.durable.workflows["order"].create({"order_id": "9"}, id="o-9", labels={"tenant": "globex"})
    orders.work()
    pages = open_pages(authorize=lambda access: Scope({"tenant": "acme"}))
    where = "/instances/change?where=workflow%3Dorder"
    assert "Paused 3" in pages.submit(pages.open(f"{where}&command=pause"), where).text
    assert orders.durable.workflows["order"].get("o-9").status().status is Status.WAITING


@pytest.mark.parametrize("where", ["", "nonsense"])
def test_a_change_of_many_needs_a_condition(orders: Shop, pages: Browser, where: str) -> None:
    pages.open("/instances")
    form = {"token": pages.cookies["durable_form"], "command": "terminate"}
    sent = pages.post(
        "/instances/change", params={"where": where}, data=form, headers={"Sec-Fetch-Site": "same-origin"}
    )
    assert sent.status_code == 400
    assert orders.durable.workflows["order"].get("o-0").status().status is Status.WAITING


def test_every_command_of_many_has_a_button(orders: Shop, pages: Browser) -> None:
    page = pages.open("/instances?where=workflow%3Dorder")
    assert set(re.findall(r'<option value="(\w+)">', page)) == set(SELECTED_STATUSES)
