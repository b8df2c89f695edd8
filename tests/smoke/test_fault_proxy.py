"""The proxy of the fault tests does what its modes say."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.smoke.fault_proxy import FaultProxy, Mode


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A proxy before a server that echoes."""
    server = socket.create_server(("127.0.0.1", 0))

    def echo(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                sock.sendall(data)
        sock.close()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    proxy = FaultProxy(server.getsockname())
    yield proxy
    proxy.close()
    server.close()


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3)


def answers(sock: socket.socket) -> bool:
    """Whether what is sent comes back; raises what the connection raises."""
    sock.sendall(b"ping")
    try:
        return sock.recv(4) == b"ping"
    except TimeoutError:
        return False


def test_it_relays(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert answers(sock)


@pytest.mark.parametrize("mode", [Mode.HANG, Mode.STALL, Mode.BLACKHOLE, Mode.MUTE])
def test_a_silent_mode_stops_open_connections_and_new_ones(proxy: FaultProxy, mode: Mode) -> None:
    with connect(proxy) as sock:
        assert answers(sock)
        proxy.set(mode)
        assert not answers(sock)
        with connect(proxy) as new:
            assert not answers(new)


def test_a_connection_that_was_stalled_goes_on_when_it_passes_again(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert answers(sock)
        proxy.set(Mode.STALL)
        assert not answers(sock)
        proxy.set(Mode.PASS)
        assert sock.recv(4) == b"ping"


def test_it_can_be_aimed_at_another_server_and_cuts_the_connections_to_the_first(proxy: FaultProxy) -> None:
    with connect(proxy) as sock, socket.create_server(("127.0.0.1", 0)) as other:
        assert answers(sock)
        proxy.aim(other.getsockname())
        assert sock.recv(4) == b""
        with connect(proxy) as new:
            new.sendall(b"ping")
            accepted, _ = other.accept()
            with accepted:
                assert accepted.recv(4) == b"ping"


def test_a_refusing_proxy_resets_what_is_open_and_listens_again_later(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert answers(sock)
        proxy.set(Mode.REFUSE)
        assert sock.recv(4) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.set(Mode.PASS)
    with connect(proxy) as sock:
        assert answers(sock)


def test_a_fail_over_stalls_the_old_connections_for_good(proxy: FaultProxy) -> None:
    with connect(proxy) as old:
        assert answers(old)
        proxy.set(Mode.STALL_OLD)
        assert not answers(old)
        with connect(proxy) as new:
            assert answers(new)
        proxy.set(Mode.PASS)
        assert not answers(old)


def test_the_server_learns_of_a_fail_over_and_the_client_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = FaultProxy(("127.0.0.1", listener.getsockname()[1]))
        with connect(proxy) as old, listener.accept()[0] as server:
            server.settimeout(10)
            old.sendall(b"ping")
            assert server.recv(4) == b"ping"  # only then does the proxy know the connection
            proxy.set(Mode.STALL_OLD)
            proxy.end_old()
            assert server.recv(4) == b""
            with pytest.raises(TimeoutError):
                old.recv(4)
        proxy.close()


def test_it_stalls_after_so_many_bytes(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        proxy.stall_after(6)
        assert answers(sock)
        sock.sendall(b"pong")
        assert sock.recv(4) == b"po"
        with pytest.raises(TimeoutError):
            sock.recv(4)
