"""retry, rewind, fork, set-result and skip: what they do and say."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shop


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
