"""`make chaos`, for a minute, and what it says where it cannot run or has found something."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos.arena import missing_programs
from tests.chaos.report import Report
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


def test_a_storm_needs_the_programs_of_its_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "missing_programs", lambda pair: pair.split("+")[:1])
    assert chaos.main(["--pair", "rabbitmq+mariadb", "--pair", "redis+mariadb"]) == 2
    said = "Not installed here: rabbitmq, redis. Choose what is: --pair redis+postgresql\n"
    assert capsys.readouterr().err == said


def test_a_violation_fails_the_run_and_says_how_to_find_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def storm(pair: str, *_: object) -> Report:
        return Report(pair, 1.0, Counter(), 3, 9, 1, 4, 0, 1, 2, {}, ["I1 something was done twice"])

    monkeypatch.setattr(chaos, "_run", storm)
    monkeypatch.setattr(chaos, "missing_programs", lambda _: [])
    assert chaos.main(["--pair", _PAIR, "--seed", "7"]) == 1
    said = capsys.readouterr().out
    folder = re.search(r"logs in (\S+)", said)
    assert folder is not None
    assert said.endswith(f"1 VIOLATIONS, seed 7, logs kept in {folder[1]}\n  {_PAIR}: I1 something was done twice\n")
    shutil.rmtree(folder[1])
