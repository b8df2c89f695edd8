"""What the commands show of values passes the redaction hook of the Durable, whatever they print."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Durable, RedactionContext, WorkflowFailed
from celery_durable.errors import ConfigInvalid
from tests.cli.conftest import Shop

SECRETS = ("1999", "mallory", "paid", "order received", "paper", "kept", "acme")


@pytest.fixture
def hidden(shop: Shop) -> set[tuple[str, str | None]]:
    """Two instances whose every value is hidden; filled with the kinds that were asked for, and their names."""
    start = ("start", "order", "-P", "order_id=7", "-P", "cents=1999", "--id", "o-1", "--label", "tenant=acme")
    assert shop.pipe(*start).code == 0
    assert shop.pipe("start", "bad", "--id", "b-1").code == 0
    shop.work("order", "o-1")
    skip = ("skip", "order", "o-1", "await approval", "--by", "mallory", "--reason", "kept")
    assert shop.pipe(*skip).code == 0
    shop.work("order", "o-1", 1)
    shop.work("bad", "b-1")
    asked: set[tuple[str, str | None]] = set()

    def redact(value: Any, shown: RedactionContext) -> Any:
        asked.add((shown.kind, shown.name))
        return "***"

    shop.durable.internals.redact = redact
    return asked


def test_no_command_that_reads_shows_what_is_hidden(shop: Shop, hidden: set[tuple[str, str | None]]) -> None:
    lines = [
        ("show", "order", "o-1", "--full"),
        ("show", "bad", "b-1", "--full"),
        ("history", "order", "o-1", "--include-logs"),
        ("history", "bad", "b-1"),
        ("logs", "order", "o-1"),
        ("logs", "order", "o-1", "--follow"),
        ("watch", "order", "o-1"),
        ("watch", "bad", "b-1"),
        ("export", "order", "o-1"),
        ("export", "bad", "b-1"),
        ("ls",),
        ("explain", "bad", "b-1"),
        ("explain", "bad", "b-1", "--json"),
    ]
    for words in lines:
        told = shop.pipe(*words)
        seen = told.out + told.err + (shop.terminal(*words) if told.code == 0 else "")
        assert seen.strip(), words
        for secret in SECRETS:
            assert secret not in seen, (words, secret, seen)
    assert {("by", "await approval"), ("reason", "await approval"), ("output", None), ("params", None)} <= hidden
    assert {("result", "count"), ("message", "payments"), ("data", "payments"), ("label", "tenant")} <= hidden


def test_the_application_reads_what_is_stored(shop: Shop, hidden: set[tuple[str, str | None]]) -> None:
    order, bad = shop.durable.workflows["order"], shop.durable.workflows["bad"]
    assert order.get("o-1").status().output == "paid"
    assert [record.by for record in order.get("o-1").history().audit] == ["mallory"]
    with pytest.raises(WorkflowFailed, match="paper"):
        bad.get("b-1").result(timeout=0)
    assert hidden == set()


@pytest.mark.parametrize("redact", ["***", 5, True])
def test_a_hook_that_cannot_be_called_is_refused(redact: Any) -> None:
    with pytest.raises(ConfigInvalid, match="redact"):
        Durable(redact=redact)
