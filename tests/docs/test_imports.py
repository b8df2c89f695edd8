"""The README, the documentation and the examples import from the modules that docs/index.md lists, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.docs.blocks import PAGES, ROOT, all_blocks, all_blocks_of
from tests.docs.public import documented_modules, exports

MODULES = documented_modules()
PYTHON = [(str(block), block.text) for block in all_blocks("python")] + [
    (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("examples/**/*.py"))
]


def undocumented_imports(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if _is_ours(each.name) and each.name not in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_ours(node.module):
            exported = exports(MODULES[node.module]) if node.module in MODULES else {}
            for each in node.names:
                name = f"{node.module}.{each.name}"
                if each.name not in exported and name not in MODULES:
                    yield name


def _is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "celery_durable"


def test_pages_and_examples_import_what_is_documented() -> None:
    found = {where: list(undocumented_imports(code)) for where, code in PYTHON}
    assert sum("examples/" in where for where in found) > 5
    assert sum(".md:" in where for where in found) > 20
    assert {where: names for where, names in found.items() if names} == {}


EXTRAS = {
    "redis://": "redis",
    "postgresql+psycopg://": "postgres",
    "from fastapi import": "(?:fastapi|http)",
    "from flask import": "flask",
}
"""The extra that a piece of code needs."""


def test_a_page_installs_the_extras_that_its_first_code_needs() -> None:
    """Pages for applications that exist already are left out: these have a broker, and its client."""
    checked = []
    for page in PAGES:
        if page.name in ("README.md", "existing-app.md"):
            continue
        [first, *others] = all_blocks_of(page) or [None]
        found = first and re.match(r"\$ pip install \"celery-durable\[([\w,]+)\]", first.text)
        if found and others and others[0].language == "python":
            extras = {extra for sign, extra in EXTRAS.items() if sign in others[0].text}
            missing = {extra for extra in extras if not any(re.fullmatch(extra, each) for each in found[1].split(","))}
            assert not missing, f"{page.name} needs {missing}, and installs {found[1]}"
            if "sqlalchemy.ext.asyncio" in others[0].text:  # which SQLAlchemy 2.1 no longer brings
                assert '"sqlalchemy[asyncio]"' in first.text
            checked.append(page.name)
    assert {"fastapi.md", "flask.md", "http.md"} <= set(checked)
