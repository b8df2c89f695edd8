"""outbox: what is to be sent or delivered, and what becomes of what was given up."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from celery_durable import OutboundEvent, Step, StepTx, WorkflowEvent
from celery_durable.doctor import workers
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.cli.conftest import Shop

SINCE = "2030-01-01T00:00:00.000Z"


class GivenUpMessages:
    """The shop with an instance that has sent a task and an outbound event, whose handler fails."""

    def __init__(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shop, self.fails = shop, True
        self.delivered: list[OutboundEvent] = []

        @shop.durable.outbound("OrderShipped", retries=0)
        def shipped(event: OutboundEvent) -> None:
            if self.fails:
                raise ValueError("the bus\n\x1b[31mis full\x1b[0m")
            self.delivered.append(event)

        def announce(tx: StepTx) -> list[str]:
            return [tx.send_task("shop.mail", 7), tx.send_outbound("OrderShipped", {"order": 7})]

        @shop.durable.workflow(name="announce")
        def announcing(event: WorkflowEvent[None], step: Step) -> list[str]:
            return step.do("announce", announce)

        # A broker that is away: what is to be sent stays.
        monkeypatch.setattr(
            shop.durable.internals.outbox, "_send", lambda sent: PublishReport.of(len(sent), SendState.UNSENT)
        )
        self.task, self.event = self.send("a-1")

    def send(self, id: str) -> list[str]:
        instance = self.shop.durable.workflows["announce"].create(id=id)
        self.shop.work("announce", id)
        sent: list[str] = instance.status().output
        return sent

    def give_up(self) -> str:
        return self.shop.durable.internals.deliveries.deliver(self.event)

    def row(self, kind: str, **other: str) -> list[str]:
        id_, name = (self.task, "shop.mail") if kind == "task" else (self.event, "OrderShipped")
        next_at = other.get("next", "2030-01-01T00:00:02.000Z")
        return [
            kind,
            name,
            id_,
            "announce",
            "a-1",
            "1",
            other.get("attempts", "0"),
            SINCE,
            next_at,
            other.get("error", ""),
        ]


@pytest.fixture
def messages(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> GivenUpMessages:
    return GivenUpMessages(shop, monkeypatch)


GIVEN_UP = {"attempts": "1", "next": "", "error": "ValueError: the bus is full"}


def test_what_is_not_done_with_is_listed(messages: GivenUpMessages, shop: Shop) -> None:
    assert shop.pipe("outbox", "--given-up").err == "No tasks or events were given up.\n"
    assert messages.give_up() == "given up: ValueError"
    wanted = [messages.row("task"), messages.row("event", **GIVEN_UP)]
    assert sorted(shop.pipe("outbox").rows) == sorted(wanted)
    assert shop.pipe("outbox", "--given-up").rows == [messages.row("event", **GIVEN_UP)]
    first = shop.pipe("outbox", "--limit", "1")
    assert (len(first.rows), first.err) == (1, "There are more: celery -A <your app> durable outbox --limit 10\n")


def test_on_a_terminal_it_is_a_table(messages: GivenUpMessages, shop: Shop) -> None:
    messages.give_up()
    shop.clock.advance(minutes=3)
    shop.no_color = True
    heads, row = (re.split(" {3,}", line) for line in shop.terminal("outbox", "--given-up").splitlines())
    assert heads == ["KIND", "NAME", "ID", "WORKFLOW", "INSTANCE", "RUN", "ATTEMPTS", "SINCE", "NEXT", "ERROR"]
    given_up = ["3 min ago", "given up", "ValueError: the bus is …"]
    assert row == ["event", "OrderShipped", messages.event, "announce", "a-1", "1", "1", *given_up]


def test_what_was_given_up_is_delivered_again_with_fresh_attempts(messages: GivenUpMessages, shop: Shop) -> None:
    messages.give_up()
    messages.fails = False
    assert shop.durable.internals.deliveries.deliver(messages.event).startswith("noop")
    said = shop.pipe("outbox", "--retry", messages.event)
    assert said.rows == [["To be sent again", "event", "OrderShipped", messages.event]]
    again = {**GIVEN_UP, "attempts": "0", "next": SINCE}
    assert messages.row("event", **again) in shop.pipe("outbox").rows
    assert shop.durable.internals.deliveries.deliver(messages.event) == "delivered"
    assert [(event.id, event.attempt) for event in messages.delivered] == [(messages.event, 1)]


def test_what_is_dropped_is_gone(messages: GivenUpMessages, shop: Shop) -> None:
    messages.give_up()
    dropped = [["Dropped", "event", "OrderShipped", messages.event], ["Dropped", "task", "shop.mail", messages.task]]
    assert sorted(shop.pipe("outbox", "--drop", messages.event, messages.task).rows) == dropped
    assert shop.pipe("outbox").err == "The outbox is empty.\n"


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_an_id_that_is_not_there_keeps_the_others_from_it(messages: GivenUpMessages, shop: Shop) -> None:
    messages.give_up()
    before = shop.pipe("outbox").rows
    for action, unknown in itertools.product(("--retry", "--drop"), ("nothing", "x" * 300, "\udcff")):
        said = shop.pipe("outbox", action, messages.event, unknown)
        assert (said.code, said.out) == (3, "")
        assert said.err == (
            f"error: Nothing in the outbox has the id {unknown!r}.\n"
            "hint: Sent messages are removed; list the others: celery -A <your app> durable outbox\n"
        )
        assert shop.pipe("outbox").rows == before


def test_what_was_not_given_up_needs_no_help(messages: GivenUpMessages, shop: Shop) -> None:
    for kind, id_, name in (("Task", messages.task, "shop.mail"), ("Outbound event", messages.event, "OrderShipped")):
        said = shop.pipe("outbox", "--retry", id_)
        assert (said.code, said.err) == (
            1,
            f"error: {kind} {name!r} ({id_}) was not given up.\n"
            "hint: It is still retried automatically; list what was given up: "
            "celery -A <your app> durable outbox --given-up\n",
        )


def test_a_wrong_usage_is_told(shop: Shop) -> None:
    for args, said in (
        (["--retry"], "Name ids together with --retry or --drop only."),
        (["one"], "Name ids together with --retry or --drop only."),
        (["--retry", "--drop", "one"], "--retry, --drop and --given-up exclude each other."),
        (["--given-up", "--drop", "one"], "--retry, --drop and --given-up exclude each other."),
    ):
        answer = shop.pipe("outbox", *args)
        assert (answer.code, answer.err.splitlines()[-1]) == (2, f"Error: {said}")


def test_what_outlives_its_instance_has_no_name_of_it(messages: GivenUpMessages, shop: Shop) -> None:
    shop.clock.advance(days=1)
    assert shop.pipe("prune", "--older-than", "1 hour", "--yes").rows == [["Deleted", "1"]]
    assert [row[3:6] for row in shop.pipe("outbox").rows] == [["", "", ""]] * 2


def test_doctor_tells_what_was_given_up(messages: GivenUpMessages, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PING_SECONDS", 0.02)  # there are none

    def told() -> list[Any]:
        return [row for row in shop.pipe("doctor").rows if row[1] == "outbox"]

    assert told() == [["OK", "outbox", "No task or outbound event was given up.", ""]]
    messages.give_up()
    remedy = "celery -A <your app> durable outbox --given-up shows why; then outbox --retry ID... or --drop ID..."
    one = "1 task or outbound event was given up."
    assert told() == [["WARN", "outbox", one, remedy]]
    _, messages.event = messages.send("a-2")
    messages.give_up()
    two = "2 tasks or outbound events were given up."
    assert told() == [["WARN", "outbox", two, remedy]]
