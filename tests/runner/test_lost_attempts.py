"""Steps with ``on_lost="fail"``: an attempt of unknown end fails the step, and its function is not called again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import (
    Completed,
    LinearContext,
    LinearStep,
    Retries,
    Step,
    StepConfig,
    StepFailed,
    StepLost,
    StepTx,
    WorkflowEvent,
    durable_step,
    signals,
)
from celery_durable.errors import ConfigInvalid, SchemaOutdated
from celery_durable.model import AttemptRecord
from tests.runner.test_after_commits import connected
from tests.runner.test_leases import look
from tests.support.flows import flow_of
from tests.support.lines import Line
from tests.support.lost_connections import cut_commit
from tests.support.world import Instance, SerializationFailure, World

LEASE = timedelta(seconds=31)
ONCE = StepConfig(on_lost="fail", retries=Retries(limit=3, delay=0))
UNKNOWN = "so it is unknown whether its function did its work; it is not called again"
DIED = f"OutcomeUnknown: the worker of attempt 1 died or lost its lease, {UNKNOWN}"
STOPPED = f"OutcomeUnknown: attempt 1 was interrupted: its worker stopped, {UNKNOWN}"


class Leaving(BaseException):
    """The worker is told to stop while a body runs."""


def _attempts(instance: Instance) -> tuple[AttemptRecord, ...]:
    return instance.world.operations.history.read(instance.workflow, instance.id).attempts


class Shop:
    """A workflow that charges once. ``calls``: what a witness outside of the database has seen of the function."""

    def __init__(self, world: World, config: StepConfig | None = ONCE, *, beside: bool = False) -> None:
        self.world, self.config, self.beside = world, config, beside
        self.calls: list[int] = []
        self.act: Callable[[], Any] = lambda: None
        if beside:
            world.exempt["I4"] = "branches end in any order"

        @world.workflow(name="order")
        def order(event: WorkflowEvent[Any], step: Step) -> Any:
            step.do("before", lambda: 1)
            if not self.beside:
                return step.do("charge", self.config or StepConfig(), self.charge)
            charge = step.submit("charge", self.config or StepConfig(), self.charge)
            return step.gather(charge, step.submit("other", lambda: "other"))[0]

        self.flow = order

    def charge(self, tx: StepTx) -> Any:
        self.calls.append(tx.attempt)
        self.act()
        return f"charge {len(self.calls)}"

    def lose(self, where: str = "after-body") -> Instance:
        """Create an instance, and let the worker of its charge die."""
        victim = self.world.worker

        def arm() -> None:
            victim.runtime.at["before-body"] = victim.die

        if where == "before-body":
            victim.runtime.at["before-body"] = arm  # that of the step before
        else:
            self.act = lambda: setattr(victim.runtime, "crash_at", where)
        instance = self.flow.run()
        self.act = lambda: None
        assert victim.runtime.is_dead
        return instance


@pytest.fixture(params=[False, True], ids=["alone", "beside others"])
def shop(world: World, request: pytest.FixtureRequest) -> Shop:
    return Shop(world, beside=request.param)


@pytest.mark.parametrize(("where", "calls"), [("before-body", []), ("after-body", [1]), ("before-commit", [1])])
def test_a_step_whose_worker_died_fails_and_its_function_is_not_called_again(
    world: World, shop: Shop, where: str, calls: list[int]
) -> None:
    instance = shop.lose(where)
    world.run_after(LEASE)
    assert (instance.error, shop.calls, instance.step("charge").attempts) == (DIED, calls, 1)
    world.run_after(timedelta(hours=1))
    assert shop.calls == calls


def test_a_second_worker_that_dies_before_it_records_the_loss_changes_nothing(world: World, shop: Shop) -> None:
    instance = shop.lose()
    world.advance(LEASE)
    world.sweeper.sweep()
    world.new_worker().runtime.crash_at = "before-commit"
    world.run_until_idle()
    world.run_after(LEASE)
    world.run_after(timedelta(minutes=2))
    assert (instance.error, shop.calls, instance.step("charge").attempts) == (DIED, [1], 1)


def test_attempts_that_raised_are_retried_until_one_has_an_unknown_end(world: World, shop: Shop) -> None:
    def fail_then_die() -> None:
        if len(shop.calls) == 1:
            raise OSError("declined")
        world.worker.die()

    shop.act = fail_then_die
    instance = shop.flow.create()
    world.run_until_idle()
    world.run_after(LEASE)
    assert instance.error == DIED.replace("attempt 1", "attempt 2")
    assert (shop.calls, instance.step("charge").attempts) == ([1, 2], 2)


def test_a_workflow_that_catches_the_loss_continues(world: World) -> None:
    calls, seen = [], []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        try:
            step.do("charge", ONCE, lambda: (calls.append(1), world.worker.die()))
        except StepLost as lost:
            seen.append((lost.step, lost.error_name, lost.attempts, isinstance(lost, StepFailed)))
            step.sleep("rest", 60)
        return step.do("ask the bank", lambda: "asked")

    instance = order.run()
    world.run_after(LEASE)
    world.run_after(60)
    assert (instance.output, calls) == ("asked", [1])
    assert seen == [("charge", "OutcomeUnknown", 1, True)] * 2


@pytest.mark.parametrize("sibling", ["wait", "sleep"])
def test_a_branch_is_lost_whatever_is_open_beside_it(world: World, sibling: str) -> None:
    world.exempt["I4"] = "branches end in any order"
    calls = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        charge = step.submit("charge", ONCE, lambda: (calls.append(1), world.worker.die()))
        if sibling == "wait":
            step.gather(charge, step.submit_wait_for_event("approval", "approval"))
        else:
            step.first("race", charge, step.submit_sleep("long", "1 day"))

    instance = order.run()
    for _ in range(3):
        world.run_after(LEASE)
    assert (calls, instance.step("charge").error.name) == ([1], "OutcomeUnknown")


def test_the_code_that_finds_the_loss_decides_and_its_decision_stays(world: World, shop: Shop) -> None:
    shop.config = StepConfig()
    instance = shop.lose()
    shop.config = ONCE  # a deploy
    world.run_after(LEASE)
    assert (instance.error, shop.calls) == (DIED, [1])
    shop.config = StepConfig()
    world.run_after(timedelta(hours=1))
    assert (instance.error, shop.calls) == (DIED, [1])


def test_a_person_may_retry_settle_or_skip_what_was_lost(world: World, shop: Shop) -> None:
    interventions = world.operations.interventions
    instance = shop.lose()
    world.run_after(LEASE)
    world.operations.rewind.retry("order", instance.id)
    world.run_until_idle()
    assert (instance.output, shop.calls) == ("charge 2", [1, 1])
    instance = _lost_again(world, shop, "i-2")
    interventions.set_result("order", instance.id, "charge", "by hand", by="eve")
    world.run_until_idle()
    assert (instance.output, len(shop.calls)) == ("by hand", 3)
    instance = _lost_again(world, shop, "i-3")
    interventions.skip("order", instance.id, "charge", by="eve")
    world.run_until_idle()
    assert (instance.output, len(shop.calls)) == (None, 4)


def _lost_again(world: World, shop: Shop, id: str) -> Instance:
    shop.act = world.worker.die
    instance = shop.flow.run(id=id)
    shop.act = lambda: None
    world.run_after(LEASE)
    assert instance.error == DIED
    return instance


def test_a_loss_after_a_retry_by_hand_is_reported_again(world: World, shop: Shop) -> None:
    instance = shop.lose()
    world.run_after(LEASE)
    shop.act = world.worker.die
    world.operations.rewind.retry("order", instance.id)
    world.run_until_idle()
    world.run_after(LEASE)
    assert (instance.error, shop.calls, instance.row.run_number) == (DIED, [1, 1], 2)


# --- a worker that stops ------------------------------------------------------------------------


def test_a_worker_that_stops_while_the_function_runs_records_its_unknown_end(world: World, shop: Shop) -> None:
    def leave() -> None:
        raise Leaving

    shop.act = leave
    instance = shop.flow.create()
    with pytest.raises(Leaving):
        world.new_worker(interruptions=(Leaving,)).advance(instance.ref)
    world.new_worker()
    (attempt,) = [each for each in _attempts(instance) if each.step_key == "charge"]
    assert (attempt.error.name, attempt.attempt) == ("OutcomeUnknown", 1)
    world.run_until_idle()
    world.run_after(LEASE)
    assert (instance.error, shop.calls, instance.row.crash_count) == (STOPPED, [1], 0)


def test_a_stop_that_cannot_be_recorded_leaves_the_loss_to_the_lease(world: World) -> None:
    shop = Shop(world)
    worker = world.new_worker(interruptions=(Leaving,))

    def leave() -> None:
        sa.event.listen(worker.store.engine, "before_cursor_execute", break_)
        raise Leaving

    def break_(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        raise sa.exc.ProgrammingError(statement, {}, Exception("broken"))

    shop.act = leave
    instance = shop.flow.create()
    with pytest.raises(Leaving):
        worker.advance(instance.ref)
    sa.event.remove(worker.store.engine, "before_cursor_execute", break_)
    world.new_worker()
    world.run_after(LEASE)
    assert (instance.error, shop.calls) == (DIED, [1])


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside an open wait"])
def test_a_worker_that_stops_before_the_function_begins_costs_no_attempt(world: World, is_beside: bool) -> None:
    world.exempt["I4"] = "branches end in any order"
    calls: list[int] = []

    def charge(tx: StepTx) -> str:
        calls.append(tx.attempt)
        if len(calls) == 1:
            raise OSError("declined")
        return "charged"

    def leave() -> None:
        raise Leaving

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        if not is_beside:
            return step.do("charge", ONCE, charge)
        charged = step.submit("charge", ONCE, charge)
        return step.first("either", charged, step.submit_wait_for_event("approval", "approval"))

    instance = order.create()
    worker = world.new_worker(interruptions=(Leaving,))
    worker.advance(instance.ref)
    assert (calls, str(instance.step("charge").status)) == ([1], "waiting")
    worker.runtime.at["before-body"] = leave
    with pytest.raises(Leaving):
        worker.advance(instance.ref)
    assert str(instance.step("charge").status) == ("pending" if is_beside else "waiting")
    world.new_worker()
    world.run_until_idle()
    assert (instance.output, calls) == ("charged", [1, 2])


@pytest.mark.parametrize(
    ("signal", "output", "calls"),
    [(signals.step_completed, "charge 1", [1]), (signals.step_retrying, "charge 2", [1, 2])],
    ids=["returned", "raised"],
)
def test_a_worker_that_stops_when_the_end_is_recorded_leaves_it_as_it_is(
    world: World, shop: Shop, signal: Any, output: str, calls: list[int]
) -> None:
    def decline() -> None:
        if len(calls) == 2 and len(shop.calls) == 1:
            raise OSError("declined")

    def stop(step: str, **_: Any) -> None:
        if step == "charge":
            raise Leaving

    shop.act = decline
    instance = shop.flow.create()
    with connected(signal, stop), pytest.raises(Leaving):
        world.new_worker(interruptions=(Leaving,)).advance(instance.ref)
    world.new_worker()
    world.run_until_idle()
    world.run_after(LEASE)
    assert (instance.output, shop.calls) == (output, calls)


# --- timeouts, transactions, stalls -------------------------------------------------------------


def test_a_timeout_that_cannot_interrupt_the_function_leaves_its_end_unknown(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    release, calls = threading.Event(), []
    once = StepConfig(on_lost="fail", retries=Retries(limit=3, delay=0), timeout=timedelta(milliseconds=50))

    def work() -> None:
        calls.append(1)
        release.wait(60)

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        charge = step.submit("charge", once, work)
        return step.gather(charge, step.submit("other", lambda: 1))

    try:
        instance = order.run()
        world.run_after(60)
    finally:
        release.set()
    text = f"OutcomeUnknown: attempt 1 took longer than 50 ms and was not interrupted, {UNKNOWN}"
    assert (instance.error, calls) == (text, [1])
    assert [str(each.outcome) for each in _attempts(instance)] == ["timedOut"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_commit_that_was_cut_is_looked_up_and_the_function_is_not_called_again(world: World, when: str) -> None:
    calls: list[int] = []

    def charge(tx: StepTx) -> str:
        calls.append(tx.attempt)
        tx.session.execute(sa.text("SELECT 1"))
        stack.enter_context(cut_commit(world.worker.store, when=when))
        return "charged"

    order = flow_of(world, lambda step: step.do("charge", ONCE, charge))
    with ExitStack() as stack:
        instance = order.run()
    assert calls == [1]
    if when == "after":
        assert instance.output == "charged"
    else:
        assert instance.error.startswith("OutcomeUnknown: the database lost the transaction of attempt 1 (")


def test_a_transaction_error_that_the_function_raised_is_a_failed_attempt(world: World) -> None:
    calls = []

    def charge(tx: StepTx) -> str:
        calls.append(tx.attempt)
        tx.session.execute(sa.text("SELECT 1"))
        if tx.attempt == 1:
            raise sa.exc.OperationalError("UPDATE ...", {}, SerializationFailure("could not serialize access"))
        return "charged"

    order = flow_of(world, lambda step: step.do("charge", ONCE, charge))
    instance = order.run()
    world.run_after(1)
    assert (instance.output, calls) == ("charged", [1, 2])


def test_a_database_that_fails_at_the_commit_leaves_the_end_unknown(world: World, shop: Shop) -> None:
    def rename(old: str, new: str) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    shop.act = lambda: rename("workflow_step", "hidden")
    instance = shop.flow.create()
    with pytest.raises(SchemaOutdated):
        world.run_until_idle()
    rename("hidden", "workflow_step")
    world.run_after(LEASE)
    assert (instance.error, shop.calls) == (DIED, [1])


def test_a_pass_that_stalls_before_it_records_the_end_keeps_its_claim_until_the_lease_ends(world: World) -> None:
    shop = Shop(world)
    slow, fast = world.new_worker(), world.new_worker()
    instance = shop.flow.create()

    def hang() -> None:
        for _ in range(4):
            world.clock.advance(10)
            look(slow)
        assert instance.row.claim_token is not None
        world.clock.advance(LEASE.total_seconds())
        world.sweeper.sweep()
        world.clock.advance(60)
        fast.advance(instance.ref)

    shop.act = lambda: slow.runtime.at.update({"after-body": hang})
    slow.advance(instance.ref)
    assert (instance.error, shop.calls) == (DIED, [1])


def test_a_process_that_froze_beyond_its_lease_records_nothing_when_it_continues(world: World) -> None:
    shop = Shop(world)
    frozen, other = world.new_worker(), world.new_worker()
    instance = shop.flow.create()
    ended = []

    def freeze() -> None:
        world.clock.advance(LEASE.total_seconds())
        world.sweeper.sweep()
        other.advance(instance.ref)
        ended.append((instance.error, instance.step("charge")))

    shop.act = freeze
    frozen.advance(instance.ref)
    world.run_after(timedelta(hours=1))
    assert (shop.calls, instance.error) == ([1], DIED)
    assert ended == [(DIED, instance.step("charge"))]


# --- retries=0, linear workflows ----------------------------------------------------------------


def test_without_retries_a_dead_worker_is_a_loss_too(world: World) -> None:
    shop = Shop(world, StepConfig(retries=0))
    instance = shop.lose()
    world.run_after(LEASE)
    assert (instance.error, shop.calls) == (DIED, [1])


def test_with_one_attempt_a_linear_step_whose_worker_died_is_a_loss_too(world: World) -> None:
    line = Line(world, [LinearStep("PAY", max_attempts=1)], PAY=lambda ctx: world.worker.die())
    instance = line.flow.run()
    world.run_after(LEASE)
    assert (instance.error, line.called) == (DIED, [("PAY", "RUN", 1)])


@pytest.mark.parametrize("end", ["dies", "stops"])
def test_the_handler_of_a_linear_step_is_not_called_again_either(world: World, end: str) -> None:
    worker = world.new_worker(interruptions=(Leaving,))

    def pay(ctx: LinearContext) -> Completed:
        if end == "dies":
            worker.die()
        raise Leaving

    line = Line(world, [LinearStep("PAY", on_lost="fail"), LinearStep("SHIP")], PAY=pay)
    instance = line.flow.create()
    if end == "stops":
        with pytest.raises(Leaving):
            worker.advance(instance.ref)
    else:
        worker.advance(instance.ref)
    world.new_worker()
    world.run_after(LEASE)
    assert line.called == [("PAY", "RUN", 1)]
    assert instance.error == (DIED if end == "dies" else STOPPED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
def test_no_crash_at_any_checkpoint_calls_the_function_twice(make_world: Any, beside: bool) -> None:
    """An external witness counts the calls. An unknown end is reported once, and only after a crash."""
    scout = Shop(make_world(), beside=beside)
    worker = scout.world.worker
    assert scout.flow.run().output == "charge 1"
    checkpoints = list(worker.runtime.passed)
    lost = 0
    for number in range(len(checkpoints)):
        scout.calls.clear()
        victim = scout.world.new_worker()
        victim.runtime.crash_at = number
        instance = scout.flow.run(id=f"dies-{number}")
        scout.world.new_worker()
        for _ in range(3):
            scout.world.run_after(LEASE)
        assert len(scout.calls) <= 1
        if instance.state.error is None:
            assert instance.output == "charge 1"
        else:
            lost += 1
            assert instance.error == DIED
    assert lost


@pytest.mark.parametrize("make", [StepConfig, durable_step])
def test_a_step_with_a_function_cannot_wait_for_what_is_lost(make: Any) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        make(on_lost="wait")
    assert 'use "resend" or "fail"; only the tasks of step.task and step.map' in str(caught.value)
