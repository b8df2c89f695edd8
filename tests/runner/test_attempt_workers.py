"""The contract of an attempt whose worker dies, loses its claim or stops, for both kinds of steps.

As in test_attempt_contract.py, each case says once what is recorded; `ByKind` marks where the two kinds differ.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from celery_durable import NonRetryableError
from tests.support.attempts import (
    COMPLETED,
    FAILED,
    LOST,
    RETRIED,
    UNKNOWN,
    UNTOUCHED,
    Act,
    ByKind,
    Call,
    dies,
    dies_at,
    each,
    everywhere,
    is_taken_over,
    kinds,
    on,
    raises,
    returns,
    works,
)
from tests.support.world import World

LEASE = timedelta(seconds=31)
SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"

# --- workers that are lost ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What the body does, or another does to its run, and what comes of it."""

    name: str
    act: Act
    result: Any = None
    only: str | None = None


@dataclass(frozen=True)
class Death:
    """Where the first worker dies, what is recorded then, and what in the end."""

    name: str
    """Of the checkpoint."""
    left: Any
    calls: Any
    attempts: Any
    committed: Any
    only: str | None = None


ONE_LOST = ByKind(2, 1)
DEATHS = [
    # Before a linear step is RUNNING, a death is no attempt of it. A function's open step counts each death.
    Death("claimed", UNTOUCHED, ByKind([2], [1]), ByKind(2, 0), ByKind([2], [1])),
    Death("before-body", UNKNOWN, [2], ONE_LOST, [2]),
    Death("after-body", UNKNOWN, [1, 2], ONE_LOST, [2]),
    Death("before-commit", UNKNOWN, [1, 2], ONE_LOST, [2]),
    Death("after-commit", COMPLETED, [1], ByKind(1, 0), [1]),
]


@each("death", DEATHS)
def test_a_worker_that_dies_costs_an_attempt_and_leaves_nothing(
    make_bench: Any, kind: str, use: str, death: Death
) -> None:
    is_before_the_body = death.name in ("claimed", "before-body")
    bench = make_bench(kind, use, works if is_before_the_body else dies_at(death.name))
    if is_before_the_body:
        bench.world.worker.runtime.crash_at = death.name
    assert bench.advance() == "crashed"
    has_committed = death.name == "after-commit"
    bench.check(
        calls=[] if is_before_the_body else [1],
        status=death.left,
        attempts=ByKind(1, 0),
        committed=[1] if has_committed else [],
        sent=[],  # a committed message waits in the outbox
        logged=[1] if has_committed else [],
    )
    bench.world.run_after(LEASE)
    bench.world.run_after(LEASE)
    bench.check(
        calls=death.calls, status=COMPLETED, attempts=death.attempts, committed=death.committed, logged=death.committed
    )
    assert bench.instance.status == "complete"


@everywhere
@kinds
@pytest.mark.parametrize("checkpoint", ["before-commit", "after-commit"])
def test_a_failure_is_on_record_or_the_worker_is_lost_and_either_way_it_is_one_attempt(
    make_bench: Any, kind: str, use: str, checkpoint: str
) -> None:
    bench = make_bench(kind, use, dies_at(checkpoint, raises(ValueError("no card"))))
    assert bench.advance() == "crashed"
    is_recorded = checkpoint == "after-commit"
    if is_recorded:
        bench.check(calls=[1], status=RETRIED, attempts=1, error="ValueError: no card")
    else:
        bench.check(calls=[1], status=UNKNOWN, attempts=0, logged=[])
    bench.world.run_after(LEASE)
    logged = [1, 2] if is_recorded else [2]
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2], logged=logged)


WORKER_DIED = ByKind(
    "StepMaxAttemptsExceeded: 2 of 2 attempts are used up, and the worker of the last one died",
    "LEASE_EXPIRED: the worker of the last attempt died",
)


@on(sqlite=["nothing", "session"], postgresql=["session"])
@kinds
@pytest.mark.parametrize("first", [dies, raises(ValueError("no card"))], ids=["dies", "fails"])
def test_a_last_attempt_whose_worker_dies_fails_the_step(make_bench: Any, kind: str, use: str, first: Act) -> None:
    bench = make_bench(kind, use, first, dies)
    bench.world.run_until_idle()
    bench.world.run_after(LEASE)
    bench.world.run_after(LEASE)
    bench.world.run_after(LEASE)
    logged = [] if first is dies else [1]
    bench.check(calls=[1, 2], status=FAILED, attempts=2, error=WORKER_DIED, logged=logged)
    assert bench.instance.error == (WORKER_DIED.function if kind == "function" else WORKER_DIED.linear)


@on(sqlite=["nothing", "session"], postgresql=["session"])
@kinds
def test_a_last_attempt_that_fails_after_a_worker_died_fails_the_step(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, dies, raises(ValueError("no card")))
    bench.world.run_until_idle()
    bench.world.run_after(LEASE)
    bench.check(calls=[1, 2], status=FAILED, attempts=2, error="ValueError: no card", undone=2, logged=[2])


# --- workers that have lost their claim -----------------------------------------------------------


def publishes(call: Call) -> None:
    call.context.publish("progress", 1)


LATE = [
    Case("works", works),
    Case("fails", raises(ValueError("no"))),
    Case("fails for good", raises(NonRetryableError("no"))),
    Case("loses its transaction", raises(LOST)),
    Case("no JSON", returns({1, object()})),
    Case("publishes", publishes),
]


@each("late", LATE)
def test_whatever_a_body_does_after_its_claim_was_lost_changes_nothing(
    make_bench: Any, kind: str, use: str, late: Case
) -> None:
    # On SQLite a session holds the only write lock, so the body writes after the takeover.
    bench = make_bench(kind, use, is_taken_over(late.act), writes_first=False)
    assert bench.advance() == SUPERSEDED
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2], logged=[2])
    assert (bench.instance.output, bench.instance.row.run_number) == ("booked at 2", 1)


@everywhere
@kinds
def test_a_body_whose_instance_was_terminated_meanwhile_commits_nothing(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, lambda call: call.bench.instance.terminate(), writes_first=False)
    assert bench.advance() == SUPERSEDED
    bench.check(calls=[1], status=UNKNOWN, attempts=0, logged=[])
    assert (bench.instance.status, bench.advance()[:4]) == ("terminated", "noop")


# --- workers that stop ----------------------------------------------------------------------------


class Stop(BaseException):
    """What the harness's worker takes for the end of its process."""


@pytest.fixture
def stopping(world: World) -> None:
    world.new_worker(interruptions=(Stop,))


STOPS = [
    Case("stop", raises(Stop()), (Stop, None)),
    Case("stop in time", raises(Stop()), (Stop, 60)),
    Case("Ctrl-C", raises(KeyboardInterrupt()), (KeyboardInterrupt, None)),
    Case("Ctrl-C in time", raises(KeyboardInterrupt()), (KeyboardInterrupt, 60)),
]


@each("stop", STOPS)
@pytest.mark.usefixtures("stopping")
def test_a_worker_that_stops_releases_the_run_and_counts_no_attempt(
    make_bench: Any, kind: str, use: str, stop: Case
) -> None:
    error, timeout = stop.result
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    bench = make_bench(kind, use, stop.act, timeout=timeout)
    with pytest.raises(error):
        bench.advance()
    bench.check(calls=[1], status=UNTOUCHED, attempts=0, logged=[])
    row = bench.instance.row
    assert (bench.instance.status, row.claim_token, row.crash_count) == ("active", None, 0)
    bench.world.new_worker()
    bench.world.run_until_idle()
    bench.check(calls=[1, 1], status=COMPLETED, attempts=ByKind(1, 0), committed=[1], logged=[1])


@on(sqlite=["mutate", "session"], postgresql=["mutate", "session"])
@kinds
@pytest.mark.usefixtures("stopping")
def test_a_worker_that_stops_while_it_commits_commits_nothing(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, lambda call: call.tx.mutate(lambda _: raises(Stop())(call)))
    with pytest.raises(Stop):
        bench.advance()
    bench.check(calls=[1], status=UNTOUCHED, attempts=0, logged=[])
    bench.world.new_worker()
    bench.world.run_after(LEASE)
    bench.check(calls=[1, 1], status=COMPLETED, attempts=ByKind(1, 0), committed=[1], logged=[1])


@everywhere
@kinds
@pytest.mark.usefixtures("stopping")
def test_a_worker_that_stops_after_its_claim_was_lost_changes_nothing(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, is_taken_over(raises(Stop())), writes_first=False)
    with pytest.raises(Stop):
        bench.advance()
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2], logged=[2])


def is_told_to_stop(call: Call) -> None:
    call.bench.world.worker.should_stop = True


RELEASES = [
    Case("shutdown", is_told_to_stop, "released: due again"),
    Case("pause", lambda call: call.bench.instance.pause(), "paused"),
]


@each("release", RELEASES)
def test_an_attempt_is_recorded_before_the_run_is_released(make_bench: Any, kind: str, use: str, release: Case) -> None:
    bench = make_bench(kind, use, release.act, writes_first=False)
    assert bench.advance() == release.result
    bench.check(calls=[1], status=COMPLETED, attempts=ByKind(1, 0), committed=[1])
    assert [str(step.status) for step in bench.instance.steps()][1:] == ([] if kind == "function" else ["READY"])
