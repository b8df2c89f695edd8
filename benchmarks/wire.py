"""Counts what clients of PostgreSQL send: a proxy in this process, between them and the server.

It reads the frontend/backend protocol, so it counts every client alike, whatever library it uses.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Self

import sqlalchemy as sa

QUERY, EXECUTE, READY = b"Q", b"E", b"Z"
IDLE = b"I"
"""What the server says behind READY if no transaction is open: the one before has been committed or rolled back."""


class CountingProxy:
    """A server at ``url`` whose connections lead to ``server``. Use it as a context manager."""

    def __init__(self, server: sa.URL) -> None:
        self._target = (server.host or "127.0.0.1", server.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        query = {"sslmode": "disable", "gssencmode": "disable"}
        self.url = server.set(host="127.0.0.1", port=self._listener.getsockname()[1]).update_query_dict(query)
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def counts(self) -> dict[str, float]:
        """Statements, round trips and transactions of all connections until now."""
        with self._lock:
            return {name: self._counts[name] for name in ("statements", "round_trips", "transactions")}

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener has been closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server, suppress(ConnectionError):
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The first message of a client has no type.
            sent, received, is_answered = MessageReader(has_types=False), MessageReader(), True
            while True:
                for source in select.select([client, server], [], [])[0]:
                    if not (data := source.recv(65536)):
                        return
                    found = Counter[str]()
                    if source is client:
                        server.sendall(data)
                        found["statements"] = sum(kind in (QUERY, EXECUTE) for kind, _ in sent.feed(data))
                        found["round_trips"] = int(is_answered)
                    else:
                        client.sendall(data)
                        found["transactions"] = received.feed(data).count((READY, IDLE))
                    is_answered = source is server
                    with self._lock:
                        self._counts.update(found)


class MessageReader:
    """Cuts a stream into messages."""

    def __init__(self, *, has_types: bool = True) -> None:
        self._rest, self._has_types = b"", has_types

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The types of the messages that are complete now, each with the first byte of its content."""
        self._rest += data
        found = []
        while len(self._rest) >= 4 + self._has_types:
            start = int(self._has_types)
            size = start + int.from_bytes(self._rest[start : start + 4], "big")
            if len(self._rest) < size:
                break
            found.append((self._rest[:start], self._rest[start + 4 : min(size, start + 5)]))
            self._rest, self._has_types = self._rest[size:], True
        return found
