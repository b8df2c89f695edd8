"""The pytest plugin: fixtures `durable_harness`, `durable_store` and `durable_golden`, and the marker `durable`.

pytest loads it in every project that has celery_durable installed. So it imports nothing else of this package until a
fixture is used, and its names are none of pytest-celery's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_durable.testing.golden import GoldenHistories
    from celery_durable.testing.harness import DurableHarness

_MARKER = (
    "durable(workflows=None, *, seed=0, start=..., settings=None, wipe=False): what the fixture durable_harness is "
    "made with; workflows None: all that @durable_workflow has registered."
)
_LINES = 40


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--durable-seed`` and ``--durable-update``."""
    group = parser.getgroup("celery_durable")
    group.addoption(
        "--durable-seed", type=int, default=None, help="the seed of durable_harness, before that of the marker"
    )
    group.addoption(
        "--durable-update", action="store_true", help="record the golden histories of durable_golden in golden/"
    )


@pytest.fixture
def durable_store() -> str | None:
    """The URL of the database for `durable_harness`; None: SQLite in memory. Override it to test on yours."""
    return None


@pytest.fixture
def durable_harness(request: pytest.FixtureRequest, durable_store: str | None) -> Iterator[DurableHarness]:
    """A `DurableHarness` with the options of the marker ``durable``, closed after the test."""
    from celery_durable.testing.harness import DurableHarness  # noqa: PLC0415  # it imports Celery

    marker = request.node.get_closest_marker("durable")
    args, options = ((), {}) if marker is None else (marker.args, dict(marker.kwargs))
    seed = request.config.getoption("--durable-seed")
    if seed is not None:
        options["seed"] = seed
    with DurableHarness(*args, **{"store_url": durable_store, **options}) as harness:
        request.node.stash[_HARNESS] = harness
        yield harness


@pytest.fixture
def durable_golden(request: pytest.FixtureRequest) -> GoldenHistories:
    """The `GoldenHistories` of the test, in the folder ``golden`` beside its file."""
    from celery_durable.testing.golden import GoldenHistories  # noqa: PLC0415  # it imports Celery

    folder = request.path.parent / "golden" / request.path.stem
    return GoldenHistories(folder, request.node.name, update=request.config.getoption("--durable-update"))


_HARNESS: pytest.StashKey[Any] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the seed of the harness and its last deliveries with a failed test."""
    report = yield
    harness = item.stash.get(_HARNESS, None)
    if report.failed and harness is not None and call.when == "call":
        lines = [f"seed {harness.seed}, {harness.clock!r}", *harness.journal[-_LINES:]]
        report.sections.append(("durable harness", "\n".join(lines)))
        harness.unused_mocks = True  # the test ended before it came to them
    return report
