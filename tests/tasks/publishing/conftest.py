"""Publishers on real brokers, behind a proxy that misbehaves as told."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.utils.url import parse_url

from celery_durable.model import DueRun, RunRef
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import Publisher
from tests.smoke.fault_proxy import FaultProxy
from tests.support.services import require_broker

HOSTILE = {
    "broker_connection_timeout": 300,
    "broker_transport_options": {"max_retries": 50, "interval_start": 5},
}
"""An application that waits for its broker without end, as is its right."""


class Line:
    """An application, one of our publishers for it, and the proxy between them and the broker."""

    def __init__(self, broker: str, url: str, **settings: Any) -> None:
        self.broker, self.url = broker, url
        parts = parse_url(url)
        self.proxy = FaultProxy((parts["hostname"], parts["port"]))
        self.name = f"line-{uuid.uuid4().hex[:10]}"
        self.queues: set[str] = set()
        self.publishers: list[Publisher] = []
        self.app = self.make_app(url.replace(f":{parts['port']}", f":{self.proxy.port}"), **settings)
        self.publisher = self.make_publisher(self.app)
        self.calls = 0
        self.is_closed = False

    def make_app(self, url: str, **settings: Any) -> Celery:
        app = Celery(self.name, broker=url, set_as_current=False)
        options = HOSTILE["broker_transport_options"]
        more = (
            {"socket_timeout": 300, "retry_on_timeout": True} if self.broker == "redis" else {"confirm_publish": True}
        )
        app.conf.update({**HOSTILE, "broker_transport_options": {**options, **more}, "task_default_queue": self.name})
        app.conf.update(settings)
        return app

    def make_publisher(self, app: Celery) -> Publisher:
        names = {
            "deliver": "celery_durable.deliver",
            "answer_task_names": ("celery_durable.done", "celery_durable.failed"),
        }
        self.publishers.append(
            Publisher(app, "celery_durable.advance", Runtime(), **names, queue=lambda: self.queue("own"))
        )
        return self.publishers[-1]

    def queue(self, name: str) -> str:
        full = f"{self.name}-{name}"
        self.queues.add(full)
        return full

    def due_runs(self, queue: str, count: int = 1, prefix: str = "i") -> list[DueRun]:
        return [DueRun(RunRef("order", f"{prefix}-{number}", 1), self.queue(queue)) for number in range(count)]

    def publish(self, queue: str = "ok", count: int = 1) -> tuple[list[str], float]:
        """Publish, with new ids each time; answers with the states, and how long the caller waited."""
        self.calls += 1
        began = time.monotonic()
        report = self.publisher.publish(self.due_runs(queue, count, f"c{self.calls}"))
        return [state.value for state in report.states], time.monotonic() - began

    def until_sent(self, seconds: float, queue: str = "ok") -> float:
        """Publish until a message is sent; answers with how long that took."""
        began = time.monotonic()
        while self.publish(queue)[0] != ["sent"]:
            assert time.monotonic() - began < seconds, f"nothing leaves: {self.publisher.outages()}"
            time.sleep(0.02)
        return time.monotonic() - began

    def direct(self) -> Connection:
        """A connection that takes no detour."""
        return Connection(self.url)

    def taken(self, queue: str) -> list[str]:
        """The ids of the instances in a queue, in order; they are taken out."""
        found = []
        with self.direct() as connection:
            channel = connection.channel()
            while (message := channel.basic_get(self.queue(queue), no_ack=True)) is not None:
                if self.broker == "redis":
                    message = channel.Message(message, channel) if isinstance(message, dict) else message
                else:
                    message = channel.message_to_python(message)
                found.append(message.payload[0][1])
        return found

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for publisher in self.publishers:
            publisher.close()
        self.proxy.close()
        with self.direct() as connection:
            if self.broker == "redis":  # kombu deletes only what the same connection has declared
                client = connection.default_channel.client
                client.delete(self.name, *client.scan_iter(f"*{self.name}*"))
            else:
                for queue in self.queues:
                    connection.channel().queue_delete(queue)
                    connection.channel().exchange_delete(queue)
        self.app.close()


@contextlib.contextmanager
def interrupted_after(seconds: float, error: type[Exception]) -> Iterator[None]:
    """Raise an error in the main thread after so many seconds, from a signal handler."""

    def interrupt(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> str:
    """The brokers that a test runs on."""
    return request.param


@pytest.fixture
def make_line() -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(broker: str, url: str | None = None, **settings: Any) -> Line:
        made.append(Line(broker, require_broker(broker, url), **settings))
        return made[-1]

    yield make
    for line in made:
        line.close()


@pytest.fixture
def line(make_line: Callable[..., Line], broker: str) -> Line:
    return make_line(broker)


def instances(due_runs: Sequence[DueRun]) -> list[str]:
    return [due.ref.instance_id for due in due_runs]
