"""stats, waits, leases and sweep: what operators with a database see and do."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable.model import RunRef
from tests.cli.conftest import Shop

DATABASES = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


@DATABASES
def test_stats_count_by_workflow_and_status_and_what_is_due(order: Shop) -> None:
    order.pipe("start", "nap", "--id", "n-1")
    order.pipe("start", "nap", "--id", "n-2")
    order.clock.advance(seconds=5)
    *rows, queue = order.pipe("stats").rows
    assert rows == [
        ["count", "nap", "active", "2"],
        ["count", "order", "waiting", "1"],
        ["due", "2", "2030-01-01T00:00:02.012Z"],
    ]
    assert queue[:2] == ["queue", "durable"]
    assert int(queue[2]) >= 2  # the memory broker is one for all apps of the process
    order.work("nap", "n-1")
    order.no_color = True
    shown, _, messages = order.terminal("stats").rpartition("   ")
    assert messages.endswith(" messages")
    assert shown == (
        "WORKFLOW   ACTIVE   WAITING\n"
        "nap        1        1\n"
        "order      -        1\n"
        "\n"
        "due now   1   the oldest 5 s ago\n"
        "queue durable"
    )


@DATABASES
def test_waits_are_who_waits_for_a_type(order: Shop) -> None:
    order.pipe("start", "order", "-P", "order_id=43", "--id", "o-2")
    order.work("order", "o-2")
    order.pipe("pause", "order", "o-1")
    since, until = "2030-01-01T00:00:02.012Z", "2030-01-02T00:00:02.012Z"
    later = ("2030-01-01T00:00:02.024Z", "2030-01-02T00:00:02.024Z")
    assert order.pipe("waits").rows == [
        ["approval", "order", "o-2", "await approval", *later, "waiting", "", ""],
        ["approval", "order", "o-1", "await approval", since, until, "paused", "", ""],
    ]
    assert [row[2] for row in order.pipe("waits", "--limit", "1").rows] == ["o-2"]
    order.pipe("send-event", "order", "o-2", "approval")
    order.work("order", "o-2")
    assert [row[2] for row in order.pipe("waits", "-t", "approval", "-w", "order").rows] == ["o-1"]
    none = order.pipe("waits", "-t", "approve")
    assert (none.out, none.err) == ("", "No instance waits for an event of type 'approve'.\n")


@DATABASES
def test_leases_are_who_works_on_what(shop: Shop) -> None:
    said: list[Any] = []

    @shop.durable.workflow(name="busy")
    def busy(event, step):
        step.do("look", lambda: said.append(shop.pipe("leases").rows))

    shop.pipe("start", "busy", "--id", "b-1")
    assert shop.work("busy", "b-1") == "complete"
    assert said == [[["busy", "b-1", "1", "celery@tests", "task-1", "2030-01-01T00:00:30.000Z", "0"]]]
    assert shop.pipe("leases").err == "No worker holds a run.\n"


def test_a_sweep_publishes_what_is_due(shop: Shop) -> None:
    shop.pipe("start", "nap", "--id", "n-1")
    shop.work("nap", "n-1")
    assert shop.pipe("sweep").rows == [["Published", "0"]]
    shop.clock.advance(days=3)
    assert shop.pipe("sweep").rows == [["Published", "1"]]
    assert shop.work("nap", "n-1") == "complete"


def test_a_sweep_that_comes_once_sends_again_what_was_lost_and_nothing_that_waits(shop: Shop) -> None:
    """Each is a process of its own, as from cron, and remembers nothing of queues."""

    def sweep() -> list[list[str]]:
        vars(shop.durable.internals).pop("sweeper", None)
        return shop.pipe("sweep").rows

    shop.pipe("start", "nap", "--id", "n-1")
    shop.clock.advance(seconds=60)
    assert sweep() == [["Published", "0"]]
    with shop.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("durable")
    assert sweep() == [["Published", "1"]]
    assert sweep() == [["Published", "0"]]
    with shop.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("durable")
    shop.clock.advance(seconds=4.9)
    assert sweep() == [["Published", "0"]]
    shop.clock.advance(seconds=0.1)
    assert sweep() == [["Published", "1"]]


def test_workflows_are_named_with_their_parameters_queues_and_functions(shop: Shop) -> None:
    rows = shop.pipe("workflows").rows
    parameters = {"order": "order_id: str, cents?: int"}
    names = ("bad", "charge", "echo", "nap", "order")
    assert [row[:3] for row in rows] == [[name, parameters.get(name, ""), "durable"] for name in names]
    assert rows[0][3] == "tests.cli.conftest.Shop._add_workflows.<locals>.bad"


def test_workflows_are_listed_without_a_database(shop: Shop) -> None:
    shop.app.conf.durable_database_url = "postgresql+psycopg://nobody@127.0.0.1:1/none"
    shop.durable.internals.__dict__.pop("store", None)
    assert [row[0] for row in shop.pipe("workflows").rows] == ["bad", "charge", "echo", "nap", "order"]


def test_a_list_is_watched_until_it_is_interrupted(order: Shop) -> None:
    def go_on() -> None:
        if order.clock.slept > 6:
            raise KeyboardInterrupt
        if order.clock.slept > 4:
            order.clock.advance(seconds=1)
            order.durable.internals.operations.lifecycle.terminate("order", "o-1")

    order.pipe("start", "nap", "--id", "n-1")
    order.clock.meanwhile = go_on
    said = order.pipe("watch", "--every", "2")
    assert [row[1:3] for row in said.rows] == [["o-1", "waiting"], ["n-1", "active"], ["o-1", "terminated"]]
    assert (said.err, said.code) == ("Interrupted\n", 130)


def test_a_watched_instance_that_fails_fails_the_watch(shop: Shop) -> None:
    shop.pipe("start", "bad", "--id", "b-1")
    shop.work("bad", "b-1")
    said = shop.pipe("watch", "bad", "b-1")
    assert said.rows[-1][1:] == ["run", "errored", "NoPaper: out of paper"]
    assert (said.code, said.err) == (
        1,
        "error: Instance 'b-1' of workflow 'bad' ended errored: NoPaper: out of paper\n",
    )


# --- where --------------------------------------------------------------------------------------


def test_a_condition_narrows_by_error_and_age(shop: Shop) -> None:
    for name, number in (("bad", 1), ("nap", 1), ("bad", 2)):
        shop.pipe("start", name, "--id", f"{name}-{number}")
        shop.work(name, f"{name}-{number}")
        shop.clock.advance(hours=1)

    def fitting(condition: str) -> list[str]:
        return [row[1] for row in shop.pipe("restart", "--where", condition).rows]

    assert fitting("error=NoPaper") == ["bad/bad-2", "bad/bad-1"]
    assert fitting("workflow=bad older=2h") == ["bad/bad-1"]
    assert fitting("status=errored since=90min") == ["bad/bad-2"]
    assert fitting("workflow=nap") == []  # it has not ended
    assert fitting("workflow=nap status=waiting") == ["nap/nap-1"]
    assert shop.pipe("restart", "--where", "error=NoPaper", "--yes").rows == [
        ["Restarted", "bad/bad-2", "run 2"],
        ["Restarted", "bad/bad-1", "run 2"],
    ]


def test_a_condition_that_says_nothing_is_wrong_usage(shop: Shop) -> None:
    keys = "workflow=, status=, error=, step=, message=, older=, since=, label.NAME=, each once"
    invalid = "Invalid value for '--where': "
    for words, complaint in (
        (("--where", ""), f"{invalid}the condition is empty"),
        (("--where", "state=errored"), f"{invalid}'state=errored' is not one of {keys}"),
        (("--where", "label.tenant="), f"{invalid}'label.tenant=' is not one of {keys}"),
        (("--where", "label.a=1 label.a=2"), f"{invalid}Label 'a=2' is not allowed: write it as name=value, each name"),
        (("--where", "label.=acme"), f"{invalid}Label name '' is not allowed"),
        (("--where", "older=soon"), f"{invalid}Duration 'soon' cannot be used: "),
        (("order",), "Name the instances, WORKFLOW ID..., or a condition, --where 'workflow=...'."),
        (("order", "o-1", "--where", "status=errored"), "Name the instances, WORKFLOW ID..., or a condition, "),
        (("order", "o-1", "--yes"), "--yes is for --where."),
    ):
        said = shop.pipe("terminate", *words)
        assert said.code == 2, words
        assert said.err.splitlines()[-1].startswith(f"Error: {complaint}")


def test_a_person_sees_some_of_many_before_anything_is_done(shop: Shop) -> None:
    for number in range(12):
        shop.durable.internals.operations.create.instance("nap", id=f"n-{number}")
    shop.no_color = True
    shown = shop.terminal("pause", "--where", "workflow=nap").splitlines()
    assert shown[:2] == ["  nap/n-11", "  nap/n-10"]
    assert shown[10:] == ["  and 2 more", "Would pause 12 instances; nothing was changed. Add --yes to do it."]
    assert shop.durable.internals.operations.queries.get("nap", "n-0").instance.ref == RunRef("nap", "n-0", 1)
