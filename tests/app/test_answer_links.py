"""Signed links to questions: who may answer with them, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent, durable_workflow
from celery_durable.errors import AnswerLinkInvalid, AnswerTooLate, ConfigInvalid, EventRefused, NameInvalid
from celery_durable.testing import DurableHarness
from tests.support.approvals import Refusal

KEY = "k" * 32


@durable_workflow
def refund(event: WorkflowEvent[int], step: Step) -> Any:
    answer = step.wait_for_event("approve", "approval", schema=Refusal, ask=f"Refund {event.payload} cents?")
    return [answer.payload.by, answer.by]


@pytest.fixture
def harness() -> Iterator[DurableHarness]:
    with DurableHarness([refund], settings={"durable_answer_key": KEY}) as harness:
        yield harness


def sign(harness: DurableHarness, **options: Any) -> str:
    """Create an instance that asks, and sign a link to its question."""
    instance = harness.create(refund, 1999, id="r-1")
    harness.run_until_idle()
    event = WorkflowEvent(1999, harness.clock.now, instance.id, 1)
    return harness.durable.sign_answer(refund, event, "approve", **({"by": "Ada Löw"} | options))


def test_a_link_shows_the_question_and_answers_it_as_its_person(harness: DurableHarness) -> None:
    link = sign(harness)
    assert link.replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert harness.durable.open_question(link).ask == "Refund 1999 cents?"
    with pytest.raises(EventRefused):
        harness.durable.answer_signed(link, {})
    assert harness.durable.answer_signed(link, Refusal(by="x")) is True
    assert harness.durable.answer_signed(link, Refusal(by="x")) is False
    for use in (harness.durable.open_question, lambda link: harness.durable.answer_signed(link, {"by": "y"})):
        with pytest.raises(AnswerTooLate, match="was answered by 'Ada Löw' at "):
            use(link)
    harness.run_until_idle()
    assert harness.instance(refund, "r-1").result() == ["x", "Ada Löw"]


def test_a_link_is_for_one_run_and_one_time(harness: DurableHarness) -> None:
    link = sign(harness, valid_for="1 hour")
    harness.advance("59 minutes")
    harness.durable.open_question(link)
    harness.instance(refund, "r-1").restart()
    harness.run_until_idle()
    with pytest.raises(AnswerTooLate, match="is of an earlier run: the current one is 2"):
        harness.durable.answer_signed(link, {"by": "x"})
    harness.advance("1 minute")
    with pytest.raises(AnswerLinkInvalid) as old:
        harness.durable.answer_signed(link, {"by": "x"})
    assert str(old.value).startswith("This link cannot be used: it was valid until ")


def test_nobody_makes_or_changes_a_link_without_the_key(harness: DurableHarness) -> None:
    link = sign(harness)
    body, _, signature = link.partition(".")
    with DurableHarness([refund], settings={"durable_answer_key": KEY[::-1] + "x"}) as other:
        foreign = sign(other)
    forged = [
        foreign,
        "",
        ".",
        body,
        f"{body}.",
        f"{body}.{signature[:-2]}",
        f".{signature}",
        f"x{link}",
        f"{link}.",
        "é.é",
    ]
    for text in forged:
        with pytest.raises(AnswerLinkInvalid) as refused:
            harness.durable.answer_signed(text, {"by": "x"})
        assert str(refused.value) == "This link cannot be used: it was changed, or signed with another key."
    for character in range(len(link)):
        changed = link[:character] + ("A" if link[character] != "A" else "B") + link[character + 1 :]
        with pytest.raises(AnswerLinkInvalid):
            harness.durable.answer_signed(changed, {"by": "x"})
    assert harness.instance(refund, "r-1").events() == ()
    with pytest.raises(NameInvalid):
        harness.durable.answer_signed(7, {"by": "x"})  # type: ignore[arg-type]


def test_links_need_a_key_that_cannot_be_guessed() -> None:
    with (
        DurableHarness([refund]) as harness,
        pytest.raises(ConfigInvalid, match=r"durable_answer_key=None .*token_urlsafe"),
    ):
        sign(harness)
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_answer_key = "sesame"
    with pytest.raises(ConfigInvalid) as short:
        Durable(app).internals.settings  # noqa: B018  # reads them
    assert "sesame" not in str(short.value)
    assert KEY not in repr(DurableHarness([refund], settings={"durable_answer_key": KEY}).settings)
