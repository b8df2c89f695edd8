"""Dataclasses that are created often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def hot_dataclass(*, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a dataclass with slots that is frozen for type checkers, and not at run time.

    Measured: a frozen dataclass of 19 fields takes 1.4 us to make, one that is not frozen 0.3 us. A step makes six such
    objects.
    """
    return dataclass(slots=True, eq=eq, unsafe_hash=eq)
