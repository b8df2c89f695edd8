"""LAW 9: whatever a body raises itself is a failed attempt under its own name; nothing repeats at full speed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import StepInterrupted, Suspend
from tests.support.world import Instance, World


def _cancelled() -> None:
    async def cancel() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    asyncio.run(cancel())


def _raises(error: BaseException) -> Callable[[], None]:
    def leave() -> None:
        raise error

    return leave


LEAVES = [
    pytest.param(lambda: _raises(SystemExit(2)), "SystemExit: 2", id="sys.exit"),
    pytest.param(lambda: _raises(KeyboardInterrupt()), "KeyboardInterrupt: ", id="KeyboardInterrupt"),
    pytest.param(lambda: _cancelled, "CancelledError: ", id="CancelledError"),
    pytest.param(lambda: _raises(Suspend()), "Suspend: ", id="Suspend"),
]
ends = pytest.mark.parametrize(("make", "said"), LEAVES)
MOST = 50


@pytest.fixture(autouse=True)
def ignored_ctrl_c() -> Any:
    """As in a pool process of Celery, where Ctrl-C is the parent's affair."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def advance_to_end(world: World, instance: Instance) -> int:
    """Deliver message after message; how many it took."""
    for turn in range(1, MOST):
        world.messages.clear()
        instance.advance()
        if instance.status.is_terminal:
            return turn
        world.run_after(10)
        if instance.status.is_terminal:
            return turn
    raise AssertionError("it never ended")


@ends
@pytest.mark.parametrize("where", ["gather", "first"])
def test_a_branch_that_leaves_by_any_exception_is_a_failed_attempt(
    world: World, make: Any, said: str, where: str
) -> None:
    world.exempt["I4"] = "branches end in any order"
    leave, attempts = make(), []
    again = StepConfig(retries=Retries(limit=1, delay=5))

    def work(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        leave()

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        if where == "gather":
            step.gather(step.submit("work", again, work), step.submit("other", lambda: None))
        else:
            step.first("race", step.submit("work", again, work), step.submit_sleep("long", "1 hour"))

    instance = order.create()
    assert advance_to_end(world, instance) < 5
    assert (instance.error, attempts, instance.row.crash_count) == (said, [1, 2], 0)
    assert (str(instance.step("work").status), instance.step("work").attempts) == ("errored", 2)


@ends
def test_a_function_that_leaves_by_any_exception_ends_its_instance(world: World, make: Any, said: str) -> None:
    leave, calls = make(), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("work", lambda: None)
        calls.append(1)
        leave()

    instance = order.run()
    assert (instance.error, calls) == (said, [1])


def test_an_internal_alarm_that_a_body_raises_itself_is_also_its_failure(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        raise StepInterrupted

    assert order.run().error == "StepInterrupted: "


def test_a_workflow_may_catch_what_a_step_of_its_own_raised(world: World) -> None:
    """It is an ordinary StepFailed by then, whatever the body raised."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        try:
            step.do("work", StepConfig(retries=0), _raises(SystemExit("no card")))
        except Exception as exc:
            return f"{type(exc).__name__} from {exc.__cause__!r}"
        return ""

    assert order.run().output == "StepFailed from SystemExit('no card')"


def test_branches_that_leave_so_do_not_stop_their_siblings(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> list[Any]:
        never = StepConfig(retries=0)
        bad, good = step.submit("bad", never, _raises(SystemExit(2))), step.submit("good", lambda: 7)
        failure, value = step.gather(bad, good, return_exceptions=True)
        return [failure.error_name, value]

    assert order.run().output == ["SystemExit", 7]
