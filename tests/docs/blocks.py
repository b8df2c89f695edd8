"""The fenced blocks of the README and the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "development"} & {*page.parts}),
]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w{}-]*).*?\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """``line``: where its text begins, from 1."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{page_name(self.page)}:{self.line}"


def all_blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("body")) + 1, found["language"], found["body"])
        for found in _FENCE.finditer(text)
    ]


def blocks(page: Path, language: str) -> list[Block]:
    return [block for block in all_blocks_of(page) if block.language == language]


def base_of(page: Path) -> Path | None:
    """The page whose first block this page continues: `<!-- continues fan-out.md -->`."""
    found = re.search(r"^<!-- continues ([\w-]+\.md) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return page.parent / found[1] if found else None


def page_name(page: Path) -> str:
    """The page's path, as the id of a test."""
    return str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page)


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]
