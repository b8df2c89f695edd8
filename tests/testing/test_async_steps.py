"""The harness runs async functions as plain ones: one at a time, with its mocks, barriers and crashes."""

from __future__ import annotations

import asyncio

from celery_durable import OutboundEvent, Step, WorkflowEvent, durable_workflow
from celery_durable.testing import DurableHarness, assert_crash_safe

calls: list[str] = []


async def ask(question: str) -> str:
    calls.append(f"{question} begins")
    await asyncio.sleep(0)
    calls.append(f"{question} ends")
    return question.upper()


@durable_workflow
def survey(event: WorkflowEvent[list[str]], step: Step) -> list[str]:
    first = step.do("greet", ask, "hello")
    step.sleep("rest", "1 hour")
    return [first, *step.gather(*(step.submit(f"ask {each}", ask, each) for each in event.payload))]


def ran(seed: int) -> tuple[list[str], list[str]]:
    calls.clear()
    with DurableHarness([survey], seed=seed) as harness:
        instance = harness.create(survey, ["a", "b", "c"])
        harness.advance("1 hour")
        return instance.result(), list(calls)


def test_branches_run_one_after_the_other_in_an_order_from_the_seed() -> None:
    orders = {tuple(ran(seed)[1]) for seed in range(8)}
    assert len(orders) > 1
    for order in orders:
        assert [each.split()[0] for each in order[::2]] == [each.split()[0] for each in order[1::2]]
    assert ran(3) == ran(3)
    assert ran(0)[0] == ["HELLO", "A", "B", "C"]


def test_a_mock_replaces_an_async_function() -> None:
    calls.clear()
    with DurableHarness([survey]) as harness:
        harness.mocks.mock_step_result("greet", "mocked")
        instance = harness.create(survey, [])
        harness.advance("1 hour")
        assert (instance.result(), calls) == (["mocked"], [])


def test_a_runner_dies_after_an_async_function_has_run() -> None:
    calls.clear()
    with DurableHarness([survey]) as harness:
        harness.faults.crash_at("after-body")
        instance = harness.create(survey, [])
        harness.advance("2 hours")
        assert instance.result() == ["HELLO"]
    assert calls == ["hello begins", "hello ends"] * 2


def test_a_barrier_holds_an_async_function_back_while_another_runner_works() -> None:
    calls.clear()
    with DurableHarness([survey]) as harness:
        barrier = harness.faults.hold("greet")
        held = harness.create(survey, [], id="held")
        harness.tick()
        assert (barrier.holds, calls) == (1, [])
        barrier.release()
        harness.advance("1 hour")
        assert held.result() == ["HELLO"]


def test_an_async_handler_of_an_outbound_event_is_awaited() -> None:
    @durable_workflow
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.do("announce", lambda tx: tx.send_outbound("shipped", 7))

    shipped: list[int] = []
    with DurableHarness([order]) as harness:

        @harness.outbound("shipped")
        async def ship(event: OutboundEvent) -> None:
            await asyncio.sleep(0)
            shipped.append(event.payload)

        harness.create(order)
        harness.run_until_idle()
    assert shipped == [7]


def test_a_workflow_with_async_steps_is_crash_safe() -> None:
    report = assert_crash_safe(survey, ["a", "b"], schedules=25)
    assert min(report.crashes, report.checkpoints) > 10
