"""Draws the pictures of the documentation from recordings of real runs: `make pictures`.

`demo.txt` is the output of `make demo`; `demo.svg` is its timeline. The other `*.txt` files are what
a terminal showed; each becomes a picture of that terminal. `architecture.txt` and `rooms.txt` list boxes and
arrows. What `benchmarks/series.py` measured is in `scale-*.txt`, and what `benchmarks/run.py` did in `latency.txt`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.docs.charts import draw_chart, draw_latencies
from tests.docs.svg import AMBER, BLUE, FAINT, GREEN, GREY, INK, MONO, RED, line, picture, rect, text

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"

# --- the timeline of the demo -------------------------------------------------------------------

EVENT = re.compile(r"^ *(\d+\.\d) s  (?:\$ )?(.+?) {2,}(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    at: float
    what: str
    remark: str


@dataclass(frozen=True)
class Bar:
    row: str
    begin: float
    end: float
    color: str
    note: str = ""


def read_events(recording: str) -> list[Event]:
    story = recording.partition("The timeline, from the database")[0]
    return [Event(float(at), what.strip(), remark) for at, what, remark in EVENT.findall(story)]


def find_bars(events: list[Event]) -> list[Bar]:
    """The bars of a timeline: the workers, then each step in the order of its end."""
    end = events[-1].at
    kill = next(event.at for event in events if event.what.startswith("kill"))
    first, second = (event for event in events if event.what == "celery worker")
    bars = [
        Bar(f"worker {first.remark.split()[-1]}", first.at, kill, BLUE, "kill -9"),
        Bar(f"worker {second.remark.split()[-1]}", second.at, end, BLUE),
    ]
    starts: dict[str, float] = {}
    for event in events:
        if event.remark.startswith("committed"):
            waits = event.what.startswith("wait")
            begin = starts.get(event.what, event.at)
            note = "waits without a process" if waits else "attempt 2, same key" if event.what in starts else ""
            bars.append(Bar(event.what, begin, event.at, GREY if waits else GREEN, note))
        elif event.remark.startswith("the bank has taken"):
            bars.append(Bar(event.what, event.at, kill, AMBER, "paid, not recorded"))
        elif event.remark.startswith(("starts again", "waits without")):
            starts[event.what] = event.at
    return bars


def draw_demo(recording: str) -> str:
    events = read_events(recording)
    bars = find_bars(events)
    rows = list(dict.fromkeys(bar.row for bar in bars))
    left, width, top, height = 150, 560, 64, 26
    begin, end = events[0].at, events[-1].at
    bottom = top + height * len(rows)

    def x(at: float) -> float:
        return round(left + (at - begin) / (end - begin) * width, 1)

    parts = [text(16, 28, "One order, and a worker that is killed during the payment", size=15)]
    parts.append(
        text(16, 48, "The output of make demo. Seconds from the start of the first worker.", color=FAINT, size=12)
    )
    for tick in range(int(end - begin) + 1):
        parts.append(line(x(begin + tick), top, x(begin + tick), bottom, "#eef0f3"))
        parts.append(text(x(begin + tick), bottom + 16, f"{tick} s", color=FAINT, size=11, anchor="middle"))
    for number, row in enumerate(rows):
        parts.append(text(left - 10, top + number * height + 17, row, anchor="end"))
    for bar in bars:
        y = top + rows.index(bar.row) * height
        parts.append(rect(x(bar.begin), y + 6, max(5, x(bar.end) - x(bar.begin)), 13, bar.color, ' rx="3"'))
        if bar.note:
            after = x(bar.end) + 10 < left + width - 200
            place = (x(bar.end) + 10, "start") if after else (x(bar.begin) - 6, "end")
            color = RED if bar.note in ("kill -9", "paid, not recorded") else FAINT
            parts.append(text(place[0], y + 17, bar.note, color=color, size=12, anchor=place[1]))
    kill = next(event.at for event in events if event.what.startswith("kill"))
    parts.append(line(x(kill), top, x(kill), bottom, RED, ' stroke-dasharray="3 3"'))
    return picture(left + width + 30, bottom + 28, "Timeline of the demo", parts)


# --- a terminal ---------------------------------------------------------------------------------

COLORS = (
    (re.compile(r"^\$ .*"), "#93c5fd"),
    (re.compile(r"\b(completed?|DONE)\b"), "#86efac"),
    (re.compile(r"\b(waiting|retrying|WAITING_EVENT|LEASE_EXPIRED)\b"), "#fcd34d"),
    (re.compile(r"\b(errored|FAILED|Killed|diverge)\b"), "#fca5a5"),
)


def colored(words: str) -> str:
    """A line as SVG, with the words of statuses in their colours."""
    if found := COLORS[0][0].match(words):
        return f'<tspan fill="{COLORS[0][1]}">{escape(found[0])}</tspan>'
    result = escape(words)
    for pattern, color in COLORS[1:]:
        result = pattern.sub(rf'<tspan fill="{color}">\g<0></tspan>', result)
    return result


def draw_terminal(name: str, recording: str) -> str:
    lines = recording.rstrip("\n").split("\n")
    size, step = 13, 19
    width = max(480, max(map(len, lines)) * size * 0.602 + 40)
    parts = [f'<circle cx="{20 + 18 * number}" cy="18" r="5.5" fill="#475569"/>' for number in range(3)]
    for number, words in enumerate(lines):
        parts.append(
            f'<text x="20" y="{50 + step * number}" fill="#e2e8f0" font-size="{size}" xml:space="preserve">'
            f"{colored(words)}</text>"
        )
    return picture(round(width), 50 + step * len(lines), f"Terminal: {name}", parts, MONO, "#0f172a")


# --- boxes and arrows ---------------------------------------------------------------------------

BOX = re.compile(r"^box (\w+) (\d+),(\d+) (\d+)x(\d+) (\w+): (.+)$", re.MULTILINE)
ARROW = re.compile(r"^arrow (\d+),(\d+) (\d+),(\d+)(?: at (\d+),(\d+) (\w+): (.+))?$", re.MULTILINE)
FILLS = {"blue": "#eff6ff", "green": "#f0fdf4", "amber": "#fffbeb", "grey": "#f9fafb"}
STROKES = {"blue": BLUE, "green": GREEN, "amber": AMBER, "grey": GREY}


def draw_boxes(source: str) -> str:
    size = re.search(r"^size (\d+)x(\d+): (.+)$", source, re.MULTILINE)
    assert size is not None
    parts = [
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>'
    ]
    for _, x, y, width, height, color, words in BOX.findall(source):
        border = f' rx="6" stroke="{STROKES[color]}"'
        parts.append(rect(int(x), int(y), int(width), int(height), FILLS[color], border))
        title, *rest = words.split(" | ")
        middle = int(x) + int(width) / 2
        parts.append(text(middle, int(y) + 24, title, size=15, anchor="middle"))
        parts += [text(middle, int(y) + 44 + 18 * n, each, color=FAINT, anchor="middle") for n, each in enumerate(rest)]
    for x1, y1, x2, y2, x, y, anchor, words in ARROW.findall(source):
        parts.append(line(int(x1), int(y1), int(x2), int(y2), FAINT, ' stroke-width="1.5" marker-end="url(#head)"'))
        if words:
            parts.append(text(int(x), int(y), words, color=INK, size=12, anchor=anchor))
    return picture(int(size[1]), int(size[2]), size[3], parts)


def draw(source: Path) -> str:
    """The picture of one source."""
    recording = source.read_text(encoding="utf-8")
    if source.stem == "demo":
        return draw_demo(recording)
    if recording.startswith("size "):
        return draw_boxes(recording)
    if source.stem == "latency":
        return draw_latencies(recording)
    if recording.startswith("{"):
        return draw_chart(recording)
    return draw_terminal(source.stem, recording)


def main() -> int:
    for source in sorted(FOLDER.glob("*.txt")):
        source.with_suffix(".svg").write_text(draw(source), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
