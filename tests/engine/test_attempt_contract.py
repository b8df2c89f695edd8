"""The contract of an attempt, for both kinds of steps: `step.do` and a step of a linear workflow.

Each case says once what the body does and what is recorded of it. `ByKind` marks the few places where the two kinds
differ: the row of a linear step exists before its first attempt, and counts only the attempts that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from celery_durable import Dead, NonRetryableError, Retry, Waiting
from celery_durable.errors import Suspend
from tests.engine.attempts import (
    DELAY,
    Act,
    Bench,
    ByKind,
    Call,
    catches_the_timeout,
    mutates,
    raises,
    returns,
    sleeps,
    waits,
    writes_late,
)
from tests.engine.world import World, insert_name

# The timer may go off in the garbage collector's callback that hypothesis installs: Python drops what it raises there,
# and the timer goes off again a second later.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function gc_cumulative_time")

LEASE = timedelta(seconds=31)
RETRIED = ByKind("waiting", "READY")
FAILED = ByKind("errored", "DEAD")
COMPLETED = ByKind("completed", "DONE")
UNTOUCHED = ByKind(None, "READY")  # a step of a function has no row before an attempt is recorded
UNKNOWN = ByKind(None, "RUNNING")  # the worker of the attempt has recorded nothing since
SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"

kinds = pytest.mark.parametrize("kind", ["function", "linear"])
uses = pytest.mark.parametrize("use", ["nothing", "mutate", "session"])


def on(**uses_of: list[str]) -> Any:
    """Run a test on these databases, with these ways of writing on each."""
    pairs = [(database, use) for database, each in uses_of.items() for use in each]
    return pytest.mark.parametrize(("database", "use"), pairs, indirect=["database"])


everywhere = on(sqlite=["nothing", "mutate", "session"], postgresql=["nothing", "session"], mariadb=["session"])


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world(max_payload_bytes=1_000)


@pytest.fixture
def make_bench(world: World) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*args: Any, **options: Any) -> Bench:
        benches.append(Bench(world, *args, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.finish()


@everywhere
@kinds
def test_an_attempt_that_succeeds_commits_what_it_wrote_with_the_step(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use)
    started_at = bench.world.now
    assert bench.advance() == "complete"
    bench.check(calls=[1], status=COMPLETED, attempts=ByKind(1, 0), committed=[1])
    assert bench.instance.output == "booked at 1"
    assert (bench.step.started_at, bench.step.finished_at) == (started_at, bench.world.now)


# --- failures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """What the body does, and the error that is recorded: "name: message", with the number of the attempt."""

    name: str
    act: Act
    error: str
    timeout: float | None = 60
    only: str | None = None
    """The kind of steps that can fail so."""


RETRIABLE = [
    Failure("exception", raises(ValueError("no card")), "ValueError: no card"),
    Failure("exception without a timeout", raises(ValueError("no card")), "ValueError: no card", timeout=None),
    Failure("Ignore", raises(Ignore("not now")), "Ignore: not now"),
    Failure("Reject", raises(Reject("not here")), "Reject: ('not here', False)"),
    Failure("Celery's Retry", raises(CeleryRetry("later")), "Retry: later"),
    Failure("SystemExit", raises(SystemExit(2)), "SystemExit: 2"),
    Failure("GeneratorExit", raises(GeneratorExit("done")), "GeneratorExit: done"),
    Failure("Suspend", raises(Suspend()), "Suspend: "),
    Failure("mutate", mutates(lambda _: 1 / 0), "ZeroDivisionError: division by zero"),
    Failure("timeout", sleeps, "StepTimeout: attempt {attempt} took longer than 0:00:05", timeout=5),
    Failure("Retry", returns(Retry("10 s", "busy")), "Retry: busy", only="linear"),
]
NO_JSON = (
    "$ is a set, which has no JSON form. Return plain data (or pydantic models, dataclasses, datetimes, Decimals, "
    "UUIDs, enums); keep other things elsewhere and store a reference."
)
TOO_LARGE = (
    "has 1001 bytes as JSON; at most 1000 are allowed. Keep large data elsewhere and store a reference, or raise "
    "durable_max_payload_bytes."
)


def takes_a_name_twice(call: Call) -> None:
    call.tx.mutate(insert_name("taken"))
    call.tx.mutate(insert_name("taken"))


FINAL = [
    Failure("NonRetryableError", raises(NonRetryableError("no", name="Stolen")), "Stolen: no"),
    Failure(
        "no JSON", returns({1, object()}), f"NotSerializable: Result of step 'book' cannot be stored as JSON: {NO_JSON}"
    ),
    Failure("too large", returns("x" * 999), f"PayloadTooLarge: Result of step 'book' {TOO_LARGE}"),
    Failure("constraint", takes_a_name_twice, "StepCommitConflict: The writes of step 'book' violate a constraint: "),
    Failure("Dead", returns(Dead("no")), "Dead: no", only="linear"),
    Failure("no event type", returns(Waiting("no type")), "InvalidEventType: Event type 'no type' ", only="linear"),
]


def either_kind(failures: list[Failure]) -> Any:
    each = [(kind, failure) for failure in failures for kind in ("function", "linear") if failure.only in (None, kind)]
    names = [f"{kind}-{failure.name}" for kind, failure in each]
    return pytest.mark.parametrize(("kind", "failure"), each, ids=names)


@everywhere
@either_kind(RETRIABLE)
def test_a_failed_attempt_leaves_nothing_and_is_retried(make_bench: Any, kind: str, failure: Failure, use: str) -> None:
    bench = make_bench(kind, use, failure.act, timeout=failure.timeout, is_timed_by_clock=failure.timeout == 5)
    world, instance, started_at = bench.world, bench.instance, bench.world.now
    said = bench.advance()
    due_at = world.now + timedelta(seconds=DELAY)
    bench.check(calls=[1], status=RETRIED, attempts=1, error=failure.error.format(attempt=1))
    assert said == f"waiting until {due_at:%Y-%m-%d %H:%M:%S} UTC"
    assert (instance.status, instance.run_at, bench.step.next_retry_at) == ("waiting", due_at, due_at)
    assert (bench.step.started_at, bench.step.finished_at, instance.row.crash_count) == (started_at, None, 0)
    world.run_after(DELAY - 1)
    assert bench.calls == [1]
    world.run_after(1)
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2])
    assert instance.output == "booked at 2"


@on(sqlite=["nothing", "mutate", "session"], postgresql=["session"])
@either_kind(RETRIABLE)
def test_the_failure_of_the_last_attempt_fails_the_step(make_bench: Any, kind: str, failure: Failure, use: str) -> None:
    is_timed_by_clock = failure.timeout == 5
    bench = make_bench(
        kind, use, failure.act, failure.act, timeout=failure.timeout, is_timed_by_clock=is_timed_by_clock
    )
    bench.advance()
    bench.world.advance(DELAY)
    error = failure.error.format(attempt=2)
    assert bench.advance() == f"errored: {error.partition(':')[0]}"
    bench.check(calls=[1, 2], status=FAILED, attempts=2, undone=2, error=error)
    assert bench.instance.error == error


@everywhere
@either_kind(FINAL)
def test_a_failure_that_forbids_a_retry_fails_the_step_at_once(
    make_bench: Any, kind: str, failure: Failure, use: str
) -> None:
    bench = make_bench(kind, use, failure.act)
    started_at = bench.world.now
    assert bench.advance() == f"errored: {failure.error.partition(':')[0]}"
    error = bench.instance.error
    assert error.startswith(failure.error)
    bench.check(calls=[1], status=FAILED, attempts=1, undone=1, error=error)
    assert (bench.step.started_at, bench.step.finished_at) == (started_at, bench.world.now)
    assert bench.advance().startswith("noop")


@on(sqlite=["mutate"], postgresql=["session"])
@kinds
def test_a_terminal_write_that_fails_does_not_hide_the_failure(make_bench: Any, kind: str, use: str) -> None:
    def fail_twice(call: Call) -> None:
        call.tx.on_terminal_error(lambda _: 1 / 0)
        raise NonRetryableError("no")

    bench = make_bench(kind, use, fail_twice)
    assert bench.advance() == "errored: NonRetryableError"
    line = "on_terminal_error of step 'book' failed: ZeroDivisionError('division by zero')"
    bench.check(calls=[1], status=FAILED, attempts=1, error="NonRetryableError: no", system=[line])


# --- timeouts, by a real timer --------------------------------------------------------------------


@on(sqlite=["session"], postgresql=["session"])
@kinds
@pytest.mark.parametrize("act", [waits, catches_the_timeout, writes_late], ids=lambda act: act.__name__)
@pytest.mark.parametrize("is_on_thread", [False, True], ids=["main thread", "worker thread"])
def test_an_attempt_that_overstays_its_timeout_has_failed_whatever_its_body_does_then(
    make_bench: Any, kind: str, use: str, act: Act, is_on_thread: bool
) -> None:
    bench = make_bench(kind, use, act, timeout=1)
    bench.advance(is_on_thread=is_on_thread)
    error = "StepTimeout: attempt 1 took longer than 0:00:01"
    bench.check(calls=[1], status=RETRIED, attempts=1, error=error)
    bench.world.run_after(DELAY)
    bench.finish()
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2])
