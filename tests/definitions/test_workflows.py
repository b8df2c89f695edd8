from __future__ import annotations

import functools
import logging
import typing
from collections.abc import AsyncIterator, Iterator
from datetime import date, timedelta
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel

from celery_durable import durable_workflow
from celery_durable.definitions import (
    LinearStep,
    Registry,
    WorkflowDefinition,
    WorkflowOptions,
    define,
    define_linear,
)
from celery_durable.errors import (
    AsyncNotSupported,
    DefinitionInvalid,
    DurationInvalid,
    NameInvalid,
    WorkflowNameTaken,
    WorkflowNotFound,
)
from celery_durable.model import WorkflowEvent
from celery_durable.step import Step
from celery_durable.values import PayloadLimits, Retries, StepConfig, ValidationFailed

if typing.TYPE_CHECKING:
    from somewhere import Elsewhere


def order(event: WorkflowEvent[OrderIn], step: Step) -> dict[str, date]:
    return {}


class OrderIn(BaseModel):
    """Stands below the workflow that names it."""

    amount: int


def read(definition: WorkflowDefinition, text: str) -> Any:
    return definition.params.decode(text)


# --- define -------------------------------------------------------------------------------------


def test_a_definition_says_what_was_decorated() -> None:
    config = StepConfig(retries=1)
    found = define(order, name="Order-2", queue="slow lane", step_defaults=config, max_steps=7)
    assert (found.name, found.fn, found.queue, found.step_defaults, found.max_steps) == (
        "Order-2",
        order,
        "slow lane",
        config,
        7,
    )
    assert found.source_location == f"{__name__}.order"


def test_a_workflow_is_named_after_its_function_by_default() -> None:
    found = define(order)
    assert (found.name, found.queue, found.step_defaults, found.max_steps) == ("order", None, None, None)


async def coroutine(event: Any, step: Any) -> None: ...


async def async_generator(event: Any, step: Any) -> AsyncIterator[int]:
    yield 1


def test_an_async_workflow_is_refused() -> None:
    with pytest.raises(AsyncNotSupported) as refused:
        define(coroutine)
    assert str(refused.value) == (
        "Workflow 'coroutine' is an async function. Write it as a plain function; only functions of steps and handlers "
        "may be async: step.do('ask', async_function, 'why?')."
    )
    with pytest.raises(DefinitionInvalid):
        define(async_generator)


class Callable:
    def __call__(self, event: Any, step: Any) -> None: ...

    def __repr__(self) -> str:
        return "<a callable>"


def test_only_a_plain_function_can_be_a_workflow() -> None:
    for fn in [
        Callable(),
        Callable,
        Callable().__call__,
        functools.partial(order),
        functools.partial(coroutine),
        len,
        7,
    ]:
        with pytest.raises(DefinitionInvalid) as refused:
            define(fn)
        assert str(refused.value) == f"{fn!r} cannot be a workflow: decorate a plain function."


def generator(event: Any, step: Any) -> Iterator[int]:
    yield 1


def test_a_generator_function_is_refused_since_calling_it_runs_nothing() -> None:
    with pytest.raises(DefinitionInvalid) as refused:
        define(generator)
    assert str(refused.value) == "Workflow function generator contains a yield: return its result instead."


def nothing() -> None: ...
def one(event: Any) -> None: ...
def three(event: Any, step: Any, more: Any) -> None: ...
def by_keyword(event: Any, *, step: Any) -> None: ...


def test_a_function_that_cannot_be_called_with_event_and_step_is_refused() -> None:
    for fn in [nothing, one, three, by_keyword]:
        with pytest.raises(DefinitionInvalid) as refused:
            define(fn)
        assert str(refused.value) == (
            f"Workflow function {fn.__name__} must take two parameters: "
            "def fn(event: WorkflowEvent[Params], step: Step)."
        )


def with_default(event: Any, step: Any, now: Any = None) -> None: ...
def with_anything(*args: Any, **kwargs: Any) -> None: ...


def test_a_function_that_can_be_called_with_event_and_step_will_do() -> None:
    for fn in [with_default, with_anything]:
        assert define(fn).fn is fn


def test_a_name_that_breaks_the_rules_is_refused() -> None:
    for name in ["", "or der", "order\n", "-order", "x" * 256]:
        with pytest.raises(NameInvalid) as refused:
            define(order, name=name)
        shown = repr(name) if len(name) < 100 else f"'{'x' * 116}..."
        assert str(refused.value) == (
            f"Workflow name {shown} is not allowed: "
            "use 1 to 255 of the characters a-z A-Z 0-9 _ - and do not begin with '-'."
        )


def test_a_queue_without_a_name_is_refused() -> None:
    with pytest.raises(NameInvalid) as refused:
        define(order, queue="")
    assert str(refused.value) == (
        "Queue '' is not allowed: use text of 1 to 255 characters without control characters."
    )


def test_a_workflow_needs_room_for_a_step() -> None:
    for max_steps in [0, "5", 2.5, True]:
        with pytest.raises(DefinitionInvalid) as refused:
            define(order, max_steps=max_steps)
        assert str(refused.value) == f"max_steps={max_steps!r} of order must be a whole number of at least 1."


def test_a_duration_is_at_most_a_hundred_years() -> None:
    for option in ["retention", "max_run_duration", "max_suspend_duration"]:
        define(order, **{option: "36500 days"})
        with pytest.raises(DurationInvalid) as refused:
            define(order, **{option: timedelta.max})
        assert str(refused.value).startswith(f"Duration {timedelta.max!r} cannot be used: it is longer than 36500 d.")


def test_the_defaults_of_steps_are_a_configuration_of_steps() -> None:
    retries: Any = Retries(limit=3)
    with pytest.raises(DefinitionInvalid) as refused:
        define(order, step_defaults=retries)
    assert str(refused.value) == (
        f"step_defaults={retries!r} of order must be a StepConfig, such as StepConfig(retries=3)."
    )


# --- types --------------------------------------------------------------------------------------


def test_payload_and_output_types_may_stand_below_the_workflow() -> None:
    found = define(order)
    assert found.params.is_typed
    assert read(found, '{"amount":3}') == OrderIn(amount=3)
    text = found.output.encode({"on": date(2030, 1, 2)}, what="Output", limits=PayloadLimits())
    assert (text, found.output.decode(text)) == ('{"on":"2030-01-02"}', {"on": date(2030, 1, 2)})


def test_parameters_that_do_not_fit_are_told_by_path() -> None:
    with pytest.raises(ValidationFailed) as failure:
        define(order).params.check({"amount": "much"})
    assert failure.value.problems == [
        ("$.amount", "Input should be a valid integer, unable to parse string as an integer")
    ]


def half_known(event: WorkflowEvent[OrderIn], step: Elsewhere) -> Elsewhere:
    raise AssertionError("only its annotations are read")


def test_an_annotation_that_exists_for_type_checkers_only_does_no_harm_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = define(half_known)
    with caplog.at_level(logging.WARNING, "celery_durable"):
        assert read(found, '{"amount":3}') == OrderIn(amount=3)
        assert not caplog.messages
        assert not found.output.is_typed
    assert caplog.messages == [
        f"Annotation Elsewhere of {__name__}.half_known names nothing that exists at run time, so its values stay "
        "plain JSON data: import or define it at the top of the module"
    ]


def no_annotations(event, step):  # type: ignore[no-untyped-def]
    return None


def bare_event(event: WorkflowEvent, step: Step) -> Any: ...  # type: ignore[type-arg]
def other_payload(event: OrderIn, step: Step) -> object: ...
def any_payload(event: WorkflowEvent[Any], step: Step) -> Any: ...


def test_without_a_declared_type_payload_and_output_are_plain_json() -> None:
    for fn in [no_annotations, bare_event, other_payload, any_payload]:
        found = define(fn)
        assert not found.params.is_typed
        assert not found.output.is_typed
        assert read(found, '{"amount":3}') == {"amount": 3}


def quoted(event: "WorkflowEvent[OrderIn]", step: Step) -> None:  # noqa: UP037  # quoted twice
    return None


def wrapped() -> Any:
    @functools.wraps(order)
    def wrapper(*args: Any) -> Any:
        return order(*args)

    return wrapper


def test_quoted_and_wrapped_annotations_are_read() -> None:
    for fn in [quoted, wrapped()]:
        assert read(define(fn), '{"amount":3}') == OrderIn(amount=3)


def test_a_workflow_that_returns_none_has_that_as_its_type() -> None:
    found = define(quoted).output
    assert found.decode("null") is None
    with pytest.raises(ValidationFailed):
        found.decode("1")


# --- the registry -------------------------------------------------------------------------------


def make(qualname: str, name: str = "order") -> WorkflowDefinition:
    def fn(event: Any, step: Any) -> None: ...

    fn.__qualname__ = qualname
    return define(fn, name=name)


def test_a_registered_workflow_is_found_by_name() -> None:
    registry, definition = Registry(), make("order")
    registry.add(definition)
    assert registry.find("order") is registry.get("order") is definition
    assert registry.find("invoice") is None
    assert list(registry) == ["order"]


def test_a_name_belongs_to_one_workflow() -> None:
    registry = Registry()
    registry.add(make("first"))
    with pytest.raises(WorkflowNameTaken) as refused:
        registry.add(make("second"))
    assert str(refused.value) == (
        f"Workflow name 'order' is already taken by {__name__}.first; {__name__}.second needs another: "
        "@durable_workflow(name=...)."
    )
    assert registry.get("order").source_location == f"{__name__}.first"


def test_a_module_imported_again_replaces_its_workflows() -> None:
    registry = Registry()
    before, after = make("order"), make("order")
    registry.add(before)
    registry.add(after)
    assert registry.get("order") is after


def test_what_is_shared_is_known_to_every_app_and_cannot_be_taken_by_one() -> None:
    shared = Registry()
    first, second = Registry(shared), Registry(shared)
    shared.add(make("order"))
    first.add(make("invoice", "invoice"))
    assert (list(first), list(second)) == (["order", "invoice"], ["order"])
    assert first.get("order") is shared.get("order")
    assert second.find("invoice") is None
    with pytest.raises(WorkflowNameTaken):
        second.add(make("another"))


def test_an_unknown_workflow_is_told_with_those_that_are_known() -> None:
    registry = Registry()
    with pytest.raises(WorkflowNotFound) as in_an_empty_one:
        registry.get("order")
    registry.add(make("b", "b"))
    registry.add(make("a", "a"))
    with pytest.raises(WorkflowNotFound) as refused:
        registry.get("order")
    remedy = "Import the module that defines it, or add it to the Celery app's `imports`."
    assert str(in_an_empty_one.value) == (
        f"No workflow is registered as 'order' in this process (registered: none). {remedy}"
    )
    assert str(refused.value) == f"No workflow is registered as 'order' in this process (registered: a, b). {remedy}"


# --- what is sent at the end --------------------------------------------------------------------

shop = Celery("shop", set_as_current=False)


@shop.task(name="shop.done", shared=False)
def done(ending: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("task", [done, "shop.done"], ids=["task", "name"])
def test_what_is_sent_at_the_end_is_a_task_or_its_name(task: Any) -> None:
    hooks = define(order, on_complete=task).hooks
    assert (hooks.on_complete and hooks.on_complete.name, hooks.on_failure) == ("shop.done", None)


@pytest.mark.parametrize(
    "task", [7, order, done.s(), [done], {"name": "shop.done"}, object()],
    ids=["number", "function", "signature", "list", "dict", "object"],
)  # fmt: skip
def test_what_is_no_task_is_refused_where_it_is_written(task: Any) -> None:
    with pytest.raises(DefinitionInvalid) as refused:
        define(order, on_failure=task)
    assert str(refused.value) == (
        f"on_failure of order is {task!r}, which is no task: pass a Celery task, or a task's name. It is called with "
        "what became of the run, and goes where task_routes says."
    )


def test_a_linear_workflow_refuses_it_too() -> None:
    with pytest.raises(DefinitionInvalid, match=r"^on_complete of linear workflow 'order' is 7, which is no task"):
        define_linear("order", module="shop", version=1, steps=[LinearStep("PAY")], on_complete=7)


def test_the_name_of_what_is_sent_is_checked_as_those_that_steps_send() -> None:
    for name in ["", "x" * 256, "shop\ndone"]:
        with pytest.raises(
            NameInvalid, match=r"^Task name .* use text of 1 to 255 characters without control characters"
        ):
            define(order, on_complete=name)


def test_an_unknown_option_is_refused_with_those_that_there_are() -> None:
    unknown: dict[str, Any] = {"retries": 3}
    with pytest.raises(TypeError) as refused:
        durable_workflow(**unknown)(order)
    assert "retries=" in str(refused.value)
    assert all(f"{option}=" in str(refused.value) for option in WorkflowOptions.__annotations__)
