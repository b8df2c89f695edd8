"""Topics: one payload for everybody who waits at the moment, each exactly once, whichever process dies."""

from __future__ import annotations

import enum
from datetime import timedelta

import pydantic
import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import EmissionMismatch
from celery_durable.operations import topics
from celery_durable.store.events import emissions
from celery_durable.testing.cooperative import Crash
from tests.support.flows import flow_of
from tests.support.topics import left, waiting
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


class Price(pydantic.BaseModel):
    cents: int


class Topic(str, enum.Enum):  # noqa: UP042  # its members have a text of their own, unlike those of StrEnum
    PRICES = "prices/eur.usd"


@everywhere
def test_a_topic_may_be_the_member_of_an_enum(world: World) -> None:
    watch = flow_of(world, lambda step: step.wait_for_topic("next price", Topic.PRICES).payload, name="watch")
    watched = watch.run()
    assert watched.step("next price").wait_topic == "prices/eur.usd"
    assert world.operations.topics.emit(Topic.PRICES, 108) == 1
    world.run_until_idle()
    assert watched.output == 108


@everywhere
def test_an_emission_ends_the_wait_of_everybody(world: World, watch) -> None:
    watched = [watch.run(id=f"w-{n}") for n in range(3)]
    step = watched[0].step("next price")
    assert (watched[0].status, step.wait_topic, step.wait_event_type, step.wake_at) == (
        "waiting",
        "prices/eur.usd",
        None,
        world.now + timedelta(seconds=60),
    )
    assert waiting(world) == ["w-0", "w-1", "w-2"]
    world.advance(5)
    emitted_at = world.now
    assert world.operations.topics.emit("prices/eur.usd", {"cents": 108}) == 3
    assert (waiting(world), left(world)) == ([], 0)
    world.run_after(1)
    for instance in watched:
        assert instance.output == ["prices/eur.usd", {"cents": 108}, emitted_at.isoformat()]
        assert instance.events() == [("prices/eur.usd", {"cents": 108}, "next price")]


def test_an_emission_to_nobody_is_0_and_leaves_nothing_behind(world: World, watch) -> None:
    assert world.operations.topics.emit("prices/eur.usd", 1, id="e-1") == 0
    assert left(world) == 0
    instance = watch.run()
    assert instance.status == "waiting"  # what was emitted before it waited is not kept for it
    assert world.operations.topics.emit("prices/eur.usd", 2, id="e-1") == 1  # the id is free
    world.run_until_idle()
    assert instance.output[1] == 2


def test_other_topics_are_for_others(world: World, watch) -> None:
    instance = watch.run()
    for topic in ("prices/eur", "prices/eur.usd/x", "PRICES/eur.usd", "prices/eur_usd"):
        assert world.operations.topics.emit(topic, 1) == 0
    assert world.messages == []
    instance.send("prices", 1)  # an event is no emission
    world.run_until_idle()
    assert instance.status == "waiting"


@everywhere
def test_every_branch_that_waits_gets_it(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        one, two = step.submit_wait_for_topic("a", "prices"), step.submit_wait_for_topic("b", "prices")
        return [told.payload for told in step.gather(one, two)]

    instance = watch.run()
    assert world.operations.topics.emit("prices", 7) == 2
    world.run_until_idle()
    assert instance.output == [7, 7]


def test_a_branch_that_lost_its_race_waits_no_more(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        step.first("race", step.submit_wait_for_topic("price", "prices"), step.submit_sleep("patience", 10))
        return step.wait_for_topic("later", "prices", timeout=60).payload

    instance = watch.run()
    world.run_after(10)
    assert [(each.step, each.deadline) for each in world.operations.topics.waiters("prices").items] == [
        ("later", world.now + timedelta(seconds=60))
    ]
    assert world.operations.topics.emit("prices", 1) == 1
    world.run_until_idle()
    assert (instance.output, left(world)) == (1, 0)


def test_a_loop_gets_an_emission_once(world: World) -> None:
    watch = flow_of(
        world, lambda step: [step.wait_for_topic(f"price {n}", "prices").payload for n in range(3)], name="watch"
    )
    instance = watch.run()
    for n in range(3):
        assert world.operations.topics.emit("prices", n, id=f"e-{n}") == 1
        world.run_until_idle()
        assert world.operations.topics.emit("prices", n, id=f"e-{n}") == 0  # repeated, this run has it already
    assert instance.output == [0, 1, 2]


def test_a_paused_instance_gets_it_when_it_goes_on(world: World, watch) -> None:
    instance = watch.run()
    instance.pause()
    assert world.operations.topics.emit("prices/eur.usd", 1) == 1
    world.run_until_idle()
    assert instance.status == "paused"
    instance.resume()
    world.run_until_idle()
    assert instance.output[1] == 1


def test_who_was_terminated_or_restarted_waits_no_more(world: World, watch) -> None:
    ended, again = watch.run(id="a"), watch.run(id="b")
    ended.terminate()
    again.restart()
    assert (waiting(world), left(world)) == ([], 0)
    assert world.operations.topics.emit("prices/eur.usd", 1) == 0
    world.run_until_idle()
    assert waiting(world) == ["b"]
    assert world.operations.topics.emit("prices/eur.usd", 2) == 1
    world.run_until_idle()
    assert again.output[1] == 2


def test_what_was_emitted_is_not_for_a_wait_that_a_rewind_opens_anew(world: World, watch) -> None:
    instance = watch.run()
    world.operations.topics.emit("prices/eur.usd", 1)
    world.run_until_idle()
    assert world.operations.rewind.restart("watch", "i-1", from_step="next price") == 2
    world.run_until_idle()
    assert (instance.status, instance.events(), waiting(world)) == ("waiting", [], ["i-1"])


def test_what_an_ended_run_left_behind_goes_with_the_next_emission(world: World) -> None:
    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        step.gather(step.submit_wait_for_topic("price", "prices"), step.submit_sleep("rest", 10))

    instance = watch.run()

    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        raise RuntimeError("a deploy in between")

    world.run_after(10)
    assert (instance.status, waiting(world, "prices"), left(world)) == ("errored", [], 1)
    assert (world.operations.topics.emit("prices", 1), left(world)) == (0, 0)


@pytest.mark.parametrize("after", ["topic", "event"])
def test_a_wait_that_a_deploy_changed_is_for_what_the_code_says(world: World, after: str) -> None:
    watch = flow_of(world, lambda step: step.wait_for_topic("answer", "old", timeout="1 hour").payload, name="watch")
    instance = watch.run()

    @world.workflow
    def watch(event: WorkflowEvent, step: Step):
        if after == "event":
            return step.wait_for_event("answer", "new", timeout="1 hour").payload
        return step.wait_for_topic("answer", "new", timeout="1 hour").payload

    instance.pause()
    instance.resume()
    world.run_until_idle()
    assert (waiting(world, "old"), waiting(world, "new")) == ([], ["i-1"] if after == "topic" else [])
    assert world.operations.topics.emit("old", 1) == 0
    _ = instance.send("new", 2) if after == "event" else world.operations.topics.emit("new", 2)
    world.run_until_idle()
    assert instance.output == 2


# --- batches and crashes ------------------------------------------------------------------------


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "BATCH", 2)


@pytest.mark.usefixtures("small_batches")
def test_a_large_emission_goes_out_in_batches(world: World, watch) -> None:
    watched = [watch.run(id=f"w-{n}") for n in range(5)]
    assert world.operations.topics.emit("prices/eur.usd", 1) == 5
    assert sorted(due.ref.instance_id for due in world.messages) == [instance.id for instance in watched]
    world.run_until_idle()
    assert [instance.output[1] for instance in watched] == [1] * 5


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("crash", range(8))
def test_an_emitter_that_dies_anywhere_is_followed_by_the_sweep(world: World, watch, crash: int) -> None:
    """Two checkpoints a commit: begin, three batches."""
    watched = [watch.run(id=f"w-{n}") for n in range(5)]
    emitter = world.new_producer()
    emitter.runtime.crash_at = crash
    with pytest.raises(Crash):
        emitter.operations.topics.emit("prices/eur.usd", 1, id="e-1")
    world.messages.clear()  # lost with the emitter
    began = crash > 0
    world.run_after(world.settings.lease)
    if began:
        assert left(world) == 0
    assert world.operations.topics.emit("prices/eur.usd", 1, id="e-1") == (0 if began else 5)
    world.run_until_idle()
    for instance in watched:
        assert instance.output[1] == 1
        assert len(instance.events()) == 1


@everywhere
@pytest.mark.usefixtures("small_batches")
def test_an_emission_under_way_is_gone_on_with_under_its_id(world: World, watch) -> None:
    watched = [watch.run(id=f"w-{n}") for n in range(5)]
    emissions_before = world.store.transact(
        lambda tx: emissions.begin(
            tx, emission_id="e-1", topic="prices/eur.usd", payload="1", lease=world.settings.lease
        )
    )
    assert emissions_before is True
    world.store.transact(
        lambda tx: topics.deliver_batch(tx, "e-1", lease=world.settings.lease, grace=timedelta(seconds=2))
    )
    late = watch.run(id="w-late")  # opened when the emission was under way: not for it
    with pytest.raises(EmissionMismatch) as caught:
        world.operations.topics.emit("prices/eur.usd", 2, id="e-1")
    assert str(caught.value) == (
        "Another emission with the id 'e-1' is under way, for topic 'prices/eur.usd'. Repeat an emission with the "
        "same topic and payload, and use a new id for a new one."
    )
    assert world.operations.topics.emit("prices/eur.usd", 1, id="e-1") == 5
    world.run_after(5)  # what the second emitter woke; until then the queue was not empty
    world.run_after(5)
    assert [instance.output[1] for instance in watched] == [1] * 5
    assert late.status == "waiting"


@everywhere
@pytest.mark.usefixtures("small_batches")
def test_a_wait_that_begins_while_an_emission_is_under_way_does_not_get_it(world: World, watch) -> None:
    @world.workflow
    def later(event: WorkflowEvent, step: Step):
        step.wait_for_event("go", "go")
        return step.wait_for_topic("next price", "prices/eur.usd", timeout=60).payload

    lease = world.settings.lease
    watched = [watch.run(id=f"w-{n}") for n in range(2)]
    late = later.run(id="late")  # among those whom the next batch is for
    watched.append(watch.run(id="w-2"))
    world.store.transact(
        lambda tx: emissions.begin(tx, emission_id="e-1", topic="prices/eur.usd", payload="1", lease=lease)
    )
    world.store.transact(lambda tx: topics.deliver_batch(tx, "e-1", lease=lease, grace=timedelta(0)))
    world.advance(1)
    late.send("go")
    world.run_until_idle()
    assert (waiting(world), left(world)) == (["late", "w-2"], 3)
    assert world.operations.topics.emit("prices/eur.usd", 1, id="e-1") == 3
    world.run_until_idle()
    assert [instance.output[1] for instance in watched] == [1] * 3
    assert (late.status, waiting(world), left(world)) == ("waiting", ["late"], 1)


def test_a_lost_message_is_found_by_the_sweep(world: World, watch) -> None:
    instance = watch.run()
    world.operations.topics.emit("prices/eur.usd", 1)
    world.messages.clear()
    world.run_after(5)
    assert instance.output[1] == 1


# --- looking ------------------------------------------------------------------------------------


def test_explain_names_the_topic(world: World, watch) -> None:
    watch.run()
    said = world.operations.queries.explain("watch", "i-1")
    assert (said.code, said.sentence, said.actions) == (
        "WAITING_EVENT",
        'Waits for topic "prices/eur.usd" at step "next price"; times out in 1 min.',
        ("celery -A <your app> durable emit prices/eur.usd --payload @payload.json",),
    )


@everywhere
def test_a_page_of_waiters_ends_between_two_waits_of_one_instance(world: World) -> None:
    order = flow_of(
        world, lambda step: step.gather(*(step.submit_wait_for_topic(name, "price") for name in ("a", "b", "c")))
    )
    for id_ in ("i-1", "i-2"):
        order.run(id=id_)
    for limit in (1, 2, 4):
        seen, cursor = [], None
        while True:
            page = world.operations.topics.waiters("price", cursor=cursor, limit=limit)
            seen += [(each.instance_id, each.step) for each in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert seen == [(id_, name) for id_ in ("i-1", "i-2") for name in "abc"]
    world.operations.topics.emit("price", 1)
    world.run_until_idle()
