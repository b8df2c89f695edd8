"""Async functions as steps: tasks of one event loop, with the attempts, timeouts and commits of any step."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Status, Step, StepConfig, StepFailed, StepTimeout, StepTx, concurrency, current_step
from celery_durable.errors import StepInterrupted
from celery_durable.event_loop import event_loop
from tests.support.authors import names
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.world import World, insert_name

database = on_databases("sqlite")

ONCE = StepConfig(retries=Retries(limit=0))
NEVER_ENDS = 3600


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return number * 2


def test_an_async_function_is_a_step(world: World) -> None:
    def flow(step: Step) -> list[Any]:
        branches = [step.submit(f"double {n}", double, n) for n in (2, 3)]
        return [step.do("double", double, 1), *step.gather(*branches, step.submit("plain", lambda: 7))]

    instance = flow_of(world, flow).run()
    assert instance.output == [2, 4, 6, 7]


def test_all_async_functions_of_a_process_share_a_loop_and_its_thread(world: World) -> None:
    async def where() -> tuple[int, int]:
        return id(asyncio.get_running_loop()), threading.get_ident()

    def flow(step: Step) -> list[Any]:
        places = [step.do("here", where)]
        step.sleep("rest", 1)
        return places + step.gather(step.submit("there", where), step.submit("everywhere", where))

    instance = flow_of(world, flow).run()
    world.run_after(1)
    assert len({tuple(place) for place in instance.output}) == 1
    assert instance.output[0][1] != threading.get_ident()


def test_a_branch_costs_no_thread(world: World) -> None:
    together = asyncio.Barrier(500)

    async def meet() -> int:
        await together.wait()
        return threading.active_count()

    flow = flow_of(world, lambda step: max(step.gather(*(step.submit(f"meet {n}", meet) for n in range(500)))))
    before = threading.active_count()
    assert flow.run().output <= before + 3  # the loop, the clock, and the pass's


def test_a_failed_attempt_is_retried(world: World) -> None:
    async def flaky(tx: StepTx) -> int:
        await asyncio.sleep(0)
        if tx.attempt == 1:
            raise OSError("not yet")
        return tx.attempt

    config = StepConfig(retries=Retries(limit=1, delay=5))
    instance = flow_of(world, lambda step: step.do("flaky", config, flaky)).run()
    assert instance.step("flaky").error.name == "OSError"
    world.run_after(5)
    assert instance.output == 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_an_error_of_the_function_fails_its_attempt_whatever_its_type(world: World, error: type[BaseException]) -> None:
    async def fails() -> None:
        raise error

    def flow(step: Step) -> list[Any]:
        try:
            step.do("fails", ONCE, fails)
        except StepFailed as failed:
            return [failed.error_name, step.do("double", double, 2)]
        return []

    assert flow_of(world, flow).run().output == [error.__name__, 4]


def test_the_loop_continues_after_a_task_of_the_author_has_raised_what_stops_a_loop(world: World) -> None:
    async def fails() -> None:
        await asyncio.create_task(exits())

    async def exits() -> None:
        raise SystemExit

    def flow(step: Step) -> Any:
        try:
            step.do("fails", ONCE, fails)
        except StepFailed as failed:
            return [failed.error_name, step.do("double", double, 2)]

    assert flow_of(world, flow).run().output == ["SystemExit", 4]


# --- timeouts and cancels -------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "in a branch"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_timeout_cancels_the_task(world: World, beside: bool, swallows: bool) -> None:
    ended: list[str] = []

    async def hangs() -> str:
        try:
            await asyncio.sleep(NEVER_ENDS)
        except asyncio.CancelledError:
            ended.append("cancelled")
            if not swallows:
                raise
        return "late"

    config = StepConfig(timeout=0.05, retries=Retries(limit=0))

    def flow(step: Step) -> Any:
        try:
            if beside:
                return step.gather(step.submit("hangs", config, hangs), step.submit("double", double, 2))
            return step.do("hangs", config, hangs)
        except StepTimeout as timeout:
            return timeout.error_message

    assert flow_of(world, flow).run().output == "attempt 1 took longer than 50 ms"
    assert ended == ["cancelled"]


def test_a_task_that_was_cancelled_has_failed_and_is_not_lost(world: World) -> None:
    async def hangs(tx: StepTx) -> int:
        if tx.attempt == 1:
            await asyncio.sleep(NEVER_ENDS)
        return tx.attempt

    config = StepConfig(timeout=0.05, retries=Retries(limit=1, delay=0), on_lost="fail")
    instance = flow_of(world, lambda step: step.do("hangs", config, hangs)).run()
    world.run_after(1)
    assert instance.output == 2


def test_what_ignores_its_cancellation_is_abandoned(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_SECONDS", 0.1)
    released: asyncio.Event | None = None
    ended = threading.Event()

    async def ignores(tx: StepTx) -> None:
        nonlocal released
        released = asyncio.Event()
        tx.mutate(insert_name("late"))
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    def flow(step: Step) -> Any:
        try:
            step.do("ignores", StepConfig(timeout=0.05, retries=Retries(limit=0), on_lost="fail"), ignores)
        except StepFailed as failed:
            return failed.error_name

    instance = flow_of(world, flow).run()
    assert instance.output == "OutcomeUnknown"
    assert event_loop._running is not None
    assert released is not None
    event_loop._running.loop.call_soon_threadsafe(released.set)
    assert ended.wait(10)
    assert world.names() == []


def cancel_once_it_runs(world: World, instance: Any, started: threading.Event) -> None:
    def cancel() -> None:
        assert started.wait(10)
        instance.cancel()
        world.worker.renew_leases()

    other = threading.Thread(target=cancel)
    world.worker  # noqa: B018  # started before the thread asks for it
    other.start()
    world.run_until_idle()
    other.join()


def test_a_cancel_of_the_run_cancels_the_task_of_a_step_that_may_be_abandoned(world: World) -> None:
    started, ended = threading.Event(), threading.Event()

    async def hangs() -> None:
        started.set()
        try:
            await asyncio.sleep(NEVER_ENDS)
        finally:
            ended.set()

    order = flow_of(world, lambda step: step.do("hangs", StepConfig(on_cancel="abandon"), hangs))
    instance = order.create()

    cancel_once_it_runs(world, instance, started)
    assert (instance.status, ended.is_set()) == (Status.TERMINATED, True)
    assert world.operations.history.read("order", instance.id).attempts == ()


def test_a_cancel_of_the_run_interrupts_a_function_that_may_be_abandoned_until_it_ends(world: World) -> None:
    """It may catch one interruption, or the signal comes just before it waits."""
    started, interruptions = threading.Event(), list[type[BaseException]]()

    def hangs() -> None:
        started.set()
        for _ in range(2):
            try:
                time.sleep(30)
            except BaseException as exc:
                interruptions.append(type(exc))

    instance = flow_of(world, lambda step: step.do("hangs", StepConfig(on_cancel="abandon"), hangs)).create()

    cancel_once_it_runs(world, instance, started)
    assert (instance.status, interruptions) == (Status.TERMINATED, [StepInterrupted] * 2)
    assert world.operations.history.read("order", instance.id).attempts == ()


def test_a_function_asks_whether_it_is_cancelled(world: World) -> None:
    async def asks() -> tuple[str, bool, str]:
        await asyncio.sleep(0)
        here = current_step()
        return here.name, here.is_cancelled, await asyncio.to_thread(lambda: current_step().name)

    assert flow_of(world, lambda step: step.do("asks", asks)).run().output == ["asks", False, "asks"]


def test_the_losers_of_a_race_are_cancelled(world: World) -> None:
    ended = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(NEVER_ENDS)
        finally:
            ended.set()

    def flow(step: Step) -> Any:
        return step.first("race", step.submit("hangs", hangs), step.submit("double", double, 2))

    assert flow_of(world, flow).run().output == 4
    assert ended.wait(10)


# --- what a function gets -------------------------------------------------------------------------


tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")


def test_context_variables_of_the_pass_are_copied_in(world: World) -> None:
    async def read() -> str:
        found = tenant.get()
        tenant.set("changed")
        return found

    def flow(step: Step) -> list[Any]:
        tenant.set("acme")
        return [step.do("read", read), *step.gather(step.submit("read too", read)), tenant.get()]

    assert flow_of(world, flow).run().output == ["acme", "acme", "acme"]


def test_log_lines_of_a_function_belong_to_its_step(world: World) -> None:
    def flow(step: Step) -> None:
        async def says() -> None:
            await asyncio.sleep(0)
            step.log.info("said")
            step.publish("progress", 1)

        step.do("says", says)

    instance = flow_of(world, flow).run()
    assert [(line.message, line.step_key) for line in instance.logs()] == [("said", "says")]


def test_buffered_writes_commit_with_the_step(world: World) -> None:
    async def charge(tx: StepTx) -> str:
        await asyncio.sleep(0)
        tx.mutate(insert_name("charged"))
        return tx.idempotency_key

    instance = flow_of(world, lambda step: step.do("charge", charge)).run()
    assert (instance.status, world.names()) == (Status.COMPLETE, ["charged"])


def test_a_session_is_refused(world: World) -> None:
    async def charge(tx: StepTx) -> None:
        tx.session.execute(sa.insert(names).values(name="never"))

    instance = flow_of(world, lambda step: step.do("charge", charge)).run()
    assert instance.error == (
        "StepTxMisuse: tx.session in step 'charge', an async function: it would block the event loop, and hold its "
        "locks during every await. Write with tx.mutate(fn), which calls fn(session) when the step commits; read in a "
        "step of its own, a plain function."
    )


def test_a_plain_function_that_returns_a_coroutine_is_refused(world: World, recwarn: pytest.WarningsRecorder) -> None:
    instance = flow_of(world, lambda step: step.do("lambda", lambda: double(2))).run()
    assert instance.error == (
        "NotSerializable: Result of step 'lambda' cannot be stored as JSON: $ is a coroutine, not its result: `await` "
        "it. A step takes the async function itself: step.do('ask', ask, 'why?'). Use plain data (or pydantic models, "
        "dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere and store a reference."
    )
    assert not recwarn.list


def test_a_plain_step_starts_no_loop(world: World) -> None:
    flow_of(world, lambda step: step.gather(step.submit("plain", lambda: 1))).run()
    assert event_loop._running is None


def test_a_blocked_loop_names_the_step(world: World) -> None:
    warnings: list[str] = []
    released = threading.Event()

    async def blocks() -> None:
        released.wait(30)

    class Releasing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())
            released.set()

    handler = Releasing(logging.WARNING)
    logging.getLogger("celery_durable").addHandler(handler)
    try:
        flow_of(world, lambda step: step.do("blocks", blocks)).run()
    finally:
        logging.getLogger("celery_durable").removeHandler(handler)
    [warning] = warnings
    assert warning.startswith("Step 'blocks' of order/i-1#1 has blocked the event loop of this process for 1 second(s)")
    assert "released.wait(30)" in warning
