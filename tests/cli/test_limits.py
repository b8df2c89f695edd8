"""`limits` over both connections: the list, who holds and awaits a limit, and numbers that count until a reset."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable import Limit, RedactionContext, Step, StepConfig, WorkflowEvent
from tests.cli.conftest import Shop


class Calls:
    """Instances of a workflow whose step has limits: `a` holds them while ``look`` is called, b and c wait."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.during: dict[str, Callable[[], object]] = {}
        self.ran: list[str] = []

    def define(self, *limits: Limit) -> None:
        @self.shop.durable.workflow(name="call")
        def call(event: WorkflowEvent[Any], step: Step) -> Any:
            return step.do("charge", StepConfig(limits=limits), self._run, event.instance_id)

    def _run(self, id: str) -> str:
        self.ran.append(id)
        self.during.pop(id, lambda: None)()
        return id

    def look(self, what: Callable[[], object]) -> Any:
        """Return what ``what`` returns while `a` holds the limits, and the other two have waited for two minutes."""
        seen = []

        def look() -> None:
            for each in "bc":
                self.shop.work("call", each)
            self.shop.clock.advance(minutes=2)
            seen.append(what())

        for each in "abc":
            self.shop.pipe("start", "call", "--params", '{"tenant": "acme"}', "--id", each)
        self.during["a"] = look
        self.shop.work("call", "a")
        (found,) = seen
        return found


@pytest.fixture
def calls(shop: Shop) -> Calls:
    return Calls(shop)


def test_the_list_says_how_many_hold_and_await_each_limit(calls: Calls, connection: Any) -> None:
    calls.define(
        Limit("stripe", at_once=1, rate="90 per second"),
        Limit("tenant", at_once=5, by=lambda event: event.payload["tenant"]),
    )
    assert connection("limits").err == "No step has asked for a limit yet.\n"
    said, document = calls.look(lambda: (connection("limits"), connection("limits", "-o", "json")))
    assert said.rows == [
        ["stripe", "", "1", "1", "2", "2 min", "90 per second", ""],
        ["tenant", "acme", "1", "5", "0", "", "", ""],
    ]
    assert json.loads(document.out) == {
        "limits": [
            {
                "name": "stripe", "key": "", "atOnce": 1, "rate": "90 per second", "held": 1,
                "waiting": {"count": 2, "isExact": True}, "longestWaitMs": 120_000,
            },
            {"name": "tenant", "key": "acme", "atOnce": 5, "held": 1, "waiting": {"count": 0, "isExact": True}},
        ],
        "hasNextPage": False,
    }  # fmt: skip
    first = connection("limits", "--limit", "1")
    assert [row[0] for row in first.rows] == ["stripe"]
    cursor = first.err.split()[-1]
    assert [row[0] for row in connection("limits", "--cursor", cursor).rows] == ["tenant"]
    assert connection("limits", "--cursor", "mine").code == 1


def test_show_names_the_holders_and_the_first_that_wait(calls: Calls, connection: Any) -> None:
    calls.define(Limit("stripe", at_once=1, fair=lambda event: event.payload["tenant"]))
    said, document = calls.look(
        lambda: (connection("limits", "show", "stripe"), connection("limits", "show", "stripe", "-o", "json"))
    )
    began = "2030-01-01T00:00:00.000Z"
    assert said.rows == [
        ["limit", "stripe", "", "1", "1", "2", "2 min", "", ""],
        ["holder", "call", "a", "1", "charge", "", "acme", began],
        ["waiting", "call", "b", "1", "charge", "", "acme", began],
        ["waiting", "call", "c", "1", "charge", "", "acme", began],
    ]
    found = json.loads(document.out)
    assert found["limit"]["name"] == "stripe"
    assert [each["instanceId"] for each in found["holders"]] == ["a"]
    assert [each["instanceId"] for each in found["waiting"]] == ["b", "c"]


def test_a_limit_with_keys_is_shown_by_its_key(calls: Calls, connection: Any) -> None:
    calls.define(Limit("tenant", at_once=1, by=lambda event: event.payload["tenant"]))
    of_key = calls.look(lambda: connection("limits", "show", "tenant", "--key", "acme"))
    assert [row[:3] for row in of_key.rows] == [
        ["limit", "tenant", "acme"],
        ["holder", "call", "a"],
        ["waiting", "call", "b"],
        ["waiting", "call", "c"],
    ]
    said = connection("limits", "show", "tenant")
    assert (said.code, said.err) == (
        3,
        "error: Limit 'tenant' counts for each key.\nhint: Name one: `durable limits` lists them.\n",
    )


def test_what_is_set_counts_at_once_and_until_it_is_reset(calls: Calls, connection: Any) -> None:
    calls.define(Limit("stripe", at_once=1))

    def raise_it() -> list[list[str]]:
        said = connection("limits", "set", "stripe", "--at-once", "2", "--rate", "120 per second", "--by", "ann")
        assert said.rows == [["Set", "stripe", "2 at once", "120 per second"]]
        calls.shop.work("call", "b")
        return connection("limits").rows

    assert calls.look(raise_it) == [["stripe", "", "2", "2", "0", "", "120 per second", "ann"]]
    assert calls.ran == ["a", "b"]  # and c may take what b has given back
    assert connection("limits", "set", "stripe", "--reset").rows == [["Reset", "stripe"]]
    assert connection("limits").rows[0][3] == "1"
    assert connection("limits").rows[0][6:] == ["", ""]


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("stripe",), 2, "Error: Give --at-once, --rate, or both; or --reset.\n"),
        (("stripe", "--reset", "--at-once", "2"), 2, "Error: Give --at-once, --rate, or both; or --reset.\n"),
        (
            ("strpe", "--at-once", "2"), 3,
            "error: No step has asked for limit 'strpe' yet.\n"
            "hint: Check the name: `durable limits` lists those that have been used.\n",
        ),
        (
            ("stripe", "--rate", "9 per week"), 1,
            "error: A limit's rate cannot be '9 per week': use text such as \"90 per second\"; the units are second, "
            "minute, hour and day.\n",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_a_remedy_and_changes_nothing(
    calls: Calls, connection: Any, words: tuple[str, ...], code: int, error: str
) -> None:
    calls.define(Limit("stripe", at_once=1))
    calls.look(lambda: None)
    before = connection("limits").rows
    said = connection("limits", "set", *words)
    assert (said.code, said.err[-len(error) :]) == (code, error)
    assert connection("limits").rows == before


def test_the_redaction_hook_gets_keys_and_who_has_set_the_numbers(calls: Calls, connection: Any) -> None:
    calls.define(Limit("tenant", at_once=1, by=lambda event: event.payload["tenant"], fair=lambda event: "gold"))
    asked: set[tuple[str, str | None, str]] = set()

    def redact(value: Any, shown: RedactionContext) -> Any:
        asked.add((shown.kind, shown.name, shown.instance_id))
        return "***"

    def look() -> str:
        connection("limits", "set", "tenant", "--key", "acme", "--at-once", "1", "--by", "mallory")
        calls.shop.durable.internals.redact = redact
        words = [("limits",), ("limits", "show", "tenant", "--key", "acme")]
        return "".join(connection(*each, "-o", form).out for each in words for form in ("tsv", "json"))

    shown = calls.look(look)
    assert shown.count("tenant") >= 4
    for secret in ("acme", "gold", "mallory"):
        assert secret not in shown
    assert {("key", "tenant", ""), ("by", "tenant", ""), ("key", "tenant", "a"), ("key", "tenant", "b")} <= asked


def test_explain_says_for_what_an_instance_waits_and_who_holds_it(calls: Calls, connection: Any) -> None:
    calls.define(Limit("tenant", at_once=1, rate="90 per second", by=lambda event: event.payload["tenant"]))
    said, document = calls.look(
        lambda: (connection("explain", "call", "c"), connection("explain", "call", "c", "-o", "json"))
    )
    limits = f"{connection.name} limits"
    assert said.rows == [
        [
            "LIMITED",
            'Step "charge" waits for limit "tenant" with the key "acme" (1 of 1 held; 90 per second; place 2, of 2; '
            "longest holder call/a, for 2 min).",
        ],
        ["action", f"{limits} show tenant --key acme"],
        ["action", f"{limits} set tenant --key acme --at-once 2"],
        ["action", f"{connection.name} explain call a"],
    ]
    facts = json.loads(document.out)["facts"]
    assert (facts["limit"], facts["key"], facts["held"], facts["place"]) == ("tenant", "acme", 1, 2)
    assert facts["longest_holder"] == "call/a"


def test_show_names_the_limits_for_which_a_step_waits(calls: Calls, connection: Any) -> None:
    calls.define(Limit("tenant", at_once=1, by=lambda event: event.payload["tenant"]), Limit("stripe", at_once=5))
    shown, document = calls.look(
        lambda: (calls.shop.terminal("show", "call", "c"), connection("show", "call", "c", "-o", "json"))
    )
    assert "limit stripe and limit tenant" in shown
    assert json.loads(document.out)["steps"][0]["limits"] == ["stripe", "tenant"]


def test_a_workflow_s_limit_is_held_and_awaited_by_the_run(calls: Calls, connection: Any) -> None:
    @calls.shop.durable.workflow(name="import", limits=[Limit("import", at_once=1)])
    def run_import(event: WorkflowEvent[None], step: Step) -> None:
        step.sleep("rest", "1 day")

    for each in "ab":
        calls.shop.pipe("start", "import", "--id", each)
        calls.shop.work("import", each)
    began = "2030-01-01T00:00:00.000Z"
    assert connection("limits", "show", "import").rows[1:] == [
        ["holder", "import", "a", "1", "", "", "", began],
        ["waiting", "import", "b", "1", "", "", "", began],
    ]
    assert connection("explain", "import", "b").rows[0][1] == (
        'The run waits for limit "import" (1 of 1 held; place 1, of 1; longest holder import/a, for 0 ms).'
    )


def test_explain_says_for_what_the_items_of_a_map_wait(calls: Calls, connection: Any) -> None:
    nap, one = calls.shop.durable.workflows["nap"], Limit("naps", at_once=1)

    @calls.shop.durable.workflow(name="fan")
    def fan(event: WorkflowEvent[None], step: Step) -> None:
        step.map("all", nap, [None, None], limits=[one])

    calls.shop.pipe("start", "fan", "--id", "f")
    calls.shop.work("fan", "f")
    (_, sentence), *actions = connection("explain", "fan", "f").rows
    waits = 'Items wait for limit "naps" (1 of 1 held; place 1, of 1; longest holder fan/f, for 0 ms).'
    assert sentence.endswith(f" {waits}")
    assert ["action", f"{connection.name} limits show naps"] in actions
    shown = connection("limits", "show", "naps").rows[1:]
    assert [[row[0], *row[2:6]] for row in shown] == [
        ["holder", "f", "1", "all", "0"],
        ["waiting", "f", "1", "all", "1"],
    ]
