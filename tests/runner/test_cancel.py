"""Cancel: the next step call raises Cancelled, the workflow cleans up with steps, and the run ends as terminated."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from celery_durable import Cancelled, NonRetryableError, Status, Step, StepConfig, current_step
from celery_durable.errors import InstanceTerminal, StepMisuse
from celery_durable.model import TaskReference
from tests.support.flows import flow_of
from tests.support.instances import Instance
from tests.support.world import World


def sleep(world: World, step: Step) -> object:
    return step.sleep("open", "3 days")


def order(world: World, wait: Callable[[World, Step], object], did: list[str]):
    def flow(step: Step) -> str:
        step.do("charge", lambda: did.append("charge"))
        try:
            wait(world, step)
        except Cancelled as cancelled:
            why = cancelled.reason
            step.do("refund", lambda: did.append(f"refund: {why}"))
            step.sleep("rest", "1 hour")
            step.do("mail", lambda: did.append("mail"))
            raise
        return "shipped"

    return flow_of(world, flow)


def reason_of(instance: Instance) -> str | None:
    return instance.world.operations.history.read(instance.workflow, instance.id).reason


def test_only_the_tasks_of_steps_that_a_cancel_ended_are_dropped(world: World) -> None:
    def flow(step: Step) -> None:
        step.do("charge", lambda: 1)
        try:
            step.gather(step.submit_task("pack", "shop.pack"), step.submit_map("print", "shop.print", [1, 2]))
        finally:
            step.task("unpack", "shop.unpack")

    instance = flow_of(world, flow).run()
    instance.cancel()
    assert are_dropped(world) == {"shop.pack": False, "shop.print": False}
    world.run_until_idle()
    assert are_dropped(world) == {"shop.pack": True, "shop.print": True, "shop.unpack": False}


def are_dropped(world: World) -> dict[str, bool]:
    """Whether a worker that takes the task of a message now drops it."""
    found = {}
    for message in world.sent:
        reference = TaskReference.read(message.content["reference"])
        assert reference is not None
        found[message.name] = world.operations.answers.is_superfluous(reference, may_be_copy=False)
    return found


def test_a_cancel_is_raised_at_the_same_call_in_each_pass(world: World) -> None:
    raised = []

    def flow(step: Step) -> None:
        step.do("charge", lambda: 1)
        try:
            step.sleep("open", "3 days")
        finally:
            raised.append(step.do("refund", lambda: 1))
            step.sleep("rest", "1 hour")
            step.wait_for_event("receipt", "receipt")

    instance = flow_of(world, flow).run()
    instance.cancel()
    world.run_until_idle()
    world.run_after(timedelta(hours=1))
    instance.send("receipt")
    world.run_until_idle()
    assert (len(raised), instance.status, reason_of(instance)) == (3, Status.TERMINATED, "cancelled")


def instance_of(world: World) -> Instance:
    return Instance(world, "order", "i-1")


def test_a_second_cancel_ends_the_cleanup(world: World) -> None:
    did: list[str] = []
    instance = order(world, sleep, did).run()
    instance.cancel("sold twice")
    world.run_until_idle()
    instance.cancel("at once")
    assert (instance.status, reason_of(instance)) == (Status.TERMINATED, "cancelled: at once")
    world.run_after(timedelta(days=9))
    assert did == ["charge", "refund: sold twice"]
    with pytest.raises(InstanceTerminal):
        instance.cancel()


def test_a_run_that_is_being_cancelled_cannot_be_paused(world: World) -> None:
    instance = order(world, sleep, []).run()
    instance.cancel()
    with pytest.raises(InstanceTerminal, match="it is being cancelled"):
        instance.pause()
    instance.resume()
    world.run_until_idle()
    world.run_after(timedelta(hours=1))
    assert instance.status is Status.TERMINATED


def test_a_cleanup_that_fails_is_retried(world: World) -> None:
    did: list[str] = []

    def refund() -> None:
        did.append("refund")
        if len(did) == 1:
            raise NonRetryableError("the bank is closed")

    def flow(step: Step) -> None:
        step.do("charge", lambda: 1)
        try:
            step.sleep("open", "3 days")
        finally:
            step.do("refund", refund)

    instance = flow_of(world, flow).run()
    instance.cancel("sold twice")
    world.run_until_idle()
    assert (instance.status, instance.error) == (Status.ERRORED, "NonRetryableError: the bank is closed")
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert (did, instance.status, reason_of(instance)) == (
        ["refund", "refund"],
        Status.TERMINATED,
        "cancelled: sold twice",
    )


def test_a_retried_cleanup_is_still_cancelled(world: World) -> None:
    did: list[str] = []
    instance = order(world, sleep, did).run()
    instance.cancel("sold twice")
    world.run_until_idle()
    world.operations.rewind.restart("order", "i-1", from_step="rest")
    world.run_until_idle()
    diagnosis = world.operations.queries.explain(instance.workflow, instance.id)
    assert "(sold twice); its workflow cleans up. Sleeps" in diagnosis.sentence
    with pytest.raises(InstanceTerminal, match="it is being cancelled"):
        instance.pause()
    instance.cancel("at once")
    assert (did, instance.status) == (["charge", "refund: sold twice"], Status.TERMINATED)
    world.operations.rewind.restart("order", "i-1", from_step="open")
    world.run_until_idle()
    instance.pause()
    assert instance.status is Status.PAUSED


def test_a_workflow_that_swallows_it_fails(world: World) -> None:
    def flow(step: Step) -> str:
        step.do("charge", lambda: 1)
        try:
            step.sleep("open", "3 days")
        except Cancelled:
            step.do("refund", lambda: 1)
        return "went on"

    instance = flow_of(world, flow).run()
    instance.cancel()
    world.run_until_idle()
    assert instance.error == (
        "CancellationSwallowed: Workflow 'order' returned although it was cancelled: it caught Cancelled. Clean up in "
        "`except Cancelled:` or `finally:`, then let the exception leave the workflow with `raise`."
    )


def test_a_cancel_that_the_worker_notices_between_steps_keeps_the_next_one_from_running(world: World) -> None:
    did: list[str] = []

    def flow(step: Step) -> None:
        step.do("charge", lambda: did.append("charge"))
        if not did[1:]:
            did.append("cancelled")
            instance_of(world).cancel()
            world.advance(timedelta(seconds=11))
            world.worker.renew_leases()
        step.do("ship", lambda: did.append("ship"))

    instance = flow_of(world, flow).run()
    assert (did, instance.status) == (["charge", "cancelled"], Status.TERMINATED)


def test_a_run_without_another_step_completes(world: World) -> None:
    instance = flow_of(world, lambda step: step.do("charge", lambda: instance_of(world).cancel() or "paid")).run()
    assert instance.output == "paid"


def test_a_worker_that_dies_after_a_cancel_leaves_the_cleanup_to_another(world: World) -> None:
    did: list[str] = []

    def flow(step: Step) -> None:
        def charge() -> None:
            did.append("charge")
            if len(did) == 1:
                instance_of(world).cancel()
                world.worker.runtime.crash_at = "after-body"

        try:
            step.do("charge", charge)
        except Cancelled:
            step.do("refund", lambda: did.append("refund"))
            raise

    instance = flow_of(world, flow).create()
    world.run_until_idle()
    world.run_after(timedelta(minutes=5))
    assert (did, instance.status) == (["charge", "refund"], Status.TERMINATED)


def test_a_restart_forgets_the_cancel(world: World) -> None:
    did: list[str] = []
    instance = order(world, sleep, did).run()
    instance.cancel()
    world.run_until_idle()
    world.run_after(timedelta(hours=1))
    assert instance.restart() == 2
    world.run_until_idle()
    world.run_after(timedelta(days=4))
    assert instance.output == "shipped"


def test_a_retried_run_that_has_not_begun_cleans_up_what_its_steps_did(world: World) -> None:
    did: list[str] = []
    instance = order(world, lambda world, step: step.do("open", StepConfig(retries=0), lambda: 1 / 0), did).run()
    assert instance.status is Status.ERRORED
    world.operations.rewind.retry("order", "i-1", delay="1 day")
    instance.cancel()
    world.run_until_idle()
    world.run_after(timedelta(hours=1))
    assert (did, instance.status) == (["charge", "refund: None", "mail"], Status.TERMINATED)


# --- a function that asks -----------------------------------------------------------------------


def test_a_branch_that_asks_ends_the_call_for_all(world: World) -> None:
    world.exempt["C2"] = "the branch that asks ends before the others, in a commit of its own"
    did: list[str] = []

    def poll() -> None:
        instance_of(world).cancel("sold twice")
        world.advance(timedelta(seconds=11))
        world.worker.renew_leases()
        did.append(f"cancelled: {current_step().is_cancelled}")
        current_step().check()

    def flow(step: Step) -> None:
        try:
            step.gather(step.submit("poll", poll), step.submit_sleep("open", "3 days"))
        except Cancelled as cancelled:
            said = str(cancelled)
            step.do("ask", lambda: did.append(f"{said}: {current_step().is_cancelled}"))
            raise

    instance = flow_of(world, flow).run()
    assert (did, instance.status) == (["cancelled: True", "cancelled: sold twice: False"], Status.TERMINATED)
    assert instance.statuses() == {"poll": "cancelled", "open": "cancelled", "ask": "completed"}


def test_only_a_function_of_a_step_may_ask() -> None:
    with pytest.raises(StepMisuse, match="outside of a step's function"):
        current_step()


def test_what_a_function_raises_by_itself_is_a_failure(world: World) -> None:
    def stop() -> None:
        raise Cancelled("by myself")

    instance = flow_of(world, lambda step: step.do("work", StepConfig(retries=0), stop)).run()
    assert instance.error == "Cancelled: cancelled: by myself"
