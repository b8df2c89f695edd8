"""Redis: one LPUSH per queue, all in one round trip; each reply says whether Redis took the messages of its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kombu import Queue
from kombu.common import maybe_declare
from kombu.utils.json import dumps

from celery_durable.tasks.publishing.batches import BatchItem, DestinationBatch
from celery_durable.tasks.publishing.recorder import RecordedMessage
from celery_durable.tasks.publishing.report import SendState
from celery_durable.tasks.publishing.transports.generic import CONNECT_SECONDS, SEND_SECONDS, Transport, resolve_address

_PRIVATE_NAMES = (
    "_create_client",
    "_get_message_priority",
    "_inplace_augment_message",
    "_lookup",
    "_q_for_pri",
    "_queue_bind",
    "_size",
)


class RedisTransport(Transport):
    """Redis and Sentinel. Without MULTI each queue has its own reply; only messages without a reply are in doubt."""

    supports_templates: ClassVar[bool] = True
    has_socket_timeouts: ClassVar[bool] = True

    @classmethod
    def supports(cls, transport: Any) -> bool:
        channel = getattr(transport, "Channel", None)
        return transport.driver_type == "redis" and all(hasattr(channel, name) for name in _PRIVATE_NAMES)

    def _options(self) -> dict[str, Any]:
        # connect_timeout has no effect on Redis, and health checks wait without a timeout.
        times = {"socket_timeout": SEND_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
        return {**times, "retry_on_timeout": False, "health_check_interval": 0}

    def _choose_address(self) -> None:
        if type(self.connection.transport).__name__ == "Transport":  # Sentinel resolves names itself
            self.connection.hostname = resolve_address(self.connection, self._failure_count) or self.connection.hostname

    def open(self) -> None:
        super().open()
        # kombu has checked the server over a second connection pool, made for consumers; close that pool.
        if (pool := getattr(self.channel, "_async_pool", None)) is not None:
            pool.disconnect()
        self._client = self.channel._create_client()  # noqa: SLF001  # kept: to make one takes as long as a message

    def send(self, batches: Sequence[DestinationBatch]) -> None:
        commands: list[tuple[DestinationBatch, list[BatchItem]]] = []
        with self._client.pipeline(transaction=False) as pipe:
            for batch in batches:
                if self._is_fanout(batch):
                    self._send_one_by_one(batch)
                else:
                    self._push(pipe, batch, commands)
            if not commands:
                return
            for _, items in commands:
                _set_states(items, SendState.UNKNOWN)
            replies = pipe.execute(raise_on_error=False)
        for (_, items), reply in zip(commands, replies, strict=True):
            _set_states(items, SendState.UNSENT if isinstance(reply, Exception) else SendState.SENT)
        for (batch, _), reply in zip(commands, replies, strict=True):
            if isinstance(reply, Exception):
                self._refuse_or_raise(batch, reply)

    def _push(
        self, pipe: Any, batch: DestinationBatch, commands: list[tuple[DestinationBatch, list[BatchItem]]]
    ) -> None:
        """Add the commands of a batch to the pipeline, each paired with the messages whose state its reply decides."""
        channel = self.channel
        try:
            queues = self._queues(batch)
        except channel.ResponseError as exc:
            self._refuse_or_raise(batch, exc)
            return
        if not queues:
            batch.refuse(f"No queue is bound to exchange {batch.exchange!r} with routing key {batch.routing_key!r}")
            return
        by_priority: dict[int, list[tuple[BatchItem, str]]] = {}
        for item in batch.open_items():
            try:
                priority = channel._get_message_priority({"properties": {"priority": item.recorded.priority}})  # noqa: SLF001
                by_priority.setdefault(priority, []).append((item, self._encode(item.recorded)))
            except Exception as exc:  # noqa: BLE001  # the content may raise any error when it is encoded as JSON
                batch.refuse_item(item, exc)
        expires: Mapping[str, int] = getattr(channel, "_expires", {})  # from kombu 5.7
        for priority, texts in by_priority.items():
            items = [item for item, _ in texts]
            for queue in queues:
                pipe.lpush(channel._q_for_pri(queue, priority), *(text for _, text in texts))  # noqa: SLF001
                commands.append((batch, items))
                for step in channel.priority_steps if queue in expires else ():
                    pipe.pexpire(channel._q_for_pri(queue, step), expires[queue])  # noqa: SLF001
                    commands.append((batch, []))

    def _is_fanout(self, batch: DestinationBatch) -> bool:
        if not batch.exchange:
            return False
        for entity in batch.declare:
            maybe_declare(entity, self.channel)
        return bool(self.channel.typeof(batch.exchange).type == "fanout")

    def _queues(self, batch: DestinationBatch) -> list[str]:
        for entity in batch.declare:
            maybe_declare(entity, self.channel)  # once per connection: SADD _kombu.binding.*, and LLEN
        if not batch.exchange:
            return [batch.routing_key]
        found = list(self.channel._lookup(batch.exchange, batch.routing_key))  # noqa: SLF001
        if not found:  # Redis has lost the binding, as after FLUSHALL; kombu would drop the message silently
            self._restore_bindings(batch)
            found = list(self.channel._lookup(batch.exchange, batch.routing_key))  # noqa: SLF001
        return found

    def _restore_bindings(self, batch: DestinationBatch) -> None:
        """Write the bindings of a batch's queues; a declaration would not, since kombu remembers it for the process."""
        channel = self.channel
        for queue in [each for each in batch.declare if isinstance(each, Queue)]:
            exchange, key = queue.exchange.name, queue.routing_key
            meta = channel.typeof(exchange).prepare_bind(queue.name, exchange, key, queue.binding_arguments)
            channel._queue_bind(exchange, *meta)  # noqa: SLF001

    def _refuse_or_raise(self, batch: DestinationBatch, exc: Exception) -> None:
        text = str(exc)
        if "WRONGTYPE" not in text and "permission" not in text.lower():
            raise exc  # READONLY, OOM, LOADING, MISCONF: a failure of the broker, not of one queue
        batch.refuse(exc)

    def _encode(self, recorded: RecordedMessage) -> str:
        message = self.channel.prepare_message(*recorded.prepare[:5], dict(recorded.properties))
        self.channel._inplace_augment_message(message, recorded.exchange, recorded.routing_key)  # noqa: SLF001
        return str(dumps(message))

    def queue_length(self, queue: str) -> int | None:
        """The total length of the queue's lists, one per priority; None if Redis denies it."""
        try:
            return int(self.channel._size(queue))  # noqa: SLF001
        except self.channel.ResponseError as exc:
            if "WRONGTYPE" not in str(exc) and "permission" not in str(exc).lower():
                raise
            return None

    def sockets(self) -> list[Any]:
        pools = [getattr(self.channel, name, None) for name in ("_pool", "_async_pool")]
        names = ("_available_connections", "_in_use_connections")
        held = [each for pool in pools if pool for name in names for each in getattr(pool, name, ())]
        return [sock for each in held if (sock := getattr(each, "_sock", None)) is not None]


def _set_states(items: Sequence[BatchItem], state: SendState) -> None:
    for item in items:
        item.state = state
