"""Arguments of the wrong type are refused with an error that names the value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable import Step, StepConfig, StepTx, WorkflowEvent
from celery_durable.errors import CursorInvalid, DurableError, NameInvalid, NotSerializable, ValueRefused
from tests.support.world import World, on_one_database

never = StepConfig(retries=0)
STATUSES = "active, waiting, paused, complete, errored, terminated"


@pytest.fixture
def order(world: World):
    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("pay", lambda: 1)
        step.wait_for_event("wait", "paid")

    return order.run()


@pytest.mark.parametrize("key", [5, b"pay", ["pay"]])
def test_a_step_is_named_by_text(world: World, order: Any, key: Any) -> None:
    rewind, interventions = world.operations.rewind, world.operations.interventions
    for call in (
        lambda: rewind.restart("order", "i-1", from_step=key),
        lambda: rewind.fork("order", "i-1", key),
        lambda: interventions.set_result("order", "i-1", key, 1, by="eve"),
        lambda: interventions.skip("order", "i-1", key, by="eve"),
    ):
        with pytest.raises(NameInvalid) as refused:
            call()
        text = f"Step {key!r} is not allowed: it is of type {type(key).__name__}; pass text (str)."
        assert str(refused.value) == text


@pytest.mark.parametrize("run", ["1", 1.0, True, 2**63])
def test_a_run_is_named_by_its_number(world: World, order: Any, run: Any) -> None:
    for read in (world.operations.history.read, world.operations.history.logs):
        with pytest.raises(ValueRefused) as refused:
            read("order", "i-1", run=run)
        assert str(refused.value) == f"run={run!r} cannot be used: pass the number of a run, from 1, or None."


def test_the_filter_of_log_lines_is_checked(world: World, order: Any) -> None:
    line, number, levels = "the id of a log line, or 0", "a whole number above 0", "a list of debug, info, warn, error"
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"after_id": "7"}, f"after_id='7' cannot be used: pass {line}."),
        ({"after_id": -1}, f"after_id=-1 cannot be used: pass {line}."),
        ({"after_id": 2**63}, f"after_id={2**63} cannot be used: pass {line}."),
        ({"limit": "7"}, f"limit='7' cannot be used: pass {number}."),
        ({"limit": True}, f"limit=True cannot be used: pass {number}."),
        ({"limit": -1}, f"limit=-1 cannot be used: pass {number}."),
        ({"levels": "info"}, f"levels='info' cannot be used: pass {levels}."),
        ({"levels": 7}, f"levels=7 cannot be used: pass {levels}."),
        ({"levels": ["loud"]}, f"levels=['loud'] cannot be used: pass {levels}."),
        ({"category": 7}, "Category 7 is not allowed: it is of type int; pass text (str)."),
    ]
    for options, message in refusals:
        with pytest.raises(ValueRefused) as refused:
            world.operations.history.logs("order", "i-1", **options)
        assert str(refused.value) == message


@on_one_database
@pytest.mark.parametrize("status", ["done", 5, ["active"]])
def test_a_status_that_does_not_exist_is_refused(world: World, order: Any, status: Any) -> None:
    for read in (world.operations.queries.list, world.operations.queries.count):
        with pytest.raises(ValueRefused) as refused:
            read("order", status=status)
        assert str(refused.value) == f"status={status!r} is not known: use one of {STATUSES}."


@on_one_database
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"if_status": "errored"}, "if_status='errored' cannot be used: pass a list of statuses."),
        ({"if_status": None}, "if_status=None cannot be used: pass a list of statuses."),
        ({"if_status": ["done"]}, f"status='done' is not known: use one of {STATUSES}."),
        ({"if_version": 7}, "if_version=7 cannot be used: pass a list of versions, or None."),
    ],
)
def test_the_conditions_of_restart_or_create_are_checked(world: World, order: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueRefused) as refused:
        world.operations.create.restart_or_create("order", id="i-1", **options)
    assert str(refused.value) == message


@on_one_database
def test_a_payload_without_a_json_form_is_refused(world: World, order: Any) -> None:
    for send in (lambda: order.send("paid", object()), lambda: world.operations.topics.emit("paid", object())):
        with pytest.raises(NotSerializable) as refused:
            send()
        assert str(refused.value).partition(" cannot be stored as JSON: ")[2] == (
            "$ is a object, which has no JSON form. Use plain data (or pydantic models, dataclasses, datetimes, "
            "Decimals, UUIDs, enums); keep other things elsewhere and store a reference."
        )


@on_one_database
@pytest.mark.parametrize("cursor", [5, b"abc", ["a"]])
def test_a_cursor_is_text(world: World, order: Any, cursor: Any) -> None:
    with pytest.raises(CursorInvalid):
        world.operations.queries.list("order", cursor=cursor)


@on_one_database
def test_what_the_items_of_a_map_raise_is_kept(world: World) -> None:
    def items():
        raise TypeError("of the author")
        yield

    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.map("squares", "shop.square", items())

    assert order.run().error == "TypeError: of the author"


@on_one_database
@pytest.mark.parametrize("method", ["mutate", "on_terminal_error"])
def test_a_step_transaction_takes_functions(world: World, method: str) -> None:
    refused: list[DurableError] = []

    @world.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        def write(tx: StepTx) -> None:
            with pytest.raises(ValueRefused) as caught:
                getattr(tx, method)("INSERT")
            refused.append(caught.value)

        step.do("write", never, write)

    assert order.run().status == "complete"
    assert [str(error) for error in refused] == [
        f"tx.{method}() needs a function, and got 'INSERT': pass one that takes a session."
    ]
