"""retry, rewind, fork, set-result and skip: what they do and say."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shop
from tests.cli.connections import Direct, OverHttp, served


def test_an_instance_is_rewound_and_show_tells_from_where(order: Shop) -> None:
    said = order.pipe("rewind", "order", "o-1", "await approval", "--reason", "asked the wrong one")
    assert (said.out, said.code) == ("Rewound\torder/o-1\trun 2\tfrom await approval\n", 0), said.err
    rows = order.pipe("show", "order", "o-1").rows
    assert ["origin", "o-1", "1", "await approval"] in rows
    assert [row[1] for row in rows if row[0] == "step"] == ["count"]
    order.no_color = True
    assert "Continues order/o-1#1, from step await approval" in order.terminal("show", "order", "o-1")


def test_a_step_that_is_not_there_is_refused_with_the_nearest(order: Shop) -> None:
    said = order.pipe("rewind", "order", "o-1", "await aproval")
    assert said.code == 3
    assert said.err == (
        "error: Run 1 of instance 'o-1' of workflow 'order' has no step 'await aproval'.\n"
        "hint: Did you mean 'await approval'?\n"
    )


def test_a_fork_prints_the_id_for_the_next_command(order: Shop) -> None:
    assert order.pipe("fork", "order", "o-1", "await approval").out == "id-1\n"
    order.no_color = True
    said = order.terminal("fork", "order", "o-1", "await approval", "--id", "o-2")
    assert said.split() == ["Forked", "order/o-2", "from", "await", "approval", "of", "o-1"]


def test_steps_are_settled_by_hand_and_show_tells_by_whom(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "root-of-all")
    shop.pipe("start", "nap", "--id", "n-1")
    shop.work("nap", "n-1")
    said = shop.pipe("skip", "nap", "n-1", "cool off", "--reason", "in a hurry")
    assert (said.out, said.code) == ("Skipped\tnap/n-1\trun 1\tcool off\n", 0), said.err
    shop.work("nap", "n-1")
    shop.pipe("start", "charge", "--id", "c-1")
    shop.work("charge", "c-1")
    said = shop.pipe("set-result", "charge", "c-1", "charge card", '"paid"', "--by", "eve")
    assert (said.out, said.code) == ("Completed\tcharge/c-1\trun 1\tcharge card\n", 0), said.err
    (slept,) = [row for row in shop.pipe("show", "nap", "n-1").rows if row[0] == "audit"]
    assert (slept[1:5], slept[6]) == (["skip", "cool off", "waiting", "root-of-all"], "in a hurry")
    (paid,) = [row for row in shop.pipe("show", "charge", "c-1").rows if row[0] == "audit"]
    assert paid[1:5] == ["set-result", "charge card", "waiting", "eve"]
    shop.no_color = True
    assert "BY HAND" in shop.terminal("show", "charge", "c-1")
    said = shop.pipe("skip", "charge", "c-1", "charge card")
    assert said.code == 1
    assert said.err.splitlines()[1] == (
        "hint: Only an open step, or one that ended an errored instance, can be completed by hand. To run it again: "
        "celery -A <your app> durable rewind charge c-1 'charge card'"
    )


@pytest.mark.parametrize("is_over_http", [False, True], ids=["direct", "http"])
def test_a_retry_may_start_later(shop: Shop, is_over_http: bool) -> None:
    with served(shop) as api:
        _retry_later(shop, api if is_over_http else Direct(shop))


def _retry_later(shop: Shop, connection: Direct | OverHttp) -> None:
    connection("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    said = connection("retry", "bad", "b-1", "--delay", "10 minutes")
    assert said.rows == [["Will retry", "bad/b-1", "run 2"]], said.err
    assert connection("ls", "-w", "bad").rows[0][2:4] == ["waiting", "2"]
    sentence = "A new run is to start later, and starts in 10 min."
    assert connection("explain", "bad", "b-1").rows[0] == ["SCHEDULED", sentence]
