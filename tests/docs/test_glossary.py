"""The glossary stays short: at most 30 terms, in alphabetical order, one sentence each."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
ENTRIES: list[tuple[str, str]] = re.findall(r"^([A-Z][^\n]*)\n((?:[: ] [^\n]*\n)+)", TEXT, re.MULTILINE)


def test_there_are_at_most_thirty_terms_in_alphabetical_order() -> None:
    terms = [term.lower() for term, _ in ENTRIES]
    assert 20 <= len(terms) <= 30
    assert terms == sorted(set(terms))
    assert len(terms) == len(re.findall(r"^: ", TEXT, re.MULTILINE))


@pytest.mark.parametrize(("term", "text"), ENTRIES, ids=[term for term, _ in ENTRIES])
def test_a_term_has_one_sentence(term: str, text: str) -> None:
    assert re.fullmatch(r": [A-Z][^.!?]*\.\n", text), term


def test_the_index_links_the_glossary() -> None:
    assert "[Glossary](reference/glossary.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
