"""Draws what `benchmarks` measured: lines over a logarithmic axis, and the bars of latencies."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from tests.docs.svg import AMBER, BLUE, FAINT, GREEN, GREY, line, picture, rect, text

LEFT, TOP, WIDTH, HEIGHT, RIGHT, BOTTOM = 70, 70, 430, 190, 210, 46
COLORS = (BLUE, GREEN, AMBER, GREY)
NOTE_STEP = 16
"""How far the names of two lines are apart at least."""


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    """The points of each line, from left to right."""


def read_chart(recording: str) -> Chart:
    head, *points = [json.loads(each) for each in recording.splitlines()]
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        lines.setdefault(point["series"], []).append((point["x"], point["y"]))
    return Chart(head["chart"], head["x"], head["y"], lines)


def draw_chart(recording: str) -> str:
    chart = read_chart(recording)
    columns = sorted({x for points in chart.lines.values() for x, _ in points})
    most = max(y for points in chart.lines.values() for _, y in points)
    ticks = choose_ticks(most)

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / columns[0]) / math.log(columns[-1] / columns[0])
        return round(LEFT + share * WIDTH, 1), round(TOP + HEIGHT * (1 - y / ticks[-1]), 1)

    parts = [text(16, 28, chart.title, size=15), text(16, 52, chart.y, color=FAINT, size=12)]
    for tick in ticks:
        _, y = place(columns[0], tick)
        parts.append(line(LEFT, y, LEFT + WIDTH, y, "#eef0f3"))
        parts.append(text(LEFT - 10, y + 4, f"{tick:,g}", color=FAINT, size=11, anchor="end"))
    for column in columns:
        x, y = place(column, 0)
        parts.append(text(x, y + 18, f"{column:,}", color=FAINT, size=11, anchor="middle"))
    parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, chart.x, color=FAINT, size=12, anchor="middle"))
    for color, points in zip(COLORS, chart.lines.values(), strict=False):
        placed = [place(*point) for point in points]
        path = "L".join(f"{x:g} {y:g}" for x, y in placed)
        parts.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"/>')
        parts += [rect(x - 2.5, y - 2.5, 5, 5, color, ' rx="2.5"') for x, y in placed]
    ends = {name: place(*points[-1]) for name, points in chart.lines.items()}
    for (name, height), color in zip(spread_notes(ends).items(), COLORS, strict=False):
        parts.append(text(ends[name][0] + 12, height + 4, name, color=color, size=12))
    return picture(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM, chart.title, parts)


def choose_ticks(most: float) -> list[float]:
    """Up to six round numbers, from 0 to the first one that is not below ``most``."""
    power = 10 ** math.floor(math.log10(most / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= most)
    return [round(step * number, 9) for number in range(math.ceil(most / step) + 1)]


def spread_notes(ends: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The heights of the names of lines, so that none covers another."""
    heights: dict[str, float] = {}
    lowest = -math.inf
    for name, (_, height) in sorted(ends.items(), key=lambda end: end[1][1]):
        lowest = max(height, lowest + NOTE_STEP)
        heights[name] = lowest
    return {name: heights[name] for name in ends}


BARS = {
    "An approval: from send_event() to the start of the next function": {
        "half of them": ("event", "p50_ms", "ms"),
        "99 of 100": ("event", "p99_ms", "ms"),
    },
    "kill -9: until the step starts again in another process": {
        "one pool process": ("recovery", "p50_s", "s"),
        "a whole worker, lease of 30 s": ("takeover", "s", "s"),
    },
}
"""The bars of a picture of latencies: the question of the benchmark, the number in its answer, and its unit."""


def draw_latencies(recording: str) -> str:
    """What `benchmarks/run.py` has answered, each in the quietest of its rounds."""
    answers = sorted((json.loads(each) for each in recording.splitlines()), key=lambda each: -each["others_cpu"])
    quietest = {each["question"]: each for each in answers}
    left, width, top = 220, 300, 28
    parts: list[str] = []
    for title, bars in BARS.items():
        parts.append(text(16, top, title, size=15))
        most = max(quietest[question][number] for question, number, _ in bars.values())
        for (name, (question, number, unit)), color in zip(bars.items(), (GREEN, BLUE), strict=True):
            top += 28
            value = quietest[question][number]
            end = left + max(3.0, value / most * width)
            parts.append(text(left - 10, top, name, size=13, anchor="end"))
            parts.append(rect(left, top - 12, end - left, 15, color, ' rx="3"'))
            parts.append(text(end + 8, top, f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}", size=13))
        top += 44
    used = max(quietest[question]["others_cpu"] for bars in BARS.values() for question, *_ in bars.values())
    note = f"Prefork, PostgreSQL and Redis on two cores. Other programs used {used:.0%} of them meanwhile."
    parts.append(text(16, top - 8, note, color=FAINT, size=12))
    return picture(left + width + 100, top + 10, "Latency of an approval, and recovery after kill -9", parts)
