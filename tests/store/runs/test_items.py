"""Items of a map: a decision counts only for the items that it was made for. What changes in between is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.model import (
    AnswerResult,
    Claim,
    FailedItem,
    ItemRef,
    MapState,
    OpenWait,
    OutboxMessage,
    ReleaseOutcome,
    RetryDecision,
    StepStatus,
    StepType,
    TaskReference,
    TaskSendingStep,
    task_event_type,
)
from celery_durable.remote.maps import ItemsNeedPass
from celery_durable.store import lost_tasks
from celery_durable.store.engine import Tx
from celery_durable.store.events import answers
from celery_durable.store.events.answers import AnswerOutcome
from celery_durable.store.instances import instances
from celery_durable.store.runs import claims, items, step_rows
from celery_durable.store.runs.items import SentItem
from celery_durable.values import encode_answer, encode_error_answer
from tests.store.test_plans import plan
from tests.store.world import GRACE, LEASE, World, seconds, step
from tests.support.references import reference_of

DONE = encode_answer("1")
FAILED = encode_error_answer("OSError", "no")
TIMEOUT = 60
BODY = '{"name":"work","args":[%d],"kwargs":{},"options":{}}'


class Map:
    """A map of some items whose first tasks are out, under the claim that started it."""

    def __init__(self, world: World, count: int, *, max_concurrency: int | None = None) -> None:
        self.world = world
        self.ref = world.create()
        self.claim: Claim = world.claim(self.ref)
        self.step = TaskSendingStep(
            self.ref.workflow, self.ref.instance_id, self.claim.pk, 1, "m", seconds(TIMEOUT), max_concurrency
        )
        self.sent: list[SentItem] = world.store.transact(lambda tx: self._start(tx, count))

    def _start(self, tx: Tx, count: int) -> list[SentItem]:
        type_ = task_event_type("work", self.claim.pk, 1, 0)
        write = step("m", StepStatus.WAITING, type=StepType.MAP, event_type=type_, wake_in=seconds(TIMEOUT))
        write = replace(write, timeout=seconds(TIMEOUT), max_attempts=3)
        step_rows.write_step(tx, self.claim, claims.guard(tx, self.claim, lease=LEASE), write)
        return items.start_map(tx, self.step, [BODY % n for n in range(count)], now=self.world.now)

    def state(self) -> MapState:
        """Count the items as a pass does before it takes the lock."""
        return self.world.store.read(lambda tx: items.read_map_state(tx, self.step, now=self.world.now))

    def lock_failed(self, tx: Tx) -> list[FailedItem]:
        claims.guard(tx, self.claim, lease=LEASE)
        return items.lock_failed_items(tx, self.step, now=self.world.now)

    def apply(self, *decisions: RetryDecision) -> None:
        def work(tx: Tx) -> None:
            claims.guard(tx, self.claim, lease=LEASE)
            items.apply_decisions(tx, self.step, decisions)

        self.world.store.transact(work)

    def reference(self, position: int, attempt: int = 1) -> TaskReference:
        event_type = ItemRef(self.claim.pk, "m", position, attempt).type
        return reference_of(self.world.store, self.ref, event_type)

    def answer_in(self, tx: Tx, reference: TaskReference, payload: str) -> AnswerOutcome:
        row = instances.lock(tx, self.ref.workflow, self.ref.instance_id)
        options: Any = {"event_id": "answer", "grace": GRACE}
        return answers.accept_answer(tx, row, reference, payload=payload, **options)

    def answer(self, position: int, payload: str, *, attempt: int = 1) -> AnswerOutcome:
        reference = self.reference(position, attempt)
        return self.world.store.transact(lambda tx: self.answer_in(tx, reference, payload))

    def lose(self, reference: TaskReference) -> Any:
        """Report that a task is lost, as the process that saw it die does."""
        return self.world.store.transact(
            lambda tx: lost_tasks.report_loss(tx, reference, sent_by=None, limit=3, grace=GRACE)
        )

    def rows(self) -> list[tuple[str, int, int, str | None]]:
        """Return status, attempts, losses and answer of each item."""
        item = self.world.store.tables.item.c
        query = sa.select(item.status, item.attempts, item.loss_count, item.answer).order_by(item.position)
        return self.world.store.read(lambda tx: [tuple(row) for row in tx.execute(query)])


@pytest.mark.parametrize(
    ("payload", "after"), [(FAILED, ReleaseOutcome.DUE), (DONE, ReleaseOutcome.WAITING)], ids=["failed", "done"]
)
def test_a_suspension_sees_an_answer_that_came_after_the_pass_had_counted_the_items(
    world: World, payload: str, after: ReleaseOutcome
) -> None:
    its_map = Map(world, 2)
    assert its_map.state().needs_pass(None) is False
    assert its_map.answer(0, payload).due_runs == ()  # the claim holds: its worker looks again before it releases
    wait = OpenWait(world.now + seconds(TIMEOUT), condition=ItemsNeedPass(its_map.step))
    assert world.suspend(its_map.claim, wait) is after


def test_a_decision_about_an_item_that_was_answered_meanwhile_has_no_effect(world: World) -> None:
    its_map = Map(world, 2)
    world.advance(TIMEOUT)
    late = world.store.transact(its_map.lock_failed)
    assert late == [FailedItem(0, 1, None), FailedItem(1, 1, None)]
    assert its_map.answer(0, DONE).result is AnswerResult.TAKEN  # a late answer counts until a pass has decided
    its_map.apply(*(RetryDecision(each, FAILED, world.now + seconds(5)) for each in late))
    assert its_map.rows() == [("done", 1, 0, DONE), ("pending", 1, 0, FAILED)]


def test_a_decision_about_an_earlier_attempt_has_no_effect(world: World) -> None:
    its_map = Map(world, 1)
    its_map.answer(0, FAILED)
    [failed] = world.store.transact(its_map.lock_failed)
    its_map.apply(RetryDecision(failed, FAILED, world.now))
    world.store.transact(lambda tx: items.mark_ready_as_sent(tx, its_map.step, limit=None))
    again = encode_error_answer("OSError", "again")
    its_map.answer(0, again, attempt=2)
    its_map.apply(RetryDecision(failed, FAILED, None))
    assert its_map.rows() == [("failed", 2, 0, again)]


def test_a_loss_that_is_reported_while_a_pass_decides_waits_for_the_decision(world: World) -> None:
    """A report of a loss does not lock the instance, only the item."""
    its_map = Map(world, 1)
    reference = its_map.reference(0)
    world.advance(TIMEOUT)

    def decide(tx: Tx) -> Any:
        [late] = its_map.lock_failed(tx)
        report = world.start_blocked(its_map.lose, reference)
        items.apply_decisions(tx, its_map.step, [RetryDecision(late, FAILED, world.now + seconds(5))])
        return report

    assert world.store.transact(decide).result() is None
    assert its_map.rows() == [("pending", 1, 0, FAILED)]


def test_a_loss_that_is_reported_before_a_pass_locks_its_items_gives_them_their_time_anew(world: World) -> None:
    its_map = Map(world, 1)
    world.advance(TIMEOUT)
    assert isinstance(its_map.lose(its_map.reference(0)), OutboxMessage)
    assert world.store.transact(its_map.lock_failed) == []
    world.advance(TIMEOUT)
    late = world.store.transact(its_map.lock_failed)
    its_map.apply(*(RetryDecision(each, FAILED, None) for each in late))
    assert its_map.rows() == [("dead", 1, 1, FAILED)]
    assert world.read_all_rows()["workflow_outbox"] == []  # the message of the lost task is not sent any more


def test_of_two_answers_at_once_each_sends_another_item(world: World) -> None:
    its_map = Map(world, 4, max_concurrency=2)
    first, second = its_map.reference(0), its_map.reference(1)

    def answer_first(tx: Tx) -> tuple[AnswerOutcome, Any]:
        outcome = its_map.answer_in(tx, first, DONE)
        work = world.store.transact
        return outcome, world.start_blocked(work, lambda tx: its_map.answer_in(tx, second, DONE))

    outcome, rival = world.store.transact(answer_first)
    sent = [*its_map.sent, *outcome.work.messages, *rival.result().work.messages]
    assert len({each.id for each in sent}) == len(sent) == 4
    assert [row[:2] for row in its_map.rows()] == [("done", 1), ("done", 1), ("sent", 1), ("sent", 1)]


def test_an_item_that_two_transactions_find_keeps_the_token_of_the_first(world: World) -> None:
    """Both find it only if one of them has not locked the instance. The WHERE clause decides then."""
    its_map = Map(world, 2, max_concurrency=1)

    def send(tx: Tx) -> list[SentItem]:
        return items.mark_ready_as_sent(tx, its_map.step, limit=1)

    def send_first(tx: Tx) -> Any:
        return send(tx), world.start_blocked(world.store.transact, send)

    [sent], rival = world.store.transact(send_first)
    rival.result()
    assert sent.reference == its_map.reference(1)
    assert [row[:2] for row in its_map.rows()] == [("sent", 1), ("sent", 1)]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_statements_of_a_large_map_find_its_open_items_by_index(live: World) -> None:
    """Half of the items have ended, and other maps have as many items."""
    many = (
        "INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, loss_count, task,"
        " on_lost, attempt_token) SELECT p, 1, 'm', n, CASE WHEN n < 500 THEN 'done' ELSE 'sent' END, 1, 0, '{}',"
        " 'resend', 't' FROM generate_series(1, 50) p, generate_series(0, 999) n"
    )
    with live.store.engine.begin() as connection:
        connection.exec_driver_sql(many)
    with live.store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE workflow_item")
    the_map = {"pk": 7, "run": 1, "key": "m"}
    attempt = {"workflow": "w", "instance": "i", "token": "t", "position": 1, "attempt": 1, "answer": "1"}
    wanted = [
        (answers._select_progress, the_map),
        (answers._record_result, the_map | attempt),
        (items._select_any_open, the_map),
        (items._cancel_open, the_map),
        (items._select_ready, the_map | {"limit": 1}),
    ]
    with live.store.engine.begin() as connection:
        for mode in ("custom", "generic"):
            for statement, params in wanted:
                text = plan(Tx(connection, live.store), statement, params, mode=mode)
                assert ("ix_workflow_item_open" in text, "Seq Scan on workflow_item" in text) == (True, False), text
