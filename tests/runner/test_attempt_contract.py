"""The contract of an attempt, for both kinds of steps: `step.do` and a step of a linear workflow.

Each case says once what the body does and what is recorded of it. `ByKind` marks the few places where the two kinds
differ: the row of a linear step exists before its first attempt, and counts only the attempts that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from celery_durable import Dead, NonRetryableError, Retry, Waiting
from celery_durable.errors import Suspend
from tests.support.attempts import (
    COMPLETED,
    DELAY,
    FAILED,
    LOST,
    RETRIED,
    Act,
    ByKind,
    Call,
    catches_the_timeout,
    each,
    everywhere,
    kinds,
    mutates,
    on,
    raises,
    returns,
    sleeps,
    waits,
    works,
    writes_late,
)
from tests.support.lost_connections import cut_commit
from tests.support.world import World, insert_name

# The timer may go off in the garbage collector's callback that hypothesis installs: Python drops what it raises there,
# and the timer goes off again a second later.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function gc_cumulative_time")


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world(max_payload_bytes=1_000)


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


class GeventTimeout(BaseException):
    """As gevent.Timeout, which is no Exception either."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise LookupError


RETRIABLE = [
    Failure("exception", raises(ValueError("no card")), "ValueError: no card"),
    Failure("exception without a timeout", raises(ValueError("no card")), "ValueError: no card", timeout=None),
    Failure("Ignore", raises(Ignore("not now")), "Ignore: not now"),
    Failure("Reject", raises(Reject("not here")), "Reject: ('not here', False)"),
    Failure("Celery's Retry", raises(CeleryRetry("later")), "Retry: later"),
    Failure("SystemExit", raises(SystemExit(2)), "SystemExit: 2"),
    Failure("GeneratorExit", raises(GeneratorExit("done")), "GeneratorExit: done"),
    Failure("Suspend", raises(Suspend()), "Suspend: "),
    Failure("gevent's Timeout", raises(GeventTimeout("2 s")), "GeventTimeout: 2 s"),
    Failure("no text", raises(Unreadable()), "Unreadable: (its __str__ raised LookupError)"),
    Failure("mutate", mutates(lambda _: 1 / 0), "ZeroDivisionError: division by zero"),
    Failure("timeout", sleeps, "StepTimeout: attempt {attempt} took longer than 5 s", timeout=5),
    Failure("Retry", returns(Retry("10 s", "busy")), "Retry: busy", only="linear"),
]
NO_JSON = (
    "$ is a set, which has no JSON form. Use plain data (or pydantic models, dataclasses, datetimes, Decimals, "
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


@each("failure", RETRIABLE, with_async=True)
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


@each("failure", [failure for failure in RETRIABLE if failure.name in ("exception", "mutate", "timeout", "Retry")])
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


@each("failure", FINAL, with_async=True)
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
@pytest.mark.parametrize(
    ("act", "kind", "is_on_thread"),
    [
        pytest.param(act, kind, is_on_thread, marks=() if (kind, is_on_thread) == quick else pytest.mark.slow)
        for act, quick in {
            waits: ("function", False),
            catches_the_timeout: ("linear", True),
            writes_late: ("function", True),
        }.items()
        for kind in ("function", "linear")
        for is_on_thread in (False, True)
    ],
)
def test_an_attempt_that_overstays_its_timeout_has_failed_whatever_its_body_does_then(
    make_bench: Any, kind: str, use: str, act: Act, is_on_thread: bool
) -> None:
    bench = make_bench(kind, use, act, timeout=1)
    bench.advance(is_on_thread=is_on_thread)
    error = "StepTimeout: attempt 1 took longer than 1 s"
    bench.check(calls=[1], status=RETRIED, attempts=1, error=error)
    bench.world.run_after(DELAY)
    bench.finish()
    bench.check(calls=[1, 2], status=COMPLETED, attempts=ByKind(2, 1), committed=[2])


# --- transactions that the database lost ----------------------------------------------------------


LOST_LINE = f"The transaction of step 'book' was lost: {LOST}"


def loses_its_commit(call: Call) -> None:
    """The commit of the first call of a body is refused, and the next one is not."""
    refusals = [LOST] if len(call.bench.calls) == 1 else []

    def refuse(_: object) -> None:
        if refusals:
            raise refusals.pop()

    call.tx.mutate(refuse)


@on(sqlite=["session"], postgresql=["session"], mariadb=["session"])
@kinds
@pytest.mark.parametrize("act", [raises(LOST), loses_its_commit], ids=["in the body", "at the commit"])
def test_a_body_whose_transaction_was_lost_runs_again_as_the_same_attempt(
    make_bench: Any, kind: str, use: str, act: Act
) -> None:
    bench = make_bench(kind, use, act)
    assert bench.advance() == "complete"
    attempts = ByKind(1, 0)
    bench.check(calls=[1, 1], status=COMPLETED, attempts=attempts, committed=[1], logged=[1], system=[LOST_LINE])


@on(sqlite=["session"], postgresql=["session"], mariadb=["session"])
@kinds
def test_an_attempt_whose_transaction_was_lost_every_time_has_failed(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, *[raises(LOST)] * 8)
    error = f"StepTransactionLost: the step's transaction was lost 4 times, at last by: {LOST}"
    bench.advance()
    bench.check(calls=[1] * 4, status=RETRIED, attempts=1, error=error, logged=[1], system=[LOST_LINE] * 4)
    bench.world.advance(DELAY)
    assert bench.advance() == "errored: StepTransactionLost"
    calls, lines = [1] * 4 + [2] * 4, [LOST_LINE] * 8
    bench.check(calls=calls, status=FAILED, attempts=2, error=error, undone=2, logged=[1, 2], system=lines)


@on(sqlite=["nothing", "mutate"], postgresql=["nothing", "mutate"])
@kinds
def test_without_a_session_an_error_of_a_database_is_a_failed_attempt(make_bench: Any, kind: str, use: str) -> None:
    bench = make_bench(kind, use, raises(LOST))
    bench.advance()
    bench.check(calls=[1], status=RETRIED, attempts=1, error=f"OperationalError: {LOST}")


@on(sqlite=["nothing", "mutate"], postgresql=["nothing", "mutate"])
@kinds
def test_without_a_session_a_commit_that_was_lost_is_repeated_without_the_body(
    make_bench: Any, kind: str, use: str
) -> None:
    bench = make_bench(kind, use, loses_its_commit)
    assert bench.advance() == "complete"
    bench.check(calls=[1], status=COMPLETED, attempts=ByKind(1, 0), committed=[1])


@on(postgresql=["nothing", "mutate", "session"], mariadb=["session"])
@kinds
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_in_doubt_is_looked_up(make_bench: Any, kind: str, use: str, when: str) -> None:
    """The connection is lost before, or after the server commits."""
    with ExitStack() as stack:

        def cut(call: Call) -> str:
            stack.enter_context(cut_commit(call.bench.world.worker.store, when=when))
            return works(call)

        bench = make_bench(kind, use, cut)
        assert bench.advance() == "complete"
    calls = [1, 1] if (use, when) == ("session", "before") else [1]
    bench.world.run_after(DELAY)  # whose messages are in doubt, too, are sent from the outbox
    lines = [line.message for line in bench.instance.logs() if line.category == "system"]
    assert [line.partition(": ")[0] for line in lines] == ["The transaction of step 'book' was lost"] * (len(calls) - 1)
    bench.check(calls=calls, status=COMPLETED, attempts=ByKind(1, 0), committed=[1], logged=[1], system=lines)
