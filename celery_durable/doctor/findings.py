"""Findings: the results of checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

APP = "<your app>"
"""Stands for the app in the commands of remedies."""
CONNECT_SECONDS = 3
"""How long a check tries to reach the broker."""


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
