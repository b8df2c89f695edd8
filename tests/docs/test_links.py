"""A link between pages names a file that exists, and a heading that the file has."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, page_name

FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)  # conf.py: myst_heading_anchors = 3


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(prose(page)))


def broken_links(page: Path, text: str) -> list[str]:
    return [link for link in LINK.findall(text) if not link.startswith(("http", "mailto:")) and not leads(page, link)]


def leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and target.is_relative_to(ROOT) and (not anchor or anchor in anchors(target))


def test_the_links_of_all_pages_lead_somewhere() -> None:
    broken = {page_name(page): broken_links(page, prose(page)) for page in PAGES}
    assert {name: links for name, links in broken.items() if links} == {}
