"""The commands in the examples' docstrings, with a real `celery worker` and no server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import examples.embedded
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate

pytestmark = pytest.mark.timeout(180)

ROOT = Path(examples.embedded.__file__).parents[1]


class Terminal:
    """Runs commands in the repository, on databases and messages of its own."""

    def __init__(self, folder: Path) -> None:
        self.env = os.environ | {"DURABLE_EXAMPLES_DIR": str(folder)}
        self.log = folder / "worker.log"
        store = Store(f"sqlite:///{folder}/durable.sqlite3")
        migrate.upgrade(store)
        store.close()
        self.worker: subprocess.Popen[bytes] | None = None

    def start_worker(self, module: str) -> None:
        with self.log.open("wb") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", module, "worker", "--loglevel", "INFO"],
                cwd=ROOT,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log.read_text()
        return done.stdout

    def run_until(self, wanted: str, *command: str) -> str:
        output, tries = "", 60
        while not re.search(wanted, output):
            tries -= 1
            assert tries, f"{wanted!r} did not come:\n{output}\n{self.log.read_text()}"
            output = self.run(*command)
        return output

    def close(self) -> None:
        if self.worker is not None:
            os.killpg(self.worker.pid, signal.SIGKILL)  # with its pool; nothing here is worth a warm shutdown
            self.worker.wait()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


@pytest.mark.gate
def test_an_order_by_hand(terminal: Terminal) -> None:
    terminal.start_worker("examples.order_approval")
    assert terminal.run("examples.order_approval", "start", "order-1", "--cents", "12500").startswith("order-1: ")
    terminal.run_until("wait for approval +waiting", "examples.order_approval", "show", "order-1")
    terminal.run("examples.order_approval", "approve", "order-1", "--by", "eve")
    output = terminal.run_until("complete", "examples.order_approval", "show", "order-1")
    assert output.startswith("order-1: complete shipped\n")
    assert "Mail to boss@example.com: approve order order-1?" in terminal.log.read_text()


@pytest.mark.gate
def test_a_newcomer_by_hand(terminal: Terminal) -> None:
    terminal.start_worker("examples.onboarding_drip")
    terminal.run("examples.onboarding_drip", "start", "ada", "--day-seconds", "0.5")
    terminal.run("examples.onboarding_drip", "activate", "ada")
    terminal.run_until(r"a month of use +waiting +until", "examples.onboarding_drip", "show", "ada")


@pytest.mark.gate
def test_an_index_by_hand(terminal: Terminal, tmp_path: Path) -> None:
    target = tmp_path / "index.json"
    assert terminal.run("examples.document_etl", "examples/texts", str(target)).startswith("4 documents, ")
    target.unlink()
    terminal.start_worker("examples.document_etl")
    assert terminal.run("examples.document_etl", "examples/texts", str(target), "--worker").startswith("4 documents, ")
    assert target.exists()
