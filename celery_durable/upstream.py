"""Marks on code that works around a fault which a newer version of another project has repaired.

When that version is the lowest that the package supports, a test fails, and the code is deleted. All faults are in
docs/development/upstream.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Repair(NamedTuple):
    """The first version of a project that does not need the code; ``issue``: its issue, or what it has instead."""

    project: str
    version: str
    issue: str
    code: str


repairs: list[Repair] = []


def until(project: str, version: str, issue: str) -> Callable[[F], F]:
    """Mark a function that is needed until ``version`` of ``project``."""

    def mark(fn: F) -> F:
        repairs.append(Repair(project, version, issue, f"{fn.__module__}.{fn.__qualname__}"))
        return fn

    return mark
