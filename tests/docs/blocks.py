"""The fenced blocks of the README and the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

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
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("body")) + 1, language, found["body"])
        for found in _FENCE.finditer(text)
        if found["language"] == language
    ]


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]
