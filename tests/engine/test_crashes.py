"""Workers that die: at every checkpoint, once and twice, in bodies and between them, again and again."""

from __future__ import annotations

from dataclasses import dataclass
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
    StepMaxAttemptsExceeded,
    StepTx,
    Waiting,
    WorkflowEvent,
)
from celery_durable.errors import SchemaOutdated
from celery_durable.testing import Crash
from tests.engine.lines import Line
from tests.engine.world import FlowControl, Instance, World, insert_name

everywhere = pytest.mark.parametrize(
    "database", ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)

LEASE = timedelta(seconds=31)


@dataclass(frozen=True)
class Journey:
    """A workflow whose steps write, wait and send, and what is left of each instance."""

    flow: FlowControl
    output: list[Any]
    statuses: dict[str, str]
    first: str
    """The key of the step after which the event is sent."""
    wait: str

    def travel(self, world: World, instance: Instance) -> None:
        for _ in range(20):
            world.run_until_idle()
            if instance.status.is_terminal:
                break
            if instance.statuses().get(self.first) == self.statuses[self.first]:
                instance.send("approval", "yes", id=f"{instance.id}-approval")
            world.advance(LEASE)
        assert instance.output == self.output
        assert instance.statuses() == self.statuses
        assert [consumer for _, _, consumer in instance.events()] == [self.wait]


def of_a_function(world: World) -> Journey:
    """Steps of every kind. Whatever it writes, it writes once."""
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def journey(event: WorkflowEvent, step: Step):
        who = event.instance_id, event.run_number
        plain = step.do("plain", lambda: 1)
        booked = step.do("book one", world.book, *who)
        step.log.info("half way")
        step.sleep("rest", 10)
        answer = step.wait_for_event("approval", "approval").payload
        branches = step.gather(
            step.submit("book two", world.book, *who),
            step.submit("beside", lambda: 2),
            step.submit_sleep("nap", 10),
        )
        step.do("mutate", lambda tx: tx.mutate(insert_name(event.instance_id)))
        return [plain, booked, answer, branches]

    keys = ["plain", "book one", "rest", "approval", "book two", "beside", "nap", "mutate"]
    output = [1, "booked book one", "yes", ["booked book two", 2, None]]
    return Journey(journey, output, dict.fromkeys(keys, "completed"), "rest", "approval")


def of_a_linear_workflow(world: World) -> Journey:
    """Handlers that write in their session or at the commit, one that waits, and one that does nothing."""

    def book(ctx: LinearContext) -> Completed:
        ctx.log.info("on the way")
        return Completed(world.book(ctx.tx, ctx.instance_id, ctx.run_number))

    def wait(ctx: LinearContext) -> Waiting | Completed:
        if ctx.event is None:
            return Waiting("approval", "1 day", outbound_events=[("ApprovalNeeded", ctx.instance_id)])
        return Completed(ctx.event.payload)

    def mutate(ctx: LinearContext) -> Completed:
        ctx.tx.mutate(insert_name(ctx.instance_id))
        return Completed(list(ctx.results.values()))

    handlers: dict[str, Any] = {
        "plain": lambda _: Completed(1), "book one": book, "approval": wait, "book two": book, "mutate": mutate
    }  # fmt: skip
    line = Line(world, [LinearStep(name) for name in handlers], **handlers)
    output = [1, "booked book one", "yes", "booked book two"]
    return Journey(line.flow, output, {str(seq): "DONE" for seq in range(len(handlers))}, "1", "2")


@pytest.fixture(params=[of_a_function, of_a_linear_workflow], ids=["function", "linear"])
def journey(request: pytest.FixtureRequest, world: World) -> Journey:
    made: Journey = request.param(world)
    return made


@pytest.mark.timeout(600)  # a journey for each checkpoint: 40 s, several times that under load
@everywhere
def test_a_worker_that_dies_at_any_checkpoint_costs_time_and_nothing_else(world: World, journey) -> None:
    scout = world.new_worker()
    journey.travel(world, journey.flow.create(id="undisturbed"))
    checkpoints = list(scout.runtime.passed)
    assert set(checkpoints) >= {"claimed", "before-body", "after-body", "before-commit", "after-commit"}
    for number, name in enumerate(checkpoints):
        victim = world.new_worker()
        victim.runtime.crash_at = number
        journey.travel(world, journey.flow.create(id=f"dies-at-{number}-{name}"))
        assert victim.runtime.is_dead
    assert len(world.names()) == len(checkpoints) + 1
    assert len(world.booked()) == 2 * (len(checkpoints) + 1)


@pytest.mark.parametrize("name", ["claimed", "before-body", "after-body", "before-commit", "after-commit"])
def test_a_second_worker_that_dies_at_the_same_checkpoint_changes_nothing(world: World, journey, name: str) -> None:
    instance = journey.flow.create()
    for _ in range(3):
        victim = world.new_worker()
        victim.runtime.crash_at = name
        world.run_until_idle()
        assert victim.runtime.is_dead
        world.advance(LEASE)
        world.sweeper.sweep()  # hands it on, after a pause that grows
        world.advance(60)
    journey.travel(world, instance)


def test_a_dead_worker_s_run_is_reclaimed_when_its_lease_ends(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    instance = order.create()
    world.worker.runtime.crash_at = "after-body"
    world.run_until_idle()
    assert (instance.status, instance.statuses(), world.booked()) == ("active", {}, [])
    world.run_after(29.999)
    assert instance.status == "active"
    world.run_after(0.001)
    assert instance.output == "booked book"
    assert instance.step("book").attempts == 2  # the attempt that died counts


# --- producers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "is_there"), [("before-commit", False), ("after-commit", True)])
def test_a_producer_that_dies_around_its_commit_has_created_all_or_nothing(
    world: World, checkpoint: str, is_there: bool
) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.wait_for_event("approval", "approval").payload

    producer = world.new_producer()
    producer.runtime.crash_at = checkpoint
    with pytest.raises(Crash):
        producer.operations.create.instance("order", id="o-1")
    producer.bury()
    assert world.messages == []
    assert len(world.operations.queries.list("order").items) == is_there
    world.run_after(5)  # the sweep finds what nobody told of
    assert [item.status for item in world.operations.queries.list("order").items] == ["waiting"] * is_there

    instance = order.run(id="o-2")
    producer = world.new_producer()
    producer.runtime.crash_at = checkpoint
    with pytest.raises(Crash):
        producer.operations.events.send("order", "o-2", "approval", "yes")
    producer.bury()
    world.run_after(5)
    assert instance.status == ("complete" if is_there else "waiting")


# --- again and again ----------------------------------------------------------------------------


def let_workers_die(world: World, instance, limit: int = 12) -> list[float]:
    """Go on until it has ended; answers with the pauses that it was given after each death, in seconds."""
    pauses = []
    for _ in range(limit):
        world.run_until_idle()
        row = instance.row
        if instance.status.is_terminal:
            return pauses
        if row.claim_token is None:
            pauses.append((row.run_at - world.now_us) / 1_000_000)
            world.advance(instance.run_at - world.now)
        else:
            world.advance(LEASE)
            world.sweeper.sweep()
            row = instance.row
            pauses.append((row.run_at - world.now_us) / 1_000_000)
            world.advance(timedelta(microseconds=max(0, row.run_at - world.now_us)))
    raise AssertionError("it goes on and on")


def test_an_instance_that_kills_every_worker_is_given_up_with_growing_pauses(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(1)
        world.worker.die()

    instance = order.create()
    assert let_workers_die(world, instance) == [0, 1, 2, 4, 8]
    assert len(seen) == 5
    assert instance.error == (
        "WorkerCrashLoop: 5 workers in a row died or lost their lease while they worked on this instance, without a "
        "step in between. Look at the workers' logs (out of memory, a crash in native code?), then restart it."
    )


def test_how_many_workers_may_die_is_a_setting(make_world) -> None:
    world = make_world(max_crashes=2)
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(1)
        world.worker.die()

    instance = order.create()
    let_workers_die(world, instance)
    assert len(seen) == 2
    assert instance.error.startswith("WorkerCrashLoop: 2 workers in a row ")


def test_a_step_that_was_recorded_in_between_clears_the_count_of_deaths(world: World) -> None:
    deaths = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(4):
            step.do(f"{n}", lambda: 1)
            if deaths.count(n) < 4:
                deaths.append(n)
                world.worker.die()
        return "survived"

    instance = order.create()
    let_workers_die(world, instance, limit=40)
    assert instance.output == "survived"
    assert len(deaths) == 16


def test_a_step_that_kills_its_worker_uses_up_its_attempts_and_the_workflow_may_go_on(world: World) -> None:
    attempts = []

    def die(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("deadly", StepConfig(retries=2), die)
        except StepMaxAttemptsExceeded as exc:
            return str(exc)

    instance = order.create()
    let_workers_die(world, instance)
    assert instance.output == (
        "Step 'deadly' failed after 3 attempts: StepMaxAttemptsExceeded: "
        "3 of 3 attempts are used up, and the worker of the last one died"
    )
    assert attempts == [1, 2, 3]
    assert instance.step("deadly").attempts == 3


def test_a_worker_that_releases_the_run_in_between_does_not_clear_the_crash_count(world: World) -> None:
    attempts, leaving = [], []

    def die(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for worker in leaving:
            worker.should_stop = True
        step.do("deadly", StepConfig(retries=2), die)

    instance = order.create()
    for _ in range(3):
        world.run_until_idle()  # one worker dies
        world.advance(LEASE)
        world.sweeper.sweep()
        world.advance(60)
        leaving.append(world.new_worker())
        assert leaving[-1].advance(instance.ref) == "released: due again"  # the next is told to stop before it begins
        world.new_worker()
    world.run_until_idle()
    assert attempts == [1, 2, 3]
    assert instance.error.startswith("StepMaxAttemptsExceeded: ")


def test_a_worker_that_makes_sure_of_its_lease_does_not_clear_the_count_of_deaths(world: World) -> None:
    attempts = []

    def die(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        world.advance(31)  # its lease may have ended by its own clock, so it asks before it begins the body
        step.do("deadly", StepConfig(retries=2), die)

    instance = order.create()
    let_workers_die(world, instance)
    assert attempts == [1, 2, 3]
    assert instance.error.startswith("StepMaxAttemptsExceeded: ")


def test_failures_and_deaths_count_together(world: World) -> None:
    attempts = []

    def work(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        if tx.attempt in (2, 3):
            world.worker.die()
        if tx.attempt == 5:
            return "done"
        raise ValueError(f"attempt {tx.attempt}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", StepConfig(retries=Retries(limit=4, delay=1)), work)

    instance = order.create()
    let_workers_die(world, instance)
    assert instance.output == "done"
    assert attempts == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "sibling",
    [
        lambda step: step.submit_wait_for_event("approval", "approval"),
        lambda step: step.submit_sleep("long", "300 days"),
        lambda step: step.submit_sleep("short", 5),
        lambda step: step.submit("quick", lambda: 1),
        lambda step: step.submit("retrying", StepConfig(retries=Retries(limit=None, delay="1 h")), lambda: 1 / 0),
    ],
    ids=["wait", "long sleep", "short sleep", "body", "retry"],
)
def test_a_deadly_branch_uses_up_its_attempts_whatever_is_open_beside_it(world: World, sibling) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts = []

    def die(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        deadly = step.submit("deadly", StepConfig(retries=2), die)
        try:
            step.first("race", deadly, sibling(step)) if event.payload else step.gather(deadly, sibling(step))
        except StepFailed as exc:
            return exc.error_name

    instance = order.create()
    for _ in range(30):
        world.run_until_idle()
        if "deadly" in instance.statuses() and instance.step("deadly").status == "errored":
            break
        world.advance(LEASE)
    assert attempts == [1, 2, 3]
    assert instance.step("deadly").error.name == "StepMaxAttemptsExceeded"


def test_a_deadly_branch_that_may_be_tried_for_ever_is_given_up_with_growing_pauses(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts = []

    def die(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        deadly = step.submit("deadly", StepConfig(retries=Retries(limit=None)), die)
        step.gather(deadly, step.submit_wait_for_event("approval", "approval"))

    instance = order.create()
    # The wait is recorded by the first pass; from then on each pass only announces the next attempt.
    assert let_workers_die(world, instance) == [0, 1, 2, 4, 8]
    assert attempts == [1, 2, 3, 4, 5]
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row ")


class Leaving(BaseException):
    """The worker is told to stop while a body runs."""


def test_deploys_between_the_deaths_of_a_branch_neither_count_nor_forget_them(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts, is_deploying = [], False

    def work(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        if is_deploying:
            raise Leaving
        world.worker.die()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        deadly = step.submit("deadly", StepConfig(retries=Retries(limit=None)), work)
        step.gather(deadly, step.submit_wait_for_event("approval", "approval"))

    instance = order.create()
    for deaths in range(1, 5):
        world.run_until_idle()  # one worker dies
        world.advance(LEASE)
        world.sweeper.sweep()
        world.advance(60)
        is_deploying = True
        with pytest.raises(Leaving):
            world.new_worker(interruptions=(Leaving,)).advance(instance.ref)
        is_deploying = False
        assert (instance.row.crash_count, instance.step("deadly").attempts) == (deaths, deaths)
        world.new_worker()
    let_workers_die(world, instance)
    assert attempts == [1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert instance.error.startswith("WorkerCrashLoop: 5 workers in a row ")


def test_a_branch_beside_a_deadly_one_keeps_its_own_count(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    attempts = []

    def work(tx: StepTx) -> str:
        attempts.append((tx.name, tx.attempt))
        return tx.name

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.gather(step.submit("a", work), step.submit("b", work))

    instance = order.create()
    world.worker.runtime.crash_at = "after-body"
    world.run_until_idle()
    assert instance.statuses() == {"a": "pending", "b": "pending"}
    world.run_after(LEASE)
    assert instance.output == ["a", "b"]
    assert sorted(attempts) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


# --- the database -------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("where", ["in the body", "before-commit", "after-body"])
def test_a_connection_that_is_lost_is_no_failure_of_the_step(world: World, where: str) -> None:
    ran = []

    def cut() -> None:
        with world.store.engine.begin() as other:
            for connection in world.worker.connections:
                other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": connection.info.backend_pid})

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            ran.append(1)
            if where == "in the body":
                cut()
            else:
                world.worker.runtime.at[where] = cut
            return "worked"

        step.do("warm up", lambda: 1)
        return step.do("work", work)

    assert order.run().output == "worked"
    assert ran == [1]


class ConnectionLost(Exception):
    sqlstate = "57P01"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("form", ["INSERT INTO workflow_step", "UPDATE workflow_step"])
def test_a_boundary_that_arrives_after_it_was_given_up_is_recognised(world: World, form: str) -> None:
    """Something between us and the server breaks our connection and delivers later what it had accepted."""
    worker, attempts, held_up = world.new_worker(), [], []

    def hold_up(connection, cursor, statement, parameters, *_) -> None:
        if statement.startswith("WITH") and form in statement and not held_up:
            held_up.append((statement, parameters))
            raise sa.exc.OperationalError(statement, {}, ConnectionLost())

    def arrive(times: int) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(*held_up[0])

    sa.event.listen(worker.store.engine, "before_cursor_execute", hold_up)
    worker.runtime.back_off = arrive  # it was looked up, and not there; now it comes, and then it is done again

    def work(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        if tx.attempt == 1 and form.startswith("UPDATE"):
            raise OSError("once")
        return "worked"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("work", StepConfig(retries=Retries(limit=1, delay=0)), work)

    assert order.run().output == "worked"
    assert len(held_up) == 1
    assert attempts == ([1, 2] if form.startswith("UPDATE") else [1])


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_body_whose_session_lost_its_connection_runs_again_as_the_same_attempt(world: World) -> None:
    world.exempt["I9"] = "the body runs again on purpose"
    attempts = []

    def book(tx: StepTx, instance: str, run: int) -> str:
        attempts.append(tx.attempt)
        result = world.book(tx, instance, run)
        if len(attempts) == 1:
            pid = tx.session.scalar(sa.text("SELECT pg_backend_pid()"))
            with world.store.engine.begin() as connection:
                connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        return result

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", book, event.instance_id, event.run_number)

    instance = order.run()
    assert instance.output == "booked book"
    assert attempts == [1, 1]
    (line,) = instance.logs()
    assert (line.level, line.category) == ("warn", "system")
    assert line.message.startswith("The transaction of step 'book' was lost: ")


@pytest.mark.parametrize("is_applied", [True, False])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_session_whose_commit_is_in_doubt_is_looked_up_also_where_it_held_the_only_lock(
    world: World, is_applied: bool
) -> None:
    world.exempt["I9"] = "the body runs again on purpose"
    cut = []

    def cut_once(connection: sa.Connection) -> None:
        if world.bodies and not cut:
            cut.append(connection)
            if is_applied:
                connection.connection.driver_connection.commit()
            connection.connection.driver_connection.close()

    sa.event.listen(world.worker.store.engine, "commit", cut_once)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    assert order.run().output == "booked book"
    assert len(world.bodies) == (1 if is_applied else 2)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_session_that_is_lost_every_time_is_a_failed_attempt_in_the_end(world: World) -> None:
    world.exempt["I9"] = "the body runs again on purpose"
    attempts = []

    def book(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        pid = tx.session.scalar(sa.text("SELECT pg_backend_pid()"))
        with world.store.engine.begin() as connection:
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", StepConfig(retries=0), book)

    instance = order.run()
    assert instance.error.startswith("StepTransactionLost: the step's transaction was lost 4 times, at last by: ")
    assert attempts == [1] * 4


def test_a_database_that_breaks_at_a_boundary_fails_no_step_and_the_run_is_found_again(world: World) -> None:
    ran = []

    def rename(old: str, new: str) -> None:
        with world.store.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> str:
            ran.append(1)
            if len(ran) == 1:
                rename("workflow_step", "hidden")
            return "worked"

        try:
            return step.do("work", work)
        except Exception as exc:
            return f"blamed the step: {exc}"

    instance = order.create()
    with pytest.raises(SchemaOutdated):
        world.run_until_idle()
    rename("hidden", "workflow_step")
    assert instance.status == "active"
    world.run_after(LEASE)
    assert instance.output == "worked"
    assert instance.step("work").attempts == 2  # nobody can tell what the broken attempt has done
