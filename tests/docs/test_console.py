"""The commands in the README and the documentation exist, with the options that are shown."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import entry_points

import click
import flask.cli
import pytest
from celery.bin.celery import celery

from celery_durable.cli import durable
from tests.cli.test_remote import parse
from tests.docs.blocks import ROOT, Block, all_blocks

COMMANDS = [
    pytest.param(block, line.removeprefix("$ "), id=f"{block}: {line[2:60]}")
    for block in all_blocks("console")
    for line in block.text.splitlines()
    if line.startswith("$ ")
]


@pytest.mark.parametrize(("block", "line"), COMMANDS)
def test_a_command_can_be_typed_like_this(block: Block, line: str) -> None:
    program, *args = shlex.split(line)
    match program:
        case "make":
            [target] = args
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case "pip":
            [extras] = re.findall(r"(?:celery-durable|\.)\[([\w,]+)\]", line)
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        case "celery":
            if args[:2] == ["durable", "init"]:  # which may be there before the app
                args = ["-A", "proj", *args]
            option, _, subcommand, *rest = args
            assert option == "-A"
            check_celery(subcommand, rest)
        case "celery-durable":
            parse(line)
        case "flask":
            _, _, subcommand, *rest = args
            if subcommand == "durable":
                check_celery(subcommand, rest)
            else:
                assert subcommand in flask.cli.FlaskGroup().commands
        case _:
            pytest.fail(f"{block}: nobody knows {program!r}")


def check_celery(subcommand: str, args: list[str]) -> None:
    if subcommand == "durable":
        name, *rest = args
        command = durable.get_command(click.Context(durable), name)
        assert command is not None
        command.make_context(name, rest)
    elif subcommand in ("worker", "beat"):
        celery.commands[subcommand].make_context(subcommand, args, resilient_parsing=True)
    else:
        assert subcommand in celery.commands or subcommand in {
            each.name for each in entry_points(group="celery.commands")
        }


def test_lines_of_console_blocks_are_commands() -> None:
    assert len(COMMANDS) > 20
    for block in all_blocks("console"):
        assert all(line.startswith("$ ") for line in block.text.splitlines()), str(block)
