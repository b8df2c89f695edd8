"""What one queue refuses is that queue's own: the others get their messages at once, in order, and nothing is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import amqp
import pytest
import redis
from kombu import Connection, Exchange, Queue

from celery_durable.model import DueRun, OutboxKind, OutboxMessage
from celery_durable.tasks.publishing import SendState
from celery_durable.tasks.publishing.transports import Transport
from tests.smoke.fault_proxy import Mode
from tests.smoke.proc import RabbitmqServer, RedisServer, until
from tests.support.services import missing
from tests.tasks.publishing.conftest import HOSTILE, Line, instances


def published(line: Line, *parts: list[DueRun]) -> dict[str, list[str]]:
    """Publish the parts as one batch; answers with the states by queue, without the line's name."""
    batch = [due for part in parts for due in part]
    states: dict[str, list[str]] = {}
    for due, state in zip(batch, line.publisher.publish(batch).states, strict=True):
        states.setdefault(due.queue.removeprefix(f"{line.name}-"), []).append(state.value)
    return states


def wait_for_rest(line: Line) -> None:
    """Until no queue is left alone any more."""
    until(
        "queues are tried again",
        lambda: not any(line.publisher._circuit_breakers.is_paused(name) for name in line.queues),
        40,
    )


# --- RabbitMQ -----------------------------------------------------------------------------------


@pytest.fixture
def rabbit(make_line: Callable[..., Line]) -> Line:
    return make_line("rabbitmq")


@contextlib.contextmanager
def holding(line: Line, queue: str) -> Iterator[None]:
    """Somebody else has this queue for himself."""
    with line.direct() as connection:
        connection.channel().queue_declare(line.queue(queue), exclusive=True, auto_delete=False)
        yield


def test_on_rabbitmq_each_refusal_stays_with_its_queue(rabbit: Line) -> None:
    line = rabbit
    topic, full = line.queue("x404"), line.queue("full")
    line.app.conf.task_queues = [
        Queue(topic, Exchange(topic, type="topic"), routing_key="x.404"),
        Queue(full, Exchange(full), queue_arguments={"x-max-length": 10, "x-overflow": "reject-publish"}),
        *(Queue(line.queue(name)) for name in ("ok1", "ok2", "poison", "excl", "gone")),
        Queue("amq.forbidden"),
        Queue(line.name),
    ]
    line.app.conf.task_create_missing_queues = False
    with line.direct() as connection:
        connection.channel().queue_declare(
            line.queue("poison"), durable=True, auto_delete=False, arguments={"x-max-priority": 5}
        )
    refused = ("poison", "excl", "missing")
    names = ("ok1", *refused, "full", "gone", "x404", "ok2")
    with holding(line, "excl"):
        forbidden = [DueRun(line.due_runs("ok1")[0].ref, "amq.forbidden")]
        states = published(line, *(line.due_runs(name, 100) for name in names), forbidden)
        assert states["amq.forbidden"] == ["refused"]
        for name in ("ok1", "ok2", "gone", "x404"):
            assert states[name] == ["sent"] * 100
        for name in refused:
            assert states[name] == ["refused"] * 100
        assert (states["full"].count("sent"), states["full"].count("refused")) == (10, 90)
        for name in ("ok1", "ok2", "gone", "x404"):
            assert line.taken(name) == instances(line.due_runs(name, 100))
        errors = {
            str(name).removeprefix(f"{line.name}-"): each.error for name, each in line.publisher.outages().items()
        }
        assert "PreconditionFailed" in errors["poison"]
        assert "inequivalent arg 'x-max-priority'" in errors["poison"]
        assert "RESOURCE_LOCKED" in errors["excl"]
        assert "ACCESS_REFUSED" in errors["amq.forbidden"]
        assert "QueueNotFound" in errors["missing"]
        assert errors["full"] == "basic.nack: the queue is full or not available"
        assert set(errors) == {"amq.forbidden", *refused, "full"}
        assert line.proxy.accepted == 1


def test_a_queue_that_rests_costs_nothing_and_comes_back(rabbit: Line) -> None:
    line = rabbit
    with line.direct() as connection:
        connection.channel().queue_declare(
            line.queue("poison"), durable=True, auto_delete=False, arguments={"x-max-priority": 5}
        )
    assert line.publish("poison")[0] == ["refused"]
    began = time.monotonic()
    assert {tuple(line.publish("poison")[0]) for _ in range(20)} == {("refused",)}
    assert time.monotonic() - began < 1
    assert line.publish("ok")[0] == ["sent"]
    assert line.publisher.outages()[line.queue("poison")].failures == 1
    wait_for_rest(line)
    assert line.publish("poison")[0] == ["refused"]
    outage = line.publisher.outages()[line.queue("poison")]
    assert (outage.where, outage.failures) == (line.queue("poison"), 2)
    with line.direct() as connection:
        connection.channel().queue_delete(line.queue("poison"))
    line.until_sent(10, "poison")
    assert line.publisher.outages() == {}


@pytest.mark.parametrize("kind", ["queue", "exchange", "binding"])
def test_what_an_operator_deleted_is_declared_anew_and_no_message_is_lost(rabbit: Line, kind: str) -> None:
    """Without mandatory RabbitMQ confirms what no queue takes: send_task loses it without a word."""
    line = rabbit
    name = line.queue("topic")
    line.app.conf.task_queues = [Queue(name, Exchange(name, type="topic"), routing_key="a.b")]
    assert line.publish("topic", 5)[0] == ["sent"] * 5
    with line.direct() as connection:
        if kind == "queue":
            connection.channel().queue_delete(name)
        elif kind == "exchange":
            connection.channel().exchange_delete(name)
        else:
            connection.channel().queue_unbind(name, name, "a.b")
    states = line.publisher.publish([*line.due_runs("topic", 100, "n"), *line.due_runs("ok", 100)]).states
    assert set(states) == {SendState.SENT}
    assert [each for each in line.taken("topic") if each.startswith("n")] == [f"n-{number}" for number in range(100)]
    assert line.taken("ok") == instances(line.due_runs("ok", 100))
    assert line.publisher.outages() == {}


def test_a_long_body_travels_in_many_frames(rabbit: Line) -> None:
    rabbit.queues.add(rabbit.name)
    text = "ä%" * 400_000
    body = f'{{"args": ["{text}"], "kwargs": {{}}, "options": {{}}}}'
    messages = [OutboxMessage(f"id-{number}", OutboxKind.TASK, "mail", body) for number in range(3)]
    assert set(rabbit.publisher.send(messages).states) == {SendState.SENT}
    with rabbit.direct() as connection:
        channel = connection.channel()
        for _ in messages:
            message = channel.message_to_python(channel.basic_get(rabbit.name, no_ack=True))
            assert message.payload[0] == [text]


@pytest.mark.parametrize("name", ["q" * 256, "ü" * 128], ids=["letters", "bytes"])
def test_a_name_too_long_for_amqp_refuses_only_its_own_queue(rabbit: Line, name: str) -> None:
    due_runs = [DueRun(rabbit.due_runs("ok")[0].ref, name), *rabbit.due_runs("ok", 3)]
    states = [state.value for state in rabbit.publisher.publish(due_runs).states]
    assert states == ["refused", "sent", "sent", "sent"]


@pytest.fixture
def generic_rabbit(rabbit: Line, monkeypatch: pytest.MonkeyPatch) -> Line:
    """RabbitMQ for an application without confirms, with a py-amqp that lacks a private name: the generic transport."""
    monkeypatch.delattr(amqp.Channel, "_do_revive")
    rabbit.app.conf.broker_transport_options = dict(HOSTILE["broker_transport_options"])
    assert rabbit.publisher._kind is Transport
    return rabbit


def test_the_generic_transport_reports_what_rabbitmq_has_not_taken_as_refused(generic_rabbit: Line) -> None:
    line = generic_rabbit
    full = line.queue("full")
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    line.app.conf.task_queues = [Queue(full, Exchange(full), routing_key=full, queue_arguments=limits)]
    states = published(line, line.due_runs("full", 4), line.due_runs("ok", 3))
    assert states == {"full": ["sent", *["refused"] * 3], "ok": ["sent"] * 3}
    assert line.taken("full") == ["i-0"]
    outages = {name: each.error for name, each in line.publisher.outages().items()}
    assert outages == {full: "basic.nack: the queue is full or not available"}


def test_the_generic_transport_waits_a_bounded_time_for_a_confirm(generic_rabbit: Line) -> None:
    line = generic_rabbit
    assert line.publish()[0] == ["sent"]
    line.proxy.set(Mode.STALL)
    states, waited = line.publish()
    assert states == ["unknown"]
    assert waited < 4.5
    until("the sender has given up", lambda: line.publisher._sender._busy_since is None, 4)
    line.proxy.set(Mode.PASS)
    line.until_sent(10)


@pytest.mark.slow
def test_a_memory_alarm_is_named_and_everything_is_delivered_after_it(
    make_line: Callable[..., Line], tmp_path: Path
) -> None:
    if RabbitmqServer.program is None or RabbitmqServer.mapper is None:
        missing("a RabbitMQ of its own", "its programs are not installed")
    server = RabbitmqServer(tmp_path)
    try:
        line = make_line("rabbitmq", server.url)
        assert line.publish()[0] == ["sent"]
        server.control("set_vm_memory_high_watermark", "0.00001")
        states, waited = line.publish(count=20)
        assert set(states) == {"unknown"}
        assert waited < 4.5
        assert "connection.blocked" in line.publisher.outages()[None].error
        time_to_probe = time.monotonic() + 8
        while time.monotonic() < time_to_probe:  # trials go on, and nobody waits for them
            states, waited = line.publish()
            assert states != ["sent"]
            assert waited < 1
            time.sleep(0.05)
        assert "connection.blocked" in line.publisher.outages()[None].error
        server.control("set_vm_memory_high_watermark", "0.9")
        line.until_sent(15)
        line.close()
    finally:
        server.clean_up()


# --- Redis --------------------------------------------------------------------------------------


@pytest.fixture
def own_line(make_line: Callable[..., Line], own_redis: RedisServer) -> Iterator[tuple[Line, Any]]:
    line = make_line("redis", own_redis.url)
    with redis.Redis(port=own_redis.port) as client:
        yield line, client
        repair(client)
        line.close()


def test_on_redis_each_refusal_stays_with_its_queue(own_line: tuple[Line, Any]) -> None:
    line, client = own_line
    client.set(line.queue("wrong"), "not a list")
    client.execute_command(
        "ACL", "SETUSER", "default", "resetkeys", f"~{line.queue('ok')}*", f"~{line.queue('wrong')}*", "~_kombu*"
    )
    try:
        states = published(line, *(line.due_runs(name, 100) for name in ("ok1", "wrong", "forbidden", "ok2")))
        for name in ("ok1", "ok2"):
            assert states[name] == ["sent"] * 100
            assert line.taken(name) == instances(line.due_runs(name, 100))
        for name in ("wrong", "forbidden"):
            assert states[name] == ["refused"] * 100
        outages = line.publisher.outages()
        assert set(outages) == {line.queue("wrong"), line.queue("forbidden")}
        assert "WRONGTYPE" in outages[line.queue("wrong")].error
        assert "permission" in outages[line.queue("forbidden")].error.lower()
    finally:
        client.execute_command("ACL", "SETUSER", "default", "allkeys")
        client.delete(line.queue("wrong"))


def oom(client: Any) -> None:
    client.config_set("maxmemory", 1)


def read_only(client: Any) -> None:
    client.replicaof("127.0.0.1", 1)


def alone(client: Any) -> None:
    client.config_set("min-replicas-to-write", 1)


def repair(client: Any) -> None:
    client.config_set("maxmemory", 0)
    client.config_set("min-replicas-to-write", 0)
    client.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(oom, "OutOfMemoryError", id="OOM"),
        pytest.param(read_only, "ReadOnlyError", id="READONLY", marks=pytest.mark.slow),
        pytest.param(alone, "NOREPLICAS", id="no replicas", marks=pytest.mark.slow),
    ],
)
def test_a_redis_that_takes_no_writes_is_named_and_costs_nobody_time(
    own_line: tuple[Line, Any], spoil: Callable[[Any], None], words: str
) -> None:
    line, client = own_line
    assert line.publish()[0] == ["sent"]
    spoil(client)
    states, waited = line.publish(count=10)
    assert states == ["unsent"] * 10
    assert waited < 3
    assert words in line.publisher.outages()[None].error
    while line.publisher.outages()[None].failures < 2:
        states, waited = line.publish()
        assert states == ["unsent"]
        assert waited < 1
        time.sleep(0.02)
    repair(client)
    line.until_sent(10)
    assert line.publisher.outages() == {}


def test_redis_that_forgot_a_binding_gets_it_anew(own_line: tuple[Line, Any]) -> None:
    """kombu drops a message for which it finds no binding, without a word."""
    line, client = own_line
    name = line.queue("topic")
    line.app.conf.task_queues = [Queue(name, Exchange(name, type="topic"), routing_key="a.b")]
    assert line.publish("topic")[0] == ["sent"]
    client.flushall()
    assert line.publish("topic", 3)[0] == ["sent"] * 3
    assert line.taken("topic") == ["c2-0", "c2-1", "c2-2"]


# --- how long a queue is ------------------------------------------------------------------------


def test_the_length_of_a_queue_is_what_waits_in_it(line: Line) -> None:
    name = line.queue("ok")
    line.app.conf.task_queues = [Queue(name, Exchange(name), routing_key=name, max_priority=9)]
    line.publish(count=10)
    with Connection(line.url) as connection:
        queue = line.app.amqp.queues[name]
        line.app.send_task("other", queue=name, priority=6)
        channel = connection.channel()
        taken = [queue(channel).get(no_ack=False) for _ in range(3)]
        assert None not in taken
        assert line.publisher.queue_length(name) == 8


def test_a_queue_that_is_missing_is_empty_on_redis_and_unknown_on_rabbitmq(line: Line) -> None:
    assert line.publisher.queue_length(line.queue("none")) == (0 if line.broker == "redis" else None)
    assert line.publish()[0] == ["sent"]
    assert line.publisher.outages() == {}


def test_a_transport_that_cannot_count_says_so(make_line: Callable[..., Line], tmp_path: Path) -> None:
    line = make_line("redis")
    app = line.make_app("filesystem://")
    folders = {key: str(tmp_path) for key in ("data_folder_in", "data_folder_out", "control_folder")}
    app.conf.broker_transport_options = folders
    publisher = line.make_publisher(app)
    assert [state.value for state in publisher.publish(line.due_runs("ok")).states] == ["sent"]
    assert publisher.queue_length(line.queue("ok")) is None


# --- messages that the application's own code made wrong ----------------------------------------


def test_a_task_that_the_protocol_cannot_carry_can_never_be_sent(rabbit: Line) -> None:
    rabbit.queues.add(rabbit.name)
    bodies = [
        f'{{"args": [], "kwargs": {{}}, "options": {{"headers": {{"n": {number}}}}}}}' for number in (1, 2**80, 2)
    ]
    messages = [OutboxMessage(f"id-{number}", OutboxKind.TASK, "mail", body) for number, body in enumerate(bodies)]
    report = rabbit.publisher.send(messages)
    assert [state.value for state in report.states] == ["sent", "unsendable", "sent"]
    assert list(report.errors) == [1]
    assert rabbit.publisher.outages() == {}
