"""Checks that no retired word comes back: `make check` runs it. docs/reference/glossary.md has the replacements."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

RETIRED: Mapping[str, str] = {
    "teller": "notify",
    "farewell": "completion messages",
    "makings": "step effects",
    "rehearsal": "replay check",
    "rehearse": "check the replay",
    "rehearsing": "replay check",
    "onlooker": "dry-run committer",
    "misfit": "validation failure",
    "lineage": "ancestry",
    "mischief": "fault injection",
    "checkup": "checks",
    "passage": "replay context",
    "redoable": "retryable",
    "roll call": "inventory",
    "whoever": "the actor, such as the worker or any client",
    "of ours": "internal",
    "handed on": "released",
    "hand on": "release",
    "look after": "handle, monitor or recover",
    "looks after": "handles, monitors or recovers",
    "looked after": "handled, monitored or recovered",
    "mend": "fix",
    "mended": "fixed",
    "begun": "started",
    "steer": "change",
    "steered": "changed",
    "steering": "life cycle",
    "asker": "the step that waits for the answer",
    "both doors": "both connections",
}
"""Each retired word, and what to write instead.

Not listed, since other uses are common English: letter, news, door, verb, double, turn, chance, place, hint.
"""
EXEMPT = {"tests/docs/retired_words.py", "tests/docs/test_retired_words.py", "CHANGELOG.md"}
SUFFIXES = {".py", ".md", ".toml", ".yml", ".json"}


def _pattern(word: str) -> str:
    # An underscore or a capital letter ends a word too: `the_teller`, `TellerOf`.
    return rf"(?<![A-Za-z])(?i:{word.replace(' ', '[ _]')}s?)(?![a-z])"


_RETIRED = re.compile("|".join(f"({_pattern(word)})" for word in RETIRED))


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Every retired word in a text: the number of its line, the word as written, and its replacement."""
    replacements = list(RETIRED.values())
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _RETIRED.finditer(line):
            assert match.lastindex is not None
            yield number, match.group(), replacements[match.lastindex - 1]


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, encoding="utf-8", check=True).stdout
    count = 0
    for name in listed.splitlines():
        path = Path(name)
        if name in EXEMPT or path.suffix not in SUFFIXES or not path.is_file():
            continue
        for number, word, replacement in find(path.read_text(encoding="utf-8")):
            count += 1
            print(f"{name}:{number}: {word!r} is retired: write {replacement!r}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
