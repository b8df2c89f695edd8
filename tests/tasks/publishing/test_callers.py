"""A caller with one message sends it itself, on the sender's connection, unless that may take long."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable.tasks.publishing import sender
from celery_durable.tasks.publishing.transports.amqp import AmqpTransport
from celery_durable.tasks.publishing.transports.generic import Transport
from celery_durable.tasks.publishing.transports.redis import RedisTransport
from tests.smoke.fault_proxy import Mode
from tests.smoke.proc import until
from tests.tasks.publishing.conftest import Line, interrupted_after
from tests.tasks.publishing.test_bounds import SLACK, until_open

SENDER = "durable-publisher"


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have sent something, in order. Each connection counts as quick."""
    names: list[str] = []
    monkeypatch.setattr(sender, "_QUICK_SECONDS", 60.0)
    for kind in (RedisTransport, AmqpTransport):
        monkeypatch.setattr(kind, "send", _noted(kind.send, names))
    return names


def _noted(send: Callable[..., None], names: list[str]) -> Callable[..., None]:
    def noted(self: Transport, *args: Any) -> None:
        names.append(threading.current_thread().name)
        send(self, *args)

    return noted


def test_a_caller_sends_one_message_itself_on_the_open_connection(line: Line, senders: list[str]) -> None:
    me = threading.current_thread().name
    for count in (1, 1, 2, 1):
        assert line.publish(count=count)[0] == ["sent"] * count
    assert senders == [SENDER, me, SENDER, me]
    assert len(line.taken("ok")) == 5
    until_open(line, 1)


def test_the_sender_sends_it_if_the_broker_is_slow(
    line: Line, senders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several answers may take nearly as long as its timeout, so only the sender's thread keeps the limit."""
    line.publish()
    monkeypatch.setattr(sender, "_QUICK_SECONDS", 0.0)
    line.publish()
    line.publish()
    monkeypatch.setattr(sender, "_QUICK_SECONDS", 60.0)
    line.publish()
    line.publish()
    assert [name == SENDER for name in senders] == [True, False, True, True, False]


def test_the_sender_opens_another_connection_where_the_broker_has_closed_it(line: Line, senders: list[str]) -> None:
    """To find the broker's address may take long."""
    line.publish()
    line.proxy.set(Mode.REFUSE)
    until_open(line, 0)
    line.proxy.set(Mode.PASS)
    assert line.publish()[0] == ["sent"]
    assert set(senders) == {SENDER}


def test_a_process_may_have_more_than_a_thousand_files_open(line: Line, senders: list[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        for _ in range(2):
            assert line.publish()[0] == ["sent"]
        assert senders[-1] != SENDER
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_generic_transport_is_never_a_callers(
    line: Line, senders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client library may have no timeouts."""
    monkeypatch.setattr(Transport, "_send_one_by_one", _noted(Transport._send_one_by_one, senders))
    for kind in (RedisTransport, AmqpTransport):
        monkeypatch.setattr(kind, "supports", lambda _: False)
    for _ in range(3):
        assert line.publish()[0] == ["sent"]
    assert senders == [SENDER] * 3


@pytest.mark.parametrize(
    "mode",
    [Mode.STALL, pytest.param(Mode.BLACKHOLE, marks=pytest.mark.slow), pytest.param(Mode.MUTE, marks=pytest.mark.slow)],
)
def test_a_caller_that_sends_itself_waits_at_most_3_s_and_then_not_at_all(
    line: Line, senders: list[str], mode: Mode
) -> None:
    line.publish()
    line.proxy.set(mode)
    states, waited = line.publish()
    assert senders[-1] != SENDER
    assert states == ["unknown"]
    assert waited < 3 + SLACK
    again = [line.publish() for _ in range(50)]
    assert {state for states, _ in again for state in states} == {"unsent"}
    assert sum(waited for _, waited in again) < 0.5 + SLACK
    assert line.publisher.outages()[None].failures >= 1
    line.proxy.set(Mode.PASS)
    line.until_sent(10)
    assert line.publisher.outages() == {}


class _Interruption(Exception):
    """What a signal handler raises."""


def test_what_a_signal_handler_raises_is_the_callers_and_costs_only_the_connection(
    line: Line, senders: list[str]
) -> None:
    line.publish()
    line.proxy.set(Mode.STALL)
    with pytest.raises(_Interruption), interrupted_after(0.3, _Interruption):
        line.publish()
    assert senders[-1] != SENDER
    assert line.publisher.outages() == {}
    accepted = line.proxy.accepted
    line.proxy.set(Mode.PASS)
    assert line.publish()[0] == ["sent"]
    assert line.proxy.accepted > accepted  # on the old connection, an old answer may come
    until_open(line, 1)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Two events: the first is set when a caller begins to send, and it continues when the second is set."""
    begins, goes_on = threading.Event(), threading.Event()
    for kind in (RedisTransport, AmqpTransport):

        def send(self: Transport, batches: Any, _send: Any = kind.send) -> None:
            if threading.current_thread().name != SENDER:
                begins.set()
                assert goes_on.wait(10)
            _send(self, batches)

        monkeypatch.setattr(kind, "send", send)
    monkeypatch.setattr(sender, "_QUICK_SECONDS", 60.0)
    return begins, goes_on


def test_others_wait_until_a_caller_has_sent_its_message(
    line: Line, held: tuple[threading.Event, threading.Event]
) -> None:
    begins, goes_on = held
    line.publish()
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.extend(line.publish()[0])) for _ in range(5)]
    threads[0].start()
    assert begins.wait(10)
    for thread in threads[1:]:
        thread.start()
    until("all others wait", lambda: len(line.publisher._sender._jobs) == 4, 10)
    assert found == []
    goes_on.set()
    for thread in threads:
        thread.join()
    assert found == ["sent"] * 5
    until_open(line, 1)


def test_closing_waits_for_a_caller_that_sends(line: Line, held: tuple[threading.Event, threading.Event]) -> None:
    begins, goes_on = held
    line.publish()
    found: list[str] = []
    caller = threading.Thread(target=lambda: found.extend(line.publish()[0]))
    caller.start()
    assert begins.wait(10)
    closing = threading.Thread(target=line.publisher.close)
    closing.start()
    until("it closes", lambda: line.publisher._sender._thread is None, 10)
    goes_on.set()
    caller.join()
    closing.join()
    assert found == ["sent"]
    until_open(line, 0)
    assert len(line.taken("ok")) == 2


def test_the_connection_stays_open_while_callers_use_it(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "IDLE_SECONDS", 1.0)
    line.publish()
    accepted = line.proxy.accepted
    for _ in range(15):
        time.sleep(0.1)
        assert line.publish()[0] == ["sent"]
    assert line.proxy.accepted == accepted
    until_open(line, 0)
