"""Dataclasses that are created often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def hot_dataclass(*, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a dataclass with slots that is frozen for type checkers, and not at run time.

    Measured for 19 fields: 1.4 us to make a frozen one, 0.3 us without. A step makes six such objects.
    """
    return dataclass(slots=True, eq=eq, unsafe_hash=eq)
