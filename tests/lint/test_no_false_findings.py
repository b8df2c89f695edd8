"""The linter finds nothing in examples, documentation and tests but the mistakes that stand there on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_durable.lint import Finding, check
from tests.docs.blocks import PAGES, ROOT, blocks

ON_PURPOSE = {
    "docs/explanation/replay.md": ["CD401"],  # shows that code between steps runs on each pass
    "tests/cli/test_replay.py": ["CD603"],
    "tests/step/test_branches.py": ["CD601", "CD601", "CD601"],
    "tests/step/test_steps.py": ["CD304"],
    "tests/runner/test_cancel.py": ["CD603"],
    "tests/runner/test_suspension.py": ["CD603", "CD603", "CD604"],
    "tests/smoke/flows.py": ["CD102", "CD304"],
    "tests/contrib/test_pydantic_ai_scenarios.py": ["CD402"],
    "tests/operations/test_repeats.py": ["CD305"],
    "tests/revise/test_family_retries.py": ["CD402"],
    "tests/smoke/asking.py": ["CD402"],
    "tests/step/test_refused_values.py": ["CD701"],
    "tests/testing/test_crash_safety.py": ["CD501", "CD603"],
    "tests/testing/test_replaying.py": ["CD603"],
    "tests/typing/mistakes.py": ["CD601", "CD601"],
}
"""Workflows that make a mistake to see what comes of it."""


def found_in(texts: dict[str, str]) -> dict[str, list[Finding]]:
    return {name: found for name, text in texts.items() if (found := check(text))}


def sources(*folders: str) -> dict[str, str]:
    paths: list[Path] = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_examples_and_benchmarks_are_free_of_findings() -> None:
    texts = sources("examples", "benchmarks")
    assert len(texts) > 5
    assert found_in(texts) == {}


def test_pages_have_the_finding_that_they_show() -> None:
    texts = {}
    for page in PAGES:
        lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
        for block in blocks(page, "python"):  # the blocks of a page build on each other
            lines[block.line - 1 : block.line - 1 + len(block.text.splitlines())] = block.text.splitlines()
        texts[str(page.relative_to(ROOT))] = "\n".join(lines)
    assert codes(found_in(texts)) == {name: found for name, found in ON_PURPOSE.items() if name.startswith("docs")}


@pytest.mark.slow
def test_tests_have_the_findings_that_they_are_about() -> None:
    texts = sources("tests")
    assert len(texts) > 200
    assert codes(found_in(texts)) == {name: found for name, found in ON_PURPOSE.items() if name.startswith("tests")}


def codes(found: dict[str, list[Finding]]) -> dict[str, list[str]]:
    return {name: [each.code for each in findings] for name, findings in found.items()}
