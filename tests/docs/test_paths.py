"""CONTRIBUTING.md, the decisions and the pages for developers name files, folders and code that exist."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"
READING = DOCS / "development" / "reading.md"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("decisions/*.md")), *sorted(DOCS.glob("development/*.md"))]

# A path in code quotes that begins with a folder of the project; an anchor or a command is none.
PATH = re.compile(r"`((?:\.github|benchmarks|celery_durable|docs|examples|news|tests)/[\w./-]*)`")
ROOM = re.compile(r"^  (\w+) {2,}\S", re.MULTILINE)
FILE_TO_READ = re.compile(r"^\| \d+ \| `([\w./]+)` \| ([^|]+) \|", re.MULTILINE)


def test_the_paths_of_all_pages_exist() -> None:
    named = [(page.name, path) for page in PAGES for path in PATH.findall(page.read_text(encoding="utf-8"))]
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_the_layout_in_contributing_has_every_room_of_the_package() -> None:
    rooms = {path.stem for path in (ROOT / "celery_durable").iterdir() if path.suffix in ("", ".py")}
    layout = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layout")[2]
    assert set(ROOM.findall(layout.partition("tests/")[0])) == rooms - {"__init__", "__pycache__"}


def test_the_functions_and_classes_to_read_are_in_their_files() -> None:
    rows = FILE_TO_READ.findall(READING.read_text(encoding="utf-8"))
    assert len(rows) == 12
    missing = [
        f"{file}: {name}"
        for file, names in rows
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"^(?:def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []


def test_the_private_names_of_other_projects_are_listed() -> None:
    uses = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "celery_durable").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "noqa: SLF001" in line and "sys._" not in line
    ]
    listed = (DOCS / "development" / "upstream.md").read_text(encoding="utf-8")
    assert uses
    assert [path for path in uses if f"`{path}`" not in listed] == []
