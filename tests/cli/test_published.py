"""What a run publishes, over both connections: a section of `show`, lines of `watch` in a pipe, bars on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.cli.output.console import Bar
from celery_durable.cli.output.render import format_progress
from tests.cli.conftest import Shop
from tests.cli.test_reading import plain

AT, LATE = "2030-01-01T00:00:02.000Z", "2030-01-01T00:01:02.000Z"


@pytest.fixture
def packing(shop: Shop) -> Shop:
    """The shop with an instance p-1 that has packed one of four boxes, and waits for paper."""

    @shop.durable.workflow(name="pack")
    def pack(event: WorkflowEvent[None], step: Step) -> str:
        step.publish("boxes", {"done": 1, "total": 4})
        step.publish("phase", "waits\nfor \x1b[31mpaper")
        step.wait_for_event("paper", "paper")
        shop.clock.advance(minutes=1)
        step.publish("phase", 0.5)
        step.publish("boxes", {"done": 4, "total": 4})
        return "packed"

    pack.create(id="p-1")
    shop.clock.advance(seconds=2)
    shop.work("pack", "p-1")
    shop.work_at_once()
    return shop


def bring_paper(packing: Shop) -> None:
    packing.durable.internals.operations.events.send("pack", "p-1", "paper", id="e-1")


def test_show_has_what_is_published(packing: Shop, connection: Any) -> None:
    assert connection("show", "pack", "p-1").rows[-3:-1] == [
        ["published", "boxes", '{"done":1,"total":4}', AT],
        ["published", "phase", '"waits\\nfor \\u001b[31mpaper"', AT],
    ]
    bring_paper(packing)
    assert connection("show", "pack", "p-1").rows[-2:] == [
        ["published", "boxes", '{"done":4,"total":4}', LATE],
        ["published", "phase", "0.5", LATE],
    ]
    packing.pipe("restart", "pack", "p-1")
    assert connection("show", "pack", "p-1", "--run", "1").rows[-1] == ["published", "phase", "0.5", LATE]


def test_of_an_instance_that_publishes_nothing_nothing_is_said(packing: Shop, connection: Any) -> None:
    packing.pipe("start", "echo", "--id", "e-1")
    assert "published" not in connection("show", "echo", "e-1").out
    assert "published" not in connection("watch", "echo", "e-1").out


def test_watch_tells_values_as_they_come(packing: Shop, connection: Any) -> None:
    with connection.when_it_waits(lambda: bring_paper(packing)):
        said = connection("watch", "pack", "p-1")
    assert said.code == 0, said.err
    assert [row for row in said.rows if row[1] == "published"] == [
        [AT, "published", "boxes", '{"done":1,"total":4}'],
        [AT, "published", "phase", '"waits\\nfor \\u001b[31mpaper"'],
        [LATE, "published", "boxes", '{"done":4,"total":4}'],
        [LATE, "published", "phase", "0.5"],
    ]
    assert said.rows[-1][1:3] == ["run", "complete"]


def test_watch_tells_once_what_stays_as_it_is(packing: Shop, connection: Any) -> None:
    with connection.when_it_waits(lambda: packing.durable.internals.operations.lifecycle.terminate("pack", "p-1")):
        said = connection("watch", "pack", "p-1")
    assert [row[2] for row in said.rows if row[1] == "published"] == ["boxes", "phase"]


def test_a_terminal_shows_bars(packing: Shop) -> None:
    packing.no_color = True
    shown = packing.terminal("show", "pack", "p-1").splitlines()[-3:]
    assert shown == [
        "PUBLISHED   VALUE                                  SINCE",
        "boxes       [#######-----------------------] 1/4   now",
        'phase       "waits\\nfor \\u001b[31mpaper"           now',
    ]
    assert packing.terminal("show", "pack", "p-1", "--full").splitlines()[-7:] == [
        "  boxes",
        "    {",
        '      "done": 1,',
        '      "total": 4',
        "    }",
        "  phase",
        r'    "waits\nfor \u001b[31mpaper"',
    ]


def test_watch_keeps_the_newest_bars_below_all_other_lines(packing: Shop) -> None:
    packing.no_color = True
    packing.clock.meanwhile = lambda: bring_paper(packing) if packing.clock.slept < 0.2 else None
    console = on_screen(packing.terminal("watch", "pack", "p-1"))
    assert [line.partition("   ")[2].strip() for line in console] == [
        r'published          phase   "waits\nfor \u001b[31mpaper"',
        'step   waiting     paper   event "paper", times out in 1 d',
        "step   completed   paper",
        "run    complete",
        "published          boxes   [##############################] 4/4",
        "published          phase   [###############---------------] 50%",
    ]


def on_screen(text: str) -> list[str]:
    """What a terminal shows in the end: only the two codes are known that go up and that erase what is below."""
    lines: list[str] = []
    for line in text.splitlines():
        while line.startswith("\x1b["):
            count, _, line = line.removeprefix("\x1b[").partition("A\x1b[J")
            del lines[len(lines) - int(count) :]
        lines.append(line)
    return lines


def test_a_terminal_that_cannot_go_up_gets_lines(packing: Shop) -> None:
    packing.no_color = True
    bring_paper(packing)
    said = packing.terminal("watch", "pack", "p-1", term="dumb")
    assert "\x1b" not in said
    assert "[##############################] 4/4" in plain(said)


def test_what_says_how_far_it_has_come_is_a_bar_and_everything_else_is_json() -> None:
    for value, fraction, label in (
        ({"done": 3, "total": 10}, 0.3, "3/10"),
        ({"done": 0, "total": 1}, 0, "0/1"),
        ({"done": 12, "total": 10}, 1, "12/10"),
        ({"done": 1.5, "total": 3, "of": "GB"}, 0.5, "1.5/3"),
        (0.25, 0.25, "25%"),
        (0, 0, "0%"),
        (1, 1, "100%"),
    ):
        bar = format_progress(value)
        assert isinstance(bar, Bar), value
        assert (bar.fraction, bar.label) == (fraction, label)
    for value in (None, True, 7, -0.5, "half", [], {}, {"done": 1}, {"done": 1, "total": 0}, {"done": "1", "total": 2}):
        assert isinstance(format_progress(value), str), value
