"""A TCP proxy that misbehaves as told: refuses, hangs, goes silent, swallows, forgets its old connections."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading


class Mode(enum.StrEnum):
    """What the proxy does with connections. Existing connections are affected unless stated otherwise."""

    PASS = "pass"
    REFUSE = "refuse"
    """Nobody listens: new connections are refused, existing ones are reset."""
    HANG = "hang"
    """New connections are accepted and never answered; existing ones are stalled."""
    STALL = "stall"
    """Nothing is read or written in either direction; the sender's buffers fill up."""
    BLACKHOLE = "blackhole"
    """What the client sends is acknowledged and thrown away; it gets no answer."""
    MUTE = "mute"
    """The server gets what the client sends; the client gets no answer."""
    STALL_OLD = "stall-old"
    """Existing connections are stalled for good, new ones work: a fail-over."""


class FaultProxy:
    """Listens on ``port`` and relays to ``target``; ``set(mode)`` changes what it does."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._mode, self._generation = Mode.PASS, 0
        self._stall_after: int | None = None
        self._changed = threading.Condition()
        self._pairs: dict[tuple[socket.socket, socket.socket], int] = {}
        self._is_closed = False
        self.accepted = 0
        """How many connections were accepted."""
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accept_on(self._listener)

    def set(self, mode: Mode) -> None:
        """Change the mode; leaving REFUSE listens on the same port again."""
        with self._changed:
            if mode is Mode.STALL_OLD:
                self._generation += 1
            self._mode, self._stall_after = mode, None
            if mode is Mode.REFUSE and self._listener is not None:
                _shut(self._listener)
                self._listener = None
            elif mode is not Mode.REFUSE and self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self.port))
                self._accept_on(self._listener)
            self._changed.notify_all()
        if mode is Mode.REFUSE:
            self.reset()

    def aim(self, target: tuple[str, int]) -> None:
        """Relay new connections to another server, and cut those that there are."""
        self._target = target
        self.reset()

    def stall_after(self, size: int) -> None:
        """Pass ``size`` more bytes of what clients send, then no more; answers still pass."""
        with self._changed:
            self._stall_after = size

    def end_old(self) -> None:
        """Let the server learn that the clients of stalled connections are gone; the clients learn nothing."""
        for (_, server), generation in list(self._pairs.items()):
            if generation < self._generation:
                _shut(server)

    def reset(self) -> None:
        """Cut all connections that there are."""
        for pair in list(self._pairs):
            for sock in pair:
                _shut(sock)

    @property
    def open(self) -> int:
        """How many connections are relayed now."""
        return len(self._pairs)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            if self._listener is not None:
                _shut(self._listener)
            self._changed.notify_all()
        self.reset()

    def _accept_on(self, listener: socket.socket) -> None:
        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    self.accepted += 1
                    threading.Thread(target=self._relay, args=(client, self._generation), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _relay(self, client: socket.socket, generation: int) -> None:
        if not self._wait_while(Mode.HANG, Mode.STALL, generation=generation):
            _shut(client)
            return
        target = self._target
        try:
            server = socket.create_connection(target)
        except OSError:  # the server is away, and so is the proxy
            _shut(client)
            return
        pair = (client, server)
        self._pairs[pair] = generation
        if target != self._target:  # `aim` did not see this pair
            for sock in pair:
                _shut(sock)
        back = threading.Thread(target=self._pump, args=(server, client, generation, Mode.MUTE), daemon=True)
        back.start()
        self._pump(client, server, generation, None)
        back.join()
        self._pairs.pop(pair, None)

    def _pump(self, source: socket.socket, target: socket.socket, generation: int, swallowed_in: Mode | None) -> None:
        with contextlib.suppress(OSError):
            while self._wait_while(Mode.HANG, Mode.STALL, generation=generation) and (data := source.recv(65536)):
                # What was read while the mode changed is subject to the new one.
                self._wait_while(Mode.HANG, Mode.STALL, generation=generation)
                if swallowed_in is None:
                    data = self._limit(data)
                if self._mode is Mode.BLACKHOLE or self._mode is swallowed_in:
                    continue
                target.sendall(data)
        _shut(source)
        self._wait_while(Mode.HANG, Mode.STALL, generation=generation)  # an end is not passed on either
        _shut(target)

    def _limit(self, data: bytes) -> bytes:
        with self._changed:
            if self._stall_after is None:
                return data
            self._changed.wait_for(lambda: self._is_closed or self._stall_after != 0)
            passed = data[: self._stall_after]
            if self._stall_after is not None:
                self._stall_after -= len(passed)
            return passed

    def _wait_while(self, *modes: Mode, generation: int) -> bool:
        """Wait while a mode stalls this connection; False once the proxy is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._mode not in modes and generation == self._generation)
            )
            return not self._is_closed


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
