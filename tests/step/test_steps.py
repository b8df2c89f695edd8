"""Steps: recorded once, handed out on every replay, identified by their name."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from celery_durable import NonRetryableError, Step, StepTx, WorkflowEvent
from celery_durable.errors import StepMisuse
from tests.support.flows import flow_of
from tests.support.results import Receipt
from tests.support.world import World, on_one_database


def test_a_step_runs_once_and_is_replayed_afterwards(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        charge = step.do("charge", lambda: ran.append("charge") or "ch_1")
        step.sleep("rest", "1 hour")
        return step.do("ship", lambda: ran.append("ship") or f"shipped {charge}")

    instance = order.run()
    assert instance.statuses() == {"charge": "completed", "rest": "waiting"}
    world.run_after(3600)
    assert instance.output == "shipped ch_1"
    assert ran == ["charge", "ship"]
    assert instance.statuses() == {"charge": "completed", "rest": "completed", "ship": "completed"}


def test_arguments_and_keywords_go_to_the_function(world: World) -> None:
    def join(*parts: str, sep: str, name: str) -> str:
        return f"{name}{sep}{sep.join(parts)}"

    order = flow_of(world, lambda step: step.do("join", join, "a", "b", sep="-", name="n"))
    assert order.run().output == "n-a-b"


def test_a_named_function_names_its_step(world: World) -> None:
    def charge(amount: int) -> int:
        return amount

    instance = flow_of(world, lambda step: step.do(charge, 5)).run()
    assert instance.output == 5
    assert instance.statuses() == {"charge": "completed"}


# --- where methods may be called ------------------------------------------------------------------


@on_one_database
@pytest.mark.parametrize(
    "method",
    [
        lambda step: step.do("inner", lambda: 1),
        lambda step: step.sleep("inner", 1),
        lambda step: step.sleep_until("inner", datetime(2031, 1, 1, tzinfo=UTC)),
        lambda step: step.wait_for_event("inner", "go"),
        lambda step: step.submit("inner", lambda: 1),
        lambda step: step.submit_sleep("inner", 1),
        lambda step: step.submit_wait_for_event("inner", "go"),
        lambda step: step.gather(),
        lambda step: step.first("inner"),
        lambda step: step.now(),
        lambda step: step.random(),
        lambda step: step.uuid(),
    ],
)
def test_a_method_inside_a_body_is_refused(world: World, method) -> None:
    instance = flow_of(world, lambda step: step.do("outer", method, step)).run()
    assert instance.error == (
        "StepMisuse: A step method was called inside a step's body. Call it from the workflow function, between steps."
    )
    assert instance.statuses() == {"outer": "errored"}
    assert instance.step("outer").attempts == 1


def test_a_method_on_another_thread_is_refused(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        caught = []

        def elsewhere() -> None:
            try:
                step.do("x", lambda: 1)
            except StepMisuse as exc:
                caught.append(str(exc))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return caught

    instance = order.run()
    assert instance.output == [
        "A step method was called from another thread. Use step.submit() and step.gather() for parallel steps."
    ]
    assert instance.statuses() == {}


FUNCTION_ENDED = (
    "A step method was called after its workflow function had ended. Use the step that the function was called with, "
    "while it runs."
)
called: list[int] = []


@pytest.mark.parametrize(
    "method", [lambda step: step.do("late", lambda: called.append(1)), Step.now, lambda step: step.publish("late", 1)]
)
def test_a_method_is_refused_when_the_function_has_ended(world: World, method) -> None:
    kept: list[Step] = []
    called.clear()

    instance = flow_of(world, lambda step: kept.append(step)).run()
    with pytest.raises(StepMisuse) as refused:
        method(kept[0])
    assert (str(refused.value), called) == (FUNCTION_ENDED, [])
    assert instance.statuses() == {}


@pytest.mark.parametrize("rest", [0, 60], ids=["ended", "suspended"])
def test_the_step_of_another_workflow_is_refused(world: World, rest: int) -> None:
    kept: list[Step] = []

    @world.workflow
    def lender(event: WorkflowEvent, step: Step):
        kept.append(step)
        step.sleep("rest", rest)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        kept[0].do("theirs", lambda: 1)

    owner = lender.run()
    assert order.run().error == f"StepMisuse: {FUNCTION_ENDED}"
    assert owner.statuses() == {"rest": "waiting" if rest else "completed"}


# --- the workflow function ----------------------------------------------------------------------


def test_the_event_is_the_same_on_every_pass(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent[Receipt], step: Step):
        seen.append((event.payload, event.timestamp, event.instance_id, event.run_number))
        step.sleep("rest", 60)

    created_at = world.now
    instance = order.create({"number": 7, "paid_at": "2030-01-02T00:00:00Z", "total": "1.0"}, id="o-1")
    world.run_after(5)
    world.run_after(60)
    assert instance.status == "complete"
    assert seen == [seen[0]] * 2
    assert seen[0][0] == Receipt(number=7, paid_at=datetime(2030, 1, 2, tzinfo=UTC), total=Decimal("1.0"))
    assert seen[0][1:] == (created_at, "o-1", 1)


def test_an_output_that_breaks_its_annotation_ends_the_instance_errored(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Receipt:
        return {"number": "x"}  # type: ignore[return-value]

    assert order.run().error == (
        "WorkflowOutputInvalid: The output of workflow 'order' does not fit its return annotation: "
        "$.number: Input should be a valid integer, unable to parse string as an integer; $.paid_at: Field required; "
        "$.total: Field required. Correct the return value or the annotation, then restart the instance."
    )


def test_an_output_that_json_cannot_hold_ends_the_instance_errored(world: World) -> None:
    order = flow_of(world, lambda step: {"socket": object()})
    assert order.run().error == (
        "NotSerializable: Output of workflow 'order' cannot be stored as JSON: $.socket is a object, which has no JSON "
        "form. Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other "
        "things elsewhere and store a reference."
    )


def test_an_error_outside_steps_ends_the_instance_at_once(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: ran.append("a"))
        raise LookupError("no such shelf")

    instance = order.run()
    assert instance.error == "LookupError: no such shelf"
    world.run_after(timedelta(days=1))
    assert ran == ["a"]


def test_a_nonretryable_error_ends_the_instance_under_the_name_it_gives(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        raise NonRetryableError("out of stock", name="OutOfStock")

    assert order.run().error == "OutOfStock: out of stock"


def test_an_error_message_that_no_database_accepts_is_sanitized(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        raise ValueError("NUL \x00 and half a pair \ud800" + "x" * 20_000)

    error = order.run().error
    assert error.startswith("ValueError: NUL  and half a pair \N{REPLACEMENT CHARACTER}xxx")
    assert len(error) == len("ValueError: ") + 10_000


# --- now, random, uuid --------------------------------------------------------------------------


def test_now_random_and_uuid_are_the_same_on_every_pass(world: World) -> None:
    passes = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen = [step.now(), step.random(), step.uuid()]
        passes.append(seen)
        step.do("work", lambda: world.advance(5))
        seen += [step.now(), step.random(), step.uuid()]
        step.sleep("rest", 60)
        seen += [step.now(), step.uuid()]
        step.wait_for_event("go", "go")

    created_at = world.now
    instance = order.create()
    world.run_after(1)
    world.run_after(600)
    instance.send("go")
    world.run_until_idle()
    assert instance.status == "complete"
    first, second, third = passes
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert [second[0], second[3], second[6]] == [
        created_at,
        created_at + timedelta(seconds=6),
        created_at + timedelta(seconds=606),  # when the sleep was found to be over
    ]
    assert len({second[2], second[5], second[7]}) == 3
    assert all(uuid.UUID(text).version == 4 for text in (second[2], second[5]))
    assert 0 <= second[1] < 1
    assert second[1] != second[4]


def test_two_runs_do_not_share_their_chance(world: World) -> None:
    order = flow_of(world, lambda step: [step.uuid(), step.random()])
    one, two = order.run(id="a"), order.run(id="b")
    first = one.output
    one.restart()
    world.run_until_idle()
    assert len({first[0], one.output[0], two.output[0]}) == 3
    assert len({first[1], one.output[1], two.output[1]}) == 3


def test_a_bodys_tx_names_its_step_and_attempt(world: World) -> None:
    seen = []

    def charge(tx: StepTx, amount: int) -> None:
        seen.append((tx.name, tx.attempt, amount))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge card", charge, 3)
        step.do("by its name", lambda tx, n: seen.append((tx.name, tx.attempt, n)), 4)

    assert order.run().status == "complete"
    assert seen == [("charge card", 1, 3), ("by its name", 1, 4)]
