"""What we publish is, byte for byte, what `send_task` would have published."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import signals
from celery._state import _task_stack
from celery.app.routes import Router
from kombu import Exchange, Producer, Queue

from celery_durable.model import DueRun, RunRef
from celery_durable.runtime import Runtime
from tests.tasks.publishing.conftest import Line

WORKFLOWS = ["order", "o'rd\"er", "50%-off %s %(id)s", "back\\slash", "line\u2028separator", "Bestellung-äöü", "w" * 60]


def plain(line: Line) -> dict[str, Any]:
    return {}


def topic(line: Line) -> dict[str, Any]:
    name = line.queue("hints")
    return {"task_queues": [Queue(name, Exchange(name, type="topic"), routing_key="hints.new")]}


def direct(line: Line) -> dict[str, Any]:
    name = line.queue("hints")
    return {"task_queues": [Queue(name, Exchange(name, type="direct"), routing_key="hints")]}


def quorum(line: Line) -> dict[str, Any]:
    name = line.queue("hints")
    arguments = {"x-queue-type": "quorum"} if line.broker == "rabbitmq" else None
    return {
        "task_default_queue_type": "quorum",
        "task_default_exchange_type": "topic",
        "task_queues": [Queue(name, Exchange(name, type="topic"), routing_key=name, queue_arguments=arguments)],
    }


def priorities(line: Line) -> dict[str, Any]:
    name = line.queue("hints")
    return {"task_default_priority": 5, "task_queues": [Queue(name, Exchange(name), routing_key=name, max_priority=9)]}


def routes(line: Line) -> dict[str, Any]:
    return {"task_routes": {"celery_durable.*": {"priority": 7, "headers": {"x-tenant": "acme"}}}}


def no_missing(line: Line) -> dict[str, Any]:
    queues = [*direct(line)["task_queues"], Queue(line.name)]
    return {"task_queues": queues, "task_create_missing_queues": False}


CONFIGURATIONS: dict[str, Callable[[Line], dict[str, Any]]] = {
    "defaults": plain,
    "protocol 1": lambda _: {"task_protocol": 1},
    "topic": topic,
    "direct": direct,
    "quorum": quorum,
    "priorities": priorities,
    "transient": lambda _: {"task_default_delivery_mode": "transient"},
    "gzip": lambda _: {"task_compression": "gzip"},
    "pickle": lambda _: {"task_serializer": "pickle", "accept_content": ["json", "pickle"]},
    "routes": routes,
    "sent events": lambda _: {"task_send_sent_event": True},
    "no missing queues": no_missing,
}
RECORDED = {"protocol 1", "gzip", "sent events"}
"""Where a template would not do."""


class Counted(Runtime):
    """Tokens that can be foretold."""

    def __init__(self) -> None:
        self.number = 0

    def new_token(self) -> str:
        self.number += 1
        return f"{self.number:08x}-0000-4000-8000-000000000000"


@contextmanager
def inside_a_task(line: Line, *, is_inside: bool) -> Iterator[None]:
    """A task of the application runs on this thread."""
    if not is_inside:
        yield
        return

    def outer() -> None: ...

    task = line.app._task_from_fun(outer, name="outer")
    task.push_request(id="parent-id", root_id="root-%-id", delivery_info={"priority": 3})
    _task_stack.push(task)
    try:
        yield
    finally:
        _task_stack.pop()
        task.pop_request()


def send_by_celery(line: Line, due_runs: list[DueRun]) -> None:
    with line.app.connection_for_write(url=line.url) as connection, Producer(connection.channel()) as producer:
        for number, due in enumerate(due_runs, 1):
            args = (due.ref.workflow, due.ref.instance_id, due.ref.run_number)
            line.app.send_task(
                "celery_durable.advance",
                args=args,
                queue=due.queue,
                task_id=f"{':'.join(map(str, args))[:240]}:{number:08x}",
                shadow=f"durable:{due.ref.workflow}",
                argsrepr=repr(args),
                kwargsrepr="{}",
                router=Router(queues=line.app.amqp.queues, app=line.app),
                priority=0,
                serializer="json",
                ignore_result=True,
                producer=producer,
            )


def raw(line: Line, queue: str) -> list[Any]:
    """All that the broker holds of each message, but for what is random by design."""
    return raw_redis(line, queue) if line.broker == "redis" else raw_rabbitmq(line, queue)


def raw_redis(line: Line, queue: str) -> list[Any]:
    found: list[Any] = []
    with redis.Redis.from_url(line.url) as client:
        for key in sorted(client.keys(f"{queue}*")):
            if key.decode().startswith(queue) and client.type(key) == b"list":
                for value in reversed(client.lrange(key, 0, -1)):
                    tag = json.loads(value)["properties"]["delivery_tag"]
                    assert len(tag) == 36
                    found.append((key, value.replace(tag.encode(), b"TAG")))
                client.delete(key)
    return found


def raw_rabbitmq(line: Line, queue: str) -> list[Any]:
    found: list[Any] = []
    with line.direct() as connection:
        channel = connection.channel()
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            info = message.delivery_info
            body = message.body if isinstance(message.body, bytes) else message.body.encode()
            found.append((message._serialize_properties(), body, info["exchange"], info["routing_key"]))
    return found


@pytest.mark.parametrize(
    ("name", "is_inside"),
    [*((name, False) for name in CONFIGURATIONS), *((name, True) for name in ("defaults", "protocol 1", "priorities"))],
)
def test_the_bytes_are_those_of_send_task_and_come_from_a_template_where_one_fits(
    line: Line, name: str, *, is_inside: bool
) -> None:
    line.app.conf.update(CONFIGURATIONS[name](line))
    queue = line.queue("hints")
    refs = [*(RunRef(workflow, "i-1", 1) for workflow in WORKFLOWS), RunRef(WORKFLOWS[-1], "x" * 100, 2**40)]
    due_runs = [DueRun(ref, queue) for ref in refs]
    line.publisher._message_builder._runtime = Counted()
    with inside_a_task(line, is_inside=is_inside):
        assert {state.value for state in line.publisher.publish(due_runs).states} == {"sent"}
        ours = raw(line, queue)
        send_by_celery(line, due_runs)
        theirs = raw(line, queue)
    assert len(ours) == len(due_runs)
    assert ours == theirs
    assert any(line.publisher._message_builder.templates._templates.values()) == (name not in RECORDED)


# --- who watches is heard -----------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Callable[..., None]]:
    connected = []

    def connect(signal: Any, function: Any) -> None:
        signal.connect(function, weak=False)
        connected.append((signal, function))

    yield connect
    for signal, function in connected:
        signal.disconnect(function)


def headers_of(line: Line, queue: str = "ok") -> list[Any]:
    found = []
    with line.direct() as connection:
        channel = connection.channel()
        while (message := channel.basic_get(line.queue(queue), no_ack=True)) is not None:
            if line.broker == "redis":
                found.append(message.headers)
            else:
                found.append(message.properties["application_headers"])
    return found


def test_a_receiver_that_adds_a_header_is_honoured(line: Line, receiver: Callable[..., None]) -> None:
    """As OpenTelemetry does."""
    line.publish()  # a template is there already
    headers_of(line)
    seen: list[str] = []

    def before(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = f"00-{len(seen)}"

    receiver(signals.before_task_publish, before)
    receiver(signals.after_task_publish, lambda headers, **_: seen.append(headers["id"]))
    assert line.publish(count=3)[0] == ["sent"] * 3
    found = headers_of(line)
    assert [each["traceparent"] for each in found] == ["00-0", "00-1", "00-2"]
    assert [each["id"] for each in found] == seen


def test_instrumentation_that_raises_refuses_only_its_own_message(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Producer.publish

    def patched(*args: Any, **options: Any) -> Any:
        if "c1-1:" in options["headers"]["id"]:
            raise ValueError("not this one")
        return real(*args, **options)

    monkeypatch.setattr(Producer, "publish", patched)
    assert line.publish(count=3)[0] == ["sent", "refused", "sent"]
    assert line.taken("ok") == ["c1-0", "c1-2"]
    assert line.publisher.outages() == {}


@pytest.mark.parametrize("target", [Producer, "app"], ids=["Producer.publish", "Celery.send_task"])
def test_a_patch_is_honoured(line: Line, monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    """As Sentry's, which uses no signals."""
    line.publish()  # a template is there already
    headers_of(line)
    owner, name = (type(line.app), "send_task") if target == "app" else (Producer, "publish")
    real = getattr(owner, name)

    @functools.wraps(real)
    def patched(*args: Any, **options: Any) -> Any:
        options["headers"] = {**(options.get("headers") or {}), "sentry-trace": "t-1"}
        return real(*args, **options)

    monkeypatch.setattr(owner, name, patched)
    assert line.publish()[0] == ["sent"]
    (headers,) = headers_of(line)
    assert headers["sentry-trace"] == "t-1"
