"""A TCP proxy that cuts a connection around one request: before the server gets it, or before its answer comes back."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """Listens on ``port``; on ``control_port`` it is told ``cut-before`` or ``cut-after``, for the next request."""

    _inside = b""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._cut = ""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.cuts: list[str] = []
        self.made: list[tuple[str, bool]] = []
        """The same cuts, each with whether it had to be inside something."""
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port, self.control_port = (listener.getsockname()[1] for listener in self._listeners)
        for listener, serve in zip(self._listeners, (self._relay, self._obey), strict=True):
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def close(self) -> None:
        for sock in (*self._listeners, *list(self._open)):
            _close(sock)

    def arm(self, cut: str, *, inside: bytes = b"") -> bool:
        """As by ``control_port``, but for the next request that contains ``inside``; False while another cut waits."""
        with self._lock:
            is_free = not self._cut
            if is_free:
                self._cut, self._inside = cut, inside
        return is_free

    def disarm(self) -> None:
        with self._lock:
            self._cut = ""

    def _accept(self, listener: socket.socket, serve: object) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=serve, args=(sock,), daemon=True).start()  # type: ignore[arg-type]

    def _obey(self, sock: socket.socket) -> None:
        with sock:
            self._cut, self._inside = sock.recv(20).decode(), b""
            sock.sendall(b"ok")

    def _relay(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:  # the server is away; so are we
            _close(client)
            return
        pair = _Pair(client, server)
        self._open |= {client, server}
        threading.Thread(target=self._answers, args=(pair,), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                with self._lock:
                    inside = self._inside
                    cut = self._cut if inside in data else ""
                    self._cut = "" if cut else self._cut
                if cut:
                    self.cuts.append(cut)
                    self.made.append((cut, bool(inside)))
                if cut == "cut-before":
                    break
                pair.is_cut = cut == "cut-after"
                server.sendall(data)
        if not pair.is_cut:
            pair.close()
        self._open -= {client, server}

    def _answers(self, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while (data := pair.server.recv(65536)) and not pair.is_cut:
                pair.client.sendall(data)
        pair.close()


class _Pair:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.is_cut = False

    def close(self) -> None:
        for sock in (self.client, self.server):
            _close(sock)


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
