"""Acknowledgements that Redis did not take are repeated where they keep a worker from consuming; nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Message, Queue

from celery_durable import signals
from celery_durable.tasks.redis_watchdog import RedisWatchdog
from tests.signals.conftest import hearing
from tests.smoke.proc import RedisServer
from tests.support.embedded import until

Take = Callable[[], Message]


@pytest.fixture
def connection(own_redis: RedisServer) -> Iterator[Connection]:
    with Connection(own_redis.url) as connection:
        yield connection


@pytest.fixture
def consumer(connection: Connection) -> Iterator[Consumer]:
    with Consumer(connection, [Queue("q")], prefetch_count=1) as consumer:
        yield consumer


@pytest.fixture
def watchdog(connection: Connection, consumer: Consumer) -> RedisWatchdog:
    watchdog = RedisWatchdog()
    watchdog.watch(SimpleNamespace(connection=connection, task_consumer=consumer))
    return watchdog


@pytest.fixture
def take(connection: Connection, consumer: Consumer) -> Take:
    """Send a message and receive it, which takes the only place."""

    def take() -> Message:
        got: list[Message] = []
        consumer.callbacks = [lambda _, message: got.append(message)]
        with connection.clone() as other:
            other.Producer().publish("x", routing_key="q", declare=[Queue("q")])
        connection.drain_events(timeout=10)
        return got[0]

    return take


@pytest.mark.parametrize("how", ["ack", "reject"])
def test_what_redis_did_not_take_is_repeated_when_it_is_back(
    own_redis: RedisServer, consumer: Consumer, watchdog: RedisWatchdog, take: Take, caplog: Any, how: str
) -> None:
    message, qos = take(), consumer.channel.qos
    own_redis.stop()
    with pytest.raises(consumer.channel.connection_errors):
        getattr(message, how)()
    watchdog.check()  # Redis is still away
    assert not qos.can_consume()
    own_redis.start()

    def consumes_again() -> bool:
        watchdog.check()
        return bool(qos.can_consume())

    with hearing(signals.consuming_resumed) as resumed:
        until(consumes_again)
        until(lambda: resumed)
    assert resumed == [{"acknowledgements": 1}]
    assert caplog.messages == [
        "This worker had stopped consuming: Redis had not taken 1 acknowledgement, which counted against its "
        "prefetch limit. The watchdog has repeated this, and the worker consumes again."
    ]


def test_a_worker_that_is_merely_full_is_left_alone(
    consumer: Consumer, watchdog: RedisWatchdog, take: Take, caplog: Any
) -> None:
    message = take()
    consumer.channel.client.connection.disconnect()  # as Redis does to the idle
    watchdog.check()
    assert not consumer.channel.qos.can_consume()
    message.ack()
    assert consumer.channel.qos.can_consume()
    assert take().payload == "x"
    assert not caplog.messages


def test_a_new_connection_forgets_what_failed_on_the_last(
    own_redis: RedisServer, connection: Connection, consumer: Consumer, watchdog: RedisWatchdog, take: Take
) -> None:
    message, qos = take(), consumer.channel.qos
    own_redis.stop()
    with pytest.raises(consumer.channel.connection_errors):
        message.ack()
    own_redis.start()
    watchdog.watch(SimpleNamespace(connection=None))
    watchdog.check()
    assert not qos.can_consume()  # Celery restores what the last one held
