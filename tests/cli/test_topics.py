"""emit and waiters: what they do, say and refuse."""

from __future__ import annotations

import pytest

from celery_durable import Step, WorkflowEvent
from tests.cli.conftest import Shop


@pytest.fixture
def watchers(shop: Shop) -> Shop:
    """The shop with two instances that wait on a topic."""

    @shop.durable.workflow(name="watch")
    def watch(event: WorkflowEvent[None], step: Step) -> object:
        return step.wait_for_topic("next price", "prices/eur.usd", timeout="1 hour").payload

    for number in range(2):
        watch.create(id=f"w-{number}")
        shop.work("watch", f"w-{number}")
    return shop


def test_waiters_tells_who_waits(watchers: Shop) -> None:
    watchers.clock.advance(minutes=40)
    watchers.no_color = True
    assert watchers.terminal("waiters", "prices/eur.usd").splitlines() == [
        "WORKFLOW   ID    RUN   STEP         SINCE        TIMES OUT",
        "watch      w-0   1     next price   40 min ago   in 20 min",
        "watch      w-1   1     next price   40 min ago   in 20 min",
    ]
    first = watchers.pipe("waiters", "prices/eur.usd", "--limit", "1")
    assert first.rows == [["watch", "w-0", "1", "next price", "2030-01-01T00:00:00.000Z", "2030-01-01T01:00:00.000Z"]]
    cursor = first.err.removeprefix("There are more: --cursor ").strip()
    assert [row[1] for row in watchers.pipe("waiters", "prices/eur.usd", "--cursor", cursor).rows] == ["w-1"]
    assert watchers.pipe("waiters", "nobody").err == "No instance waits for topic 'nobody'.\n"


def test_emit_reaches_all_who_wait(watchers: Shop) -> None:
    assert watchers.pipe("emit", "prices/eur.usd", "--payload", '{"cents": 108}').out == "prices/eur.usd\t2\n"
    watchers.work("watch", "w-1")
    assert watchers.durable.internals.operations.queries.get("watch", "w-1").status.output == {"cents": 108}
    watchers.no_color = True
    assert watchers.terminal("emit", "prices/eur.usd") == "Emitted   prices/eur.usd   to 0 waits"


def test_show_names_the_topic(watchers: Shop) -> None:
    assert 'topic "prices/eur.usd"' in watchers.pipe("show", "watch", "w-0").out


def test_what_is_no_topic_is_refused(shop: Shop) -> None:
    said = shop.pipe("emit", "no spaces")
    assert (said.code, said.err) == (
        1,
        "error: Topic 'no spaces' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - . : / and begin with "
        "none of - . : /.\n",
    )
