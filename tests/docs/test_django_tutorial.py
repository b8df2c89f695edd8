"""The Django tutorial, followed: its files, in its order, make a project whose checks, migrations and tests pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "tutorial" / "django.md"


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.gate
def test_a_project_that_follows_the_page_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```(sh|py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = []
    for language, text in blocks:
        if language == "py":
            where, _, rest = text.partition("\n")
            path = tmp_path / where.removeprefix("# ").split()[0]
            if "(at the end)" in where:
                path.write_text(path.read_text(encoding="utf-8") + rest, encoding="utf-8")
            else:
                path.write_text(rest, encoding="utf-8")
            continue
        for line in text.splitlines():
            program, *arguments = line.split()
            if program == "django-admin":
                done.append(run(tmp_path, sys.executable, "-m", "django", *arguments))
            elif program == "python" and arguments[1] in ("startapp", "makemigrations", "migrate", "test"):
                done.append(run(tmp_path, sys.executable, *arguments))
    assert "Ran 2 tests" in done[-1]
    assert "W002" not in "".join(done)
    assert "System check identified no issues" in run(tmp_path, sys.executable, "manage.py", "check")
