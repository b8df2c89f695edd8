"""The tutorial, typed as it stands: its files, `durable dev`, and the commands of its second terminal."""

from __future__ import annotations

import ast
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, all_blocks_of, base_of, blocks

TUTORIAL = ROOT / "docs" / "tutorial"
APPEARS = {
    ("first-workflow.md", "start"): "order/order-41#1\trun\tcomplete",
    ("crash.md", "start"): "packing order 42",
    ("crash.md", "dev", 2): "order/order-42#1\trun\tcomplete",
    ("approval.md", "start"): "waiting\twait for approval",
    ("approval.md", "send-event"): "order/order-43#1\trun\tcomplete",
    ("failure.md", "start"): "order/order-47#1\trun\terrored",
    ("failure.md", "retry"): "waiting\ttime to change your mind",
    ("change.md", "start"): "waiting\ttime to change your mind",
}
"""What the first terminal shows after a command; `dev` with the number of its start, from 1."""
OUTPUTS = {
    ("first-workflow.md", "start"): "order-41\n",
    ("approval.md", "send-event"): "Sent\tapproval\torder/order-43\n",
    ("first-workflow.md", "show"): "step\tship\tdo\tcompleted\t1/6",
    ("crash.md", "show"): "step\tcharge card\tdo\tcompleted\t1/6",
    ("crash.md", "show", 2): "step\tpack\tdo\tcompleted\t2/6",
    ("approval.md", "explain"): 'WAITING_EVENT\tWaits for event "approval" at step "wait for approval"',
    ("approval.md", "show"): "instance\torder\torder-43\tcomplete\t1",
    ("fan-out.md", "watch"): "run\tcomplete",
    ("failure.md", "ls"): "order\torder-47\terrored\t",
    ("failure.md", "explain"): "FAILED\tIt failed ",
    ("failure.md", "show"): "origin\torder-47\t1\tcharge card",  # run 2, still waiting or complete already
}
"""What a command prints, by page, command and the number of its use."""
CODES = {("change.md", "preflight", 2): 1}
IN_GATE = ["first-workflow.md", "approval.md", "failure.md"]
AT_NIGHT = ["crash.md", "fan-out.md", "test.md", "change.md"]
"""Their code runs in test_pages, and test_console knows their commands."""


class Reader:
    """A reader in an empty folder with two terminals."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page, self.folder, self.log = page, folder, folder / "dev.log"
        self.environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
        self.dev: subprocess.Popen[bytes] | None = None
        self.used: dict[str, int] = {}
        self.starts = 0
        base = base_of(TUTORIAL / page)
        if base is not None:
            self.write(blocks(base, "python")[0].text)

    def write(self, code: str) -> None:
        (self.folder / "shop.py").write_text(code)
        if self.dev is not None and self.dev.poll() is None:
            self.wait_until_started()

    def wait_until_started(self) -> None:
        """`dev` prints how to stop it whenever it starts, also by itself after an edit."""
        self.starts += 1
        self.wait_for("Ctrl-C\n", times=self.starts)

    def follow(self, block: Block) -> None:
        if block.language == "python":
            self.edit(block.text)
            return
        for line in block.text.splitlines():
            if block.language == "console":
                self.type(shlex.split(line)[1:])
            elif line.startswith("kill -9"):
                self.stop(signal.SIGKILL)
            elif line == "pytest":
                self.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."], 0)

    def edit(self, code: str) -> None:
        """Save a whole file, or replace the functions of this name."""
        if "def test_" in code:
            (self.folder / "test_shop.py").write_text(code)
        elif "Durable(app)" in code:
            self.write(code)
        else:
            for function in ast.parse(code).body:
                if isinstance(function, ast.FunctionDef):
                    self.replace(function.name, code)

    def replace(self, name: str, code: str) -> None:
        old = (self.folder / "shop.py").read_text()
        found = next(each for each in ast.parse(old).body if getattr(each, "name", None) == name)
        assert isinstance(found, ast.FunctionDef)
        assert old.count(code) == 0, "the page changes nothing"
        first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
        lines = old.splitlines()
        self.write("\n".join([*lines[: first - 1], code.rstrip(), *lines[found.end_lineno :]]) + "\n")

    def type(self, words: list[str]) -> None:
        if words[0] == "pip":
            return
        assert words[:4] == ["celery", "-A", "shop", "durable"]
        command = words[4]
        self.used[command] = number = self.used.get(command, 0) + 1
        if command == "dev":
            self.stop(signal.SIGINT)
            self.start()
        else:
            output = self.run([sys.executable, "-m", *words], self.expected(CODES, command, number) or 0)
            assert (self.expected(OUTPUTS, command, number) or "") in output
        if text := self.expected(APPEARS, command, number):
            self.wait_for(text)

    def expected(self, table: dict, command: str, number: int) -> object:
        return table.get((self.page, command, number)) or (table.get((self.page, command)) if number == 1 else None)

    def start(self) -> None:
        with self.log.open("ab") as out:
            words = [sys.executable, "-m", "celery", "-A", "shop", "durable", "dev"]
            self.dev = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=out, stderr=out)
        self.wait_until_started()

    def stop(self, number: int) -> None:
        if self.dev is not None and self.dev.poll() is None:
            self.dev.send_signal(number)
            assert self.dev.wait(timeout=60) in {0, -signal.SIGKILL}, self.log.read_text()

    def run(self, words: list[str], code: int) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def wait_for(self, text: object, times: int = 1) -> None:
        deadline = time.monotonic() + 90
        while self.log.read_text().count(str(text)) < times:
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.log.read_text()}"
            time.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    "durable" not in {each.name for each in entry_points(group="celery.commands")},
    reason="celery_durable is on the path, but not installed, so celery does not know its command",
)
@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(page, marks=pytest.mark.gate) for page in IN_GATE),
        *(pytest.param(page, marks=pytest.mark.slow) for page in AT_NIGHT),
    ],
)
def test_a_page_of_the_tutorial_works_as_it_is_written(page: str, tmp_path: Path) -> None:
    reader = Reader(page, tmp_path)
    try:
        for block in all_blocks_of(TUTORIAL / page):
            reader.follow(block)
    finally:
        reader.stop(signal.SIGINT)
    for table in (APPEARS, OUTPUTS, CODES):
        for _, command, *number in (key for key in table if key[0] == page):
            assert reader.used[command] >= (number[0] if number else 1), "a command of the page is not there any more"
