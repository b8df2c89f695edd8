"""The quickstart, typed as it stands: a file, `durable dev`, and the commands of its second terminal."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks

PAGE = ROOT / "docs" / "quickstart.md"


def durable_lines() -> list[list[str]]:
    lines = [line[2:] for block in blocks(PAGE, "console") for line in block.text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("celery -A shop durable ")]


def celery(folder: Path, args: list[str]) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "celery", *args], os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.timeout(180)
@pytest.mark.skipif(
    "durable" not in {each.name for each in entry_points(group="celery.commands")},
    reason="celery_durable is on the path, but not installed, so celery does not know its command",
)
def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(blocks(PAGE, "python")[0].text)
    dev, start, *others, migrate = durable_lines()
    assert dev[-1] == "dev"
    assert start[3] == "start"
    assert migrate[-1] == "migrate"

    command, env = celery(tmp_path, dev)
    log = tmp_path / "dev.log"
    with log.open("wb") as out:
        running = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=out)
    try:
        wait_for("stop", log)
        assert type_in(tmp_path, start) == "order-42\n"
        wait_for("waiting\twait for approval", log)
        outputs = {args[3]: type_in(tmp_path, args) for args in others}
        wait_for("run\tcomplete", log)
        assert "step\tcharge card\tdo\tcompleted\t" in outputs["show"]
        assert outputs["send-event"] == "Sent\tapproval\torder/order-42\n"
        assert type_in(tmp_path, ["-A", "shop", "durable", "ls"]).startswith("order\torder-42\tcomplete\t")
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 0, log.read_text()


def type_in(folder: Path, args: list[str]) -> str:
    command, env = celery(folder, args)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{log.read_text()}"
        time.sleep(0.05)
