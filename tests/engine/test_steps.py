"""Steps: recorded once, handed out on every replay, identified by their name."""

from __future__ import annotations

import enum
import functools
import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pydantic
import pytest

from celery_durable import NonRetryableError, Step, StepConfig, StepTx, WorkflowEvent, durable_step
from celery_durable.errors import (
    DefinitionInvalid,
    NameInvalid,
    StepLimitExceeded,
    StepMisuse,
    StepNameReused,
    StepTypeMismatch,
)
from tests.engine.world import World, on_one_database


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


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}, 0.0])
def test_a_falsy_result_is_a_result(world: World, value: object) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        first = step.do("look", lambda: ran.append(1) or value)
        step.sleep("rest", 60)
        return [first, step.do("look", lambda: ran.append(1) or value)] if event.payload else [first]

    instance = order.run()
    world.run_after(60)
    assert instance.output == [value]
    assert type(instance.output[0]) is type(value)
    assert ran == [1]


class Colour(enum.Enum):
    RED = "red"


class Receipt(pydantic.BaseModel):
    number: int
    paid_at: datetime
    total: Decimal


@dataclass
class Parcel:
    weight: Decimal
    sent: date
    colours: list[Colour]


def make_receipt() -> Receipt:
    return Receipt(number=7, paid_at=datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), total=Decimal("12.30"))


def make_parcel() -> Parcel:
    return Parcel(Decimal("1.50"), date(2030, 2, 3), [Colour.RED])


def make_instant() -> datetime:
    return datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


def make_amount() -> Decimal:
    return Decimal("0.10")


def make_id() -> uuid.UUID:
    return uuid.UUID(int=5)


def make_pair() -> tuple[int, Receipt]:
    return 1, make_receipt()


def make_span() -> timedelta:
    return timedelta(days=2, microseconds=3)


def make_keys() -> dict[int, Colour]:
    return {1: Colour.RED}


def make_untyped():
    return (1, {"when": make_instant(), 2: Decimal("1.0")})


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (make_receipt, make_receipt()),
        (make_parcel, make_parcel()),
        (make_instant, make_instant()),
        (make_amount, Decimal("0.10")),
        (make_id, uuid.UUID(int=5)),
        (make_pair, (1, make_receipt())),
        (make_span, timedelta(days=2, microseconds=3)),
        (make_keys, {1: Colour.RED}),
        (make_untyped, [1, {"when": "2030-05-06T07:08:09.123456Z", "2": "1.0"}]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_result_is_the_same_the_first_time_as_on_every_replay(world: World, make, expected) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        seen.append(step.do("make", make))
        step.sleep("rest", 60)

    order.run()
    world.run_after(60)
    assert seen == [expected, expected]
    assert [type(value) for value in seen] == [type(expected)] * 2


def test_a_result_that_json_cannot_hold_fails_the_step_at_once_and_names_it(world: World) -> None:
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("open", lambda: ran.append(1) or {"rows": [1, object()]})

    instance = order.run()
    assert instance.error == (
        "NotSerializable: Result of step 'open' cannot be stored as JSON: $.rows[1] is a object, which has no JSON "
        "form. Return plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other "
        "things elsewhere and store a reference."
    )
    assert ran == [1]
    assert instance.step("open").attempts == 1


@on_one_database
@pytest.mark.parametrize("value", [float("nan"), "a\x00b", "\ud800", functools.reduce(lambda v, _: [v], range(70), 1)])
def test_a_result_that_some_database_would_refuse_fails_the_step_before_any_sql(world: World, value: object) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("make", lambda: value)

    assert order.run().error.startswith("NotSerializable: Result of step 'make' cannot be stored as JSON: $")


def test_a_result_that_is_too_large_fails_the_step_at_once_and_names_it(make_world) -> None:
    world = make_world(max_payload_bytes=100)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("read", lambda: "x" * 99)

    instance = order.run()
    assert instance.error == (
        "PayloadTooLarge: Result of step 'read' has 101 bytes as JSON; at most 100 are allowed. Keep large data "
        "elsewhere and store a reference, or raise durable_max_payload_bytes."
    )
    assert instance.step("read").attempts == 1


def promise_number() -> int:
    return "seven"  # type: ignore[return-value]


def test_a_result_that_breaks_its_annotation_fails_the_step_at_once(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("count", promise_number)

    assert order.run().error == (
        "StepResultInvalid: The result of step 'count' does not fit the function's return annotation: "
        "$: Input should be a valid integer, unable to parse string as an integer."
    )


class Moody(pydantic.BaseModel):
    @pydantic.model_serializer
    def refuse(self) -> dict:
        raise KeyError("not today")


def make_moody() -> Moody:
    return Moody()


SERIALIZER = (
    "cannot be stored as JSON: $ is a Moody, which has no JSON form. Return plain data (or pydantic models, "
    "dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere and store a reference."
)


def test_a_result_whose_own_serializer_fails_fails_the_step(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("make", make_moody)

    instance = order.run()
    assert instance.error == f"NotSerializable: Result of step 'make' {SERIALIZER}"
    assert instance.step("make").attempts == 1


def test_an_output_whose_own_serializer_fails_ends_the_instance_errored(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> Moody:
        return Moody()

    assert order.run().error == f"NotSerializable: Output of workflow 'order' {SERIALIZER}"


def test_arguments_and_keywords_go_to_the_function(world: World) -> None:
    def join(*parts: str, sep: str, name: str) -> str:
        return f"{name}{sep}{sep.join(parts)}"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("join", join, "a", "b", sep="-", name="n")

    assert order.run().output == "n-a-b"


def test_a_named_function_names_its_step(world: World) -> None:
    def charge(amount: int) -> int:
        return amount

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do(charge, 5)

    instance = order.run()
    assert instance.output == 5
    assert instance.statuses() == {"charge": "completed"}


def test_a_lambda_needs_a_name(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do(lambda: 1)

    assert order.run().error == "DefinitionInvalid: A lambda has no name of its own: step.do('name', lambda: ...)."


def test_do_without_a_function_says_how_to_call_it(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", 5)

    assert order.run().error == (
        "DefinitionInvalid: step.do() needs a function: step.do('name', fn, *args) or "
        "step.do('name', StepConfig(...), fn, *args); it got ('charge', 5)."
    )


@on_one_database
@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257])
def test_a_step_name_is_checked(world: World, name: str) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do(name, lambda: 1)
        except NameInvalid as exc:
            seen.append(str(exc))

    assert order.run().status == "complete"
    shown = repr(name) if len(name) < 100 else repr(name)[:117] + "..."
    assert seen == [f"Step name {shown} is not allowed: use text of 1 to 256 characters without control characters."]


# --- identity -----------------------------------------------------------------------------------


def test_the_same_name_again_returns_the_recorded_result_and_warns(world: World) -> None:
    ran = []

    def charge() -> str:
        ran.append(1)
        return "ch_1"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.do("charge", charge), step.do("charge", charge)]

    instance = order.run()
    assert instance.output == ["ch_1", "ch_1"]
    assert ran == [1]
    assert [(line.level, line.category, line.message) for line in instance.logs()] == [
        ("warn", "system", "Step name 'charge' is used again in one pass: the recorded result is returned.")
    ]


def test_the_same_name_for_other_arguments_is_an_error(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", lambda amount: amount, 1)
        step.do("charge", lambda amount: amount, 2)

    assert order.run().error == (
        "StepNameReused: Step name 'charge' is used again for a different function or other arguments. Names identify "
        "steps: put the loop index or a key in the name, or pass StepConfig(repeat=True) to count the occurrences."
    )


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    def sell(self) -> str:
        return self.name


@on_one_database
@pytest.mark.parametrize(
    "use_again",
    [
        lambda step: [step.do("x", lambda: n) for n in (1, 2)],
        lambda step: [step.do("x", lambda n=n: n) for n in (1, 2)],
        lambda step: [step.do("x", shop.sell) for shop in (Shop("a"), Shop("b"))],
        lambda step: [step.do("x", functools.partial(int, n)) for n in ("1", "2")],
        lambda step: [step.do("x", fn) for fn in (make_id, make_amount)],
        lambda step: [step.do("x", pow, 2, n) for n in (1, 2)],
    ],
    ids=["closure", "default", "method", "partial", "function", "argument"],
)
def test_the_same_name_for_different_work_is_an_error_however_the_work_is_written(world: World, use_again) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(StepNameReused):
            use_again(step)
        return "refused"

    assert order.run().output == "refused"


def test_repeat_makes_each_occurrence_a_step(world: World) -> None:
    ran = []
    counted = StepConfig(repeat=True)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        found = [step.do("charge", counted, lambda n=n: ran.append(n) or n * 10) for n in range(3)]
        step.sleep("rest", 60)
        return found

    instance = order.run()
    world.run_after(60)
    assert instance.output == [0, 10, 20]
    assert ran == [0, 1, 2]
    assert [step.name for step in instance.steps()] == ["charge", "charge", "charge", "rest"]


def test_a_decorated_function_can_say_repeat_for_itself(world: World) -> None:
    @durable_step(repeat=True)
    def roll(n: int) -> int:
        return n

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.do(roll, n) for n in (4, 5)]

    assert order.run().output == [4, 5]


def test_a_name_keeps_its_type_within_a_pass(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("x", lambda: 1)
        step.sleep("x", 5)

    assert order.run().error == (
        "StepTypeMismatch: Step 'x' is recorded as 'do', but the code now calls it as 'sleep'. "
        "Give the new step another name; a recorded name keeps its kind."
    )


def test_a_name_keeps_its_type_over_a_deploy(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.sleep("x", 60)

    instance = order.run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(StepTypeMismatch):
            step.wait_for_event("x", "go")
        return "refused"

    world.run_after(60)
    assert instance.output == "refused"


def test_renamed_removed_and_new_steps_never_block(world: World) -> None:
    world.exempt["I4"] = "the step that was removed stays as it was"
    ran = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("a", lambda: ran.append("a"))
        step.do("removed", lambda: ran.append("removed"))
        step.wait_for_event("renamed", "go", timeout=60)

    instance = order.run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("new", lambda: ran.append("new"))
        step.do("a", lambda: ran.append("a"))
        step.sleep("waits instead", 30)
        return "done"

    world.run_after(60)
    assert instance.status == "waiting"
    assert instance.run_at == world.now + timedelta(seconds=30)
    world.run_until_idle()  # no hot loop over the wait that nobody asks for any more
    world.run_after(30)
    assert instance.output == "done"
    assert ran == ["a", "removed", "new"]
    assert list(instance.statuses()) == ["a", "removed", "renamed", "new", "waits instead"]


def test_a_run_has_at_most_so_many_steps_and_sleeps_are_free(make_world) -> None:
    world = make_world(max_steps=3)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("1", lambda: 1)
        for n in range(5):
            step.sleep(f"sleep {n}", 0)
        step.wait_for_event("2", "go")
        step.do("3", lambda: 1)
        step.do("3", lambda: 1) if event.payload else None
        step.do("4", lambda: 1)

    instance = order.run()
    instance.send("go")
    world.run_until_idle()
    assert instance.error == (
        "StepLimitExceeded: A run of workflow 'order' may have 3 steps (sleeps are free). Put several units of work "
        "in one step, start child instances, or raise max_steps on the workflow."
    )
    assert "4" not in instance.statuses()


def test_a_workflow_can_have_its_own_step_limit(world: World) -> None:
    @world.workflow(max_steps=2)
    def order(event: WorkflowEvent, step: Step):
        for n in range(2):
            step.do(f"{n}", lambda: 1)
        with pytest.raises(StepLimitExceeded):
            step.do("2", lambda: 1)
        return "refused"

    assert order.run().output == "refused"


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
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("outer", method, step)

    instance = order.run()
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
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return {"socket": object()}

    assert order.run().error == (
        "NotSerializable: Output of workflow 'order' cannot be stored as JSON: $.socket is a object, which has no JSON "
        "form. Return plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other "
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
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return [step.uuid(), step.random()]

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


def test_a_definition_error_in_a_race_without_branches_is_named(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        with pytest.raises(DefinitionInvalid, match=r"^step.first\('winner'\) needs at least one branch.$"):
            step.first("winner")

    assert order.run().status == "complete"
