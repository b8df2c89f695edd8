"""docker-compose.yml, as far as it can be judged without an engine: read, resolved, and its commands tried."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.smoke.proc import ROOT, python

yaml = pytest.importorskip("yaml")
OURS = {"migrate", "worker", "beat", "flower"}


def resolved(text: str, environment: dict[str, str]) -> str:
    """The file with its variables filled in, as compose does it: ${NAME:-default}, ${NAME:?complaint}, $$."""

    def fill(found: re.Match[str]) -> str:
        if found.group(0) == "$$":
            return "$"
        name, kind, rest = found.group(1, 2, 3)
        value = environment.get(name, "")
        assert value or kind == "-", f"{name}: {rest}"
        return value or rest

    return re.sub(r"\$\$|\$\{(\w+):([-?])([^}]*)\}", fill, text)


@pytest.fixture(scope="module")
def text() -> str:
    lines = (ROOT / "docker-compose.yml").read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


@pytest.fixture(scope="module")
def compose(text: str) -> dict[str, Any]:
    return yaml.safe_load(resolved(text, {"FLOWER_BASIC_AUTH": "user:password"}))


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return dict(compose["services"])


def test_flower_does_not_start_without_a_password(services: dict[str, Any], tmp_path: Path) -> None:
    celery = tmp_path / "celery"
    celery.write_text("#!/bin/sh\necho started $@\n")
    celery.chmod(0o755)
    command = [word.replace("$$", "$") for word in services["flower"]["command"]]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for given, code in (({}, 2), ({"FLOWER_BASIC_AUTH": ""}, 2), ({"FLOWER_BASIC_AUTH": "eve:sesame"}, 0)):
        done = subprocess.run(command, env={**path, **given}, capture_output=True, text=True, timeout=50)
        assert bool(done.returncode) == bool(code), done
        assert ("set FLOWER_BASIC_AUTH=user:password" in done.stderr) == bool(code)
        assert done.stdout.startswith("started -A examples.order_approval flower ") != bool(code)


@pytest.mark.gate
def test_the_application_reads_that_environment(services: dict[str, Any]) -> None:
    given = services["worker"]["environment"]
    program = (
        "import json; from examples.order_approval import app; "
        "print(json.dumps([app.conf.broker_url, app.conf.durable_database_url]))"
    )
    told = subprocess.run(
        python("-c", program),
        cwd=ROOT,
        env={**os.environ, **given, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout
    assert json.loads(told) == [given["CELERY_BROKER_URL"], given["DURABLE_DATABASE_URL"]]


@pytest.mark.gate
def test_every_command_is_one_that_exists(services: dict[str, Any], tmp_path: Path) -> None:
    """With --help at its end a command only reads its options, and stumbles over those that do not exist."""
    commands = [services[name]["command"] for name in OURS - {"flower"}]
    commands.append(re.findall(r"\S+", services["worker"]["healthcheck"]["test"][1]))
    commands.append(json.loads((ROOT / "Dockerfile").read_text().rpartition("CMD ")[2]))
    assert {command[0] for command in commands} == {"celery"}
    program = """
import json, sys
from celery.bin.celery import celery
from click.testing import CliRunner
from celery_durable.cli import durable
celery.add_command(durable, "durable")  # what the entry point does where the package is installed
for command in json.loads(sys.argv[1]):
    ended = CliRunner().invoke(celery, [*command[1:], "--help"])
    print(ended.exit_code, *command, "" if ended.exit_code == 0 else ended.output)
"""
    told = subprocess.run(
        python("-c", program, json.dumps(commands)),
        cwd=ROOT,
        env={**os.environ, "DURABLE_EXAMPLES_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout
    assert [line for line in told.splitlines() if not line.startswith("0 celery -A examples.order_approval ")] == []
    assert len(told.splitlines()) == len(commands)


@pytest.mark.gate
def test_flower_and_our_commands_come_with_what_the_image_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["celery.commands"]["durable"] == "celery_durable.cli:durable"
    assert re.search(r'pip install "\.\[all\]" flower', (ROOT / "Dockerfile").read_text())


def test_the_image_is_made_of_files_that_are_there_and_let_through() -> None:
    copied = [
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in let_through
