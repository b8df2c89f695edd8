"""RabbitMQ over py-amqp: one channel per destination, all messages written before a confirm is read.

py-amqp raises a channel's error from the read that happens to be running. So the sender first declares the entities of
each batch in turn, while no message is in flight. Then it writes all messages, by a method that does not read, as
`basic_publish` does. Then it reads until all are confirmed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import amqp
from amqp.spec import Basic
from kombu import Queue

from celery_durable.tasks.publishing.batches import BatchItem, DestinationBatch
from celery_durable.tasks.publishing.report import SendState
from celery_durable.tasks.publishing.transports.generic import (
    CONNECT_SECONDS,
    NACK,
    SEND_SECONDS,
    Transport,
    resolve_address,
)

_ALARM = "connection.blocked: the broker takes no messages (a memory or disk alarm)"
_PROBE_QUEUE = "celery-durable.probe"
_MAX_DESTINATIONS = 64
_MAX_NAME_BYTES = 255


@dataclass(slots=True, eq=False)
class _Destination:
    channel: Any
    batch: DestinationBatch
    declared: set[int] = field(default_factory=set)
    tag: int = 0
    unconfirmed: dict[int, BatchItem] = field(default_factory=dict)
    """Written and not confirmed, by delivery tag."""
    was_declared_earlier: bool = False
    """Entities were declared on this channel for an earlier batch; so a missing one was deleted since."""
    was_deleted: bool = False
    """The exchange or queue was deleted after it was declared."""


class AmqpTransport(Transport):
    """Sends over RabbitMQ; each destination has its own channel, so a refusal concerns that destination only."""

    supports_templates: ClassVar[bool] = True
    has_socket_timeouts: ClassVar[bool] = True

    @classmethod
    def supports(cls, transport: Any) -> bool:
        connection = getattr(transport, "Connection", None)
        has_names = hasattr(amqp.Channel, "_do_revive") and hasattr(amqp.Message, "_serialize_properties")
        return bool(has_names and isinstance(connection, type) and issubclass(connection, amqp.Connection))

    def _options(self) -> dict[str, Any]:
        # No code calls heartbeat_check for a connection that only publishes: with a heartbeat RabbitMQ would close it.
        self.is_blocked = False
        return {
            "confirm_publish": False,
            "connect_timeout": CONNECT_SECONDS,
            "heartbeat": 0,
            "on_blocked": lambda _: setattr(self, "is_blocked", True),
            "on_unblocked": lambda: setattr(self, "is_blocked", False),
        }

    def _choose_address(self) -> None:
        self.connection.hostname = resolve_address(self.connection, self._failure_count) or self.connection.hostname

    def open(self) -> None:
        super().open()
        self._amqp: Any = self.connection.connection
        # py-amqp leaves the socket without Python's own timeout (celery/py-amqp#98). With read_timeout (SO_RCVTIMEO) it
        # waits forever in the middle of a frame.
        self._amqp.transport.sock.settimeout(SEND_SECONDS)
        self._destinations: dict[tuple[str, str], _Destination] = {}

    # --- sending --------------------------------------------------------------------------------

    def send(self, batches: Sequence[DestinationBatch]) -> None:
        with self._explain_timeout():
            self._read_pending_frames()
            again = self._send_round(batches)
            for batch in again:  # an operator has deleted these destinations: declare them again, send once more
                batch.error = ""
            if again:
                self._send_round(again)
            while len(self._destinations) > _MAX_DESTINATIONS:
                self._destinations.pop(next(iter(self._destinations))).channel.close()

    @contextlib.contextmanager
    def _explain_timeout(self) -> Iterator[None]:
        """Turn a timeout into a ConnectionError that names the broker's alarm, if the broker has reported one."""
        try:
            yield
        except TimeoutError as exc:  # the kernel's ETIMEDOUT is a TimeoutError too
            silence = str(exc) if exc.errno else f"no answer within {SEND_SECONDS:g} s"
            raise ConnectionError(_ALARM if self.is_blocked else silence) from exc

    def _read_pending_frames(self) -> None:
        """Read the frames that arrived while the connection was idle; raises ConnectionError if it is blocked."""
        with contextlib.suppress(BlockingIOError):
            try:
                while True:
                    self._amqp.drain_events(timeout=0)
            except TimeoutError as exc:
                if exc.errno:  # ETIMEDOUT: the connection is gone
                    raise
        if self.is_blocked:
            raise ConnectionError(_ALARM)

    def _send_round(self, batches: Sequence[DestinationBatch]) -> list[DestinationBatch]:
        """Declare, write and confirm; returns the batches whose destination was deleted after it was declared."""
        ready = []
        for batch in batches:
            messages = self._prepare_messages(batch)
            destination = self._prepare_destination(batch)
            if destination is not None:
                ready.append((destination, messages))
        for destination, messages in ready:
            self._write(destination, messages)
        self._read_confirms([destination for destination, _ in ready])
        return [
            destination.batch
            for destination, _ in ready
            if destination.was_deleted and destination.was_declared_earlier
        ]

    def _prepare_messages(self, batch: DestinationBatch) -> list[tuple[BatchItem, Any]]:
        messages = []
        for item in batch.open_items():
            try:
                recorded = item.recorded
                message = self.channel.prepare_message(*recorded.prepare[:5], dict(recorded.properties))
                properties = message._serialize_properties()  # noqa: SLF001
                message._serialize_properties = lambda properties=properties: properties  # noqa: SLF001  # once is enough
                messages.append((item, message))
            except Exception as exc:  # noqa: BLE001  # for example a header without an AMQP type, or an id too long
                batch.refuse_item(item, exc)
        return messages

    def _prepare_destination(self, batch: DestinationBatch) -> _Destination | None:
        """The channel of a batch, with its entities declared; None if the broker refused that."""
        if any(len(name.encode()) > _MAX_NAME_BYTES for name in batch.key):
            batch.refuse(
                f"The name of an exchange, queue or routing key is longer than {_MAX_NAME_BYTES} bytes in AMQP"
            )
            return None
        destination = self._destinations.pop(batch.key, None)  # inserted again below, so the dict is in order of use
        try:
            if destination is None:
                destination = self._open_destination(batch)
            destination.batch, destination.unconfirmed = batch, {}
            destination.was_declared_earlier, destination.was_deleted = bool(destination.declared), False
            for entity in batch.declare:
                if hash(entity) not in destination.declared:
                    entity(destination.channel).declare()
                    destination.declared.add(hash(entity))
        except self.connection.channel_errors as exc:
            batch.refuse(exc)
            return None
        self._destinations[batch.key] = destination
        return destination

    def _open_destination(self, batch: DestinationBatch) -> _Destination:
        channel = self._amqp.channel()
        # After an error py-amqp would open the channel again in the middle of a read: it would wait, and the channel
        # would have no confirms. A publish on such a channel waits forever (celery/py-amqp#445).
        channel._do_revive = channel.collect  # noqa: SLF001
        channel.confirm_select()
        destination = _Destination(channel, batch)

        def record_confirms(tag: int, multiple: bool, state: SendState) -> None:  # noqa: FBT001  # py-amqp calls it
            for each in [tag_ for tag_ in destination.unconfirmed if tag_ <= tag] if multiple else [tag]:
                item = destination.unconfirmed.pop(each, None)
                # The broker acknowledges a returned message too, after the return, which has set REFUSED.
                if item is not None and item.state is not SendState.REFUSED:
                    item.state = state
            if state is SendState.REFUSED:
                destination.batch.error = NACK

        def record_return(exc: Exception, _exchange: str, _key: str, message: Any) -> None:
            destination.batch.error, destination.was_deleted = f"{type(exc).__name__}: {exc}", True
            destination.declared.clear()
            id_ = message.properties.get("correlation_id")
            unconfirmed = destination.unconfirmed.values()
            found = (item for item in unconfirmed if item.id == id_ and item.state is not SendState.REFUSED)
            if (item := next(found, None)) is not None:
                item.state = SendState.REFUSED

        channel.events["basic_ack"].add(lambda tag, multiple: record_confirms(tag, multiple, SendState.SENT))
        channel.events["basic_nack"].add(lambda tag, multiple: record_confirms(tag, multiple, SendState.REFUSED))
        channel.events["basic_return"].add(record_return)
        return destination

    @staticmethod
    def _write(destination: _Destination, messages: Sequence[tuple[BatchItem, Any]]) -> None:
        batch, channel = destination.batch, destination.channel
        # Celery's events are not mandatory: their exchange may have no bound queue.
        is_mandatory = any(isinstance(entity, Queue) for entity in batch.declare)
        arguments = (0, batch.exchange, batch.routing_key, is_mandatory, False)
        for item, message in messages:
            destination.tag += 1
            destination.unconfirmed[destination.tag] = item
            item.state = SendState.UNKNOWN
            channel.send_method(Basic.Publish, "Bssbb", arguments, message)

    def _read_confirms(self, destinations: Sequence[_Destination]) -> None:
        """Read until all messages are confirmed. Each answer extends the wait, up to 4 s: a slow broker still works."""
        started_at = last_answer_at = self._monotonic()
        while unconfirmed := [each for each in destinations if each.unconfirmed]:
            try:
                left = min(last_answer_at + SEND_SECONDS, started_at + 2 * SEND_SECONDS) - self._monotonic()
                self._amqp.drain_events(timeout=max(left, 0.001))
                last_answer_at = self._monotonic()
            except self.connection.channel_errors as exc:
                for each in [each for each in unconfirmed if each.channel.connection is None]:
                    each.was_deleted = isinstance(exc, amqp.NotFound)
                    each.unconfirmed.clear()
                    each.batch.refuse(exc)
                    self._destinations.pop(each.batch.key, None)

    # --- asking ---------------------------------------------------------------------------------

    def probe(self) -> None:
        """Publish a message that the broker must return: only that proves that the broker takes messages.

        During an alarm, RabbitMQ reads one, then reports that it is blocked. It does not answer when the channel is
        closed.
        """
        with self._explain_timeout(), self._throwaway_channel() as channel:
            self._read_pending_frames()
            confirmed: list[int] = []
            channel.confirm_select()
            channel.events["basic_return"].add(lambda *_: None)
            channel.events["basic_ack"].add(lambda tag, _: confirmed.append(tag))
            channel.basic_publish(amqp.Message(""), routing_key=_PROBE_QUEUE, mandatory=True)
            try:
                while not confirmed:
                    self._amqp.drain_events(timeout=SEND_SECONDS)
            except self.connection.channel_errors:
                pass  # the user may not publish to the probe queue, but the broker has answered

    def queue_length(self, queue: str) -> int | None:
        """The number of ready messages; None if the queue is missing, or exclusive to another connection."""
        with self._explain_timeout(), self._throwaway_channel() as channel:
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except self.connection.channel_errors:
                return None

    @contextlib.contextmanager
    def _throwaway_channel(self) -> Iterator[Any]:
        """Open a channel for one request: an error closes it, and must not close a channel that sends."""
        channel = self._amqp.channel()
        channel._do_revive = channel.collect  # noqa: SLF001
        yield channel
        if channel.connection is not None:  # None: a channel error has closed it. Other errors end the connection.
            channel.close()

    def sockets(self) -> list[Any]:
        transport = getattr(getattr(self, "_amqp", None), "transport", None)
        sock = getattr(transport, "sock", None)
        return [] if sock is None else [sock]
