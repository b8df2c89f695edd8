"""What a worker logs of failures: a failed attempt at WARNING, the end of a run with an error at ERROR."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from celery_durable import Completed, LinearStep, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.contrib.log_context import WorkflowContext
from celery_durable.errors import StepFailed
from tests.support.attempts import LOST, dies_at, is_taken_over, kinds, raises
from tests.support.lines import Line
from tests.support.three_frames import FILE, LINE, charge
from tests.support.world import Instance, World, on_one_database

pytestmark = on_one_database
FIELDS = ("workflow", "instance_id", "run_number", "step", "attempt")


def fail(world: World, kind: str) -> Instance:
    """Return an instance whose step "charge" has failed three frames deep in two attempts."""
    if kind == "linear":
        steps = [LinearStep("charge", max_attempts=2, delay=1)]
        flow = Line(world, steps, charge=lambda ctx: Completed(charge({}))).flow
    else:

        @world.workflow
        def order(event: WorkflowEvent, step: Step) -> None:
            step.do("charge", StepConfig(retries=Retries(limit=1, delay=1)), charge, {})

        flow = order
    instance = flow.run()
    world.run_after(1)
    return instance


def about(record: logging.LogRecord) -> tuple[Any, ...]:
    return record.levelname, record.getMessage(), *(getattr(record, name) for name in FIELDS)


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@kinds
def test_attempts_are_warnings_and_the_end_is_an_error(
    world: World, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    fail(world, kind)
    found = failures(caplog)
    run = ("order", "i-1", 1, "charge")
    assert [about(record) for record in found] == [
        ("WARNING", "Attempt 1 of step 'charge' of order/i-1#1 failed: KeyError: 'total'", *run, 1),
        ("WARNING", "Attempt 2 of step 'charge' of order/i-1#1 failed: KeyError: 'total'", *run, 2),
        ("ERROR", "order/i-1#1 failed in step 'charge': KeyError: 'total'", *run, 2),
    ]
    for record in found[:2]:
        frames = re.findall(r'File "(.*)", line (\d+)', logging.Formatter().format(record))
        assert frames[-1] == (FILE, str(LINE))
        assert [file for file, _ in frames if "/celery_durable/" in file] == []  # the author's frames alone
    assert found[2].exc_info is not None  # for tools that collect errors
    text = logging.Formatter().format(found[2])
    assert (f"line {LINE}, in look_up" in text, "Traceback" in text) == (False, False)  # the attempts have it
    assert kind == "linear" or 'step.do("charge"' in text


def test_an_error_between_steps_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        step.do("ship", lambda: 1)
        charge({})

    order.run()
    (record,) = failures(caplog)
    assert about(record) == ("ERROR", "order/i-1#1 failed: KeyError: 'total'", "order", "i-1", 1, None, None)
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_the_causes_of_an_error_are_printed_without_frames_of_the_engine(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        try:
            step.gather(step.submit("charge", StepConfig(retries=0), charge, {}))
        except StepFailed as exc:
            raise ExceptionGroup("no order", [RuntimeError("no money"), exc]) from exc

    order.run()
    text = logging.Formatter().format(failures(caplog)[-1])
    assert "The above exception was the direct cause of the following exception" in text
    assert re.findall(r'File ".*/celery_durable/.*', text) == []


def test_a_failure_that_the_code_catches_is_a_warning_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> str:
        try:
            step.do("charge", StepConfig(retries=0), charge, {})
        except StepFailed:
            return "free"
        return "paid"

    assert order.run().output == "free"
    assert [record.levelname for record in failures(caplog)] == ["WARNING"]


@kinds
def test_what_is_not_committed_is_not_logged(make_bench: Any, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    bench = make_bench(kind, "nothing", dies_at("before-commit", raises(ValueError("no"))))
    bench.advance()
    assert [record for record in failures(caplog) if "failed" in record.getMessage()] == []


@kinds
def test_a_superseded_worker_logs_no_failure(make_bench: Any, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    bench = make_bench(kind, "nothing", is_taken_over(raises(ValueError("late"))))
    bench.advance()
    assert not [record for record in caplog.records if "late" in record.getMessage()]


# --- the records of your own code ---------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """A handler for any formatter, here one for JSON, with the fields of `WorkflowContext`."""
    stream, logger = io.StringIO(), logging.getLogger("shop")
    handler = logging.StreamHandler(stream)
    handler.addFilter(WorkflowContext())
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"message": record.getMessage()} | {name: getattr(record, name) for name in FIELDS})


@kinds
def test_a_record_of_a_body_names_its_step_and_attempt(world: World, lines: io.StringIO, kind: str) -> None:
    log = logging.getLogger("shop")
    if kind == "linear":
        handler = lambda ctx: Completed(log.info("working"))  # a handler
        Line(world, [LinearStep("charge")], charge=handler).flow.run()
    else:

        @world.workflow
        def order(event: WorkflowEvent, step: Step) -> None:
            step.do("charge", log.info, "working")

        order.run()
    run = {"workflow": "order", "instance_id": "i-1", "run_number": 1}
    assert json.loads(lines.getvalue()) == {"message": "working", **run, "step": "charge", "attempt": 1}


def test_a_record_of_a_branch_names_its_own_step(world: World, lines: io.StringIO) -> None:
    log = logging.getLogger("shop")

    @world.workflow
    def order(event: WorkflowEvent, step: Step) -> None:
        log.info("between")
        step.gather(*(step.submit(name, log.info, name) for name in ("one", "two")))

    order.run()
    log.info("outside")
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert {(each["message"], each["instance_id"], each["step"]) for each in found} == {
        ("between", "i-1", None),
        ("one", "i-1", "one"),
        ("two", "i-1", "two"),
        ("outside", None, None),
    }


@pytest.mark.usefixtures("world")
def test_a_field_that_a_record_has_stays(lines: io.StringIO) -> None:
    logging.getLogger("shop").info("mine", extra={"step": "of a dance"})
    assert json.loads(lines.getvalue())["step"] == "of a dance"


def test_a_lost_transaction_is_no_failed_attempt(make_bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench("function", "session", raises(LOST))
    bench.advance()
    assert not [record for record in failures(caplog) if record.name == "celery_durable.runner"]
