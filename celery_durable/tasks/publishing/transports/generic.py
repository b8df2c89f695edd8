"""Any transport of kombu: one message at a time over a connection of our own, with every option bounded."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from celery import Celery
from kombu.common import maybe_declare

from celery_durable.tasks.publishing.batches import DestinationBatch, Item
from celery_durable.tasks.publishing.report import SendState

logger = logging.getLogger("celery_durable.tasks")

CONNECT_SECONDS = SEND_SECONDS = 2.0


class Transport:
    """A connection that one thread uses. What its methods raise, but for a lane's own errors, is the broker's failure.

    It keeps the application's URL, user, TLS and virtual host, and overrides each option that touches time. ``turn``:
    how often others failed before; then the next URL, and the next address of a name, is tried.
    """

    can_fill: ClassVar[bool] = False
    """Whether messages may be made of templates."""

    def __init__(self, app: Celery, monotonic: Callable[[], float], turn: int) -> None:
        self._monotonic, self._turn = monotonic, turn
        bounds = {"max_retries": 0, "interval_start": 0, **self._options()}
        self.connection: Any = app.connection_for_write(connect_timeout=CONNECT_SECONDS, transport_options=bounds)
        self.channel: Any = None

    @classmethod
    def fits(cls, transport: Any) -> bool:  # noqa: ARG003
        return True

    def _options(self) -> dict[str, Any]:
        # Over AMQP without py-amqp: a message counts as sent when it is confirmed.
        return {"confirm_publish": True} if self._driver == "amqp" else {}

    _driver: ClassVar[str] = ""

    def open(self) -> None:
        """Connect."""
        for _ in range(self._turn % max(len(self.connection.alt), 1)):
            self.connection.maybe_switch_next()
        self._choose_address()
        self.connection.ensure_connection(max_retries=0)  # the only form that fails at the first error, without a pause
        self.channel = self.connection.default_channel

    def _choose_address(self) -> None:
        """Nothing: only some transports connect to a host's name."""

    def send(self, batches: Sequence[DestinationBatch]) -> None:
        """Send all, and set the state of each item."""
        for batch in batches:
            self._send_one_by_one(batch)

    def _send_one_by_one(self, batch: DestinationBatch) -> None:
        try:
            for entity in batch.declare:
                maybe_declare(entity, self.channel)
            for item in batch.open_items():
                self._send_one(item)
        except self.connection.channel_errors as exc:
            batch.refuse(exc)

    def _send_one(self, item: Item) -> None:
        recorded = item.recorded
        properties = dict(recorded.properties)
        message = self.channel.prepare_message(*recorded.prepare[:5], properties)
        item.state = SendState.UNKNOWN
        self.channel.basic_publish(message, exchange=recorded.exchange, routing_key=recorded.routing_key)
        item.state = SendState.SENT

    def probe(self) -> None:
        """Find out whether the broker takes messages, as far as that can be known without sending one."""

    def queue_length(self, queue: str) -> int | None:
        """How many messages wait; None where that is not known. Transports that cannot count say 0."""
        if self.connection.transport.driver_type != "memory":
            return None
        return int(self.channel._size(queue))  # noqa: SLF001  # kombu has no public name for it

    def sockets(self) -> list[Any]:
        """Those that a child must not keep."""
        return []

    def close(self) -> None:
        """Close, without waiting for the broker where that is possible."""
        with contextlib.suppress(Exception):
            # collect() of a transport without _collect sets the default timeout of the whole process.
            if hasattr(self.connection.transport, "_collect"):
                self.connection.collect()
            else:
                self.connection.close()


def resolved(connection: Any, turn: int) -> str | None:
    """The ``turn``-th address of a connection's host; None where its name has to stay.

    Libraries go on to a name's next address only if connecting fails: one that accepts and hangs hides the others.
    """
    host = connection.hostname
    if not host or connection.ssl or "/" in host:  # TLS compares names; a path is a local socket
        return None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None  # connecting says it in its own words
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    return addresses[turn % len(addresses)]
