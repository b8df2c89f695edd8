"""explain: for a person, for a pipe, as JSON."""

from __future__ import annotations

import json

from tests.cli.conftest import Shop
from tests.cli.test_reading import plain


def test_a_person_reads_a_sentence_and_what_to_type(order: Shop) -> None:
    order.clock.advance(minutes=40)
    order.pipe("send-event", "order", "o-1", "aproval", "--payload", "1")
    assert plain(order.terminal("explain", "order/o-1")) == (
        "order/o-1   WAITING_EVENT\n"
        '  Waits for event "approval" at step "await approval"; times out in 23 h 20 min. An event "aproval" is '
        'stored, but the wait is for "approval": a typing mistake?\n'
        "  Try: celery -A <your app> durable send-event order o-1 approval --payload @payload.json"
    )


def test_a_pipe_gets_records(order: Shop) -> None:
    said = order.pipe("explain", "order", "o-1")
    assert said.rows == [
        [
            "WAITING_EVENT",
            'Waits for event "approval" at step "await approval"; times out in 24 h.'.replace("24 h", "1 d"),
        ],
        ["action", "celery -A <your app> durable send-event order o-1 approval --payload @payload.json"],
    ]


def test_a_program_gets_json(order: Shop) -> None:
    said = json.loads(order.pipe("explain", "order/o-1", "--json").out)
    assert set(said) == {"code", "sentence", "facts", "actions"}
    assert said["code"] == "WAITING_EVENT"
    assert said["facts"]["event_type"] == "approval"
    assert said["facts"]["due_at"] == "2030-01-02T00:00:02.012Z"


def test_a_workflow_cannot_send_control_characters_to_the_terminal(shop: Shop) -> None:
    shop.pipe("start", "charge", "--id", "c-1")
    shop.work("charge", "c-1")
    shown = shop.terminal("explain", "charge/c-1")
    assert "attempt 1/4 failed: ConnectionError: the gateway is away for c-1." in shown
    assert "\x1b[31mis away" not in shown


def test_what_is_not_there_or_not_named_is_refused(order: Shop) -> None:
    missing = order.pipe("explain", "order/none")
    assert (missing.code, missing.err.splitlines()[0]) == (3, "error: Workflow 'order' has no instance 'none'.")
    half = order.pipe("explain", "order")
    assert (half.code, half.err.splitlines()[-1]) == (2, "Error: Missing argument 'ID'.")
    both = order.pipe("explain", "order/o-1", "o-2")
    assert (both.code, both.err.splitlines()[-1]) == (2, "Error: Got unexpected extra argument (o-2)")
