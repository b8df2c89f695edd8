"""The waits, and the forms that answer questions."""

from __future__ import annotations

import datetime as dt
import enum
import html
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from celery_durable import Step, WorkflowEvent
from celery_durable.dashboard import waits
from celery_durable.http import Access, Authorize, Permission, Scope
from tests.dashboard.conftest import Browser
from tests.http.conftest import Shop

ANSWER = "/workflows/refund-money/instances/r-1/answer"


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Decision(BaseModel):
    approved: bool
    cents: int = Field(gt=0, description="What to pay back.")
    on: dt.date
    why: Literal["kind", "legal"] = "kind"
    size: Size | None = None
    comment: str = ""
    parts: list[int] = []


GOOD = {"field.approved": "true", "field.cents": "1999", "field.on": "2026-12-01", "field.comment": "fine"}


@pytest.fixture
def asking(shop: Shop) -> list[Any]:
    """A refund that asks the finance team, and what it was told."""
    told: list[Any] = []

    @shop.durable.workflow(name="refund-money")
    def refund(event: WorkflowEvent[None], step: Step) -> None:
        question = {"amount": "19.99", "customer": "<b>Ada</b>"}
        told.append(step.wait_for_event("ok?", "ok", schema=Decision, ask=question, to="finance").payload)

    @shop.durable.workflow(name="note")
    def note(event: WorkflowEvent[None], step: Step) -> None:
        told.append(step.wait_for_event("say", "said", ask="What do you say?").payload)

    refund.create(None, id="r-1", labels={"tenant": "acme"})
    note.create(None, id="n-1")
    shop.work()
    return told


def answer(pages: Browser, path: str = f"{ANSWER}?step=ok%3F", **fields: str) -> Any:
    page = pages.open(path)
    action = html.unescape(re.search(r'class="action" method="post" action="([^"]*)"', page)[1])
    return pages.submit(page.replace("&amp;", "&"), action, **fields)


@pytest.fixture
def named(asking: list[Any], open_pages: Callable[..., Browser]) -> Callable[[str], Browser]:
    """The pages of a user with this name."""
    return lambda name: open_pages(authorize=Authorize(lambda access: True, actor=lambda access: name))


def test_the_inbox_lists_the_questions(asking: list[Any], orders: Shop, pages: Browser) -> None:
    page = pages.open("/waits")
    assert "What do you say?" in page
    assert "&lt;b&gt;Ada&lt;/b&gt;" in page
    assert "await approval" not in page
    assert "What do you say?" not in pages.open("/waits?to=finance")
    assert "No question is open for nobody" in pages.open("/waits?to=nobody")
    assert "await approval" in pages.open("/waits?show=all")


def test_the_inbox_continues_on_further_pages(
    asking: list[Any], pages: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_ROWS", 1)
    first = pages.open("/waits")
    assert ("What do you say?" in first, "Newest" in first) == (True, False)
    second = pages.open(html.unescape(re.search(r'href="([^"]*)" rel="next">Older', first)[1]))
    assert ("&lt;b&gt;Ada&lt;/b&gt;" in second, "What do you say?" in second) == (True, False)
    assert ("Newest" in second, "Older" in second) == (True, False)


def test_a_form_has_a_field_for_each_kind(asking: list[Any], pages: Browser) -> None:
    page = pages.open(f"{ANSWER}?step=ok%3F")
    assert re.search(r'name="field.cents" type="number"', page)
    assert re.search(r'name="field.on" type="date"', page)
    assert re.search(r'name="field.comment" type="text"', page)
    assert re.search(r'<textarea[^>]* name="field.parts"', page)
    choices = dict(re.findall(r'name="field.(\w+)"[^>]*>\s*<option value=""></option>(.*?)</select>', page, re.DOTALL))
    labels = {name: re.findall(">([^<]+)</option>", found) for name, found in choices.items()}
    assert labels == {"approved": ["yes", "no"], "why": ["kind", "legal"], "size": ["small", "large"]}
    assert "What to pay back." in page


def test_an_answer_reaches_the_workflow(shop: Shop, asking: list[Any], named: Any) -> None:
    fields = GOOD | {"field.size": '"large"', "field.parts": "[1, 2]"}
    sent = answer(named("eve"), **fields)
    assert (sent.status_code, sent.headers["location"]) == (303, "/waits?answered=yes")
    shop.work()
    on = dt.date(2026, 12, 1)
    expected = Decision(approved=True, cents=1999, on=on, size=Size.LARGE, comment="fine", parts=[1, 2])
    assert asking == [expected]
    (event,) = shop.durable.workflows["refund-money"].get("r-1").history().events
    assert event.by == "eve"


def test_a_question_without_schema_takes_json(shop: Shop, asking: list[Any], pages: Browser) -> None:
    path = "/workflows/note/instances/n-1/answer?step=say"
    refused = answer(pages, path, by="ada", **{"field.": "yes"})
    assert refused.status_code == 422
    assert "This is not JSON" in refused.text
    assert answer(pages, path, by="ada", **{"field.": '{"yes": true}'}).status_code == 303
    shop.work()
    assert asking == [{"yes": True}]


@pytest.mark.parametrize(
    ("field", "given"), [("cents", "0"), ("cents", "many"), ("on", "tomorrow"), ("why", '"greedy"'), ("parts", "[x")]
)
def test_a_refused_answer_shows_the_field_and_keeps_the_others(
    shop: Shop, asking: list[Any], named: Any, field: str, given: str
) -> None:
    refused = answer(named("eve"), **(GOOD | {f"field.{field}": given}))
    assert refused.status_code == 422
    wrong = re.findall(r'name="field\.(\w+)"[^>]*aria-invalid="true"', refused.text)
    assert wrong == [field]
    assert 'value="fine"' in refused.text
    shop.work()
    assert asking == []


def test_a_field_that_is_missing_is_named(asking: list[Any], named: Any) -> None:
    refused = answer(named("eve"), **(GOOD | {"field.approved": ""}))
    assert refused.status_code == 422
    assert re.search(r'name="field.approved"[^>]*aria-invalid="true"', refused.text)


def test_the_second_person_reads_who_answered(shop: Shop, asking: list[Any], named: Any) -> None:
    eve, ada = named("eve"), named("ada")
    page = ada.open(f"{ANSWER}?step=ok%3F").replace("&amp;", "&")
    assert answer(eve, **GOOD).status_code == 303
    action = html.unescape(re.search(r'class="action" method="post" action="([^"]*)"', page)[1])
    late = ada.submit(page, action, **GOOD)
    assert late.status_code == 409
    assert "was answered by 'eve'" in html.unescape(late.text)
    assert "was answered by 'eve'" in html.unescape(ada.get(f"{ANSWER}?step=ok%3F").text)


def test_an_answer_to_an_earlier_run_is_refused(shop: Shop, asking: list[Any], pages: Browser) -> None:
    page = pages.open(f"{ANSWER}?step=ok%3F").replace("&amp;", "&")
    shop.durable.workflows["refund-money"].get("r-1").restart()
    shop.work()
    action = html.unescape(re.search(r'class="action" method="post" action="([^"]*)"', page)[1])
    late = pages.submit(page, action, by="ada", **GOOD)
    assert late.status_code == 409
    assert "is of an earlier run" in late.text


def test_a_name_is_needed(asking: list[Any], pages: Browser) -> None:
    refused = answer(pages, **GOOD)
    assert refused.status_code == 400
    assert "Say who answers" in refused.text


def test_answers_need_the_permission_for_events(asking: list[Any], open_pages: Callable[..., Browser]) -> None:
    def allow(access: Access) -> bool:
        return access.permission is not Permission.EVENTS

    pages = open_pages(authorize=allow)
    assert "/answer" not in pages.open("/waits")
    page = pages.open(f"{ANSWER}?step=ok%3F")
    assert 'method="post"' not in page
    form = {"token": pages.cookies["durable_form"], **GOOD}
    sent = pages.post(f"{ANSWER}?step=ok%3F", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert sent.status_code == 403


def test_a_scope_limits_the_inbox(asking: list[Any], open_pages: Callable[..., Browser]) -> None:
    pages = open_pages(authorize=lambda access: Scope({"tenant": "globex"}))
    assert "No question is open." in pages.open("/waits")
    assert pages.get(f"{ANSWER}?step=ok%3F").status_code == 404


def test_an_empty_inbox_says_how_a_question_gets_there(pages: Browser) -> None:
    assert 'step.wait_for_event("approve", "approval", ask="Refund 19.99?", to="finance")' in html.unescape(
        pages.open("/waits")
    )
    assert "wait_for_event(" not in pages.open("/waits?to=nobody")


def test_questions_are_redacted(shop: Shop, asking: list[Any], pages: Browser) -> None:
    shop.durable.internals.redact = lambda value, context: "###" if context.kind == "ask" else value
    for path in ("/waits", f"{ANSWER}?step=ok%3F", "/workflows/refund-money/instances/r-1?step=ok%3F"):
        page = pages.open(path)
        assert "###" in page
        assert "Ada" not in page
