"""doctor: installations that are broken in one way each, and what it says to do."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Signature

from celery_durable import Durable, Limit, Step, WorkflowEvent
from celery_durable.doctor.workers import check_node_names, leave_out_replaced
from celery_durable.model import Heartbeat, Outage, RunRef
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.store.schema.tables import REVISION
from celery_durable.tasks import ADVANCE
from tests.cli.conftest import Said
from tests.cli.installations import Make, findings, live, make, one
from tests.cli.test_refusals import call
from tests.support.embedded import until, worker
from tests.support.services import BROKERS

__all__ = ["make"]
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
REDIS, RABBITMQ = BROKERS["redis"], BROKERS["rabbitmq"]


# --- in order -----------------------------------------------------------------------------------


def test_a_sound_installation_has_no_failure(make: Make) -> None:
    app = make(durable_dispatcher="worker", durable_poll_seconds=0.02)
    with worker(app, hostname="w@here"):
        until(lambda: any(beat.swept_at for beat in app.durable.internals.store.read(heartbeats.read)[1]))
        found = findings(app, wait_seconds=1.0)
    levels = {(level, about) for about, each in found.items() for level, *_ in each}
    assert levels == {
        ("OK", "configuration"),
        ("OK", "accept_content"),
        ("OK", "time limits"),
        ("WARN", "broker"),  # this process's memory
        ("OK", "database"),
        ("OK", "tables"),
        ("OK", "clock"),
        ("OK", "dispatcher"),
        ("OK", "backlog"),
        ("OK", "outbox"),
        ("OK", "workers"),
        ("OK", "queue"),
    }
    assert found["workers"] == [("OK", "1 running: w@here.", "")]
    assert found["queue"] == [("OK", "'durable' is consumed by w@here.", "")]


def test_findings_as_json(make: Make) -> None:
    said: Said = call(make(), "doctor", "--json")
    first, *_ = json.loads(said.out)
    assert first == {
        "level": "OK",
        "about": "configuration",
        "sentence": "The durable_* settings are valid; 1 workflow is known.",
        "remedy": "",
    }
    assert said.code == 1  # nobody runs


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_the_database_is_told_with_version_isolation_and_revision(make: Make, database: str) -> None:
    found = findings(make())
    ((level, sentence, _),) = found["database"]
    isolation = "SERIALIZABLE" if database == "sqlite" else "READ COMMITTED"
    assert (level, sentence.startswith(f"{database} "), sentence.endswith(f", {isolation}.")) == ("OK", True, True)
    assert found["tables"] == [("OK", f"The tables are at revision {REVISION}; this version needs {REVISION}.", "")]
    ((level, sentence, _),) = found["clock"]
    assert (level, sentence.startswith("This machine's clock is ")) == ("OK", True)


# --- configuration ------------------------------------------------------------------------------


def test_a_setting_that_does_not_exist_is_a_failure() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = "sqlite:////no/such/folder/x.sqlite3"
    app.conf.durable_leese_seconds = 3
    Durable(app)
    ((level, sentence, remedy),) = findings(app)["configuration"]
    assert (level, remedy) == ("FAIL", "Set it as the message says.")
    assert "durable_leese_seconds" in sentence
    assert "durable_lease_seconds" in sentence


@pytest.mark.parametrize(
    ("settings", "about", "finding"),
    [
        (
            {"accept_content": ["json", "pickle"]},
            "accept_content",
            (
                "WARN",
                "accept_content allows pickle: any client that can write to the broker can run code in your workers.",
                "Remove pickle: accept_content = ['json'].",
            ),
        ),
        (
            {"accept_content": ["yaml"]},
            "configuration",
            (
                "FAIL",
                "Setting accept_content=['yaml'] cannot be used: add 'json', in which the messages of workflows are "
                "written",
                "Set it as the message says.",
            ),
        ),
        (
            {"task_time_limit": 30, "task_soft_time_limit": 20},
            "time limits",
            (
                "OK",
                "task_time_limit and task_soft_time_limit do not apply to passes, which have limits of their own: 1 d.",
                "",
            ),
        ),
    ],
)
def test_a_setting_has_its_finding(make: Make, settings: dict[str, Any], about: str, finding: tuple[str, ...]) -> None:
    assert one(make(**settings), about) == finding


def test_a_time_limit_that_would_hit_a_pass_is_a_failure(make: Make) -> None:
    app = make()
    app.tasks[ADVANCE].soft_time_limit = 30
    level, sentence, _ = one(app, "time limits")
    assert (level, sentence.partition(" and")[0]) == ("FAIL", f"A time limit of 30 s kills {ADVANCE}")


def test_pools_and_eagerness_that_do_not_fit_are_told(make: Make) -> None:
    found = findings(make(worker_pool="gevent", task_always_eager=True))["configuration"]
    # The pool is this worker's own affair: other workers run the workflows.
    assert [level for level, *_ in found] == ["OK", "WARN", "WARN"]


@pytest.mark.parametrize(
    ("options", "level"), [({}, "OK"), ({"visibility_timeout": 20}, "WARN"), ({"visibility_timeout": 60}, "OK")]
)
def test_a_visibility_timeout_below_the_lease_is_told(make: Make, options: dict[str, Any], level: str) -> None:
    app = make("redis://127.0.0.1:1/0", broker_transport_options=options)
    assert one(app, "visibility_timeout")[0] == level


# --- processes ----------------------------------------------------------------------------------


def test_what_the_sweep_task_does_not_do_is_said_where_it_sweeps_alone(make: Make) -> None:
    app = make("memory://")
    app.durable.internals.sweep_task_heartbeat.write_if_due("w@here")
    level, sentence, fix = one(app, "dispatcher")
    assert (level, sentence, fix) == (
        "WARN",
        "Only the task celery_durable.sweep looks for due work, last on w@here: timers are up to five seconds late, "
        "and outages are not reported.",
        "Set durable_dispatcher to worker or both, or see why beat has none.",
    )
    live(app, HeartbeatUpdate("a", "dispatcher", "beat@a", 1, swept_ago=timedelta(0)))
    assert one(app, "dispatcher")[:2] == ("OK", "Due work is looked for by beat@a, w@here.")


def test_what_keeps_dispatchers_from_their_work_is_told_once_by_the_one_that_saw_it_first(make: Make) -> None:
    app = make()
    words = "PreconditionFailed: Queue.declare: (406) PRECONDITION_FAILED - inequivalent arg"
    since = datetime(2030, 1, 1, tzinfo=UTC)  # by another clock
    refused, gone = Outage("queue", "durable", since, words, 3), Outage("database", "database", since, "gone", 1)
    away = Outage("broker", "redis://shop", since, "ReadOnlyError: no", 2)
    lasting = [(refused, timedelta(minutes=5)), (away, timedelta(minutes=2)), (gone, timedelta(minutes=1))]
    first = HeartbeatUpdate(
        "a", "dispatcher", "beat@a", 1, swept_ago=timedelta(0), wakes_in=timedelta(0), outages=lasting
    )
    second = replace(first, id="b", outages=[(replace(refused, error="later"), timedelta(minutes=4))])
    live(app, first, second)
    found = findings(app)
    (queue,), (broker,), databases = found["queue"][:-1], found["broker"][1:], found["database"]
    assert (queue[0], queue[2]) == (
        "FAIL",
        "The queue exists with other arguments: delete it, or declare it in task_queues with these arguments.",
    )
    assert re.fullmatch(rf"Queue 'durable' has refused messages since \S+, 5 min ago: {re.escape(words)}", queue[1])
    assert re.fullmatch(
        r"The broker redis://shop has taken no messages since \S+, 2 min ago: ReadOnlyError: no", broker[1]
    )
    assert (broker[0], broker[2]) == ("FAIL", "This Redis is a replica: set broker_url to the primary server.")
    (database,) = [each for each in databases if each[0] == "FAIL"]
    assert re.fullmatch(r"The dispatcher has not reached the database since \S+, 1 min ago: gone", database[1])


def test_without_processes_everything_that_is_missing_is_told(make: Make) -> None:
    found = findings(make())
    assert found["dispatcher"] == [
        (
            "FAIL",
            "No dispatcher has been seen: sleeps, timeouts and retries do not end (durable_dispatcher is 'beat').",
            "celery -A <your app> beat",
        )
    ]
    assert found["workers"] == [("FAIL", "No worker has been seen in the last 20 s.", "celery -A <your app> worker")]
    assert found["queue"] == [("FAIL", "No worker consumes queue 'durable'.", "celery -A <your app> worker -Q durable")]


def test_a_worker_of_another_queue_or_without_the_code_is_told(make: Make) -> None:
    app = make()
    live(app, HeartbeatUpdate("w", "worker", "w@here", os.getpid(), queues=["celery"], workflows=["order"]))
    assert one(app, "queue")[0] == "FAIL"
    live(app, HeartbeatUpdate("w", "worker", "w@here", os.getpid(), queues=["durable"], workflows=["other"]))
    found = findings(app)
    assert found["queue"] == [("OK", "'durable' is consumed by w@here.", "")]
    assert found["workflows"][0][:2] == ("FAIL", "No worker of queue 'durable' knows 'order'.")
    assert found["workers"] == [("OK", "1 running: w@here.", "")]  # a broker in memory carries no replies


def test_a_queue_of_unfinished_instances_that_no_worker_consumes_is_a_failure(make: Make) -> None:
    make().durable.internals.operations.create.instance("order", id="o-1")
    app = make(durable_queue="renamed")
    live(app, HeartbeatUpdate("w", "worker", "w@here", os.getpid(), queues=["renamed"], workflows=["order"]))
    assert findings(app)["queue"] == [
        ("OK", "'renamed' is consumed by w@here.", ""),
        (
            "FAIL",
            "No worker consumes queue 'durable', and unfinished instances belong to it.",
            "celery -A <your app> worker -Q durable",
        ),
    ]


def test_a_queue_of_step_tasks_that_no_worker_consumes_is_a_warning(make: Make) -> None:
    app = make(task_routes={"routed": {"queue": "images"}})

    @app.durable.workflow
    def thumbnails(event: WorkflowEvent[Any], step: Step) -> None:
        step.map("resize", Signature("resize", options={"queue": "images"}), [1, 2, 3])

    @app.durable.workflow
    def rotation(event: WorkflowEvent[Any], step: Step) -> None:
        step.task("by its route", Signature("routed"))

    for workflow in ("thumbnails", "rotation"):
        app.durable.internals.operations.create.instance(workflow, id="t-1")
        app.durable.internals.runner.advance(RunRef(workflow, "t-1", 1), task_id="t", node="w@here")
    [(level, sentence, remedy)] = findings(app)["task queue"]
    assert (level, remedy) == ("WARN", "celery -A <your app> worker -Q images")
    assert sentence.startswith(
        "4 tasks of steps wait in queue 'images', which no known worker consumes; the oldest was"
    )
    assert app.durable.internals.queue_lengths()["images"] is not None
    live(app, HeartbeatUpdate("w", "worker", "w@here", os.getpid(), queues=["images"]))
    assert "task queue" not in findings(app)


def test_a_worker_that_answers_but_does_not_work_here_is_a_failure(make: Make) -> None:
    app = make()
    with worker(app, hostname="w@here"):
        until(lambda: app.durable.internals.store.read(heartbeats.read)[1])
        with app.durable.internals.store.engine.begin() as connection:
            connection.execute(sa.delete(app.durable.internals.store.tables.heartbeat))
        found = findings(app, wait_seconds=1.0)
    [(level, sentence, _)] = found["workers"]
    assert (level, sentence) == (
        "FAIL",
        "w@here reply over the broker, but have written no heartbeat in the last 20 s.",
    )
    assert found["queue"][0][:2] == (
        "FAIL",
        "No worker consumes queue 'durable'. But w@here consumes it and writes no heartbeat to this database.",
    )


def test_a_worker_that_has_stopped_to_consume_a_queue_is_told_before_its_next_heartbeat(make: Make) -> None:
    app = make()

    @app.durable.workflow(name="bill", queue="billing")
    def bill(event: WorkflowEvent[Any], step: Step) -> None:
        pass

    with worker(app, hostname="w@here"):
        until(lambda: app.durable.internals.store.read(heartbeats.read)[1])
        live(app, HeartbeatUpdate("b", "worker", "w@here", 1, queues=["billing"], workflows=["bill"]))
        found = findings(app, wait_seconds=1.0)
    assert found["queue"] == [
        ("OK", "'durable' is consumed by w@here.", ""),
        (
            "FAIL",
            "The last heartbeats say that w@here consume 'billing', but the workers reply that they no longer do.",
            "celery -A <your app> control add_consumer billing",
        ),
    ]


def test_workers_that_use_one_node_name_are_reported(make: Make) -> None:
    app = make()
    first = HeartbeatUpdate("a", "worker", "w@here", 11, queues=["durable"], workflows=["order"])
    second = HeartbeatUpdate("b", "worker", "w@here", 12, queues=["durable"], workflows=["order"])
    alone = HeartbeatUpdate("c", "worker", "w@there", 11, queues=["durable"], workflows=["order"])
    live(app, first, second, alone, HeartbeatUpdate("d", "dispatcher", "w@there", 13), first)
    app.conf.worker_enable_remote_control = False  # these workers cannot reply
    found = findings(app)
    assert found["node name"] == [
        (
            "WARN",
            "2 workers use the node name w@here (pids 11, 12): remote control and monitors take them for one.",
            "Give each worker a name of its own: celery -A <your app> worker -n NAME@%h",
        )
    ]
    assert found["workers"] == [("OK", "3 running: w@here, w@there.", "")]


def beat(id_: str, *, started: int, seen: int, node: str = "w@here") -> Heartbeat:
    """A worker by the seconds at which it started and was last seen."""
    started_at, seen_at = (NOON + timedelta(seconds=seconds) for seconds in (started, seen))
    return Heartbeat(id_, "worker", node, 1, ("durable",), ("order",), started_at, seen_at, None, None)


@pytest.mark.parametrize(
    ("beats", "working"),
    [
        ([beat("a", started=0, seen=20), beat("b", started=5, seen=25)], "ab"),
        ([beat("a", started=0, seen=9), beat("b", started=12, seen=22)], "b"),
        ([beat("a", started=0, seen=9), beat("b", started=12, seen=22), beat("c", started=13, seen=23)], "bc"),
        ([beat("a", started=0, seen=9), beat("b", started=12, seen=22, node="w@there")], "ab"),
    ],
    ids=["both work", "replaced", "replaced by two", "other names"],
)
def test_a_worker_that_replaces_a_killed_one_may_use_its_name(beats: list[Heartbeat], working: str) -> None:
    found = leave_out_replaced(beats)
    assert "".join(each.id for each in found) == working
    is_shared = len({each.node for each in found}) < len(found)
    assert len(list(check_node_names(found))) == is_shared


def test_due_work_that_no_process_picked_up_is_reported(make: Make) -> None:
    app = make()
    assert one(app, "backlog") == ("OK", "No due work has waited longer than 1 min.", "")
    app.durable.internals.operations.create.instance("order", id="o-1")
    with app.durable.internals.store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE workflow_instance SET next_check_at = next_check_at - 200000000"))
    level, sentence, _ = one(app, "backlog")
    assert (level, sentence) == ("WARN", "The oldest due work has been waiting for 3 min.")


def test_a_run_whose_message_no_worker_has_taken_is_due_work(make: Make) -> None:
    app = make()
    app.durable.internals.operations.create.instance("order", id="o-1")
    with app.durable.internals.store.engine.begin() as connection:
        set_back = "run_at = run_at - 200000000, sent_at = sent_at - 200000000"
        connection.execute(sa.text(f"UPDATE workflow_instance SET {set_back}"))
        assert connection.scalar(sa.text("SELECT next_check_at - run_at FROM workflow_instance")) > 200_000_000
    level, sentence, _ = one(app, "backlog")
    assert (level, sentence) == ("WARN", "The oldest due work has been waiting for 3 min.")


def test_a_limit_for_which_a_run_has_waited_for_hours_is_told_with_its_key(make: Make) -> None:
    app = make()
    durable: Durable = app.durable

    @durable.workflow(name="import", limits=[Limit("import", at_once=1, by=lambda event: event.payload)])
    def run_import(event: WorkflowEvent[str], step: Step) -> None:
        step.sleep("rest", "1 day")

    for each in ("a", "b"):
        durable.workflows["import"].create("acme", id=each)
        durable.tick()
    assert "limits" not in findings(app)
    hold = durable.internals.store.tables.hold
    earlier = hold.c.asked_at - timedelta(hours=3) // timedelta(microseconds=1)
    with durable.internals.store.engine.begin() as conn:
        conn.execute(sa.update(hold).where(hold.c.state == "waiting").values(asked_at=earlier))
    assert one(app, "limits") == (
        "WARN",
        "The first of 1 that wait for limit 'import' with the key 'acme' has waited for 3 h; 1 of 1 held.",
        "celery -A <your app> durable limits show import --key acme",
    )
