"""Creating, finding and listing instances."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pydantic
import pytest
from sqlalchemy.orm import Session

from celery_durable import CreateOptions, Step, WorkflowEvent
from celery_durable.errors import (
    BatchTooLarge,
    DurationInvalid,
    InstanceAlreadyExists,
    InstantInvalid,
    InvalidInstanceId,
    NotSerializable,
    PayloadTooLarge,
    StartTooFar,
    StepFailed,
    ValueRefused,
    WorkflowNotFound,
    WorkflowParamsInvalid,
)
from celery_durable.model import Status
from celery_durable.testing import START
from tests.support.flows import flow_of
from tests.support.world import World, on_one_database


class OrderIn(pydantic.BaseModel):
    order_id: str
    cents: int = 5


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


@pytest.fixture
def order(world: World):
    @world.workflow
    def order(event: WorkflowEvent[OrderIn], step: Step):
        return f"{event.payload.order_id}: {event.payload.cents}"

    return order


GOOD = {"order_id": "42"}
ID_RULE = "use 1 to 100 of the characters a-z A-Z 0-9 _ - and do not begin with '-'"


def ids(world: World) -> list[str]:
    return sorted(item.id for item in world.operations.queries.list("order").items)


def test_create_records_the_instance_and_tells_the_workers(world: World, order) -> None:
    instance = order.create(OrderIn(order_id="42"), id="o-1")
    assert (instance.status, instance.row.run_number) == ("active", 1)
    assert [due.ref for due in world.messages] == [instance.ref]
    assert world.messages[0].queue == "durable"
    world.run_until_idle()
    assert instance.output == "42: 5"


def test_a_workflow_can_have_its_own_queue(world: World) -> None:
    @world.workflow(queue="slow")
    def order(event: WorkflowEvent, step: Step):
        step.sleep("rest", 60)

    order.create()
    assert [due.queue for due in world.messages] == ["slow"]
    world.run_until_idle()
    world.advance(60)
    world.sweeper.sweep()
    assert [due.queue for due in world.messages] == ["slow"]


def test_without_an_id_each_instance_gets_one(world: World, order) -> None:
    made = {world.operations.create.instance("order", GOOD) for _ in range(3)}
    assert len(made) == 3


def test_an_id_is_unique_within_its_workflow(world: World, order) -> None:
    order.create(GOOD, id="o-1")
    with pytest.raises(InstanceAlreadyExists) as caught:
        order.create({"order_id": "other"}, id="o-1")
    assert str(caught.value) == (
        "Workflow 'order' already has an instance 'o-1'. Use another id, or get or restart the existing instance."
    )
    invoice = flow_of(world, lambda step: "i", name="invoice")
    assert invoice.run(id="o-1").output == "i"
    assert order.of("o-1").output == "42: 5"


@pytest.mark.parametrize("ended", [False, True])
def test_an_existing_instance_can_be_returned_and_is_left_alone(world: World, order, ended: bool) -> None:
    instance = order.create(GOOD, id="o-1")
    if ended:
        world.run_until_idle()
    world.messages.clear()
    before = instance.row
    assert order.create({"order_id": "other"}, id="o-1", if_exists="return").id == "o-1"
    assert instance.row == before
    assert world.messages == []


def test_what_cannot_be_created_leaves_nothing_behind(world: World, order) -> None:
    for params, id_, error, message in (
        (
            {"cents": "x"}, None, WorkflowParamsInvalid,
            "Parameters of workflow 'order' are not valid: $.order_id: Field required; "
            "$.cents: Input should be a valid integer, unable to parse string as an integer.",
        ),
        (GOOD, "no spaces", InvalidInstanceId, f"Instance id 'no spaces' is not allowed: {ID_RULE}."),
        (GOOD, "newline\n", InvalidInstanceId, f"Instance id 'newline\\n' is not allowed: {ID_RULE}."),
        (
            {"order_id": "x" * 2**20}, None, PayloadTooLarge,
            "Parameters of workflow 'order' has 1048601 bytes as JSON; at most 1048576 are allowed. "
            "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes.",
        ),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            order.create(params, **({} if id_ is None else {"id": id_}))
        assert str(caught.value) == message
    assert (ids(world), world.messages) == ([], [])


def test_untyped_params_are_any_json_and_nothing_else(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return event.payload

    for number, params in enumerate([None, 0, False, "", [], {"a": [1.5, None]}]):
        assert order.run(params, id=f"i-{number}").output == params
    with pytest.raises(NotSerializable):
        order.create({"socket": object()}, id="no")


def test_a_secret_is_refused_before_anything_is_written(world: World) -> None:
    """In parameters, in a step's result and in what the workflow returns: pydantic would write asterisks."""

    @world.workflow
    def login(event: WorkflowEvent[Login], step: Step):
        return event.payload.user

    @world.workflow
    def leak(event: WorkflowEvent, step: Step):
        given = Login(user="eve", password=pydantic.SecretStr("hunter2"))
        try:
            step.do("log in", lambda: given)
        except StepFailed as failed:
            assert failed.error_message.startswith("Result of step 'log in' cannot be stored as JSON: $.password is a ")
            return given
        return None

    with pytest.raises(NotSerializable) as refused:
        login.create({"user": "eve", "password": "hunter2"}, id="no")
    assert (refused.value.path, ids(world)) == ("$.password", [])
    leaked = leak.run()
    assert (leaked.status, leaked.error.split(":")[0]) == ("errored", "NotSerializable")
    assert leaked.statuses() == {"log in": "errored"}


def test_a_workflow_that_nobody_registered_is_refused(world: World, order) -> None:
    with pytest.raises(WorkflowNotFound) as caught:
        world.operations.create.instance("invoice")
    assert str(caught.value) == (
        "No workflow is registered as 'invoice' in this process (registered: order). Import the module that defines "
        "it, or add it to the Celery app's `imports`."
    )


def test_params_that_no_longer_fit_the_code_end_the_instance_errored(world: World, order) -> None:
    instance = order.create(GOOD)

    @world.workflow
    def order(event: WorkflowEvent[int], step: Step):
        return event.payload

    world.run_until_idle()
    assert instance.error == (
        "WorkflowParamsInvalid: Parameters of workflow 'order' are not valid: $: Input should be a valid integer."
    )


# --- run_at -------------------------------------------------------------------------------------


def test_a_start_can_be_put_off(world: World, order) -> None:
    instance = order.create(GOOD, run_at=START + timedelta(hours=1))
    assert (instance.status, world.messages) == ("waiting", [])
    assert instance.advance() == "noop: not due, or claimed by another worker"
    world.run_after(3599.999999)
    assert instance.status == "waiting"
    world.run_after(0.000001)
    assert instance.output == "42: 5"


def test_a_start_that_was_put_off_into_the_past_is_due(world: World, order) -> None:
    instance = order.create(GOOD, run_at=datetime(2020, 1, 1, tzinfo=UTC))
    world.run_until_idle()
    assert instance.status == "complete"


def test_a_start_can_be_put_off_as_long_as_a_sleep_may_be(world: World, order) -> None:
    longest = timedelta(days=365)
    late = START + longest + timedelta(microseconds=1)
    with pytest.raises(StartTooFar) as caught:
        order.create(GOOD, run_at=late)
    assert str(caught.value) == (
        f"run_at={late} is too far ahead: a start can be put off by up to 365 d "
        "(durable_max_sleep_seconds). Create the instance later."
    )
    with Session(world.store.engine) as session, pytest.raises(StartTooFar):
        world.operations.create.instance("order", GOOD, run_at=late, session=session)
    assert ids(world) == []
    order.create(GOOD, run_at=START + longest)
    assert len(ids(world)) == 1
    world.advance(timedelta(microseconds=1))
    order.create(GOOD, id="i-2", run_at=late)
    assert len(ids(world)) == 2


def test_a_start_without_a_zone_is_refused(world: World, order) -> None:
    with pytest.raises(ValueRefused, match="run_at"):
        order.create(GOOD, run_at=datetime(2030, 1, 1))
    assert ids(world) == []


# --- if_exists, if_running and at_latest ----------------------------------------------------------

DEBOUNCE: dict[str, Any] = {"if_exists": "postpone", "run_at": "30 seconds"}
SKIP: dict[str, Any] = {"if_running": "skip"}


@on_one_database
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"if_exists": "x"}, ValueRefused, 'if_exists=\'x\' is not known: use "error", "return" or "postpone".'),
        ({"if_running": "again"}, ValueRefused, "if_running='again' is not known: use \"skip\" or \"queue\"."),
        (
            DEBOUNCE | SKIP, ValueRefused,
            'if_exists="postpone" and if_running="skip" exclude each other: pass one of them.',
        ),
        (
            {"if_exists": "postpone"}, ValueRefused,
            'if_exists="postpone" needs run_at, such as run_at="30 seconds": it moves that start.',
        ),
        (
            {"at_latest": "5 min", "run_at": "1 s"}, ValueRefused,
            "at_latest='5 min' needs if_exists=\"postpone\": nothing else moves the start.",
        ),
        (SKIP | {"id": None}, ValueRefused, 'if_running="skip" needs an id: a random one never exists.'),
        (DEBOUNCE | {"id": None}, ValueRefused, 'if_exists="postpone" needs an id: a random one never exists.'),
        (SKIP | {"id": "a b"}, InvalidInstanceId, "Instance id 'a b' is not allowed: use 1 to 100 of the characters "),
        ({"run_at": "soon"}, DurationInvalid, "soon"),
        ({"run_at": "366 days"}, DurationInvalid, "366 days"),
        (DEBOUNCE | {"at_latest": "-1 s"}, DurationInvalid, "-1 s"),
        ({"run_at": datetime(2030, 1, 1)}, InstantInvalid, "run_at"),
        ({"run_at": [1]}, InstantInvalid, "run_at"),
        ({"run_at": datetime(9000, 1, 1, tzinfo=UTC)}, StartTooFar, "9000"),
    ],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(world: World, order, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        world.operations.create.instance("order", GOOD, **{"id": "i-1"} | options)
    assert message in str(caught.value)
    assert world.operations.queries.list("order").items == ()


# --- batches ------------------------------------------------------------------------------------


def create_batch(world: World, *items) -> list[str]:
    return world.operations.create.batch("order", [CreateOptions(id=id_, params=params) for id_, params in items])


def test_a_batch_records_all_that_is_new_and_answers_with_it(world: World, order) -> None:
    order.run(GOOD, id="b")
    made = create_batch(world, ("c", GOOD), ("b", {"order_id": "new"}), ("a", GOOD), ("c", {"order_id": "again"}))
    assert made == ["c", "a"]
    assert [due.ref.instance_id for due in world.messages] == ["c", "a"]
    world.run_until_idle()
    assert [order.of(id_).output for id_ in "abc"] == ["42: 5"] * 3


def test_a_batch_returns_before_anything_runs(world: World, order) -> None:
    made = create_batch(world, *((f"o-{n}", GOOD) for n in range(100)))
    assert len(made) == 100
    assert {item.status for item in world.operations.queries.list("order", limit=100).items} == {Status.ACTIVE}


def test_what_is_no_list_of_create_options_is_refused(world: World, order) -> None:
    pass_options = "pass CreateOptions(id, params, labels)."
    batches: list[tuple[Any, str]] = [
        ([CreateOptions("a", GOOD), {"id": "b", "params": GOOD}], f"Item 1 of the batch is a dict: {pass_options}"),
        ([("a", GOOD)], f"Item 0 of the batch is a tuple: {pass_options}"),
        ({"a": GOOD}, f"Item 0 of the batch is a str: {pass_options}"),
        ([CreateOptions], f"Item 0 of the batch is a type: {pass_options}"),
        ((CreateOptions(each) for each in "ab"), "The batch is a generator: pass a list of CreateOptions."),
        (CreateOptions("a"), "The batch is a CreateOptions: pass a list of CreateOptions."),
    ]
    for batch, message in batches:
        with pytest.raises(ValueRefused) as caught:
            world.operations.create.batch("order", batch)
        assert str(caught.value) == message
    assert ids(world) == []


def test_one_invalid_item_rejects_the_batch(world: World, order) -> None:
    with pytest.raises(WorkflowParamsInvalid) as caught:
        create_batch(world, ("a", GOOD), ("b", {}))
    assert str(caught.value) == (
        "Parameters of workflow 'order' for instance 'b' are not valid: $.order_id: Field required."
    )
    with pytest.raises(InvalidInstanceId):
        create_batch(world, ("a", GOOD), ("no spaces", GOOD))
    assert ids(world) == []
    assert world.messages == []


def test_a_batch_that_is_too_large_is_refused(world: World, order) -> None:
    with pytest.raises(BatchTooLarge) as caught:
        create_batch(world, *((f"o-{n}", GOOD) for n in range(1001)))
    assert str(caught.value) == "A batch of 1001 is too large; create at most 1000 instances in one call."


def test_an_empty_batch_is_nothing(world: World, order) -> None:
    assert create_batch(world) == []
    assert world.messages == []


# --- in a transaction of the caller ------------------------------------------------------------


def test_a_batch_in_a_callers_transaction_is_there_when_that_commits(world: World, order) -> None:
    batch = [CreateOptions("o-1", OrderIn(order_id="1")), CreateOptions("o-2", OrderIn(order_id="2"))]
    with world.session() as session:
        assert world.operations.create.batch("order", batch, session=session) == ["o-1", "o-2"]
        session.rollback()
        assert world.operations.create.batch("order", batch[:1], session=session) == ["o-1"]
        assert (ids(world), world.messages) == ([], [])
        session.commit()
    assert ids(world) == ["o-1"]
    assert [due.ref.instance_id for due in world.messages] == ["o-1"]


def test_a_savepoint_that_rolls_back_takes_its_instance_with_it(world: World, order) -> None:
    with world.session() as session:
        order.create(GOOD, id="kept", session=session)
        savepoint = session.begin_nested()
        world.operations.create.instance("order", GOOD, id="gone", session=session)
        savepoint.rollback()
        session.commit()
    assert ids(world) == ["kept"]
    assert sorted(world.tick()) == ["complete", "noop: not due, or claimed by another worker"]  # a message too many


# --- no parameters ------------------------------------------------------------------------------


class Options(pydantic.BaseModel):
    depth: int = 3


class Target(pydantic.BaseModel):
    url: str
    depth: int = 3


def test_a_model_whose_fields_all_have_defaults_needs_no_parameters(world: World) -> None:
    @world.workflow
    def crawl(event: WorkflowEvent[Options], step: Step) -> int:
        return event.payload.depth

    @world.workflow
    def crawl_or_not(event: WorkflowEvent[Options | None], step: Step) -> bool:
        return event.payload is None

    instance, other = crawl.create(), crawl_or_not.create()
    world.run_until_idle()
    assert (instance.output, other.output) == (3, True)


def test_without_parameters_the_error_names_the_fields_that_are_required(world: World) -> None:
    @world.workflow
    def crawl(event: WorkflowEvent[Target], step: Step) -> None: ...

    with pytest.raises(WorkflowParamsInvalid) as error:
        crawl.create()
    assert str(error.value) == "Parameters of workflow 'crawl' are not valid: $.url: Field required."
