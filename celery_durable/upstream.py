"""Marks on code that works around a fault which a newer version of another project has repaired.

The code stays until that version is the lowest that the package supports: then a test fails, and the code is deleted.
docs/development/upstream.md lists all faults, also those that no release has repaired.
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
