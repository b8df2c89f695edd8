"""init: what it writes runs, passes its own test, and is typed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import click
import pytest
from celery import Celery
from celery.app.base import Celery as Default

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.cli import durable as durable_command
from tests.cli.test_refusals import call

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.gate
@pytest.mark.timeout(120)
def test_what_it_writes_runs_and_passes_its_test(folder: Path) -> None:
    said = call(Default("default", set_as_current=False), "init")
    assert (said.code, said.rows[:2]) == (0, [["wrote", "shop.py"], ["wrote", "test_shop.py"]]), said.err
    tested = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py")
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    asked = run(folder, "celery", "-A", "shop", "durable", "replay", "--file", "none.json")
    assert "error: none.json cannot be read" in asked.stderr  # the app is found, and its Durable


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_it_writes_is_typed(folder: Path) -> None:
    assert call(Default("default", set_as_current=False), "init").code == 0
    typed = run(folder, "mypy", "--strict", "shop.py", "test_shop.py")
    assert typed.returncode == 0, typed.stdout
    assert run(folder, "ruff", "check", "--isolated", ".").returncode == 0


def test_what_it_says_to_type_can_be_typed() -> None:
    said = call(Default("default", set_as_current=False), "init", "orders")
    lines = [words for what, words in said.rows if what == "do"]
    assert lines[-2:] == ["python -m pip install pytest", "python -m pytest test_orders.py"]
    for line in lines[:-2]:
        *prefix, name = shlex.split(line)[:5]
        assert prefix == ["celery", "-A", "orders", "durable"]
        command = durable_command.get_command(click.Context(durable_command), name)
        assert command is not None
        command.make_context(name, shlex.split(line)[5:])


def test_files_that_exist_are_left_alone(folder: Path) -> None:
    app = Default("default", set_as_current=False)
    (folder / "test_shop.py").write_text("mine")
    said = call(app, "init")
    assert said.err == ("error: test_shop.py exists already.\nhint: Give another name: celery durable init orders\n")
    assert said.code == 1
    assert [path.name for path in folder.iterdir()] == ["test_shop.py"]
    assert (folder / "test_shop.py").read_text() == "mine"


def test_a_name_that_cannot_be_a_new_module_is_refused(folder: Path) -> None:
    for name, code in (("celery", 1), ("json", 1), ("my-shop", 2), ("class", 2), ("a/b", 2)):
        assert call(Default("default", set_as_current=False), "init", name).code == code
        assert list(folder.iterdir()) == []


def test_an_app_of_ones_own_gets_the_workflow_alone(folder: Path) -> None:
    app = Celery("shop", set_as_current=False)
    said = call(app, "init")
    assert "Celery(" not in (folder / "workflows.py").read_text()
    assert [words for _, words in said.rows[2:4]] == [
        "from celery_durable import Durable; durable = Durable(app)",
        'imports = ["workflows"]',
    ]
    durable = Durable(app)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[None], step: Step) -> None:
        pass

    said = call(app, "init", "others")
    assert (said.code, said.err.splitlines()[0]) == (1, "error: The app has a workflow 'order' already.")
    assert not (folder / "others.py").exists()


def test_the_wheel_has_the_templates() -> None:
    templates = resources.files("celery_durable.cli") / "templates"
    assert {each.name for each in templates.iterdir()} == {
        "imports.txt", "imports_and_app.txt", "test.txt", "workflow.txt"
    }  # fmt: skip
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built == {"packages": ["celery_durable"]}  # all files of the package that git does not ignore
