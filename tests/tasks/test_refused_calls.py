"""Tasks that refuse their own call: the step that sends one fails at once. Only errors of the broker are retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task
from kombu.exceptions import OperationalError

from celery_durable import Durable, Retries, Step, StepFailed, WorkflowEvent
from tests.support.embedded import until

RETRIES = Retries(limit=5, delay=0)


class Choosy(Task):
    """A base class that sends nothing that it does not like."""

    error: Exception | None = LookupError("no tenant")

    def apply_async(self, *args: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return None


@pytest.fixture
def add(app: Celery) -> Any:
    @app.task(name="add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    return add


def ended(durable: Durable, use: Callable[[Step], Any]) -> Any:
    """The end of a workflow that sends tasks in one pass or more; no worker takes them."""

    @durable.workflow(name="asking")
    def asking(event: WorkflowEvent[None], step: Step) -> Any:
        return use(step)

    instance = asking.create(id="a-1")
    while durable.tick():
        pass
    return instance


def failure(use: Callable[[Step], Any]) -> Callable[[Step], Any]:
    def caught(step: Step) -> Any:
        try:
            return use(step)
        except StepFailed as exc:
            return [exc.error_name, exc.error_message, exc.attempts]

    return caught


MISSING = "add() missing 1 required positional argument: 'y'"
TOO_MANY = "add() takes 2 positional arguments but 3 were given"
UNKNOWN = "add() got an unexpected keyword argument 'z'"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"), [((1,), {}, MISSING), ((1, 2, 3), {}, TOO_MANY), ((1, 2), {"z": 3}, UNKNOWN)]
)
def test_a_step_whose_task_does_not_take_its_arguments_fails_at_once_with_the_traceback(
    durable: Durable, add: Any, args: tuple[int, ...], kwargs: dict[str, int], text: str
) -> None:
    instance = ended(durable, failure(lambda step: step.task("add", add.s(*args, **kwargs), retries=RETRIES)))
    assert instance.result() == ["TypeError", text, 1]
    (attempt,) = durable.internals.operations.history.attempts("asking", "a-1", run=1)
    assert (attempt.error.name, attempt.error.message) == ("TypeError", text)
    assert "check_arguments" in attempt.traceback


def test_the_items_of_a_map_whose_task_does_not_take_them_fail_at_once(durable: Durable, add: Any) -> None:
    items = list(range(250))  # more than Python may recurse for

    def use(step: Step) -> Any:
        failed = step.map("add", add.si(1, 2), items, max_concurrency=2, return_exceptions=True)
        return [[each.error_name, each.error_message, each.attempts] for each in failed]

    assert ended(durable, use).result() == [["TypeError", TOO_MANY, 1]] * 250


def test_one_bad_item_does_not_keep_the_others(app: Celery, durable: Durable) -> None:
    @app.task(name="first", shared=False, base=Choosy)
    def first(number: int) -> int:
        return number

    use = failure(lambda step: step.map("first", first.s(), [1, 2]))
    assert ended(durable, use).result() == ["LookupError", "item 0: no tenant", 1]


def test_a_branch_whose_task_refuses_its_call_fails(app: Celery, durable: Durable) -> None:
    @app.task(name="first", shared=False, base=Choosy)
    def first() -> None: ...

    use = failure(lambda step: step.gather(step.submit_task("a", first), step.submit_map("b", first, [1])))
    assert ended(durable, use).result() == ["LookupError", "no tenant", 1]


def test_a_task_that_sends_nothing_fails_its_step_and_else_counts_as_sent(app: Celery, durable: Durable) -> None:
    @app.task(name="once", shared=False, base=Choosy, error=None)
    def once() -> None: ...

    def use(step: Step) -> Any:
        step.do("announce", lambda tx: tx.send_task(once))
        return failure(lambda step: step.task("once", once))(step)

    text = "Task 'once' cannot be sent with a step: its apply_async sent no message, so no result would come."
    assert ended(durable, use).result() == ["TaskRefused", text, 1]
    assert durable.internals.operations.outbox.read() == []


def test_an_error_of_the_broker_is_retried(app: Celery, durable: Durable) -> None:
    """A lock in the broker, as packages for unique tasks take it."""

    @app.task(name="first", shared=False, base=Choosy, error=OperationalError("away"))
    def first() -> None: ...

    instance = ended(durable, lambda step: step.task("first", first))
    assert instance.status().status == "waiting"
    (entry,) = durable.internals.operations.outbox.read()
    assert (entry.name, entry.is_given_up) == ("first", False)


def test_a_task_that_no_step_waits_for_is_kept_for_an_operator(app: Celery, durable: Durable, add: Any) -> None:
    class Gate(Choosy):
        error = LookupError("no tenant")

    @app.task(name="tell", shared=False, base=Gate)
    def tell(outcome: Any) -> None: ...

    @durable.workflow(name="order", on_complete=tell)
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.do("announce", lambda tx: tx.send_task(add, 1))

    order.create()
    assert durable.tick()
    outbox = durable.internals.operations.outbox
    kept = outbox.read(given_up=True)
    assert [(each.name, each.error) for each in kept] == [
        ("add", f"TypeError: {MISSING}"),
        ("tell", "LookupError: no tenant"),
    ]
    outbox.drop([kept[0].id])
    Gate.error = None
    outbox.retry([kept[1].id])
    durable.internals.sweeper.sweep()
    assert outbox.read() == []


def test_a_dispatcher_that_sends_later_fails_the_items_too(app: Celery, durable: Durable) -> None:
    class Gate(Choosy):
        error = OperationalError("away")

    @app.task(name="first", shared=False, base=Gate)
    def first(number: int) -> None: ...

    app.conf.durable_grace_seconds = 0.1
    use = failure(lambda step: step.map("first", first, [1, 2, 3], max_concurrency=2))
    instance = ended(durable, use)
    Gate.error = LookupError("no tenant")

    def sweep() -> bool:
        durable.internals.sweeper.sweep()
        return durable.tick() and instance.status().status == "complete"

    until(sweep)
    assert instance.result() == ["LookupError", "item 0: no tenant", 1]
