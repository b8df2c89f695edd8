"""A soft time limit that fires at any line of this package while a task's end is committed: its step has one answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

import celery_durable
from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.model import ItemRef, RunRef
from celery_durable.tasks import TASK_DONE, TASK_FAILED
from tests.support.embedded import messages, until, worker
from tests.support.references import reference_of

_OURS = str(Path(celery_durable.__file__).parent)
_ITEMS = 1_000
_LIMIT = "the soft limit"


class Interruption:
    """Raises as billiard's signal handler does, before the line of this package that is the ``at``-th to run."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where: str | None = None
        self.while_ending = False
        """Whether the end of the task was being committed or sent."""

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(_OURS) or self.where is not None:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.while_ending = any(each.f_code.co_name == "commit" for each, _ in walk_stack(frame))
                raise SoftTimeLimitExceeded(_LIMIT)
        return self


@contextmanager
def interrupted(at: int) -> Iterator[Interruption]:
    interruption = Interruption(at)
    before = sys.gettrace()
    sys.settrace(interruption)
    try:
        yield interruption
    finally:
        sys.settrace(before)


@pytest.fixture
def out(app: Celery, durable: Durable) -> RunRef:
    """An instance whose map has all its items out."""

    @durable.workflow
    def maps(event: WorkflowEvent, step: Step) -> Any:
        return len(step.map("map", "nobody.knows.it", range(_ITEMS), retries=0, timeout="1 day"))

    with worker(app, queues=[app.conf.durable_queue]):
        instance = maps.create(id="m-1")
        until(lambda: instance.status().status == "waiting")
    messages(app)
    return RunRef("maps", "m-1", 1)


def returns(app: Celery, nth: int, reference: list[Any]) -> None:
    """As Celery does when a task has returned: the link, and where that raises, the errback."""
    try:
        app.tasks[TASK_DONE].apply_async((f"item {nth}.", reference))
    except SoftTimeLimitExceeded as exc:
        app.tasks[TASK_FAILED](app.tasks[TASK_DONE].request, exc, None, reference)


def fails(app: Celery, nth: int, reference: list[Any]) -> None:
    """As Celery 5.7 does when a task has failed: what the errback raises is logged."""
    with contextlib.suppress(SoftTimeLimitExceeded):
        app.tasks[TASK_FAILED](app.tasks[TASK_DONE].request, LookupError(f"item {nth}."), None, reference)


@pytest.mark.gate
@pytest.mark.parametrize("end", [returns, fails])
def test_a_task_that_is_interrupted_while_it_answers_answers_once(
    app: Celery, durable: Durable, out: RunRef, end: Callable[[Celery, int, list[Any]], None]
) -> None:
    pk = durable.internals.operations.queries.get(out.workflow, out.instance_id).instance.pk
    item = durable.internals.store.tables.item.c
    ended = 0
    for nth in range(_ITEMS):
        reference = reference_of(durable.internals.store, out, ItemRef(pk, "map", nth, 1).type).to_json()
        with interrupted(nth) as interruption:
            end(app, nth, reference)
        if interruption.where is None:
            break
        query = sa.select(item.answer).where(item.instance_pk == pk, item.position == nth)
        committed = durable.internals.store.read(lambda tx, query=query: tx.execute(query).scalar())
        answers = [str(each.payload) for each in messages(app)] + ([] if committed is None else [committed])
        if interruption.while_ending:
            ended += 1
            assert len(answers) == 1, f"{answers} at {interruption.where}"
            assert f"item {nth}." in answers[0], f"{answers} at {interruption.where}"
        elif end is returns:
            assert len(answers) == 1, f"{answers} at {interruption.where}"
    else:
        pytest.fail(f"not over after {_ITEMS} lines")
    assert ended > 100
