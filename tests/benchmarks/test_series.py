"""`benchmarks/series.py` measures each chart, and the charts of the documentation were measured on a quiet machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import redis

from tests.docs.blocks import ROOT
from tests.docs.charts import choose_ticks, draw_chart, read_chart, spread_notes
from tests.docs.pictures import FOLDER
from tests.support.services import BROKERS, DATABASES, missing

CHARTS = ["history", "payload", "processes", "sleepers"]
OTHERS_AT_MOST = 0.1
SOURCES = sorted(FOLDER.glob("scale-*.txt"))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(CHARTS[0], marks=pytest.mark.gate),
        *(pytest.param(name, marks=pytest.mark.slow) for name in CHARTS[1:]),
    ],
)
def test_a_series_prints_the_points_that_its_chart_draws(store_url: str, name: str) -> None:
    try:
        redis.Redis.from_url(BROKERS["redis"]).ping()
    except redis.ConnectionError as error:
        missing("redis", f"{BROKERS['redis']} does not answer ({error})")
    environment = {
        "BENCH_NAME": f"durable_bench_{uuid.uuid4().hex[:8]}",
        "BENCH_POSTGRESQL_URL": DATABASES["postgresql"],
        "BENCH_BROKER": BROKERS["redis"],
    }
    points = 1 if name == "processes" else 2
    options = ["--tries", "1", "--points", str(points), "--sleepers", "10000"]
    ran = subprocess.run(
        [sys.executable, "benchmarks/series.py", name, *options],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert len(ran.stdout.splitlines()) > points, ran.stderr
    chart = read_chart(ran.stdout)
    assert len(chart.lines) >= 2
    assert all(len(line) == points and all(y > 0 for _, y in line) for line in chart.lines.values())
    if (source := FOLDER / f"scale-{name}.txt") in SOURCES:
        drawn = read_chart(source.read_text(encoding="utf-8"))
        assert (chart.title, chart.x, chart.y, [*chart.lines]) == (drawn.title, drawn.x, drawn.y, [*drawn.lines])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_chart_of_the_documentation_was_measured_on_a_quiet_machine(source: Path) -> None:
    _, *points = source.read_text(encoding="utf-8").splitlines()
    assert len(points) >= 8
    assert [point for point in points if json.loads(point)["others_cpu"] > OTHERS_AT_MOST] == []


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (26.53, [0, 10, 20, 30]),
        (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5000, [0, 1000, 2000, 3000, 4000, 5000]),
        (5001, [0, 2000, 4000, 6000]),
    ],
)
def test_an_axis_has_round_numbers_up_to_the_highest_point(most: float, ticks: list[float]) -> None:
    assert choose_ticks(most) == ticks


def test_the_names_of_lines_do_not_cover_each_other() -> None:
    assert spread_notes({"high": (0, 100.0), "low": (0, 104.0), "far": (0, 20.0)}) == {
        "high": 100.0, "low": 116.0, "far": 20.0,
    }  # fmt: skip


def test_a_chart_draws_each_line_and_its_name() -> None:
    points = [{"series": name, "x": x, "y": y} for name, y in (("a", 1.5), ("b & c", 3)) for x in (10, 100)]
    lines = [{"chart": "Title", "x": "items", "y": "ms"}, *points]
    drawn = draw_chart("\n".join(json.dumps(line) for line in lines))
    texts = [each.text for each in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["Title", "ms", "0", "1", "2", "3", "10", "100", "items", "a", "b & c"]
