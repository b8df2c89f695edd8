"""The help: complete, and its examples true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import celery_durable
from celery_durable.cli import durable

COMMANDS = durable.list_commands(click.Context(durable))
PROJECT = Path(celery_durable.__file__).parents[1] / "pyproject.toml"


def help_of(*command: str) -> str:
    done = CliRunner().invoke(durable, [*command, "--help"], prog_name="celery durable")
    assert done.exit_code == 0, done.output
    return done.output


def examples_in(text: str) -> list[str]:
    return re.findall(r"^ +(celery .*)$", text, flags=re.MULTILINE)


def test_every_example_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("order.json", "approval.json"):
        (tmp_path / name).write_text("{}")
    for command in (None, *COMMANDS):
        for line in examples_in(help_of(command) if command else help_of()):
            *prefix, name = shlex.split(line)[:5]
            assert prefix == ["celery", "-A", "proj", "durable"]
            assert command in (None, name)
            found = durable.get_command(click.Context(durable), name)
            assert found is not None, line
            found.make_context(name, shlex.split(line)[5:])  # raises where the line is not understood


def test_an_unknown_command_is_refused_with_the_one_that_was_probably_meant() -> None:
    for typed, meant in (("terminat", "terminate"), ("status", "show"), ("result", "show"), ("list", "ls")):
        done = CliRunner().invoke(durable, [typed], prog_name="celery durable")
        assert done.exit_code == 2
        assert done.stderr.endswith(f"Error: There is no command {typed!r}. Did you mean {meant!r}?\n")


def test_the_package_declares_the_verbs_to_celery() -> None:
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["celery.commands"]
    assert declared == {"durable": "celery_durable.cli:durable"}


def test_celery_s_other_commands_pay_nothing_for_ours() -> None:
    """Every `celery` command imports the plug-in; it may load click, which Celery has loaded, and itself."""
    program = """
import sys
import celery.bin.celery
import celery_durable.cli
ours = {name for name in sys.modules if name.partition(".")[0] == "celery_durable"}
heavy = {"sqlalchemy", "pydantic", "alembic", "rich"} & set(sys.modules)
print(*sorted(ours | heavy))
"""
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=PROJECT.parent)
    assert loaded.split() == ["celery_durable", "celery_durable.cli"]


def test_each_public_name_is_there_although_it_is_loaded_late() -> None:
    for name in celery_durable.__all__:
        assert getattr(celery_durable, name) is not None
    assert set(celery_durable.__all__) <= set(dir(celery_durable))
    with pytest.raises(AttributeError, match=r"^module 'celery_durable' has no attribute 'durables'$"):
        _ = celery_durable.durables
