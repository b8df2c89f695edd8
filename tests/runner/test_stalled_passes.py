"""Passes that make no progress in the engine's own code lose their claims."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import pydantic
import pytest

from celery_durable import Retries, Step, StepConfig, StepFailed, WorkflowEvent, signals
from celery_durable.model import Status, from_us
from celery_durable.step import StepTx
from tests.runner.test_leases import SUPERSEDED, look
from tests.signals.conftest import hearing
from tests.store.world import LEASE
from tests.support.embedded import until
from tests.support.flows import flow_of
from tests.support.world import Instance, Worker, World


def working(world: World) -> Instance:
    """An instance with one step."""

    return flow_of(world, lambda step: step.do("work", lambda: None)).create()


def call_after_load(worker: Worker, hang: Callable[[], None]) -> None:
    """Have the next pass of this worker call ``hang`` between loading the run and its first step."""
    worker.runtime.at["claimed"] = lambda: worker.runtime.at.update({"after-commit": hang})


def test_a_pass_that_hangs_in_our_own_code_loses_its_claim_and_that_is_no_crash(world: World) -> None:
    slow, fast = world.new_worker(), world.new_worker()
    ran: list[str] = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do("work", lambda: ran.append("worked"))
        return "done"

    instance = order.create()

    def hang() -> None:
        for _ in range(3):
            world.clock.advance(10)
            look(slow)
        assert instance.row.claim_token is not None  # as long as the limit, not longer
        world.clock.advance(1)
        look(slow)
        assert (instance.row.claim_token, instance.row.crash_count) == (None, 0)
        assert instance.row.status == Status.ACTIVE.value
        assert from_us(instance.row.run_at) - world.now == LEASE / 3
        world.clock.advance(10)  # it rests meanwhile
        assert fast.advance(instance.ref) == "complete"

    call_after_load(slow, hang)
    with hearing(signals.pass_stalled) as stalled:
        assert slow.advance(instance.ref) == SUPERSEDED
        until(lambda: stalled)
    run = {"workflow": "order", "instance_id": instance.ref.instance_id, "run_number": 1}
    assert stalled == [{**run, "stalled": timedelta(seconds=31)}]
    assert (instance.output, ran) == ("done", ["worked"])
    assert instance.step("work").attempts == 1
    assert instance.lines() == [
        f"PassStalled: The pass over {instance.ref} has hung for 31 s outside of the workflow's code: it waits for "
        "something that does not answer. The worker's process still hangs; restart it if it does not recover by itself."
    ]


def test_a_receiver_that_hangs_does_not_keep_the_renewer_from_other_leases(world: World) -> None:
    slow, is_over = world.new_worker(), threading.Event()
    hung: list[bool] = []

    instance = working(world)
    looking = threading.Thread(target=look, args=(slow,), daemon=True)

    def hang() -> None:
        world.clock.advance(31)
        looking.start()
        looking.join(20)
        hung.append(looking.is_alive())

    def hang_in_receiver(**_: Any) -> None:
        is_over.wait()

    call_after_load(slow, hang)
    signals.pass_stalled.connect(hang_in_receiver)
    try:
        assert slow.advance(instance.ref) == SUPERSEDED
    finally:
        signals.pass_stalled.disconnect(hang_in_receiver)
        is_over.set()
    assert hung == [False]


def test_a_stuck_pass_whose_instance_is_to_pause_leaves_it_paused(world: World) -> None:
    slow = world.new_worker()

    instance = working(world)

    def hang() -> None:
        instance.pause()
        world.clock.advance(31)
        look(slow)
        assert (instance.row.claim_token, instance.row.status) == (None, Status.PAUSED.value)

    call_after_load(slow, hang)
    assert slow.advance(instance.ref) == SUPERSEDED
    instance.resume()
    world.run_until_idle()
    assert instance.status is Status.COMPLETE


def test_how_long_a_pass_may_stand_still_is_a_setting(make_world: Callable[..., World]) -> None:
    world = make_world(stall_seconds=100)
    slow = world.new_worker()

    instance = working(world)

    def hang() -> None:
        for _ in range(10):
            world.clock.advance(10)
            look(slow)

    call_after_load(slow, hang)
    assert slow.advance(instance.ref) == "complete"
    assert instance.lines() == []


def test_a_body_that_was_left_behind_keeps_no_lease(world: World) -> None:
    """Its thread may hang for ever; the pass that went on without it is judged by itself."""
    slow, release = world.new_worker(), threading.Event()

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        config = StepConfig(timeout=0.05, retries=Retries(limit=0))
        try:
            step.gather(
                step.submit("hangs", config, lambda: release.wait(60)),
                step.submit("fails too", config, lambda: release.wait(60)),
            )
        except StepFailed:
            slow.runtime.at["before-body"] = hang
            step.do("work", lambda: None)

    def hang() -> None:
        world.clock.advance(31)
        look(slow)
        assert instance.row.claim_token is None

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    release.set()


def test_a_pass_may_stand_still_from_the_end_of_a_function_on(world: World) -> None:
    slow = world.new_worker()
    instance = flow_of(world, lambda step: step.do("work", lambda: world.clock.advance(40))).create()
    slow.runtime.at["after-body"] = lambda: look(slow)
    assert slow.advance(instance.ref) == "complete"
    assert instance.lines() == []


@pytest.mark.parametrize("where", ["schema", "delay", "serializer"])
def test_slow_code_of_the_author_that_the_engine_calls_is_no_stall(world: World, where: str) -> None:
    slow = world.new_worker()

    def be_slow(value: Any) -> Any:
        for _ in range(4):
            world.clock.advance(10)
            look(slow)
        return value

    slow_int = Annotated[int, pydantic.AfterValidator(be_slow)]
    slow_text = Annotated[str, pydantic.PlainSerializer(be_slow)]

    class Bill(pydantic.BaseModel):
        text: slow_text = "paid"

    def work(tx: StepTx) -> None:
        if where == "serializer":
            tx.emit("bills", Bill())
        elif where == "delay":
            raise OSError("disk full")

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        step.do("work", StepConfig(retries=Retries(limit=1, delay=lambda attempt, _: be_slow(attempt))), work)
        return str(step.wait_for_event("paid", "paid", schema=slow_int, timeout="1 day").payload)

    instance = order.create()
    instance.send("paid", 7)
    slow.advance(instance.ref)
    assert instance.lines() == []
    assert instance.status is (Status.WAITING if where == "delay" else Status.COMPLETE)
