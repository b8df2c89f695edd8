"""`make chaos`, for a minute."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.chaos.arena import missing_programs
from tests.smoke.proc import ROOT, python
from tests.support.services import missing

_PAIR = "redis+postgresql"


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(600)
def test_a_minute_of_storm_with_a_hundred_kills_loses_nothing() -> None:
    if programs := missing_programs(_PAIR):
        missing(_PAIR, f"{' and '.join(programs)} not installed")
    options = ["--minutes", "1", "--pair", _PAIR, "--kills", "100"]
    done = subprocess.run(
        python("-m", "tests.chaos", *options), cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^VIOLATIONS +0$", done.stdout, re.MULTILINE)
    kills = sum(
        int(n) for n in re.findall(r"^(?:pool processes|workers|beats) killed.* (\d+)$", done.stdout, re.MULTILINE)
    )
    assert kills >= 100
