"""The commands in the README and the documentation exist, with the options that are shown."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import click
import flask.cli
import pytest
from celery.bin.celery import celery

from celery_durable.cli import durable
from tests.cli.test_remote import parse
from tests.docs.blocks import ROOT, all_blocks, blocks, page_name

PAGES = sorted({block.page for block in all_blocks("console")})


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_commands_of_a_page_can_be_typed_like_this(page: Path) -> None:
    for block in blocks(page, "console"):
        for line in block.text.splitlines():
            assert line.startswith("$ "), str(block)
            check(line.removeprefix("$ "))


def check(line: str) -> None:
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
            pytest.fail(f"nobody knows {program!r}")


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
