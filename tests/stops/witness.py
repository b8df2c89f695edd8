"""The witness: a file to which a function appends a line before it does anything else, and after it has worked.

No database and no broker is involved, so no system under test decides what it says. Only the standard library is
needed, so that each system can import it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LEASE_SECONDS = 6.0
_HELD_SECONDS = 120.0


class Declined(Exception):
    """What a first attempt raises."""


def note(folder: Path, what: str, job: str, attempt: int = 1) -> None:
    """Append a line. A process that is killed leaves a whole line, or none."""
    fd = os.open(folder / "witness", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {job} {attempt}\n".encode())
    os.close(fd)


def work(folder: Path, job: str, attempt: int, *, raises_first: bool) -> None:
    """The function of a step or a task: it works until the driver lets it go on. Some first attempts raise."""
    note(folder, "called", job, attempt)
    if raises_first and attempt == 1 and int(job.rpartition("-")[2]) % 3 == 0:
        note(folder, "raised", job, attempt)
        raise Declined(job)
    end = time.monotonic() + _HELD_SECONDS
    while not any((folder / name).exists() for name in ("go", f"go-{job}")) and time.monotonic() < end:
        time.sleep(0.02)
    note(folder, "ended", job, attempt)


@dataclass(frozen=True)
class Testimony:
    """What the file says; the keys are an job and an attempt."""

    called: Counter[tuple[str, str]]
    raised: Counter[tuple[str, str]]
    ended: Counter[tuple[str, str]]
    reported: Counter[str]
    """By job: how often a receiver of signals heard that the end of an attempt is unknown."""

    @classmethod
    def read(cls, folder: Path, prefix: str) -> Testimony:
        """What it says of ids that begin with ``prefix``."""
        path = folder / "witness"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        said = [(what, job, attempt) for what, job, attempt in lines if job.startswith(prefix)]
        called, raised, ended = (
            Counter((job, attempt) for each, job, attempt in said if each == what)
            for what in ("called", "raised", "ended")
        )
        return cls(called, raised, ended, Counter(job for what, job, _ in said if what == "reported"))

    @property
    def running(self) -> set[tuple[str, str]]:
        """The calls that have not come back."""
        return {call for call in self.called if not self.raised[call] and not self.ended[call]}
