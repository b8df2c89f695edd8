"""No user code runs while the row of its instance is locked.

It may be slow, or wait for a transaction that waits for the instance. And a commit may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import pydantic
import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, WorkflowEvent
from celery_durable.model import OutboxMessage
from celery_durable.redaction import Redaction, RedactionContext
from celery_durable.step import StepTx
from tests.support.answers import answer, resize
from tests.support.flows import flow_of
from tests.support.mapping import mapping
from tests.support.world import World

on_servers = pytest.mark.parametrize(
    "database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)
everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


class Probe:
    """User code: each call locks all instances over a connection of its own, without waiting, and is counted."""

    def __init__(self, world: World) -> None:
        self._world, self.calls = world, 0

    def look(self) -> None:
        self.calls += 1
        with self._world.session() as session:
            session.execute(sa.select(self._world.store.tables.instance.c.id).with_for_update(nowait=True)).all()

    def delay(self, attempt: int, error: BaseException) -> int:
        self.look()
        return 30

    def validate(self, value: Any) -> Any:
        self.look()
        return value

    def redact(self, value: Any, context: RedactionContext) -> Any:
        self.look()
        return "(hidden)"


@pytest.fixture
def probe(world: World) -> Probe:
    return Probe(world)


def redact_with(world: World, hook: Callable[[Any, RedactionContext], Any]) -> None:
    runner: Any = world.worker.runner
    runner.env = replace(runner.env, make_redaction=lambda workflow, id_: Redaction(hook, workflow, id_))


def with_task(world: World, retries: Retries) -> Any:
    media = flow_of(
        world, lambda step: step.task("thumb", resize.s(1), timeout="1 hour", retries=retries), name="media"
    )
    return media.run()


def take_sent(world: World) -> list[OutboxMessage]:
    messages, world.sent[:] = list(world.sent), []
    return messages


# --- the calls ----------------------------------------------------------------------------------


@on_servers
@pytest.mark.parametrize("is_early", [True, False], ids=["event first", "wait first"])
def test_the_row_is_not_locked_while_a_payload_is_validated(world: World, probe: Probe, is_early: bool) -> None:
    schema = Annotated[int, pydantic.AfterValidator(probe.validate)]

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Any:
        step.wait_for_event("ok", "ok", schema=schema)
        replayed.append(probe.calls)

    replayed: list[int] = []
    instance = order.create() if is_early else order.run()
    instance.send("ok", 1)
    world.run_until_idle()
    assert instance.status == "complete"
    assert replayed == [2]  # once to record the event, and once for the code that receives it


@on_servers
@pytest.mark.parametrize("kind", ["failed", "timed out"])
def test_the_row_is_not_locked_while_the_delay_of_a_task_is_chosen(world: World, probe: Probe, kind: str) -> None:
    instance = with_task(world, Retries(limit=1, delay=probe.delay))
    if kind == "failed":
        answer(world, world.sent[0], error=OSError("disk full"))
        world.run_until_idle()
    else:
        world.run_after(3600)
    assert (instance.step("thumb").status, probe.calls) == ("waiting", 1)
    assert (instance.run_at - world.now).total_seconds() == 30


@on_servers
def test_the_row_is_not_locked_while_the_timeout_of_a_task_is_redacted(world: World, probe: Probe) -> None:
    redact_with(world, probe.redact)
    instance = with_task(world, Retries(limit=0))
    world.run_after(3600)
    assert instance.status == "errored"
    (found,) = world.operations.history.read("media", instance.id).attempts
    assert (found.error.name, found.error.message) == ("StepTimeout", "(hidden)")
    assert probe.calls == 1


@on_servers
@pytest.mark.parametrize("kind", ["failed", "timed out"])
def test_the_row_is_not_locked_while_the_delays_of_items_are_chosen(world: World, probe: Probe, kind: str) -> None:
    retries = Retries(limit=1, delay=probe.delay)
    instance = mapping(world, 2, retries=retries, timeout="1 hour").run()
    if kind == "failed":
        for message in take_sent(world):
            answer(world, message, error=OSError("disk full"))
        world.run_until_idle()
    else:
        world.run_after(3600)
    assert probe.calls == 2  # once for each item
    assert instance.step("convert").status == "waiting"
    assert (instance.run_at - world.now).total_seconds() == 30


@on_servers
def test_the_row_is_not_locked_while_the_timeouts_of_items_are_redacted(world: World, probe: Probe) -> None:
    redact_with(world, probe.redact)
    instance = mapping(world, 2, retries=0, timeout="1 hour").run()
    world.run_after(3600)
    found = world.operations.history.read("press", instance.id).attempts
    assert [(each.item, each.error.message) for each in found] == [(0, "(hidden)"), (1, "(hidden)")]
    assert probe.calls == 2


class Bill(pydantic.BaseModel):
    """A model whose validator and serializer call ``look``."""

    look: ClassVar[Callable[[], None]]
    cents: int

    @pydantic.field_validator("cents")
    @classmethod
    def _validate(cls, value: int) -> int:
        cls.look()
        return value

    @pydantic.field_serializer("cents")
    def _serialize(self, value: int) -> int:
        type(self).look()
        return value


@on_servers
@pytest.mark.parametrize("effect", ["child", "create", "send_event", "emit", "create in a transaction"])
def test_the_row_is_not_locked_while_what_a_step_sends_is_encoded(
    world: World, probe: Probe, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    @world.workflow
    def billing(event: WorkflowEvent[Bill], step: Step) -> None:
        """Never run here."""

    def send(tx: StepTx) -> None:
        if effect == "send_event":
            tx.send_event(receiver, "b-1", "bill", Bill.model_construct(cents=1))
        elif effect == "emit":
            tx.emit("bills", Bill.model_construct(cents=1))
        else:
            if effect == "create in a transaction":
                tx.session.execute(sa.select(1))
            tx.create(billing, {"cents": 1}, id="b-1")

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        if effect == "child":
            step.child("bill", billing, {"cents": 1}, id="b-1")
        else:
            step.do("send", send)

    @world.workflow
    def receiver(event: WorkflowEvent, step: Step) -> None:
        step.wait_for_event("bill", "bill")

    monkeypatch.setattr(Bill, "look", probe.look, raising=False)
    receiver.create(id="b-1")
    instance = order.create()
    world.worker.advance(instance.ref)
    assert instance.status == ("waiting" if effect == "child" else "complete")
    # For parameters a validator, a serializer and the validator of what is read back; for a payload only a serializer.
    assert probe.calls == (1 if effect in ("send_event", "emit") else 3)


# --- what comes while it runs -------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("error", [None, OSError("disk full")], ids=["result", "failure"])
def test_an_answer_that_comes_while_a_delay_is_chosen_counts(world: World, error: Exception | None) -> None:
    """It comes at the last moment, after the pass has seen the timeout."""

    def delay(attempt: int, failure: BaseException) -> int:
        seen.append(failure.error_name)  # type: ignore[attr-defined]
        if len(seen) == 1:
            assert answer(world, message, "done", error=error)
        return 30

    seen: list[str] = []
    instance = with_task(world, Retries(limit=1, delay=delay))
    [message] = take_sent(world)
    world.run_after(3600)
    found = world.operations.history.read("media", instance.id).attempts
    if error is None:
        assert (instance.output, seen, found) == ("done", ["StepTimeout"], ())
    else:
        assert (instance.step("thumb").status, seen) == ("waiting", ["StepTimeout", "OSError"])
        assert instance.step("thumb").error.name == "OSError"


@everywhere
@pytest.mark.parametrize("error", [None, OSError("disk full")], ids=["result", "failure"])
def test_an_item_that_is_answered_while_a_delay_is_chosen_is_done_or_left_to_the_next_pass(
    world: World, error: Exception | None
) -> None:
    def delay(attempt: int, failure: BaseException) -> int:
        seen.append(failure.error_name)  # type: ignore[attr-defined]
        if len(seen) == 1:
            assert answer(world, messages[1], "done", error=error)
        return 30

    seen: list[str] = []
    instance = mapping(world, 2, retries=Retries(limit=1, delay=delay), timeout="1 hour").run()
    messages = take_sent(world)
    world.run_after(3600)
    world.run_after(30)
    again = take_sent(world)
    assert seen == ["StepTimeout"] * 2 + ["OSError"] * (error is not None)
    assert len(again) == 1 + (error is not None)
    for message in again:
        answer(world, message, "done")
    world.run_until_idle()
    assert instance.output == ["done", "done"]
    found = world.operations.history.read("press", instance.id).attempts
    assert [each.item for each in found if each.error.name == "StepTimeout"] == [0]


@everywhere
def test_an_item_that_fails_while_the_last_open_one_is_decided_needs_no_timer(world: World) -> None:
    """It has no deadline any more: the pass must not wait for one."""

    def delay(attempt: int, failure: BaseException) -> int:
        if attempt == 1 and len(seen) == 0:
            seen.append(attempt)
            assert answer(world, messages[1], error=OSError("disk full"))
        raise KeyError("no delay")

    seen: list[int] = []
    instance = mapping(world, 2, retries=Retries(limit=3, delay=delay), timeout="1 hour", return_exceptions=True).run()
    messages = take_sent(world)
    answer(world, messages[0], error=OSError("disk full"))
    world.run_until_idle()
    assert [text.partition(": ")[2].partition(":")[0] for text in instance.output] == ["RetryDelayInvalid"] * 2
