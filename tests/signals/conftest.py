"""An ear on all signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_durable import signals

ALL: dict[str, Signal] = {name: it for name, it in vars(signals).items() if isinstance(it, Signal)}


class Ear:
    """What was told, in order: the signal's name, its sender and its arguments."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any, dict[str, Any]]] = []

    def __call__(self, signal: Signal, sender: Any, **told: Any) -> None:
        self.heard.append((signal.name, sender, told))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.heard if name != "sweep_done"]

    def told(self, name: str) -> list[dict[str, Any]]:
        return [told for heard, _, told in self.heard if heard == name]


@contextmanager
def hearing(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """Collect what one signal carries, without its name."""
    heard: list[dict[str, Any]] = []

    def receive(signal: Signal, sender: Any, **told: Any) -> None:
        heard.append(told)

    signal.connect(receive, weak=False)
    try:
        yield heard
    finally:
        signal.disconnect(receive)
        assert all(set(told) == set(signal.providing_args) for told in heard)


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    for signal in ALL.values():
        signal.connect(ear, weak=False)
    yield ear
    for signal in ALL.values():
        signal.disconnect(ear)
