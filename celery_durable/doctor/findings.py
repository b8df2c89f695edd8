"""Findings: the results of checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")

APP = "<your app>"
"""Stands for the app in the commands of remedies."""
CONNECT_SECONDS = 3
"""How long a check tries to reach the broker."""
ANSWER_SECONDS = 5
"""How long a check waits for the broker in all. A client library may have no timeout of its own."""


class Level(StrEnum):
    """FAIL: work does not get done now. WARN: it works, but is likely to fail later."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``remedy`` is empty if the level is OK."""

    level: Level
    about: str
    sentence: str
    remedy: str = ""


Replies = dict[str, set[str]]
"""The queues that each worker consumes, as it replies over the broker."""


@dataclass(slots=True)
class Servers:
    """What the checks of servers learn besides their findings: whether tables can be read, and what workers reply."""

    can_read: bool = False
    replies: Replies = field(default_factory=dict)
    must_reply: bool = False
    """Whether all workers were asked: those of a broker in memory are in other processes."""


def ask_in_time(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns; raises TimeoutError after `ANSWER_SECONDS`, and leaves its thread behind."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as exc:  # noqa: BLE001  # raised where the answer is awaited
            answer.set_exception(exc)

    threading.Thread(target=run, name="durable-doctor", daemon=True).start()
    return answer.result(ANSWER_SECONDS)
