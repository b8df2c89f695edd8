"""How Celery tasks answer: through the callbacks of a worker, eagerly, and when the database cannot take it."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import itertools
import json
import logging
import pathlib
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task, signals
from celery.exceptions import Ignore, Reject

from celery_durable import Cancelled, Durable, NonRetryableError, Retries, Status, Step, StepFailed, WorkflowEvent
from celery_durable.tasks import TASK_DONE, TASK_FAILED
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages, until, worker

_ATTEMPTS: list[int] = []


class CardDeclined(Exception):
    """One that pickle cannot carry, which is what Celery tries."""

    def __init__(self, card: str, why: str) -> None:
        super().__init__(f"{card}: {why}")


_watching: list[list[str]] = []


def _note(sender: str, **_: Any) -> None:
    for names in _watching:
        names.append(sender)


@pytest.fixture(scope="module", autouse=True)
def connected() -> Iterator[None]:
    """For all tests here: before 5.7 Celery may keep asking the receivers that there were when an app first sent."""
    signals.before_task_publish.connect(_note, weak=False)
    yield
    signals.before_task_publish.disconnect(_note)


@contextmanager
def published() -> Iterator[list[str]]:
    """The names of the messages that this process sends meanwhile."""
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def adding_tasks(app: Celery) -> None:
    @app.task(name="fine", shared=False)
    def fine(number: int) -> Any:
        return {"number": number, "day": dt.date(2030, 1, 2)}

    @app.task(name="fails", shared=False)
    def fails(number: int) -> None:
        raise LookupError(f"no {number}")

    @app.task(name="final", shared=False)
    def final(number: int) -> None:
        raise NonRetryableError("no use", name="Gone")

    @app.task(name="declined", shared=False)
    def declined(number: int) -> None:
        raise CardDeclined("4242", "no cover")

    @app.task(name="odd", shared=False)
    def odd(number: int) -> float:
        return float("nan")

    @app.task(name="again", bind=True, shared=False, max_retries=2)
    def again(task: Any, number: int) -> int:
        _ATTEMPTS.append(number)
        if len(_ATTEMPTS) < 3:
            raise task.retry(countdown=0)
        return number

    @app.task(name="silent", shared=False)
    def silent(number: int) -> None:
        raise Ignore

    @app.task(name="rejected", shared=False)
    def rejected(number: int) -> None:
        raise Reject("no", requeue=False)

    @app.task(name="put_back", shared=False)
    def put_back(number: int) -> None:
        raise Reject("later", requeue=True)

    @app.task(name="replaced", bind=True, shared=False)
    def replaced(task: Any, number: int) -> None:
        task.replace(app.signature("fine", (number,)).set(queue=app.conf.durable_queue))

    @app.task(name="auto", shared=False, autoretry_for=(OSError,), max_retries=2, retry_backoff=False)
    def auto(number: int) -> int:
        _ATTEMPTS.append(number)
        if len(_ATTEMPTS) < 3:
            raise OSError("not yet")
        return number

    @app.task(name="unlucky", shared=False)
    def unlucky(number: int) -> None:
        try:
            fails(number)
        except LookupError:
            raise KeyError("none") from None


@pytest.fixture
def ask(durable: Durable, app: Celery) -> Any:
    """A workflow that has the tasks of these names do a step each, and tells what came of them."""
    adding_tasks(app)
    _ATTEMPTS.clear()

    @durable.workflow
    def ask(event: WorkflowEvent[list[str]], step: Step) -> Any:
        got = []
        for name in event.payload:
            try:
                task = app.signature(name, (7,)).set(queue=app.conf.durable_queue)
                got.append(step.task(name, task, timeout="1 minute", retries=Retries(limit=1, delay=0)))
            except StepFailed as exc:
                got.append([exc.error_name, exc.error_message, exc.attempts])
        return got

    return ask


EXPECTED = {
    "fine": {"number": 7, "day": "2030-01-02T00:00:00"},
    "fails": ["LookupError", "no 7", 2],
    "final": ["Gone", "no use", 1],
    "again": 7,
    "declined": ["CardDeclined", "CardDeclined('4242: no cover')", 2],
}


def test_results_and_errors_come_back_from_a_worker(app: Celery, ask) -> None:
    with published() as names, worker(app, queues=[app.conf.durable_queue]):
        got = ask.create([*EXPECTED, "odd"]).result(timeout=30)
    assert not {TASK_DONE, TASK_FAILED} & set(names)  # each was committed where its task ended
    assert got[0]["day"].startswith("2030-01-02")
    assert got[1:-1] == [*EXPECTED.values()][1:]
    assert (got[-1][0], got[-1][2]) == ("NotSerializable", 1)  # again it would be the same
    assert len(_ATTEMPTS) == 3  # Celery's own retries are one attempt


def test_ends_that_call_nothing_are_answered_too(app: Celery, ask) -> None:
    asked = ["silent", "rejected", "put_back", "replaced"]
    with published() as names, worker(app, queues=[app.conf.durable_queue]):
        ignored, rejected, put_back, replaced = ask.create(asked).result(timeout=30)
    assert ignored == ["TaskIgnored", "The Celery task raised Ignore, so it has no result", 2]
    assert rejected == ["TaskRejected", "The Celery task raised Reject: no", 2]
    assert put_back == ["TaskRejected", "The Celery task raised Reject: later", 2]  # acknowledged before it ran
    assert replaced["number"] == 7
    assert not {TASK_DONE, TASK_FAILED} & set(names)


def test_a_result_backend_that_is_away_changes_nothing(make_app: MakeApp) -> None:
    app = make_app(result_backend="tests.tasks.away:AwayBackend", task_ignore_result=False)
    durable = Durable(app)
    adding_tasks(app)
    _ATTEMPTS.clear()

    @durable.workflow
    def several(event: WorkflowEvent, step: Step) -> Any:
        names = ("fine", "fails", "unlucky", "again")
        tasks = [app.signature(name, (7,)).set(queue=app.conf.durable_queue) for name in names]
        futures = [step.submit_task(name, task) for name, task in zip(names, tasks, strict=True)]
        fine, *failed, again = step.gather(*futures, return_exceptions=True)
        return [fine["number"], [(each.error_name, each.error_message) for each in failed], again]

    with worker(app, queues=[app.conf.durable_queue]):
        wanted = [7, [["LookupError", "no 7"], ["KeyError", "'none'"]], 7]
        assert several.create().result(timeout=20) == wanted


def test_a_task_of_another_database_answers_by_message(app: Celery, durable: Durable, ask) -> None:
    """Two applications on one broker: the worker that does the task has a Durable of its own."""
    theirs = f"theirs-{app.conf.durable_queue}"
    reference = ["another store", "ask", "i-1", 1, "task:1:1:1:x", "a" * 32, theirs, 0]
    done, failed = (app.signature(name, (reference,)).set(queue=theirs) for name in (TASK_DONE, TASK_FAILED))
    how = {"queue": app.conf.durable_queue, "link": done, "link_error": failed, "headers": {"durable": reference}}
    with published() as names, worker(app, queues=[app.conf.durable_queue]):
        for name in ("fine", "fails", "silent", "rejected"):
            app.send_task(name, (7,), **how)
        until(lambda: sorted(names)[:4] == [TASK_DONE, *[TASK_FAILED] * 3])
    told = [message.decode()[0] for message in messages(app, theirs)]
    assert all(rest == reference for _, rest in told)  # Celery from 5.6 on tells twice of what was rejected
    assert {what["name"] for what, _ in told if "name" in what} == {"LookupError", "TaskIgnored", "TaskRejected"}


def test_what_runs_eagerly_answers_at_once(make_app: MakeApp) -> None:
    app = make_app(broker_url="redis://127.0.0.1:1/0", task_always_eager=True)
    durable = Durable(app)
    adding_tasks(app)

    @durable.workflow
    def kid(event: WorkflowEvent[int], step: Step) -> int:
        return event.payload + 1

    @durable.workflow
    def all_sorts(event: WorkflowEvent, step: Step) -> Any:
        got = step.map("map", app.signature("fine"), range(3), max_concurrency=1, return_exceptions=True)
        try:
            step.task("unknown", "nobody.knows.it")
        except StepFailed as exc:
            return [[each["number"] for each in got], exc.error_name, step.child("kid", kid, 1)]

    assert all_sorts.create().status().output == [[0, 1, 2], "NotRegistered", 2]


def test_an_answer_waits_in_the_broker_while_the_database_does_not_take_it(
    app: Celery, durable: Durable, ask, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, refused = durable.internals.operations.answers.accept, []

    def refuse(*args: Any, **options: Any) -> Any:
        if len(refused) < 2:
            refused.append(options)
            raise OSError("the database is away")
        return answer(*args, **options)

    monkeypatch.setattr(durable.internals.operations.answers, "accept", refuse)
    monkeypatch.setattr(durable.internals.answers, "pause_before_resend", lambda: None)
    with caplog.at_level(logging.WARNING), worker(app, queues=[app.conf.durable_queue]):
        assert ask.create(["again"]).result(timeout=30) == [7]
    assert [each["is_direct"] for each in refused] == [True, False]  # where the task ran, then from a message
    assert "is sent as a message: the database is away" in caplog.text
    assert "sends its message to the broker again: the database is away" in caplog.text


def test_a_task_that_celery_will_not_run_fails_its_step_at_once(app: Celery, durable: Durable) -> None:
    adding_tasks(app)

    @durable.workflow
    def late(event: WorkflowEvent, step: Step) -> Any:
        try:
            step.task("fine", app.signature("fine", (7,)).set(queue=app.conf.durable_queue, expires=-1))
        except StepFailed as exc:
            return [exc.error_name, exc.error_message.partition(" (")[0], exc.error_message.partition(") ")[2]]

    with worker(app, queues=[app.conf.durable_queue]):
        got = late.create().result(timeout=30)
    assert got == ["TaskRevoked", "Celery task 'fine'", "was not run: it had expired"]


def test_a_task_that_never_answers_is_waited_for(app: Celery, ask) -> None:
    with worker(app, queues=[app.conf.durable_queue]):
        instance = ask.create(["nobody.knows.it"])
        until(lambda: instance.status().status == "waiting")
        step = instance.history().steps[0]
    assert (step.status, step.task, step.attempts) == ("waiting", "nobody.knows.it", 1)
    assert instance.explain().code == "TASK_NOT_CONSUMED"


def test_an_error_goes_to_the_queue_of_who_has_asked(app: Celery, durable: Durable) -> None:
    """The worker that did the task may have workflows of its own, and a queue and a database for them."""
    theirs = f"theirs-{app.conf.durable_queue}"
    reference = ["another store", "ask", "i-1", 1, "task:1:1:1:x", "a" * 32, theirs, 0]
    app.tasks[TASK_FAILED](object(), LookupError("no 7"), None, reference)
    (message,) = messages(app, theirs)
    (error, rest), _, _ = message.decode()
    assert (error, rest) == ({"name": "LookupError", "message": "no 7"}, reference)
    assert messages(app) == []


UNREADABLE: list[Any] = [
    None, "", [], {}, ["ask"], "abcdefgh", ["s", "ask", 7, 1, "task:1:1:x", "t", "q", 0],
    ["s", "ask", "i-1", "one", "x", "t", "q", 0], ["s", "ask", "i-1", 1, "x", None, "q", 0], ["a"] * 8,
    ["s", "ask", "i-1", 1, "x", "t", 7, 0], ["s", "ask", "i-1", 1, "x", "t", "q", "0"],
]  # fmt: skip


def test_a_message_that_nobody_can_read_is_dropped(app: Celery, durable: Durable) -> None:
    for reference in UNREADABLE:
        for name, what in ((TASK_DONE, 1), (TASK_FAILED, {"name": "E", "message": "m"}), (TASK_FAILED, "task-id")):
            assert app.tasks[name].apply((what, reference)).get() == "noop: malformed message", reference


def test_an_answer_to_nothing_changes_nothing(app: Celery, durable: Durable, ask) -> None:
    instance = ask.create(["fine"])
    messages(app)
    refs = (("ask", instance.id, 1), ("ask", "other", 1), ("ask", instance.id, 9), ("\0", "\0", 1))
    types = ("task:1:1:x", "item:0:1:map", "approval", "item:x", "item:a:b:c", "")
    for ref, type_ in itertools.product(refs, types):
        said = app.tasks[TASK_DONE].apply(("forged", ["s", *ref, type_, "t", "q", 0])).get()
        assert said.startswith("noop: "), (ref, type_)
    assert instance.history().events == ()


# --- the same by both ways ----------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Price:
    cents: int

    def __json__(self) -> Any:  # by which kombu asks
        return ["EUR", self.cents]


CORPUS: list[Callable[[], Any]] = [
    lambda: None, lambda: (1, (2, [3])), lambda: {1: {2.5: "a", None: "b", True: "c"}}, lambda: {"1": "a", 1: "b"},
    lambda: dt.datetime(2030, 1, 2, 3, 4, 5, 678), lambda: dt.datetime(2030, 1, 2, tzinfo=dt.UTC),
    lambda: dt.date(2030, 1, 2), lambda: dt.time(3, 4, 5, 678), lambda: dt.timedelta(1),
    lambda: decimal.Decimal("1.10"), lambda: uuid.UUID(int=7), lambda: [uuid.UUID(int=7), decimal.Decimal(3)],
    lambda: b"bytes", lambda: b"\xff", lambda: 2**70, lambda: 1e300, lambda: float("inf"), lambda: {"n": float("nan")},
    lambda: "\ud800", lambda: "\x00", lambda: "\N{SNOWMAN}", lambda: {2, 3}, lambda: frozenset(), lambda: range(3),
    lambda: Point(7), lambda: Colour.RED, lambda: object, lambda: object(), lambda: iter([1]), lambda: ValueError("no"),
    lambda: {(1, 2): 3}, lambda: "x" * 2_000_000,
    lambda: Price(7), lambda: [{"__type__": "decimal", "__value__": "1.50"}],
    lambda: pathlib.PurePosixPath("/tmp"), lambda: collections.OrderedDict(b=1, a=2), lambda: 1 + 2j,
]  # fmt: skip


def test_a_result_is_the_same_committed_where_its_task_ran_or_sent(
    app: Celery, durable: Durable, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="give", shared=False)
    def give(number: int) -> Any:
        return CORPUS[number]()

    @durable.workflow
    def gather(event: WorkflowEvent, step: Step) -> Any:
        task = give.s().set(queue=app.conf.durable_queue)
        return len(step.map("all", task, range(len(CORPUS)), retries=0, return_exceptions=True))

    got = []
    for is_direct in (True, False):
        if not is_direct:
            monkeypatch.setattr(durable.internals.answers, "can_commit_directly", lambda _: False)
        with published() as names, worker(app, queues=[app.conf.durable_queue]):
            instance = gather.create()
            until(lambda: instance.status().status == "complete")
            got.append([re.sub(r" at 0x\w+", "", json.dumps(each)) for each in instance.history().steps[0].result])
        assert ({TASK_DONE, TASK_FAILED} <= set(names)) is not is_direct
    direct, sent = got
    assert direct == sent
    assert sum('"output"' in each for each in direct) >= 15


def test_a_result_that_kombu_writes_but_cannot_read_fails_its_step(app: Celery, durable: Durable) -> None:
    @app.task(name="odd", shared=False)
    def odd() -> Any:
        return {"__type__": "unknown", "__value__": 1}

    @durable.workflow
    def one(event: WorkflowEvent, step: Step) -> Any:
        try:
            return step.task("odd", odd.s().set(queue=app.conf.durable_queue), retries=0)
        except StepFailed as exc:
            return exc.error_name

    with worker(app, queues=[app.conf.durable_queue]):
        assert one.create().result(timeout=20) == "DecodeError"


# --- tasks of runs that are over ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["terminate", "restart", "cancel"])
def test_a_message_of_a_run_that_is_over_is_dropped_when_it_is_taken(app: Celery, durable: Durable, end: str) -> None:
    queue, started = app.conf.durable_queue, []

    class Announced(Task):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            started.append(args)

    @app.task(name="convert", base=Announced, shared=False)
    def convert(page: str) -> str:
        started.append(page)
        return page

    @durable.workflow(name="book")
    def book(event: WorkflowEvent[str], step: Step) -> Any:
        task = convert.s(event.payload).set(queue=queue)
        try:
            return step.gather(
                step.submit_task("cover", task, timeout="1 minute"),
                step.submit_map("pages", convert.s().set(queue=queue), [event.payload] * 2, timeout="1 minute"),
            )
        except Cancelled:
            step.task("apologize", convert.s("sorry").set(queue=queue), timeout="1 minute")
            raise

    over = book.create("over", id="over")
    kept = book.create("kept", id="kept")
    assert durable.tick()
    if end == "restart":
        over.restart()
    if end == "cancel":
        over.cancel()
        assert durable.tick()
    else:
        over.terminate()
    with worker(app, queues=[queue]):
        assert kept.result(timeout=20) == ["kept", ["kept", "kept"]]
        if end == "cancel":
            until(lambda: over.status().status is Status.TERMINATED)
    assert "over" not in str(started)
    assert len([each for each in started if "kept" in each]) == 6
