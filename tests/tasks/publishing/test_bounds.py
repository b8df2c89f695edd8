"""Nobody waits for a broker without a bound, whatever the application's own options say (LAW 7)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_durable.model import OutboxKind, OutboxMessage
from celery_durable.tasks.publishing import sender
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.tasks.publishing.conftest import Line, interrupted_after

SLACK = 1.5
"""Seconds beyond the bound of 3 s that a busy machine may take."""


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "durable-publisher"]


@pytest.mark.parametrize(
    ("mode", "is_connected"),
    [
        pytest.param(mode, is_connected, marks=() if is_connected in quick else pytest.mark.slow)
        for mode, quick in {
            Mode.REFUSE: [False],
            Mode.HANG: [False],
            Mode.STALL: [True],
            Mode.BLACKHOLE: [],
            Mode.MUTE: [],
        }.items()
        for is_connected in (False, True)
    ],
)
def test_a_caller_waits_at_most_3_s_and_then_not_at_all(line: Line, mode: Mode, *, is_connected: bool) -> None:
    if is_connected:
        assert line.publish()[0] == ["sent"]
    line.proxy.set(mode)
    states, waited = line.publish(count=10)
    assert "sent" not in states
    assert "refused" not in states
    assert waited < 3 + SLACK
    again = [line.publish() for _ in range(50)]
    assert {state for states, _ in again for state in states} == {"unsent"}
    assert sum(waited for _, waited in again) < 0.5 + SLACK  # 10 ms each
    outage = line.publisher.outages()[None]
    assert outage.failures >= 1
    assert outage.error
    assert "guest:guest" not in outage.where
    line.proxy.set(Mode.PASS)
    assert line.until_sent(10) < 10
    assert line.publisher.outages() == {}


def test_a_fail_over_is_noticed_within_10_s(line: Line) -> None:
    """The old connection hangs for good, new ones work: which is what a virtual address that moved looks like."""
    assert line.publish()[0] == ["sent"]
    line.proxy.set(Mode.STALL_OLD)
    states, waited = line.publish(count=5)
    assert states == ["unknown"] * 5
    assert waited < 3 + SLACK
    assert line.until_sent(10) < 10


def test_an_outage_of_the_outbox_is_bounded_too(line: Line) -> None:
    message = OutboxMessage("id-1", OutboxKind.TASK, "mail", '{"args": [1], "kwargs": {}, "options": {}}')
    line.queues.add(line.name)
    assert [state.value for state in line.publisher.send([message]).states] == ["sent"]
    line.proxy.set(Mode.STALL)
    began = time.monotonic()
    assert [state.value for state in line.publisher.send([message] * 3).states] == ["unknown"] * 3
    assert line.publisher.send([message]).states[0].value == "unsent"
    assert line.publisher.queue_length(line.queue("ok")) is None
    assert time.monotonic() - began < 3 + SLACK


def test_what_stalls_in_the_middle_of_a_batch_is_not_reported_as_sent(line: Line) -> None:
    """On RabbitMQ it is known of each message, on Redis of each queue."""
    line.publish()
    line.taken("ok")
    line.proxy.stall_after(60_000)
    states, waited = line.publish(count=1000)
    assert waited < 3 + SLACK
    line.proxy.set(Mode.PASS)
    sent = [f"c2-{index}" for index, state in enumerate(states) if state == "sent"]
    assert len(sent) < 1000
    assert line.taken("ok")[: len(sent)] == sent


def test_a_connection_that_the_broker_closed_while_it_lay_idle_costs_nothing(line: Line) -> None:
    assert line.publish()[0] == ["sent"]
    line.proxy.reset()
    assert line.publish()[0] == ["sent"]
    assert line.publisher.outages() == {}


@pytest.mark.parametrize("broker", ["redis"])
def test_a_resolver_that_hangs_costs_one_caller_3_s_and_the_next_nothing(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, real = threading.Event(), socket.getaddrinfo
    before = set(threads())

    def hang(*args: object, **options: object) -> object:
        answer.wait(9)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(sender, "_STUCK_SECONDS", 0.5)
    try:
        states, waited = line.publish()
        assert states == ["unknown"]
        assert waited < 3 + SLACK
        most, end = 0, time.monotonic() + 4  # past several trials
        while time.monotonic() < end:
            states, waited = line.publish()
            assert states == ["unsent"]
            assert waited < 1
            most = max(most, len(set(threads()) - before))
            time.sleep(0.05)
        assert most == 2
    finally:
        answer.set()
    line.until_sent(15)


@pytest.mark.parametrize("broker", ["redis"])
def test_a_thread_that_was_replaced_fails_later_and_nothing_is_paused(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, real, hung = threading.Event(), socket.getaddrinfo, list[threading.Thread]()
    before = set(threads())

    def hang_first(*args: object, **options: object) -> object:
        if not hung:
            hung.extend(set(threads()) - before)
        if threading.current_thread() in hung:
            answer.wait(60)
            raise OSError("no such host")
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang_first)
    monkeypatch.setattr(sender, "_STUCK_SECONDS", 0.5)
    assert line.publish()[0] == ["unknown"]
    line.until_sent(15)
    answer.set()
    hung[0].join(20)
    assert (hung[0].is_alive(), line.publisher.outages()) == (False, {})


def test_a_name_with_two_addresses_reaches_the_second(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first accepts and says nothing: both libraries go on to the next only where connecting fails."""
    silent = socket.create_server(("127.0.0.2", line.proxy.port))
    real = socket.getaddrinfo

    def two(host: str, port: object, *args: object, **options: object) -> object:
        if host == "two.test":
            found = [real(address, port, *args, **options) for address in ("127.0.0.2", "127.0.0.1")]  # type: ignore[arg-type]
            return found[0] + found[1]
        return real(host, port, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    url = str(line.app.conf.broker_url).replace("127.0.0.1", "two.test")
    line.publisher = line.make_publisher(line.make_app(url))
    with contextlib.closing(silent):
        states, waited = line.publish()
        assert states == ["unsent"]
        assert waited < 3 + SLACK
        line.until_sent(10)


# --- connections and threads --------------------------------------------------------------------


def test_a_process_has_one_connection_and_none_after_a_while(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "IDLE_SECONDS", 0.5)
    assert line.proxy.accepted == 0  # opened at first use
    line.publish()
    accepted = line.proxy.accepted
    for queue in ("a", "b", "c"):
        assert line.publish(queue, 10)[0] == ["sent"] * 10
        assert line.publisher.queue_length(line.queue(queue)) == 10
    assert line.proxy.accepted == accepted
    until_open(line, 1)
    until_open(line, 0)
    assert line.publish()[0] == ["sent"]


def until_open(line: Line, count: int) -> None:
    end = time.monotonic() + 10
    while line.proxy.open != count:
        assert time.monotonic() < end, f"{line.proxy.open} connections stay open"
        time.sleep(0.02)


def test_100_threads_that_publish_at_once_share_round_trips(line: Line) -> None:
    line.publish()
    line.taken("ok")
    barrier = threading.Barrier(100)
    states: list[str] = []
    lock = threading.Lock()

    def publish(number: int) -> None:
        due_runs = line.due_runs("ok", 1, f"t{number}")
        barrier.wait(30)
        report = line.publisher.publish(due_runs)
        with lock:
            states.extend(state.value for state in report.states)

    began = time.monotonic()
    each = [threading.Thread(target=publish, args=(number,)) for number in range(100)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert states == ["sent"] * 100
    assert time.monotonic() - began < 3 + SLACK
    assert sorted(line.taken("ok")) == sorted(f"t{number}-0" for number in range(100))


def test_a_soft_time_limit_ends_the_wait_of_its_task(line: Line) -> None:
    """It is the caller's: raised in his thread while he waits, and not taken for a failure of the broker."""
    line.publish()
    line.proxy.set(Mode.STALL)
    with pytest.raises(SoftTimeLimitExceeded), interrupted_after(0.3, SoftTimeLimitExceeded):
        line.publish()


def test_a_second_broker_url_is_tried_after_the_first(make_line: Callable[..., Line], broker: str) -> None:
    line = make_line(broker)
    away = FaultProxy(("127.0.0.1", 9))
    away.set(Mode.REFUSE)
    working = str(line.app.conf.broker_url)
    first = working.replace(f":{line.proxy.port}", f":{away.port}")
    line.publisher = line.make_publisher(line.make_app(f"{first};{working}"))
    line.until_sent(10)
    away.close()
