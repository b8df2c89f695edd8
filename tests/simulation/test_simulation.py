"""Thousands of schedules, each decided by one integer; after each of them every invariant holds."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.simulation.run import outcomes, told
from tests.simulation.simulation import Outcome

_CHUNK = 100
QUICK, FIRST, GATE, ALL = 25, 200, 800, 10_000
RARE = (390, 418)
"""Seeds of the gate in which a parent hears that its child was terminated."""
patient = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A storm of warnings is what these tests make."""
    logger = logging.getLogger("celery_durable")
    before, logger.level = logger.level, logging.CRITICAL
    yield
    logger.setLevel(before)


def run(seeds: Sequence[int]) -> list[Outcome]:
    """The outcomes of these seeds, none of them broken."""
    found = outcomes(seeds)
    broken = [told(outcome) for outcome in found if outcome.broken]
    assert not broken, "\n".join(broken)
    return found


@patient
def test_every_invariant_holds_after_the_first_storms() -> None:
    run(range(QUICK))


@pytest.mark.gate
@patient
@pytest.mark.parametrize("first", range(FIRST, GATE, _CHUNK))
def test_every_invariant_holds_after_a_storm(first: int) -> None:
    run(range(first, first + _CHUNK))


@pytest.mark.slow
@patient
@pytest.mark.parametrize("first", range(GATE, ALL, _CHUNK))
def test_every_invariant_holds_after_more_storms(first: int) -> None:
    run(range(first, first + _CHUNK))


@pytest.mark.gate
@patient
def test_a_seed_gives_the_same_story_in_another_process() -> None:
    """Byte for byte, also where sets of names are walked through in another order."""

    def stories(hash_seed: str) -> bytes:
        return subprocess.run(
            [sys.executable, "-m", "tests.simulation.run", "--replay", "3", "4"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout

    assert stories("1") == stories("2") != b""


@pytest.mark.gate
@patient
def test_every_invariant_holds_after_storms_which_have_every_fault_in_them() -> None:
    stats: Counter[str] = Counter()
    for outcome in run([*range(FIRST), *RARE]):
        stats.update(outcome.stats)
    checkpoints = ("claimed", "before-body", "after-body", "before-commit", "after-commit", "before-publish")
    expected = {
        *(f"died at {name}" for name in checkpoints),
        *("killed", "crashed", "suspended", "starved", "stopped", "superseded", "released"),
        *("cut, applied", "cut, lost", "lost", "stray", "refused by the broker"),
        *("event", "pause", "resume", "restart", "terminate", "cancel", "emit", "rewind", "retry", "fork"),
        *("READY to RUNNING", "RUNNING to WAITING", "WAITING to READY", "WAITING to RUNNING", "RUNNING to DEAD"),
        *("Retry", "Dead", "LEASE_EXPIRED"),
        *("emission resumed", "emission crashed", "received from a topic"),
        *("task lost", "task gives up", "answer taken", "answer noop"),
        *(f"task waiting to {status}" for status in ("waiting", "completed", "errored", "cancelled")),
        *(f"child waiting to {status}" for status in ("completed", "errored", "cancelled")),
        *("task errored: StepTimeout", "child errored: StepTimeout", "child errored: ValueError"),
        *("child errored: ChildTerminated", "child errored: InstanceAlreadyExists"),
        *(f"item {way}" for way in ("pending to sent", "sent to done", "sent to failed", "sent to dead")),
        *(f"item {way}" for way in ("failed to pending", "sent to pending")),
        *(f"map {status}" for status in ("completed", "errored", "cancelled")),
        *("senders at once", "sender crashed"),
        *("batch created", "restart or create created", "restart or create restarted", "restart or create unchanged"),
        *("settle accepted", "settle refused", "prune deleted", "deleted after its retention"),
        *(f"heard of {what}" for what in ("complete", "errored", "terminated", "steps")),
        *("cancel: asked", "cancel: ended", "cancel: asked, then ended", "Cancelled raised"),
        *("ended by a limit", "read accepted"),
        *(f"limit {state}" for state in ("waiting", "blocked", "parked", "granted", "held")),
        *("messages sent", "messages lost", "message delivered", "message crashed", "message tried again"),
    }
    assert expected <= {name for name, count in stats.items() if count}, stats
