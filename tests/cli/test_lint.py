"""`lint`: reads files and folders, needs no app, and fails if it finds something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Said
from tests.cli.connections import remote
from tests.docs.blocks import ROOT

MISTAKE = "import time\n\n\ndef order(event, step):\n    step.sleep('nap', 5)\n    return time.time()\n"
SENTENCE = "Workflow code of 'order' calls time.time(), which returns another time on each pass."
REMEDY = "Use step.now(), or read the clock in a step."


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("shop/flows.py", ".venv/site.py", "build/old.py", "shop/__pycache__/flows.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MISTAKE)
    (tmp_path / "shop/notes.txt").write_text("not Python")
    (tmp_path / "clean.py").write_text("def order(event, step):\n    step.sleep('nap', 5)\n")
    return tmp_path


def lint(*words: str) -> Said:
    return remote("lint", *words)


def test_it_checks_the_current_folder_without_what_is_hidden_or_generated() -> None:
    said = lint()
    assert said.rows == [["shop/flows.py", "6", "12", "CD101", SENTENCE, REMEDY]]
    assert (said.err, said.code) == ("1 finding in 2 files\n", 1)


def test_it_checks_what_is_named() -> None:
    assert lint("clean.py") == Said("", "0 findings in 1 file\n", 0)
    assert [row[0] for row in lint("shop", ".venv").rows] == ["shop/flows.py", ".venv/site.py"]


def test_json_has_a_document_for_each_finding() -> None:
    said = lint("shop", "-o", "json")
    assert said.code == 1
    assert json.loads(said.out) == [
        {"path": "shop/flows.py", "line": 6, "column": 12, "code": "CD101", "sentence": SENTENCE, "remedy": REMEDY}
    ]
    assert json.loads(lint("clean.py", "--json").out) == []


def test_people_see_the_place_and_the_fix() -> None:
    assert lint("shop", "-o", "table").out == f"shop/flows.py:6:12:   CD101   {SENTENCE}\n  Fix: {REMEDY}\n"


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "latin.py").write_bytes(b"name = '\xe9'\n")
    said = lint("latin.py")
    assert (said.out, said.code) == ("", 1)
    assert said.err == (
        "error: latin.py cannot be read: invalid or missing encoding declaration for 'latin.py'\n"
        "hint: Leave it out, or make it readable as UTF-8.\n"
    )
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    assert lint("latin.py").code == 0


def test_a_file_that_does_not_exist_is_named() -> None:
    said = lint("gone.py")
    assert said.code == 1
    assert said.err == "error: gone.py does not exist.\nhint: Name a file or a folder that exists.\n"


def test_the_hook_runs_a_program_that_loads_neither_the_app_nor_the_database(folder: Path) -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, *words = hook["entry"].split()
    assert program == "celery-durable"
    called = (
        "import sys; from celery_durable.cli.remote import main\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", called, *words, "shop/flows.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    finding, modules = done.stdout.splitlines()
    assert finding.startswith("shop/flows.py\t6\t12\tCD101\t")
    assert done.returncode == 1
    assert {"celery", "sqlalchemy", "httpx"} & set(modules.split()) == set()
