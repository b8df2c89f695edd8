"""The durable log: stored with the next boundary, from workflows and bodies, marked on replay, bounded."""

from __future__ import annotations

import pytest

from celery_durable import Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import NameInvalid, NotSerializable, PayloadTooLarge, ValueRefused
from celery_durable.model import LogLevel
from tests.support.world import World


def test_a_line_has_level_category_message_and_data(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.debug("one")
        step.log.info("two", category="orders", amount=5, of={"a": [1]})
        step.log.warning("three")
        step.log.error("four", reason=None)

    instance = order.run()
    assert [(line.level, line.category, line.message, line.data) for line in instance.logs()] == [
        ("debug", "workflow", "one", None),
        ("info", "orders", "two", {"amount": 5, "of": {"a": [1]}}),
        ("warn", "workflow", "three", None),
        ("error", "workflow", "four", {"reason": None}),
    ]


def test_a_line_outside_steps_is_marked_when_it_is_a_replay(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.info("start")
        step.do("a", lambda: 1)
        step.log.info("middle")
        step.sleep("rest", 60)
        step.log.info("end")

    instance = order.run()
    assert [(line.message, line.is_replay) for line in instance.logs()] == [("start", False), ("middle", False)]
    world.run_after(60)
    assert [(line.message, line.is_replay) for line in instance.logs()[2:]] == [
        ("start", True),
        ("middle", True),
        ("end", False),
    ]


def test_lines_are_not_marked_because_a_deploy_removed_a_step(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("removed", lambda: 1)
        step.do("kept", lambda: 1)
        step.sleep("rest", 60)

    instance = order.run()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("kept", lambda: 1)
        step.log.info("between")
        step.sleep("rest", 60)
        step.log.info("end")

    world.run_after(60)
    assert [(line.message, line.is_replay) for line in instance.logs()] == [("between", True), ("end", False)]


def test_a_line_in_a_body_names_its_step_and_attempt_and_is_never_a_replay(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("charge", lambda: step.log.info("charging", amount=5))
        step.sleep("rest", 60)

    instance = order.run()
    world.run_after(60)
    assert [(line.message, line.step_key, line.attempt, line.is_replay) for line in instance.logs()] == [
        ("charging", "charge", 1, False)
    ]


def test_the_lines_of_failed_attempts_are_kept(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def charge(tx) -> None:
            step.log.info("attempt", of=tx.attempt)
            if tx.attempt < 3:
                raise ValueError("no")

        step.do("charge", StepConfig(retries=Retries(limit=5, delay=1, backoff="constant")), charge)

    instance = order.run()
    for _ in range(2):
        world.run_after(1)
    assert instance.status == "complete"
    assert [(line.data, line.step_key, line.attempt) for line in instance.logs()] == [
        ({"of": n}, "charge", n) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("limit", [0, 1])
def test_lines_survive_a_commit_that_the_authors_writes_break(world: World, limit: int) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work(tx) -> None:
            step.log.info("in the body")
            tx.mutate(lambda _: 1 / 0)

        step.log.info("before")
        step.do("work", StepConfig(retries=Retries(limit=limit, delay=60)), work)

    instance = order.run()
    assert [(line.message, line.is_replay) for line in instance.logs()] == [("before", False), ("in the body", False)]


def test_the_lines_of_branches_are_kept_apart(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work(n: int) -> None:
            for part in "abc":
                step.log.info(part)

        step.gather(*(step.submit(f"work {n}", work, n) for n in range(3)))

    instance = order.run()
    lines = instance.logs()
    for n in range(3):
        assert [line.message for line in lines if line.step_key == f"work {n}"] == ["a", "b", "c"]
    assert len(lines) == 9


def test_lines_before_an_error_are_kept(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.info("about to fail")
        raise ValueError("no")

    instance = order.run()
    assert instance.status == "errored"
    assert instance.lines() == ["about to fail"]


def test_a_run_keeps_so_many_lines_and_counts_the_rest(make_world) -> None:
    world = make_world(max_logs=5)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in "0123":
            step.log.info(n)
        step.do("a", lambda: step.log.info("body"))
        step.log.info("too many")
        step.sleep("rest", 60)

    instance = order.run()
    assert instance.lines() == ["0", "1", "2", "3", "body"]
    world.run_after(60)
    assert len(instance.logs()) == 5
    (run,) = world.recorded(instance, 1)["workflow_run"]
    assert (run.log_count, run.dropped_log_count) == (5, 1 + 5)


def test_each_run_has_a_log_of_its_own(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.info("run", number=event.run_number)

    instance = order.run()
    instance.restart()
    world.run_until_idle()
    found = [[line.data for line in instance.logs(run)] for run in (1, 2, None)]
    assert found == [[{"number": 1}], [{"number": 2}], [{"number": 2}]]


def test_lines_are_read_by_level_category_and_from_a_line_on(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in "012":
            step.log.info(n)
            step.log.error(n * 2, category="shop")

    instance = order.run()

    def read(**options) -> list[str]:
        return [line.message for line in world.operations.history.logs("order", "i-1", **options)]

    assert read(levels=[LogLevel.ERROR]) == read(levels=["error"]) == ["00", "11", "22"]
    assert read(category="workflow") == ["0", "1", "2"]
    assert read(levels=[LogLevel.INFO], category="shop") == []
    assert read(limit=2) == ["0", "00"]
    assert read(after_id=instance.logs()[1].id, limit=2) == ["1", "11"]


def test_a_long_message_is_cut_and_an_impossible_one_is_sanitized(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.log.info("x" * 3000)
        step.log.info("NUL \x00, half \ud800")

    long, odd = order.run().lines()
    assert long == "x" * 2045 + "..."
    assert odd == "NUL , half \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("say", "error", "message"),
    [
        (
            lambda log: log.error(ValueError("no")),
            NameInvalid,
            "Log message ValueError('no') is not allowed: it is of type ValueError; pass text (str).",
        ),
        (
            lambda log: log.info("x", category="system"),
            ValueRefused,
            'Log category "system" is reserved for the engine; use another.',
        ),
        (
            lambda log: log.info("x", category="c" * 65),
            NameInvalid,
            f"Log category '{'c' * 65}' is not allowed: use text of 1 to 64 characters without control characters.",
        ),
        (
            lambda log: log.info("hello", socket=object()),
            NotSerializable,
            "Data of log line 'hello' cannot be stored as JSON: $.socket is a object, which has no JSON form. "
            "Use plain data (or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things "
            "elsewhere and store a reference.",
        ),
        (
            lambda log: log.info("hello", blob="x" * 2**20),
            PayloadTooLarge,
            "Data of log line 'hello' has 1048587 bytes as JSON; at most 1048576 are allowed. "
            "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes.",
        ),
    ],
)
def test_a_line_that_cannot_be_kept_is_refused_where_it_is_written(world: World, say, error, message: str) -> None:
    caught = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for place in (lambda say: say(), lambda say: step.do("body", say)):
            try:
                place(lambda: say(step.log))
            except error as exc:
                caught.append(str(exc))
            except Exception as exc:  # the step's failure
                caught.append(exc.error_message)

    assert order.run().status == "complete"
    assert caught == [message] * 2
