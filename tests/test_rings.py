"""What tests/rings.py leaves to `make test-all`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT
from tests.rings import SAME_ON_SERVERS, TESTS


def test_the_modules_that_are_named_are_there() -> None:
    missing = [
        f"{folder}/{name}"
        for folder, names in SAME_ON_SERVERS.items()
        for name in names
        if not list((TESTS / folder).glob(f"test_{name}.py"))
    ]
    assert missing == []


def collected(marks: str) -> set[str]:
    """The databases of the tests of one module of rule 1 that ``-m`` chooses."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, "tests/engine/test_reliability.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return set(re.findall(r"\[(?:.*-)?(sqlite|postgresql|mariadb)\b", ran.stdout))


@pytest.mark.gate
def test_repetitions_on_servers_are_slow() -> None:
    assert collected("slow") == {"postgresql", "mariadb"}
    assert collected("not slow") == {"sqlite"}
