"""What a run shows of itself while it goes on: the newest value of each key, and never an old one again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable import Completed, LinearContext, LinearStep, Retries, Retry, Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.definitions import define_linear
from celery_durable.errors import InstanceNotFound, RunNotFound
from celery_durable.model import Published
from celery_durable.testing import START
from tests.support.databases import on_databases
from tests.support.flows import flow_of
from tests.support.publishing import Statements, published
from tests.support.world import FlowControl, World

database = on_databases("sqlite", "postgresql", "mariadb")
SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"
LONG = 10


# --- when it is seen ----------------------------------------------------------------------------


def test_a_value_is_read_while_the_body_runs_and_after_the_end(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            for done in range(3):
                step.publish("progress", {"done": done, "total": 3})
                seen.append(published(instance))
                world.advance(1)

        step.publish("state", "begins")
        seen.append(published(instance))
        step.do("work", work)
        step.publish("state", "ended")
        return "worked"

    instance = order.create()
    world.run_until_idle()
    assert seen == [
        {"state": "begins"},
        *({"state": "begins", "progress": {"done": done, "total": 3}} for done in range(3)),
    ]
    assert instance.output == "worked"
    assert world.operations.history.published("order", "i-1") == {
        "progress": Published({"done": 2, "total": 3}, updated_at=START + timedelta(seconds=2)),
        "state": Published("ended", updated_at=START + timedelta(seconds=3)),
    }


@pytest.mark.parametrize("value", [0, None, "ä\N{GRINNING FACE}", {"a": {"b": [1, None]}}])
def test_any_json_value_comes_back_as_it_was(world: World, value: Any) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.publish("some value", value)

    assert published(order.run()) == {"some value": value}


def test_who_follows_an_instance_is_told_that_there_is_something_new(world: World) -> None:
    versions = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            versions.append(instance.row.version)
            step.publish("n", 1)
            versions.append(instance.row.version)

        step.do("work", work)

    instance = order.create()
    world.run_until_idle()
    before, after = versions
    assert after > before


def test_a_value_that_is_published_while_an_older_one_is_written_is_the_last(world: World) -> None:
    worker = world.new_worker()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            worker.runtime.at["before-commit"] = lambda: step.publish("n", 2)
            step.publish("n", 1)

        step.do("work", work)

    instance = order.create()
    assert worker.advance(instance.ref) == "complete"
    assert published(instance) == {"n": 2}


# --- replay -------------------------------------------------------------------------------------


def test_a_replay_never_puts_an_old_value_over_a_newer_one(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.publish("state", "started")
        step.do("charge", lambda: step.publish("state", "charging"))
        seen.append(published(instance))
        step.publish("state", "resting")
        step.sleep("rest", 60)
        seen.append(published(instance))
        step.publish("state", "rested")
        step.wait_for_event("approval", "approval")
        seen.append(published(instance))

    instance = order.create()
    world.run_until_idle()
    assert published(instance) == {"state": "resting"}  # within a second: it came with the sleep
    world.run_after(60)
    assert published(instance) == {"state": "rested"}
    instance.send("approval")
    world.run_until_idle()
    assert seen == [{"state": value} for value in ("charging", "resting", "resting", "rested", "rested", "rested")]
    assert instance.status == "complete"
    assert published(instance) == {"state": "rested"}


def test_a_retry_goes_on_where_the_attempt_before_had_come(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work(tx: StepTx) -> None:
            seen.append(published(instance))
            step.publish("attempt", tx.attempt)
            if tx.attempt == 1:
                raise OSError("no")

        step.publish("attempt", 0)
        step.do("work", StepConfig(retries=Retries(limit=1, delay=10)), work)

    instance = order.create()
    world.run_until_idle()
    world.run_after(10)
    assert seen == [{"attempt": 0}, {"attempt": 1}]
    assert published(instance) == {"attempt": 2}


def test_a_new_run_begins_with_nothing_and_the_one_before_keeps_what_it_had(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.publish(f"run {event.run_number}", event.run_number)

    instance = order.run()
    instance.restart()
    assert published(instance) == {}
    world.run_until_idle()
    assert (published(instance), published(instance, run=1)) == ({"run 2": 2}, {"run 1": 1})
    with pytest.raises(RunNotFound):
        published(instance, run=3)
    with pytest.raises(InstanceNotFound):
        published(order.of("none"))


# --- how often it is written --------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending", ["a step", "a failed attempt", "a sleep", "a wait", "a pause", "the end", "an error"]
)
def test_the_last_value_of_a_tight_loop_is_written_with_what_comes_next(world: World, ending: str) -> None:
    watched, before, at_once = Statements(world), [], []

    def loop(step: Step) -> None:
        for number in range(1000):
            step.publish("n", number)
        before.append((published(instance), watched.of_publishing))

    def fail(step: Step) -> None:
        loop(step)
        raise OSError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        inside = {"a step": loop, "a failed attempt": fail}
        then = {
            "a step": lambda: at_once.append(published(instance)),
            "a sleep": lambda: step.sleep("rest", 60),
            "a wait": lambda: step.wait_for_event("approval", "approval"),
            "a pause": lambda: step.do("not yet", pytest.fail),
            "an error": lambda: 1 / 0,
        }
        step.do("first", instance.pause if ending == "a pause" else int)
        if ending in inside:
            step.do("loop", inside[ending], step)
        else:
            loop(step)
        if ending in then:
            then[ending]()

    instance = order.create()
    world.run_until_idle()
    assert before == [({"n": 0}, 1)]
    assert at_once == ([{"n": 999}] if ending == "a step" else [])
    assert published(instance) == {"n": 999}
    assert watched.of_publishing == 2


def test_a_loop_that_lasts_writes_once_a_second(world: World) -> None:
    watched = Statements(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            for number in range(100):
                step.publish("n", number)
                world.advance(0.1)

        step.do("work", work)

    assert published(order.run()) == {"n": 99}
    assert watched.of_publishing == 10 + 1


def test_each_key_is_written_for_itself(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            for number in range(3):
                for key in "ab":
                    step.publish(key, number)
            seen.append(published(instance))
            world.advance(1)
            step.publish("a", "late")
            seen.append(published(instance))

        step.do("work", work)

    instance = order.create()
    world.run_until_idle()
    assert seen == [{"a": 0, "b": 0}, {"a": "late", "b": 2}]  # what was kept comes along


def test_a_workflow_that_publishes_nothing_costs_no_statement_more(world: World) -> None:
    watched = Statements(world)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", lambda: 1)
        step.sleep("rest", 60)

    order.run()
    world.run_after(60)
    assert watched.seen
    assert watched.of_publishing == 0


# --- whose it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in a body", "between steps", "in a branch"])
def test_a_worker_that_has_lost_its_claim_writes_nothing_and_stops(world: World, where: str) -> None:
    slow, fast, went_on = world.new_worker(), world.new_worker(), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work(by: str) -> None:
            if not fast.runtime.passed:
                world.advance(31)  # longer than the lease
                assert fast.advance(instance.ref) == "complete"
            step.publish("by", by)
            went_on.append(by)

        by = "slow" if not fast.runtime.passed else "fast"
        if where == "between steps":
            work(by)
        elif where == "in a body":
            step.do("work", work, by)
        else:
            step.gather(step.submit("work", work, by), step.submit_sleep("nap", 0))

    instance = order.create()
    assert slow.advance(instance.ref) == SUPERSEDED
    assert went_on == ["fast"]
    assert published(instance) == {"by": "fast"}


def test_of_an_instance_that_was_ended_meanwhile_nothing_is_published(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            step.publish("n", 1)
            instance.terminate()
            step.publish("n", 2)  # kept, for a commit that never comes
            step.publish("other", 2)

        step.do("work", work)

    instance = order.create()
    assert instance.advance() == SUPERSEDED
    assert published(instance) == {"n": 1}


def test_publishing_does_not_hold_a_claim(world: World) -> None:
    leases = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        leases.append((instance.row.lease_until, instance.row.crash_count))
        world.advance(5)
        step.publish("n", 1)
        leases.append((instance.row.lease_until, instance.row.crash_count))

    victim = world.new_worker()
    victim.runtime.crash_at = "claimed"
    instance = order.create()
    world.run_until_idle()
    world.advance(31)
    world.run_until_idle()
    assert instance.status == "complete"
    first, second = leases
    assert first == second
    assert first[1] == 1


# --- linear workflows ---------------------------------------------------------------------------


def test_a_handler_publishes_too(world: World) -> None:
    seen = []

    def pack(ctx: LinearContext) -> Completed | Retry:
        seen.append(published(instance))
        for number in range(5):
            ctx.publish("packed", {"done": number, "total": 5})
        seen.append(published(instance))
        return Retry("10s", "no paper") if ctx.attempt == 1 else Completed()

    definition = define_linear("parcel", module=__name__, version=1, steps=[LinearStep("PACK")])
    definition.handlers["PACK"] = pack
    world.registry.replace(definition)
    instance = FlowControl(world, definition).create()
    world.run_until_idle()
    assert published(instance) == {"packed": {"done": 4, "total": 5}}
    world.run_after(10)
    assert instance.status == "complete"
    assert seen == [{}, *({"packed": {"done": number, "total": 5}} for number in (0, 4, 0))]


# --- deletion -----------------------------------------------------------------------------------


def test_what_was_published_is_deleted_with_its_instance(world: World) -> None:
    flow_of(world, lambda step: step.publish("n", 1), retention="1 day").run()
    world.accepted.clear()
    world.advance(timedelta(days=2))
    assert world.delete_expired() == 1
    assert world.rows(sa.select(world.store.tables.published)) == []
