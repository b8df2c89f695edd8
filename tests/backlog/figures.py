"""What was measured, beside the most that it may be."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; ``most`` None: it is shown and not judged."""

    what: str
    value: float
    unit: str
    most: float | None = None

    @property
    def is_broken(self) -> bool:
        return self.most is not None and self.value > self.most


def late(what: str, seconds: Iterable[float], *, most: float | None) -> list[Figure]:
    """How late several things were: the latest is judged."""
    found = sorted(seconds)
    return [
        Figure(f"{what}, latest of {len(found)}", found[-1], "s", most),
        Figure(f"{what}, median", statistics.median(found), "s"),
    ]


def table(rows: Sequence[tuple[str, Figure]]) -> str:
    """One line for each figure, with its scenario."""
    width = max(len(f"{name}: {each.what}") for name, each in rows)
    lines = []
    for name, each in rows:
        bound = "" if each.most is None else f"at most {each.most:g}"
        verdict = "BROKEN" if each.is_broken else "ok" if bound else ""
        lines.append(
            f"{f'{name}: {each.what}':{width}}  {each.value:10.2f} {each.unit:9} {bound:14} {verdict}".rstrip()
        )
    return "\n".join(lines)
