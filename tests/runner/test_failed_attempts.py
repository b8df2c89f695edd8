"""Attempts that did not succeed: what is recorded of them and when, and that it comes with the row of the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Completed, LinearStep, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.model import AttemptOutcome, AttemptRecord, ErrorInfo
from celery_durable.redaction import Redaction, RedactionContext
from celery_durable.store.runs.attempts import MAX_KEPT
from tests.runner.test_leases import look
from tests.support.answers import answer, resize
from tests.support.attempts import Bench, dies, kinds, raises, returns, sleeps, works
from tests.support.flows import flow_of
from tests.support.lines import Line
from tests.support.mapping import mapping
from tests.support.three_frames import FILE, LINE, charge
from tests.support.world import Instance, World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
KEPT = StepConfig(retries=Retries(limit=0))


def attempts_of(instance: Instance, run: int | None = None) -> tuple[AttemptRecord, ...]:
    return instance.world.operations.history.read(instance.workflow, instance.id, run=run).attempts


def fail_deeply(world: World, kind: str) -> Instance:
    """Return an instance of a workflow whose only step has failed three frames deep."""
    if kind == "linear":
        step = LinearStep("charge", max_attempts=1)
        flow = Line(world, [step], charge=lambda ctx: Completed(charge({}))).flow
    else:

        @world.workflow
        def order(event: WorkflowEvent, step: Step) -> None:
            step.do("charge", KEPT, charge, {})

        flow = order
    return flow.run()


@everywhere
@kinds
def test_an_attempt_that_fails_is_recorded_with_its_place_and_its_worker(world: World, kind: str) -> None:
    instance = fail_deeply(world, kind)
    (found,) = attempts_of(instance)
    assert (found.outcome, found.attempt, found.item) == (AttemptOutcome.FAILED, 1, None)
    assert found.step_key == ("charge" if kind == "function" else "0")
    assert found.error == ErrorInfo("KeyError", "'total'")
    assert (found.file, found.line) == (FILE, LINE)
    assert (found.worker, found.pid, found.task_id) == ("worker-1", os.getpid(), "task")
    assert (found.started_at, found.ended_at) == (world.now, world.now)
    assert found.traceback is not None
    lines = found.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'total'"
    # The author's frames come first, those of the engine are one line.
    in_files = [line for line in lines if line.startswith("  File ")]
    assert [line.rpartition(", in ")[2] for line in in_files][-3:] == ["charge", "price", "look_up"]
    assert not any("celery_durable/" in line for line in in_files)
    assert lines[-2].startswith("  ... ")
    assert lines[-2].endswith(" frames of celery_durable")
    assert '    return order["total"]' in lines
    assert "4242" not in found.traceback  # no values of local variables


@kinds
def test_each_failed_attempt_is_recorded_and_the_one_that_succeeds_is_not(make_bench: Any, kind: str) -> None:
    bench = make_bench(kind, "nothing", raises(ValueError("first")), works)
    bench.advance()
    bench.world.advance(10)
    assert bench.advance() == "complete"
    (found,) = attempts_of(bench.instance)
    assert (found.attempt, found.error) == (1, ErrorInfo("ValueError", "first"))
    assert found.ended_at - (found.started_at or found.ended_at) == timedelta(seconds=2)


@kinds
def test_a_timeout_is_recorded_as_such(make_bench: Any, kind: str) -> None:
    bench = make_bench(kind, "nothing", sleeps, timeout=5, is_timed_by_clock=True)
    bench.advance()
    (found,) = attempts_of(bench.instance)
    assert (found.outcome, found.error.name) == (AttemptOutcome.TIMED_OUT, "StepTimeout")


def test_a_timeout_that_interrupts_the_body_shows_where_the_body_was(make_bench: Any) -> None:
    def hangs(call: Any) -> None:
        call.bench.released.wait(10)

    bench = make_bench("function", "nothing", hangs, timeout=0.2)
    bench.advance()
    (found,) = attempts_of(bench.instance)
    assert (found.outcome, found.file) == (AttemptOutcome.TIMED_OUT, __file__)
    assert found.line == hangs.__code__.co_firstlineno + 1


def test_a_result_that_is_refused_is_recorded_without_a_place_in_the_authors_code(make_bench: Any) -> None:
    bench = make_bench("function", "nothing", returns(object()))
    bench.advance()
    (found,) = attempts_of(bench.instance)
    assert found.error.name == "NotSerializable"
    assert found.traceback is not None
    assert found.traceback.splitlines()[-1].startswith("celery_durable.errors")


def test_an_error_between_steps_is_recorded_without_a_step(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("ship", lambda: 1)
        charge({})

    instance = order.run()
    assert instance.error == "KeyError: 'total'"
    (found,) = attempts_of(instance)
    assert (found.step_key, found.attempt, found.outcome) == (None, None, AttemptOutcome.FAILED)
    assert (found.file, found.line) == (FILE, LINE)


def test_branches_that_fail_are_recorded_each(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        branches = [step.submit(f"charge {n}", KEPT, charge, {}) for n in range(3)]
        step.gather(*branches, return_exceptions=True)

    found = attempts_of(order.run())
    assert sorted((each.step_key, each.attempt, each.line) for each in found) == [
        (f"charge {n}", 1, LINE) for n in range(3)
    ]


# --- deaths of workers --------------------------------------------------------------------------


@everywhere
@kinds
@pytest.mark.parametrize("finder", ["claim", "sweep"])
def test_the_death_of_a_worker_is_recorded_without_a_step(make_bench: Any, kind: str, finder: str) -> None:
    bench = make_bench(kind, "nothing", dies, works)
    bench.advance()
    died_at = bench.world.now
    bench.world.advance(31)
    if finder == "sweep":
        bench.world.sweeper.sweep()
    assert attempts_of(bench.instance)[:1] == () or finder == "sweep"
    bench.advance()
    (found,) = attempts_of(bench.instance)
    assert (found.outcome, found.step_key, found.attempt) == (AttemptOutcome.CRASHED, None, None)
    last = "It recorded no step." if kind == "function" else "The last step that it recorded is 'book'."
    assert found.error == ErrorInfo("LEASE_EXPIRED", f"The worker died, hung or lost its lease. {last}")
    assert (found.worker, found.task_id, found.pid) == ("worker-1", "task", None)
    assert found.ended_at >= died_at + timedelta(seconds=30)


def test_the_death_of_a_worker_that_has_renewed_its_lease_names_the_step(world: World) -> None:
    instance = world.instance("order", "i-1")

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("report", report)

    def report() -> None:
        world.clock.advance(11)
        look(world.worker)
        world.worker.die()

    order.run()
    world.run_after(31)
    (found,) = attempts_of(instance)[:1]
    assert found.error.message == (
        "The worker died, hung or lost its lease. When it last renewed its lease, it ran step 'report', attempt 1."
    )


@everywhere
@kinds
@pytest.mark.parametrize("is_last", [False, True], ids=["a retry follows", "the step fails"])
@pytest.mark.parametrize("checkpoint", ["before-commit", "after-commit"])
def test_the_record_and_the_row_of_the_step_are_committed_together_or_not_at_all(
    make_bench: Any, kind: str, is_last: bool, checkpoint: str
) -> None:
    """Whether they agree, the invariants F1 and F2 check after each of these tests; here is what is there."""

    def dies_at_the_commit(call: Any) -> None:
        call.bench.world.worker.runtime.crash_at = checkpoint
        raise ValueError("no")

    acts = [raises(ValueError("no")), dies_at_the_commit] if is_last else [dies_at_the_commit]
    bench: Bench = make_bench(kind, "nothing", *acts)
    if is_last:
        bench.advance()
        bench.world.advance(10)
    bench.advance()
    found = [each for each in attempts_of(bench.instance) if each.outcome is AttemptOutcome.FAILED]
    rows = [step for step in bench.instance.steps() if step.name == "book" and step.error is not None]
    number = len(acts)
    is_committed = checkpoint == "after-commit"
    assert [each.attempt for each in found] == list(range(1, number + is_committed))
    assert [step.attempts for step in rows] == [number - 1 + is_committed] * (is_committed or is_last)


def test_a_worker_that_dies_in_a_takeover_leaves_no_record_of_it(world: World) -> None:
    """The takeover is one transaction: the crash is recorded with the new claim, or not at all."""

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("work", world.worker.die) if not bodies else None

    bodies: list[int] = []
    instance = order.run()
    world.advance(31)
    world.new_worker().runtime.crash_at = "before-commit"
    world.worker.advance(instance.ref)
    assert attempts_of(instance) == ()
    bodies.append(1)
    assert world.new_worker().advance(instance.ref) == "complete"
    assert len(attempts_of(instance)) == 1


# --- Celery tasks -------------------------------------------------------------------------------


def test_a_failed_task_of_a_step_is_recorded(world: World) -> None:
    instance = flow_of(world, lambda step: step.task("ship", resize.s(1), timeout=60)).run()
    (message,) = world.sent
    answer(world, message, error=ValueError("no screws"))
    world.run_until_idle()
    (found,) = attempts_of(instance)
    assert (found.step_key, found.attempt, found.outcome) == ("ship", 1, AttemptOutcome.FAILED)
    assert (found.error, found.task_id) == (ErrorInfo("ValueError", "no screws"), message.id)


def test_a_task_that_does_not_answer_is_recorded_as_timed_out(world: World) -> None:
    instance = flow_of(world, lambda step: step.task("ship", resize.s(1), timeout=60)).run()
    world.run_after(61)
    (found,) = attempts_of(instance)
    assert (found.outcome, found.error.name, found.task_id) == (
        AttemptOutcome.TIMED_OUT,
        "StepTimeout",
        world.sent[0].id,
    )


@pytest.mark.parametrize(
    ("later", "outcome"), [(0, AttemptOutcome.FAILED), (1, AttemptOutcome.TIMED_OUT)], ids=["at it", "after it"]
)
def test_an_error_at_the_deadline_is_in_time_and_a_later_one_is_recorded_as_timed_out(
    world: World, later: int, outcome: AttemptOutcome
) -> None:
    instance = flow_of(world, lambda step: step.task("ship", resize.s(1), timeout=60)).run()
    world.advance(timedelta(seconds=60, microseconds=later))
    answer(world, world.sent[0], error=ValueError("no screws"))
    world.run_until_idle()
    assert [(found.outcome, found.attempt) for found in attempts_of(instance)] == [(outcome, 1)]


def test_failed_items_of_a_map_are_recorded_with_their_positions(world: World) -> None:
    retries = Retries(limit=1, delay=10, backoff="constant")
    instance = mapping(world, 3, retries=retries, timeout=60, return_exceptions=True).run()
    messages, world.sent[:] = list(world.sent), []
    answer(world, messages[0])
    answer(world, messages[1], error=ValueError("no ink"))
    world.run_until_idle()
    world.run_after(10)  # the second try of the second item
    answer(world, world.sent[0], error=ValueError("still none"))
    world.run_after(51)  # the third item has not answered
    found = [(each.item, each.attempt, str(each.outcome), each.error.message) for each in attempts_of(instance)]
    assert found[:3] == [
        (1, 1, "failed", "no ink"),
        (1, 2, "failed", "still none"),
        (2, 1, "timedOut", "no answer within 1 min"),
    ]


# --- how long they stay, and what is stored -----------------------------------------------------


def test_the_newest_attempts_of_a_step_that_is_retried_for_ever_are_kept_and_those_of_earlier_runs(
    world: World,
) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        retries = Retries(limit=None, delay=1, backoff="constant")
        step.do("charge", StepConfig(retries=retries), charge, {})

    instance = order.run()
    world.restart(instance)
    world.run_until_idle()
    for _ in range(MAX_KEPT + 2):
        world.run_after(1)
    found = [[each.attempt for each in attempts_of(instance, run)] for run in (1, 2)]
    assert found == [[1], list(range(4, MAX_KEPT + 4))]


@everywhere
def test_they_are_deleted_with_their_instance(world: World) -> None:
    flow_of(world, lambda step: step.do("charge", KEPT, charge, {}), retention=60).run()
    count = sa.select(sa.func.count()).select_from(world.store.tables.attempt)
    assert world.rows(count) == [(1,)]
    world.advance(61)
    assert world.delete_expired() == 1
    assert world.rows(count) == [(0,)]
    world.accepted.clear()


def test_an_earlier_run_keeps_its_own(world: World) -> None:
    instance = fail_deeply(world, "function")
    world.restart(instance)
    world.run_until_idle()
    assert len(attempts_of(instance, 1)) == len(attempts_of(instance, 2)) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_no_traceback_is_stored_if_the_setting_says_so(make_world: Callable[..., World]) -> None:
    (found,) = attempts_of(fail_deeply(make_world(tracebacks="none"), "function"))
    assert (found.traceback, found.file, found.line) == (None, FILE, LINE)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_the_redaction_comes_before_the_store(world: World) -> None:
    """Neither the message nor the traceback reaches the database as the author wrote it."""
    contexts: list[RedactionContext] = []

    def redact(value: Any, context: RedactionContext) -> Any:
        contexts.append(context)
        return value.replace("total", "xxxxx") if context.kind == "error" else value

    runner: Any = world.worker.runner
    runner.env = replace(runner.env, make_redaction=lambda workflow, id_: Redaction(redact, workflow, id_))
    fail_deeply(world, "function")
    a = world.store.tables.attempt.c
    ((message, text),) = world.rows(sa.select(a.error_message, a.traceback))
    assert message == "'xxxxx'"
    assert text.splitlines()[-1] == "KeyError: 'xxxxx'"
    assert {(each.kind, each.workflow, each.instance_id, each.name) for each in contexts} == {
        ("error", "order", "i-1", "charge"),
        ("traceback", "order", "i-1", "charge"),
    }
