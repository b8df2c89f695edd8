"""AMQP 0-9-1 frames of messages, built from properties that py-amqp serializes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

from amqp.serialization import dumps

from celery_durable.tasks.publishing.message_builder import Message
from celery_durable.tasks.publishing.recorder import RecordedMessage
from celery_durable.tasks.publishing.templates import PLACEHOLDER_PREFIX, Template

_BASIC, _PUBLISH = 60, 40
_METHOD, _HEADER, _BODY = 1, 2, 3
_END = b"\xce"
_FRAME_OVERHEAD = 8
"""The bytes of a frame besides its content: type, channel, size and end."""
_MAX_RENDERERS = 1000
_PLACEHOLDER_PREFIX = PLACEHOLDER_PREFIX.encode()


@dataclass(frozen=True, slots=True)
class Payload:
    """A message's properties and body, in their encoded form."""

    properties: bytes
    body: bytes


Render = Callable[[Mapping[str, str], str], Payload]


class Encoder:
    """Encodes messages; ``channel``: any of kombu's, for its `prepare_message`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._renderers: dict[Template, Render] = {}

    def encode(self, message: Message) -> Payload:
        """Encode a message; raises py-amqp's errors for values that have no AMQP type."""
        if isinstance(message, RecordedMessage):
            return self._encode(message)
        render = self._renderers.get(message.template)
        if render is None:
            if len(self._renderers) > _MAX_RENDERERS:
                self._renderers = {}
            render = self._renderers[message.template] = self._make_renderer(message.template)
        return render(message.values, message.body)

    def _encode(self, recorded: RecordedMessage) -> Payload:
        message = self._channel.prepare_message(*recorded.prepare[:5], dict(recorded.properties))
        body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
        return Payload(message._serialize_properties(), body)  # noqa: SLF001

    def _make_renderer(self, template: Template) -> Render:
        recorded = template.recorded
        raw, table = self._encode(recorded).properties, dumps("F", (recorded.headers,))
        start = raw.index(table)
        # A string in the headers' table has a length of 4 bytes before it, any other string a length of 1 byte. The
        # table has its own length before it, in 4 bytes.
        long = re.compile(rb"\x00{3}." + re.escape(_PLACEHOLDER_PREFIX) + rb"(\w+)@", re.DOTALL)
        short = re.compile(rb"." + re.escape(_PLACEHOLDER_PREFIX) + rb"(\w+)@", re.DOTALL)
        head, tail = short.split(raw[:start]), short.split(raw[start + len(table) :])
        middle = long.split(table[4:])

        def render(values: Mapping[str, str], body: str) -> Payload:
            fit = {key.encode(): value.encode() for key, value in values.items()}
            inner = _fill_parts(middle, fit, ">I")
            parts = (_fill_parts(head, fit, ">B"), pack(">I", len(inner)), inner, _fill_parts(tail, fit, ">B"))
            return Payload(b"".join(parts), body.encode())

        return render


def _fill_parts(parts: Sequence[bytes], values: Mapping[bytes, bytes], width: str) -> bytes:
    """Join the parts of `re.split`, in which text and names alternate; each name becomes a length and its value."""
    found = []
    for index, part in enumerate(parts):
        if index % 2:
            value = values[part]
            found += [pack(width, len(value)), value]
        else:
            found.append(part)
    return b"".join(found)


def publish_method(channel: int, exchange: str, routing_key: str, *, is_mandatory: bool) -> bytes:
    """The method frame of a basic.publish."""
    name, key = exchange.encode(), routing_key.encode()
    head = pack(">HHHB", _BASIC, _PUBLISH, 0, len(name)) + name + pack(">B", len(key)) + key
    arguments = head + bytes([is_mandatory])
    return pack(">BHI", _METHOD, channel, len(arguments)) + arguments + _END


def content_frames(channel: int, payload: Payload, frame_max: int) -> Iterator[bytes]:
    """The header frame and the body frames of a message; ``frame_max`` limits the size of a frame."""
    properties, body = payload.properties, payload.body
    yield pack(">BHIHHQ", _HEADER, channel, len(properties) + 12, _BASIC, 0, len(body)) + properties + _END
    max_size = frame_max - _FRAME_OVERHEAD
    for start in range(0, len(body), max_size):
        part = body[start : start + max_size]
        yield pack(">BHI", _BODY, channel, len(part)) + part + _END
