"""The text of --where."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from celery_durable.conditions import Condition, first_line, read_condition
from celery_durable.errors import ValueRefused
from celery_durable.model import ErrorInfo, InstanceStatus, InstanceSummary, Status

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def errored(message: str = "no money\nat all", step: str | None = "charge") -> InstanceSummary:
    details = InstanceStatus(Status.ERRORED, ErrorInfo("CardDeclined", message))
    return InstanceSummary(
        id="o-1", workflow="order", run_number=1, details=details, created_at=NOW, updated_at=NOW, failed_step=step
    )


def test_a_text_names_each_field() -> None:
    text = "workflow=order status=errored error=CardDeclined step='charge card' 'message=no money' since=2h label.a=b"
    assert read_condition(text) == Condition(
        workflow="order",
        status=Status.ERRORED,
        error="CardDeclined",
        step="charge card",
        message="no money",
        since=timedelta(hours=2),
        labels={"a": "b"},
    )


@pytest.mark.parametrize(
    ("text", "does_match"),
    [
        ("step=charge", True),
        ("step=refund", False),
        ("message='no money'", True),
        ("message='no money at all'", False),
        ("error=CardDeclined step=charge message='no money'", True),
    ],
)
def test_the_step_and_the_first_line_of_the_error_match(text: str, does_match: bool) -> None:
    assert read_condition(text).matches(errored(), NOW) is does_match
    waiting = InstanceSummary(
        id="o-2", workflow="order", run_number=1, details=InstanceStatus(Status.WAITING), created_at=NOW, updated_at=NOW
    )
    assert not read_condition(text).matches(waiting, NOW)


def test_an_error_is_looked_for_among_errored_instances_only() -> None:
    statuses = {text: read_condition(text).listed_status for text in ("error=A", "step=a", "older=1h", "status=paused")}
    assert list(statuses.values()) == [Status.ERRORED, Status.ERRORED, None, Status.PAUSED]


def test_a_first_line_is_cut() -> None:
    assert first_line("\n") == ""
    assert first_line("x" * 300) == "x" * 200
    assert read_condition(f"message={'x' * 200}").matches(errored("x" * 300), NOW)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the condition is empty"),
        ("status=sick", "'sick' is not one of 'active', 'waiting', 'paused', 'complete', 'errored', 'terminated'"),
        ("step=a step=b", "'step=b' is not one of workflow=, status=, error=, step=, message=, older=, since=,"),
        ("'", '"\'" cannot be read: No closing quotation'),
    ],
)
def test_a_text_that_cannot_be_read_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        read_condition(text)
    assert str(refused.value).startswith(sentence)
