"""Pytest sessions, each in a process that is forked after the imports: `python -m tests.testing.sessions`.

The imports and the first harness take longer than a session. It reads lines of JSON with the arguments of pytest, the
folder to run in and the file for the output. For each it prints the exit code.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from typing import NoReturn

import pytest

from celery_durable.testing import DurableHarness


def use_harness() -> None:
    """Import what a harness and a workflow import, and make the database that all harnesses copy."""

    def warm(event, step):
        step.sleep("nap", 1)
        return step.do("charge", lambda: "paid")

    with DurableHarness([warm]) as harness:
        harness.create(warm)
        harness.advance(2)


def run_forked(args: list[str], folder: str, output: str) -> NoReturn:
    """Run a session as the child of a fork, and end as an interpreter ends: with its hooks."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # further lines belong to the parent
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m pytest` does
    sys.exit(pytest.main(args))


def serve() -> None:
    use_harness()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--version", "--version"])  # imports pytest's own plugins
    gc.freeze()  # each session collects garbage several times
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run_forked(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
