"""A child of a fork publishes over a connection of its own, and leaves its parent's alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.tasks.publishing.conftest import Line, instances


def child_of(line: Line, number: int, first: Callable[[], object] = lambda: None) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(20)  # a child that hangs is ended
        try:
            first()
            states = line.publisher.publish(line.due_runs("ok", 3, f"child{number}")).states
            code = 0 if [state.value for state in states] == ["sent"] * 3 else 2
            line.publisher.close()
        finally:
            os._exit(code)
    return pid


def test_children_publish_and_do_not_disturb_their_parent(line: Line) -> None:
    for _ in range(2):  # others that have been closed are in nobody's way
        other = line.make_publisher(line.app)
        other.publish(line.due_runs("other"))
        other.close()
    assert line.publish()[0] == ["sent"]
    stop, states = threading.Event(), Counter[str]()
    sent: list[str] = []

    def publish() -> None:
        number = 0
        while not stop.wait(0.01):  # leaves the processor to the children
            number += 1
            due_runs = line.due_runs("ok", 5, f"parent{number}")
            states.update(state.value for state in line.publisher.publish(due_runs).states)
            sent.extend(instances(due_runs))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        codes = [os.waitpid(child_of(line, number), 0)[1] for number in range(3)]
    finally:
        stop.set()
        thread.join()
    assert codes == [0] * 3
    assert states == {"sent": len(sent)}
    assert line.publisher.outages() == {}
    found = line.taken("ok")
    assert sum(each.startswith("child") for each in found) == 9
    assert [each for each in found if each.startswith("parent")] == sent


def test_a_child_publishes_whose_parent_was_handing_over_a_message(line: Line) -> None:
    """At the fork another thread holds the lock of the messages that wait."""
    line.publish()
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with line.publisher._sender._changed:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        is_held.wait()
        pid = child_of(line, 1)
    finally:
        is_over.set()
        thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert line.publish()[0] == ["sent"]


def test_no_child_is_forked_while_a_connection_is_made(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu imports then. A child that inherits the lock of an import hangs for ever at its own."""
    sender = line.publisher._sender
    make = sender._make_transport
    has_started, is_making = threading.Event(), False

    def make_slowly(turn: int) -> Any:
        nonlocal is_making
        is_making = True
        has_started.set()
        time.sleep(0.3)
        is_making = False
        return make(turn)

    monkeypatch.setattr(sender, "_make_transport", make_slowly)
    thread = threading.Thread(target=line.publish)
    thread.start()
    assert has_started.wait(10)
    pid = child_of(line, 1, first=lambda: os._exit(3) if is_making else None)
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_childs_messages_name_the_child(line: Line) -> None:
    """`origin` holds the process: templates are made anew."""
    line.publish()
    line.taken("ok")
    pid = child_of(line, 1)
    assert os.waitpid(pid, 0)[1] == 0
    with line.direct() as connection:
        channel = connection.channel()
        message = channel.basic_get(line.queue("ok"), no_ack=True)
        headers = message.headers if line.broker == "redis" else message.properties["application_headers"]
    assert headers["origin"].startswith(f"gen{pid}@")
    assert line.publish()[0] == ["sent"]
