"""ls, show and logs: in a pipe exact records, on a terminal what a person reads."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import NonRetryableError
from celery_durable.cli.backends.stored import StoreBackend
from celery_durable.cli.commands.follow import Follower
from celery_durable.cli.output.console import Styled
from celery_durable.model import RunRef
from tests.cli import conftest
from tests.cli.conftest import Shop

COLOR = re.compile(r"\x1b\[[0-9;]*m")


RAISED_AT = f"{conftest.__file__}:{inspect.getsourcelines(Shop._add_workflows)[1] + 7}"
"""Where the step "charge card" raises."""


def plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in COLOR.sub("", text).splitlines())


# --- ls -----------------------------------------------------------------------------------------


def test_ls_shows_the_newest_first_and_what_is_in_trouble(order: Shop) -> None:
    order.clock.advance(minutes=40)
    order.pipe("start", "bad", "--id", "b-1")
    order.work("bad", "b-1")
    assert plain(order.terminal("ls", columns=150)) == (
        "WORKFLOW   ID    STATUS    RUN   CREATED      CHANGED      "
        "AT                                                           ERROR\n"
        "bad        b-1   errored   1     now          now          "
        "                                                             NoPaper: out of paper\n"
        "order      o-1   waiting   1     40 min ago   40 min ago   "
        'await approval: event "approval", times out in 23 h 20 min'
    )


def test_ls_in_a_pipe_is_one_record_a_line_without_head_and_with_exact_times(order: Shop) -> None:
    order.pipe("start", "bad", "--id", "b-1")
    order.work("bad", "b-1")
    assert order.pipe("ls").rows == [
        [
            "bad",
            "b-1",
            "errored",
            "1",
            "2030-01-01T00:00:02.012Z",
            "2030-01-01T00:00:02.012Z",
            "",
            "",
            "NoPaper: out of paper",
        ],
        [
            "order",
            "o-1",
            "waiting",
            "1",
            "2030-01-01T00:00:00.000Z",
            "2030-01-01T00:00:02.012Z",
            'await approval: event "approval", times out at 2030-01-02T00:00:02.012Z',
            "",
            "",
        ],
    ]


def test_ls_asks_for_the_time_and_not_for_what_is_due(order: Shop) -> None:
    statements: list[str] = []
    engine = order.durable.internals.store.engine
    sa.event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert order.pipe("ls").code == 0
    assert len(statements) > 0
    assert [each for each in statements if "next_check_at" in each and "workflow_outbox" in each] == []


def test_ls_by_workflow_and_status_and_page_by_page(shop: Shop) -> None:
    for number in range(5):
        shop.pipe("start", "nap", "--id", f"n-{number}")
    shop.pipe("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    assert [row[1] for row in shop.pipe("ls", "-s", "errored").rows] == ["b-1"]
    page = shop.pipe("ls", "--workflow", "nap", "--limit", "3")
    assert [row[1] for row in page.rows] == ["n-4", "n-3", "n-2"]
    cursor = re.fullmatch(r"There are more: --cursor (\S+)\n", page.err)
    assert cursor is not None
    rest = shop.pipe("ls", "--workflow", "nap", "--limit", "3", "--cursor", cursor[1])
    assert ([row[1] for row in rest.rows], rest.err) == (["n-1", "n-0"], "")


def test_an_empty_list_says_so_beside_the_pipe(shop: Shop) -> None:
    said = shop.pipe("ls", "-w", "order", "-s", "paused")
    assert (said.out, said.err, said.code) == ("", "No paused instances of workflow 'order'.\n", 0)


def test_ids_and_statuses_are_whole_however_narrow_the_terminal(shop: Shop) -> None:
    long_id = "i" * 100
    shop.pipe("start", "bad", "--id", long_id)
    shop.work("bad", long_id)
    shown = plain(shop.terminal("ls", columns=40))
    assert long_id in shown
    assert "errored" in shown


# --- show ---------------------------------------------------------------------------------------


def test_show_tells_what_it_waits_for_and_how_to_give_it(order: Shop) -> None:
    order.clock.advance(minutes=40)
    assert plain(order.terminal("show", "order", "o-1")) == (
        "order/o-1   waiting   run 1   created 40 min ago\n"
        '  Waits for event "approval" at step "await approval"; times out in 23 h 20 min.\n'
        "  Try: celery -A <your app> durable send-event order o-1 approval --payload @payload.json\n"
        "\n"
        "STEP             TYPE    STATUS      ATTEMPTS   TOOK     WAITS FOR\n"
        "count            do      completed   1/6        12 ms\n"
        'await approval   event   waiting                40 min   event "approval", times out in 23 h 20 min'
    )


def test_show_tells_of_a_retry_and_its_error_without_control_characters(shop: Shop) -> None:
    shop.pipe("start", "charge", "--id", "c-1")
    shop.work("charge", "c-1")
    shop.clock.advance(seconds=4)
    shown, _, attempts = plain(shop.terminal("show", "charge", "c-1", columns=140)).partition("\n\nFAILED ATTEMPT")
    assert len(attempts.splitlines()) == 2
    assert shown == (
        "charge/c-1   waiting   run 1   created 6 s ago\n"
        '  Tries step "charge card" again in 6.0 s; attempt 1/4 failed: ConnectionError: the gateway is away for c-1. '
        f"Raised at {RAISED_AT}.\n"
        "  Try: celery -A <your app> durable show charge c-1 --full\n"
        "\n"
        "STEP          TYPE   STATUS    ATTEMPTS   TOOK    WAITS FOR               ERROR\n"
        "charge card   do     waiting   1/4        5.5 s   next attempt in 6.0 s   "
        "ConnectionError: the gateway is away for c-1"
    )


def test_show_tells_of_a_sleep_a_pause_a_worker_and_of_none(shop: Shop) -> None:
    shop.pipe("start", "nap", "--id", "n-1")
    shop.clock.advance(seconds=5)
    due = (
        "\n  It has been due for 5 s, and no message for it has been sent. No dispatcher has been seen: is celery beat"
    )
    assert due in plain(shop.terminal("show", "nap", "n-1"))
    shop.work("nap", "n-1")
    asleep = '\n  Sleeps at step "cool off"; wakes in 3 d.\n'
    assert asleep in plain(shop.terminal("show", "nap", "n-1"))
    shop.pipe("pause", "nap", "n-1")
    assert plain(shop.terminal("show", "nap", "n-1")).startswith(
        "nap/n-1   paused   run 1   created 5 s ago\n"
        '  It has been paused for 0 ms; its timers keep running. Unfinished: step "cool off" sleeps.\n'
        "  Try: celery -A <your app> durable resume nap n-1\n"
    )


def test_show_of_an_ended_run_and_of_the_one_before_it(shop: Shop) -> None:
    shop.pipe("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    shop.clock.advance(hours=2)
    shop.pipe("restart", "bad", "b-1", "--reason", "paper\0 is in")
    assert plain(shop.terminal("show", "bad", "b-1")) == (
        "bad/b-1   active   run 2   created now\n  Reason: paper is in\n"
        "  It is due; a worker should claim it at any moment. But no worker consumes queue 'durable'.\n"
        "  Try: celery -A <your app> worker -Q durable"
    )
    shown, _, attempts = plain(shop.terminal("show", "bad", "b-1", "--run", "1")).partition("\n\nFAILED ATTEMPT")
    assert shown == (
        "bad/b-1   errored   run 1 (the current one is 2)   created 2 h ago   ended 2 h ago\n  NoPaper: out of paper"
    )
    assert len(attempts.splitlines()) == 2


def test_show_in_full_has_every_value_and_exact_times(order: Shop) -> None:
    order.work_at_once()
    order.pipe("send-event", "order", "o-1", "approval", "--payload", '{"by": "eve"}', "--event-id", "mail-7")
    assert plain(order.terminal("show", "order", "o-1", "--full", columns=160)) == (
        "order/o-1   complete   run 1   created at 2030-01-01T00:00:00.000Z   ended at 2030-01-01T00:00:02.012Z\n"
        "\n"
        "PARAMS\n"
        "  {\n"
        '    "order_id": "42",\n'
        '    "cents": 1999\n'
        "  }\n"
        "\n"
        "STEP             TYPE    STATUS      ATTEMPTS   TOOK    STARTED                    FINISHED\n"
        "count            do      completed   1/6        12 ms   2030-01-01T00:00:02.000Z   2030-01-01T00:00:02.012Z\n"
        "await approval   event   completed              0 ms    2030-01-01T00:00:02.012Z   2030-01-01T00:00:02.012Z\n"
        "\n"
        "RESULTS\n"
        "  count\n"
        "    {\n"
        '      "cents": 1999\n'
        "    }\n"
        "  await approval\n"
        "    {\n"
        '      "by": "eve"\n'
        "    }\n"
        "\n"
        "EVENT      ID       SENT                       CONSUMED BY      BY\n"
        "approval   mail-7   2030-01-01T00:00:02.012Z   await approval\n"
        "\n"
        "PAYLOADS\n"
        "  approval   mail-7\n"
        "    {\n"
        '      "by": "eve"\n'
        "    }\n"
        "\n"
        "OUTPUT\n"
        '  "paid"'
    )


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_show_in_a_pipe_is_records_named_by_their_first_field(order: Shop) -> None:
    order.pipe("send-event", "order", "o-1", "early", "--payload", '"é"', "--event-id", "mail-7")
    at = "2030-01-01T00:00:02.012Z"
    assert order.pipe("show", "order", "o-1", "--full").rows == [
        ["instance", "order", "o-1", "waiting", "1", "2030-01-01T00:00:00.000Z", ""],
        ["params", '{"order_id":"42","cents":1999}'],
        ["step", "count", "do", "completed", "1/6", "12 ms", "", "", "2030-01-01T00:00:02.000Z", at, '{"cents":1999}'],
        ["step", "await approval", "event", "waiting", "", "0 ms",
         'event "approval", times out at 2030-01-02T00:00:02.012Z', "", at, "", "null"],
        ["event", "early", "mail-7", at, "-", "", '"é"'],
        ["explain", "WAITING_EVENT", 'Waits for event "approval" at step "await approval"; times out in 1 d. '
         'Buffered for later waits: "early".'],
    ]  # fmt: skip


def test_show_in_a_pipe_names_error_and_reason(shop: Shop) -> None:
    shop.pipe("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    shop.pipe("start", "nap", "--id", "n-1")
    shop.pipe("terminate", "nap", "n-1", "--reason", "sold\ttwice")
    error, attempt = shop.pipe("show", "bad", "b-1").rows[1:]
    assert error == ["error", "NoPaper", "out of paper"]
    assert [attempt[0], attempt[-1]] == ["attempt", "NoPaper: out of paper"]
    reason, audit = shop.pipe("show", "nap", "n-1").rows[1:]
    assert reason == ["reason", "sold twice"]
    assert audit[:2] == ["audit", "terminate"]


def test_a_person_reads_why_it_waits_and_what_to_type(order: Shop) -> None:
    order.clock.advance(minutes=40)
    order.pipe("send-event", "order", "o-1", "aproval", "--payload", "1")
    assert plain(order.terminal("explain", "order/o-1")) == (
        "order/o-1   WAITING_EVENT\n"
        '  Waits for event "approval" at step "await approval"; times out in 23 h 20 min. An event "aproval" is '
        'stored, but the wait is for "approval": a typing mistake?\n'
        "  Try: celery -A <your app> durable send-event order o-1 approval --payload @payload.json"
    )
    half = order.pipe("explain", "order")
    assert (half.code, half.err.splitlines()[-1]) == (2, "Error: Missing argument 'ID'.")


# --- logs ---------------------------------------------------------------------------------------


def test_logs_are_said_once_unless_replays_are_wanted(order: Shop) -> None:
    order.work_at_once()
    order.pipe("send-event", "order", "o-1", "approval", "--payload", '"eve"')
    at = "2030-01-01T00:00:02.012Z"
    received = [at, "info", "payments", 'order received cents=1999 note="two words"']
    decided = [at, "warn", "workflow", "decided by=eve"]
    assert order.pipe("logs", "order", "o-1").rows == [received, decided]
    assert order.pipe("logs", "order", "o-1", "--replays").rows == [received, [*received, "(replay)"], decided]
    assert order.pipe("logs", "order", "o-1", "--level", "warn").rows == [decided]
    assert order.pipe("logs", "order", "o-1", "--category", "payments").rows == [received]
    assert plain(order.terminal("logs", "order", "o-1")) == (
        f'{at}   info    payments   order received cents=1999 note="two words"\n'
        f"{at}   warn    workflow   decided by=eve"
    )


@pytest.mark.parametrize("method", ["read", "logs"])
def test_what_comes_between_two_reads_is_told_once_and_in_order(
    order: Shop, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    operations = order.durable.internals.operations
    follower = Follower(StoreBackend(order.durable), RunRef("order", "o-1", 1))
    read = getattr(operations.history, method)

    def read_late(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        order.clock.advance(seconds=1)
        operations.events.send("order", "o-1", "approval", "eve")
        order.work("order", "o-1")
        return read(*args, **options)

    monkeypatch.setattr(operations.history, method, read_late)
    told = [update.cells[0] for _ in range(3) for update in follower.read_updates()]
    assert [cell.text for cell in told if isinstance(cell, Styled)] == ["log", "step", "log", "step", "run"]
    assert follower.has_ended


def test_following_can_be_interrupted(order: Shop) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    order.clock.meanwhile = interrupt
    said = order.pipe("logs", "order", "o-1", "--follow")
    assert (said.err, said.code) == ("Interrupted\n", 130)


# --- the screen ---------------------------------------------------------------------------------


def test_a_terminal_gets_colours_unless_celery_is_told_otherwise(order: Shop) -> None:
    assert "\x1b[33mwaiting\x1b[0m" in order.terminal("ls")
    assert "\x1b[33mwaiting\x1b[0m" in order.terminal("show", "order", "o-1")
    order.no_color = True  # -C, --no-color, NO_COLOR
    assert "\x1b" not in order.terminal("ls")
    assert "\x1b" not in order.terminal("show", "order", "o-1")


def test_a_dumb_terminal_gets_no_escape_sequences(order: Shop) -> None:
    order.pipe("send-event", "order", "o-1", "approval")
    order.work("order", "o-1")
    for words in (("ls",), ("show", "order", "o-1"), ("watch", "order", "o-1")):
        assert "\x1b" in order.terminal(*words)
        assert "\x1b" not in order.terminal(*words, term="dumb")


def test_values_and_logs_cannot_send_control_characters_to_the_terminal(shop: Shop) -> None:
    evil = "\x1b]0;title\x07\x1b[2Jwiped\x9b31m \u202erow\r\n[red]not markup[/red]"
    shop.durable.workflow(name="evil")(_say(evil))
    shop.pipe("start", "evil", "--id", "e-1")
    shop.work("evil", "e-1")
    shop.no_color = True
    for words in (("ls",), ("show", "evil", "e-1", "--full"), ("logs", "evil", "e-1"), ("explain", "evil/e-1")):
        shown = shop.terminal(*words, columns=200)
        assert "wiped row [red]not markup[/red]" in shown, words
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown.replace("\r\n", "\n")), words


def _say(text: str):
    def evil(event, step):
        step.log.info(text)
        raise NonRetryableError(text)

    return evil


def test_without_rich_a_terminal_gets_tabs_under_a_head(order: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    order.no_color = True
    shown = order.terminal("ls")
    assert [line.split() for line in shown.splitlines()] == [
        ["WORKFLOW", "ID", "STATUS", "RUN", "CREATED", "CHANGED", "AT"],
        [
            *("order", "o-1", "waiting", "1", "2", "s", "ago", "now"),
            *("await", "approval:", "event", '"approval",', "times", "out", "in", "1", "d"),
        ],
    ]


# --- names of instances -------------------------------------------------------------------------


def test_a_printed_name_of_an_instance_can_be_pasted(order: Shop) -> None:
    for command in ("show", "history", "logs", "export", "explain"):
        for target in ("order/o-1", "order/o-1#1"):
            assert order.pipe(command, target) == order.pipe(command, "order", "o-1")


def test_options_may_come_before_a_pasted_name(order: Shop) -> None:
    assert order.pipe("logs", "--level", "info", "order/o-1#1") == order.pipe("logs", "order", "o-1", "--level", "info")
    sent = order.pipe("send-event", "--payload", '"a/b"', "order/o-1#1", "approval")
    assert (sent.code, sent.out) == (0, "Sent\tapproval\torder/o-1\n")


def test_a_pasted_name_of_an_earlier_run_changes_nothing(order: Shop) -> None:
    assert order.pipe("restart", "order/o-1").code == 0
    assert order.pipe("history", "order/o-1#1").rows[0][3] == "run 1 of order/o-1"
    said = order.pipe("terminate", "order/o-1#1")
    assert said.code == 1
    assert said.err == (
        "error: Run 1 is not the current run of order/o-1, which is 2.\n"
        "hint: This command works on the current run: name order/o-1\n"
    )


def test_several_pasted_names_may_be_of_several_workflows(order: Shop) -> None:
    order.pipe("start", "nap", "--id", "n-1")
    said = order.pipe("pause", "order/o-1", "nap/n-1#1")
    assert (said.code, said.rows) == (0, [["Paused", "order/o-1"], ["Paused", "nap/n-1"]])
    said = order.pipe("resume", "order/o-1", "n-1")
    assert (said.code, said.err.splitlines()[-1]) == (2, "Error: 'n-1' is not WORKFLOW/ID.")


def test_start_takes_the_id_in_the_form_in_which_it_is_printed(shop: Shop) -> None:
    assert shop.pipe("start", "nap/n-1", "--label", "tenant=acme/eu").rows == [["n-1"]]
    assert shop.pipe("ls").rows[0][:2] == ["nap", "n-1"]
