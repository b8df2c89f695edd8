"""The transport for any broker of kombu: one message at a time over an internal connection, with bounded timeouts."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from amqp.exceptions import MessageNacked
from celery import Celery
from kombu.common import maybe_declare

from celery_durable.tasks.publishing.batches import BatchItem, DestinationBatch
from celery_durable.tasks.publishing.report import SendState

logger = logging.getLogger("celery_durable.tasks")

CONNECT_SECONDS = SEND_SECONDS = 2.0
NACK = "basic.nack: the queue is full or not available"
"""The error of a queue whose message RabbitMQ did not take."""


class Transport:
    """A connection that one thread uses. It raises failures of the broker; the error of a destination is in its batch.

    It keeps the application's URL, user, TLS and virtual host, and overrides each option that sets a time.
    ``failure_count``: the number of earlier failures, which selects the next URL and address.
    """

    supports_templates: ClassVar[bool] = False
    has_socket_timeouts: ClassVar[bool] = False
    """Whether each answer of the broker has a timeout of its own, whatever the broker does."""

    def __init__(self, app: Celery, monotonic: Callable[[], float], failure_count: int) -> None:
        self._monotonic, self._failure_count = monotonic, failure_count
        self._is_py_amqp = app.connection_for_write().transport.driver_name == "py-amqp"
        bounds = {"max_retries": 0, "interval_start": 0, **self._options()}
        self.connection: Any = app.connection_for_write(connect_timeout=CONNECT_SECONDS, transport_options=bounds)
        self.channel: Any = None

    @classmethod
    def supports(cls, transport: Any) -> bool:  # noqa: ARG003
        return True

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (OSError, *self.connection.connection_errors, *self.connection.channel_errors)

    def _options(self) -> dict[str, Any]:
        # Over py-amqp, `basic_publish` then returns when the broker has confirmed the message, and not before.
        return {"confirm_publish": True} if self._is_py_amqp else {}

    def open(self) -> None:
        for _ in range(self._failure_count % max(len(self.connection.alt), 1)):
            self.connection.maybe_switch_next()
        self._choose_address()
        self.connection.ensure_connection(max_retries=0)  # the only form that fails at the first error, without a pause
        self.channel = self.connection.default_channel

    def _choose_address(self) -> None:
        """Do nothing; a transport that connects to a host's name overrides this."""

    def send(self, batches: Sequence[DestinationBatch]) -> None:
        for batch in batches:
            self._send_one_by_one(batch)

    def _send_one_by_one(self, batch: DestinationBatch) -> None:
        try:
            for entity in batch.declare:
                maybe_declare(entity, self.channel)
            for item in batch.open_items():
                self._send_one(item)
        except MessageNacked:
            batch.refuse(NACK)
        except self.connection.channel_errors as exc:
            batch.refuse(exc)

    def _send_one(self, item: BatchItem) -> None:
        recorded = item.recorded
        properties = dict(recorded.properties)
        message = self.channel.prepare_message(*recorded.prepare[:5], properties)
        bounds = {"timeout": SEND_SECONDS} if self._is_py_amqp else {}  # for the write and for the confirm
        item.state = SendState.UNKNOWN
        self.channel.basic_publish(message, exchange=recorded.exchange, routing_key=recorded.routing_key, **bounds)
        item.state = SendState.SENT

    def probe(self) -> None:
        """Raise if the broker does not take messages, as far as that can be known without sending one."""

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait; None except for the memory transport: others may return 0 without counting."""
        if self.connection.transport.driver_type != "memory":
            return None
        return int(self.channel._size(queue))  # noqa: SLF001  # kombu has no public name for it

    def sockets(self) -> list[Any]:
        """The sockets that a forked child must close."""
        return []

    def close(self) -> None:
        """Close the connection, without waiting for the broker if that is possible."""
        with contextlib.suppress(Exception):
            # collect() of a transport without _collect sets the default timeout of the whole process.
            if hasattr(self.connection.transport, "_collect"):
                self.connection.collect()
            else:
                self.connection.close()


def resolve_address(connection: Any, failure_count: int) -> str | None:
    """The ``failure_count``-th address of a connection's host; None if the connection has to use the host's name.

    A client library tries the next address only if connecting fails, not if one accepts the connection and hangs.
    """
    host = connection.hostname
    if not host or connection.ssl or "/" in host:  # TLS compares names; a path is a local socket
        return None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None  # connecting to the name raises the transport's own error
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    return addresses[failure_count % len(addresses)]
