"""One body for both kinds of steps: a workflow whose step "book" does at each attempt what the test says."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
import sqlalchemy as sa

from celery_durable import (
    Completed,
    Dead,
    LinearContext,
    LinearStep,
    Retries,
    Retry,
    Step,
    StepConfig,
    StepTx,
    Waiting,
    WorkflowEvent,
)
from celery_durable.model import StepRecord
from celery_durable.testing.runtime import HarnessRuntime
from tests.support.authors import ledger
from tests.support.lines import Line
from tests.support.world import FlowControl, Instance, SerializationFailure, World, insert_name

T = TypeVar("T")
DELAY = 10
LONG = 10


@dataclass(frozen=True)
class ByKind(Generic[T]):
    """An expectation in which the two kinds of steps differ."""

    function: T
    linear: T


def expect(value: T | ByKind[T], kind: str) -> T:
    return getattr(value, kind) if isinstance(value, ByKind) else value


RETRIED = ByKind("waiting", "READY")
FAILED = ByKind("errored", "DEAD")
COMPLETED = ByKind("completed", "DONE")
UNTOUCHED = ByKind(None, "READY")  # a step of a function has no row before an attempt is recorded
UNKNOWN = ByKind(None, "RUNNING")  # the worker of the attempt has recorded nothing since
LOST = sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))

kinds = pytest.mark.parametrize("kind", ["function", "linear"])


def on(**uses_of: list[str]) -> Any:
    """Run a test on these databases, with these ways of writing on each."""
    pairs = [(database, use) for database, each in uses_of.items() for use in each]
    return pytest.mark.parametrize(("database", "use"), pairs, indirect=["database"])


WAYS = ["nothing", "mutate", "session"]
_USES: dict[str, list[str]] = {"sqlite": WAYS, "postgresql": ["nothing", "session"], "mariadb": ["session"]}
everywhere = on(**_USES)


def each(name: str, cases: Iterable[Any], *, with_async: bool = False) -> Any:
    """Run each case with both kinds of steps: with one way of writing in turn, and every night with all of them.

    A case has a ``name``, and may have a kind that ``only`` fits it.
    """
    ways = [*WAYS, "async"] if with_async else WAYS
    pairs = [(kind, case) for case in cases for kind in ("function", "linear") if case.only in (None, kind)]
    params = [
        pytest.param(
            kind,
            case,
            database,
            use,
            id=f"{kind}-{case.name}-{database}-{use}",
            marks=() if (database, use) == ("sqlite", ways[number % len(ways)]) else pytest.mark.slow,
        )
        for number, (kind, case) in enumerate(pairs)
        for database, uses in {**_USES, "sqlite": ways}.items()
        for use in uses
    ]
    return pytest.mark.parametrize(("kind", name, "database", "use"), params, indirect=["database"])


@dataclass(frozen=True)
class Call:
    """One call of the body. ``context``: the linear context, or the `Step` of a function."""

    bench: Bench
    tx: StepTx
    context: Any

    def write(self) -> None:
        """Write one row by the means under test, send a task, and register a write in case the step fails."""
        number, use = self.tx.attempt, self.bench.use
        if use == "nothing":
            return
        text, row = f"attempt {number}", {"instance": "i-1", "run": 1, "step": "book", "attempt": number}
        self.context.log.info(text)
        self.tx.send_task("mail", number)
        self.tx.on_terminal_error(insert_name(f"failed at {number}"))
        if use == "session":
            self.tx.session.execute(sa.insert(ledger).values(row))
        else:
            self.tx.mutate(lambda session: session.execute(sa.insert(ledger).values(row)))


Act = Callable[[Call], Any]


class Bench:
    """An instance of a workflow of either kind: step "book" runs the body twice at most, step "ship" follows.

    ``use``: how the body writes: "nothing", "mutate" or "session"; an "async" body mutates. ``acts``: what its first,
    second and further calls do after that, or before it without ``writes_first``. A call without an act works.
    ``is_timed_by_clock``: the timeout is measured with the clock of the world, instead of a real timer.
    """

    def __init__(
        self,
        world: World,
        kind: str,
        use: str,
        *acts: Act,
        timeout: float | None = 60,
        writes_first: bool = True,
        is_timed_by_clock: bool = False,
    ) -> None:
        self.world, self.kind, self.use = world, kind, use
        self.calls: list[int] = []
        """The number of the attempt, for each call of the body."""
        self.released = threading.Event()
        """What the acts that overstay their timeout wait for."""
        self._acts, self._writes_first = acts, writes_first
        self._threads: list[threading.Thread] = []
        flow = self._function(timeout) if kind == "function" else self._linear(timeout)
        self.instance: Instance = flow.create()
        if use == "nothing":
            world.exempt["I1"] = "this body books nothing"
        if is_timed_by_clock:
            runtime: Any = world.worker.runtime
            runtime.can_interrupt = lambda: False
            runtime.run_concurrently = functools.partial(HarnessRuntime.run_concurrently, runtime)

    def _function(self, timeout: float | None) -> FlowControl:
        config = StepConfig(retries=Retries(limit=1, delay=DELAY, backoff="constant"), timeout=timeout)

        @self.world.workflow
        def order(event: WorkflowEvent, step: Step) -> Any:
            async def book(tx: StepTx) -> Any:
                await asyncio.sleep(0)
                return self._body(tx, step)

            booked = step.do("book", config, book if self.use == "async" else lambda tx: self._body(tx, step))
            return step.do("ship", lambda: booked)

        return order

    def _linear(self, timeout: float | None) -> FlowControl:
        def book(ctx: LinearContext) -> Any:
            returned = self._body(ctx.tx, ctx)
            return returned if isinstance(returned, (Retry, Dead, Waiting)) else Completed(returned)

        async def book_async(ctx: LinearContext) -> Any:
            await asyncio.sleep(0)
            return book(ctx)

        step = LinearStep("book", max_attempts=2, delay=DELAY, backoff="constant", timeout=timeout)
        answers = {"book": book, "ship": lambda ctx: Completed(ctx.results["book"])}
        line = Line(self.world, [step, LinearStep("ship")], **answers)
        if self.use == "async":
            line.flow.definition.handlers["book"] = book_async  # type: ignore[attr-defined]
        return line.flow

    def _body(self, tx: StepTx, context: Any) -> Any:
        self.calls.append(tx.attempt)
        if self.use != "async":  # the thread of the event loop goes on
            self._threads.append(threading.current_thread())
        self.world.clock.advance(2)  # what an attempt takes
        call = Call(self, tx, context)
        act = self._acts[len(self.calls) - 1] if len(self.calls) <= len(self._acts) else works
        if self._writes_first:
            call.write()
        returned = act(call)
        if not self._writes_first:
            call.write()
        return returned

    # --- driving --------------------------------------------------------------------------------

    def advance(self, *, is_on_thread: bool = False) -> str:
        """Deliver one message; returns what the worker says."""
        self.world.messages.clear()
        said: list[str] = []
        if is_on_thread:
            thread = threading.Thread(target=lambda: said.append(self.instance.advance()))
            thread.start()
            thread.join(LONG)
        else:
            said.append(self.instance.advance())
        return said[0]

    def finish(self) -> None:
        """Release the bodies that still run, and wait for them."""
        self.released.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LONG)
                assert not thread.is_alive()

    # --- what there is --------------------------------------------------------------------------

    @property
    def step(self) -> StepRecord:
        return next(step for step in self.instance.steps() if step.name == "book")

    def check(
        self,
        *,
        calls: Any,
        status: Any,
        attempts: Any = None,
        error: Any = None,
        committed: Any = (),
        sent: Any = None,
        undone: int | None = None,
        logged: Any = None,
        system: Any = (),
    ) -> None:
        """Compare what is recorded with what should be. Each argument may be a `ByKind`.

        Args:
            calls: The number of the attempt, for each call of the body.
            status: The recorded status of the step; None if it has no row.
            attempts: The recorded number of attempts.
            error: The recorded error, as "name: message".
            committed: The attempts whose row is in the author's table.
            sent: The attempts whose task was sent, by default those of ``committed``.
            undone: The attempt whose write for a terminal error is there.
            logged: The attempts whose log lines are there, by default those of ``calls``.
            system: The engine's own log lines.
        """
        step = next((step for step in self.instance.steps() if step.name == "book"), None)
        logs = self.instance.logs()
        found: dict[str, Any] = {
            "calls": self.calls,
            "status": None if step is None else str(step.status),
            "attempts": None if step is None else step.attempts,
            "error": None if step is None or step.error is None else f"{step.error.name}: {step.error.message}",
            "committed": [row.attempt for row in self.world.rows(sa.select(ledger.c.attempt))],
            "sent": [task.content["args"][0] for task in self.world.sent],
            "undone": self.world.names(),
            "logged": [line.message for line in logs if line.category != "system"],
            "system": [line.message for line in logs if line.category == "system"],
        }
        expected = {
            "calls": list(expect(calls, self.kind)),
            "status": expect(status, self.kind),
            "attempts": None if step is None else expect(attempts, self.kind),
            "error": None if step is None else expect(error, self.kind),
            "committed": self._written(committed),
            "sent": self._written(committed if sent is None else sent),
            "undone": [f"failed at {number}" for number in self._written([] if undone is None else [undone])],
            "logged": [f"attempt {number}" for number in self._written(calls if logged is None else logged)],
            "system": list(expect(system, self.kind)),
        }
        assert found == expected, f"{found} instead of {expected}"

    def _written(self, attempts: Any) -> list[int]:
        return [] if self.use == "nothing" else list(expect(attempts, self.kind))


def works(call: Call) -> str:
    return f"booked at {call.tx.attempt}"


def raises(error: BaseException) -> Act:
    def act(call: Call) -> Any:
        raise error

    return act


def returns(value: Any) -> Act:
    return lambda call: value


def mutates(write: Callable[[Any], Any]) -> Act:
    return lambda call: call.tx.mutate(write)


def sleeps(call: Call) -> str:
    """Let the time pass on the clock of the world."""
    call.bench.world.clock.advance(10)
    return "too late"


def waits(call: Call) -> str:
    """Let real time pass."""
    call.bench.released.wait(LONG)
    return "too late"


def catches_the_timeout(call: Call) -> str:
    try:
        return waits(call)
    except BaseException:  # what a careless author writes
        return "too late"


def writes_late(call: Call) -> str:
    waits(call)
    call.write()
    return "too late"


def dies(call: Call) -> None:
    call.bench.world.worker.die()


def dies_at(checkpoint: str, then: Act = works) -> Act:
    def act(call: Call) -> Any:
        call.bench.world.worker.runtime.crash_at = checkpoint
        return then(call)

    return act


def is_taken_over(then: Act) -> Act:
    """The worker pauses until its lease has expired and another one has ended the run. Then it continues."""

    def act(call: Call) -> Any:
        world = call.bench.world
        frozen = world.worker
        frozen.suspend()
        world.advance(100)
        world.sweeper.sweep()
        world.messages.clear()
        world.new_worker().advance(call.bench.instance.ref)
        frozen.wake_up()
        return then(call)

    return act
