"""The README, the documentation and the examples import from the modules that docs/index.md lists, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.docs.blocks import ROOT, all_blocks
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
