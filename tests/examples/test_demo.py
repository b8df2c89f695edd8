"""`make demo`: what it prints is true, what it starts it ends, what it makes it removes."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from examples import demo

pytestmark = pytest.mark.timeout(180)

ROOT = Path(demo.__file__).parents[1]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process; its temporary folder lies in ours."""
    process = subprocess.Popen(
        [sys.executable, "examples/demo.py"],
        cwd=ROOT,
        # Addresses of yours must not reach it: it would play with your database.
        env=os.environ | {"TMPDIR": str(tmp_path), "DURABLE_DATABASE_URL": "x://y", "CELERY_BROKER_URL": "x://y"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def without_numbers(text: str) -> list[str]:
    return [" ".join(re.sub(r"\d+(\.\d+)?", "N", line).split()) for line in text.splitlines()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.gate
def test_the_demo_kills_a_worker_in_a_payment_and_proves_that_nothing_happened_twice(running, tmp_path) -> None:
    output, _ = running.communicate(timeout=150)
    assert running.returncode == 0, output
    first, second = re.findall(r"celery worker +process (\d+)", output)
    assert f"$ kill -9 {first}" in output
    for fact in (
        "6 steps, 6 rows: each step is recorded once",
        "the payment started 2 times, with 1 idempotency key",
        "the bank charged the card 1 time",
        "the shop's own table: 1 order, changed 3 times (new, charged, shipped)",
    ):
        assert f"  ok     {fact}\n" in output
    assert "WRONG" not in output
    recorded = (ROOT / "docs" / "pictures" / "demo.txt").read_text()  # README shows it as a picture
    is_timeline = re.compile(r"\|[ #-]+\|")  # its bars differ from run to run
    assert set(without_numbers(is_timeline.sub("", recorded))) <= set(without_numbers(is_timeline.sub("", output)))
    assert "\033[" not in output  # no colours where nobody sees them
    assert max(map(len, output.splitlines())) <= 110
    assert not is_alive(int(first))
    assert not is_alive(int(second))
    assert list(tmp_path.iterdir()) == []
    url = output.partition("dashboard --database-url ")[2].split()[0]
    with closing(sqlite3.connect(ROOT / url.removeprefix("sqlite:///"))) as left:
        assert left.execute("SELECT instance_id, status FROM workflow_instance").fetchall() == [
            (demo.ORDER, "complete")
        ]


@pytest.mark.gate
def test_a_demo_that_is_stopped_ends_its_worker_and_removes_its_folder(running, tmp_path) -> None:
    pid = 0
    while not pid:
        line = running.stdout.readline()
        assert line, "the demo ended by itself"
        found = re.search(r"celery worker +process (\d+)", line)
        pid = int(found[1]) if found else 0
    assert is_alive(pid)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert not is_alive(pid)
    assert list(tmp_path.iterdir()) == []


# --- the proof itself ---------------------------------------------------------------------------

GOOD = {
    "durable": [
        "CREATE TABLE workflow_step (name, status, attempts)",
        *(
            f"INSERT INTO workflow_step VALUES ('{name}', 'completed', {2 if name == 'charge card' else 1})"
            for name in demo.STEPS
        ),
        "CREATE TABLE orders (state, payment, changes)",
        "INSERT INTO orders VALUES ('shipped', 'pay_1', 3)",
    ],
    "payments": [
        "CREATE TABLE payment_request (idempotency_key)",
        "INSERT INTO payment_request VALUES ('k'), ('k')",
        "CREATE TABLE payment (cents, refunded)",
        "INSERT INTO payment VALUES (12500, 0)",
    ],
}


def proof(folder: Path, capsys: pytest.CaptureFixture[str], database: str = "durable", harm: str = "") -> list[str]:
    """The proof's lines over good books, with ``harm`` done to one of them; [] where all is right."""
    for name, statements in GOOD.items():
        with closing(sqlite3.connect(folder / f"{name}.sqlite3")) as connection, connection:
            for statement in [*statements, harm if name == database else ""]:
                connection.execute(statement)
    is_proved = demo.prove(demo.Story(), demo.World(folder))
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert is_proved is not bool(wrong)
    return wrong


def test_good_books_are_proof(tmp_path, capsys) -> None:
    assert proof(tmp_path, capsys) == []


@pytest.mark.parametrize(
    ("database", "harm"),
    [
        ("durable", "INSERT INTO workflow_step VALUES ('charge card', 'completed', 2)"),
        ("durable", "INSERT INTO workflow_step VALUES ('charge card again', 'completed', 1)"),
        ("durable", "UPDATE workflow_step SET status = 'waiting' WHERE name = 'tell customer'"),
        ("durable", "UPDATE workflow_step SET attempts = 1"),
        ("durable", "UPDATE orders SET changes = 4"),
        ("durable", "INSERT INTO orders VALUES ('shipped', 'pay_1', 3)"),
        ("payments", "INSERT INTO payment VALUES (12500, 0)"),
        ("payments", "UPDATE payment_request SET idempotency_key = 'k2' WHERE rowid = 2"),
    ],
)
def test_one_wrong_row_is_noticed(tmp_path, capsys, database: str, harm: str) -> None:
    assert proof(tmp_path, capsys, database, harm)


def test_a_demo_without_proof_ends_with_1(monkeypatch, capsys) -> None:
    def play_badly(_: demo.Story, here: demo.World) -> None:
        here.log.write_text("last words")
        assert proof(here.folder, capsys, "payments", "INSERT INTO payment VALUES (12500, 0)")

    monkeypatch.setattr(demo, "run", play_badly)
    monkeypatch.setattr(demo, "timeline", lambda _: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert demo.main() == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "A count is wrong. The end of the worker's log:\n\nlast words" in capsys.readouterr().out
