"""Maps: one step that many Celery tasks do, one for each item.

The items are rows of their own (`store.items`): who takes an answer sends the next item, and the instance sleeps on
until all have answered, or one is to be judged: tried again, or given up.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from celery_durable import values
from celery_durable.ledger import Await, Replay, Run, Wait
from celery_durable.model import StepRow, StepStatus, task_type
from celery_durable.runner.boundary import Boundary
from celery_durable.runner.branches import Branch
from celery_durable.runner.delegation import task_name
from celery_durable.runner.progress import Progress
from celery_durable.runner.waits import Waits
from celery_durable.step import MapCall
from celery_durable.store import items
from celery_durable.store.claims import Guarded, OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.items import Fallen, Map, Verdict
from celery_durable.store.journal import StepWrite


class Maps:
    """Brings the maps of a pass as far as they go."""

    def __init__(self, at: Progress, waits: Waits) -> None:
        self._at, self._waits = at, waits

    def map(self, branch: Branch, call: MapCall, *, sole: bool) -> None:
        match self._at.ledger.decide_delegated(branch.entry.row, now=self._at.now):
            case Replay(row):
                branch.row = row
            case Run() | Wait():
                self._begin(branch, call, sole=sole)
            case Await(row):
                self._go_on(branch, call, row)

    def answers(self, branch: Branch, row: StepRow) -> list[tuple[str, int]]:
        """What each item of a map that has ended answered, and after how many attempts."""
        if row.result is not None:  # settled by hand, or from a record that is no store
            return [(json.dumps(each), 1) for each in json.loads(row.result) or ()]
        claim = self._at.lease.claim
        where: dict[str, Any] = {"pk": claim.pk, "run_number": claim.ref.run_number, "step_key": branch.key}
        read = self._at.env.store.read
        found: list[tuple[str, int]] = self._at.guarded(lambda: read(lambda tx: items.answers(tx, **where)))
        return found

    def _map(self, branch: Branch, call: MapCall) -> Map:
        claim = self._at.lease.claim
        assert branch.policy.timeout is not None
        timeout = self._waits.span(branch, branch.policy.timeout, "event")
        where = (claim.ref.workflow, claim.ref.instance_id, claim.pk, claim.ref.run_number)
        on_lost = call.on_lost or self._at.env.settings.task_on_lost
        return Map(*where, branch.key, timeout, call.max_concurrency, on_lost)

    def _begin(self, branch: Branch, call: MapCall, *, sole: bool) -> None:
        """Record all items, and send as many as may be out."""
        map_, limits = self._map(branch, call), self._at.env.settings.limits
        bodies = [values.map_task(call.task, item, limits=limits) for item in call.items]
        if not bodies:
            self._at.commit(branch, self._at.write(branch, StepStatus.COMPLETED, attempts=1))
            return
        write = self._at.write(
            branch,
            StepStatus.WAITING,
            attempts=1,
            wake_in=map_.timeout,
            event_type=task_type(task_name(call.task), map_.pk, branch.entry.seq, 0),
        )

        def send(tx: Tx, _: Guarded) -> list[StepWrite]:
            items.insert(tx, map_, bodies)
            boundary.outgoing = items.send(tx, map_, room=map_.at_once)
            return [write]

        def asleep(rows: list[StepRow]) -> list[OpenWait]:
            return [_until(map_, row.wake_at) for row in rows if row.wake_at is not None]

        boundary = Boundary([write], self._at.take_logs(), look=send, sleep=asleep if sole else None)
        if sole:
            self._at.defer(boundary)
            return
        self._commit(branch, map_, boundary)

    def _go_on(self, branch: Branch, call: MapCall, row: StepRow) -> None:
        """Judge what has failed, send what is due, and end the step when nothing is open; else wait on."""
        map_ = self._map(branch, call)
        assert row.wake_at is not None
        if row.wake_at > self._at.now and not self._at.guarded(
            lambda: self._at.env.store.read(lambda tx: items.wants_a_pass(tx, map_, now=self._at.now))
        ):
            branch.wait = _until(map_, row.wake_at)
            return
        commit_id = self._at.env.runtime.new_token()
        settle = functools.partial(
            self._at.write, branch, attempts=1, event_type=row.wait_event_type, commit_id=commit_id
        )

        def judge(tx: Tx, guarded: Guarded) -> list[StepWrite]:
            fallen = items.to_judge(tx, map_, now=guarded.now)
            items.judge(tx, map_, [self._verdict(branch, each, now=guarded.now) for each in fallen])
            stands = items.standing(tx, map_, now=guarded.now)
            room = None if map_.at_once is None else map_.at_once - stands.sent
            boundary.outgoing = items.send(tx, map_, room=room)
            stands = items.standing(tx, map_, now=guarded.now)
            if stands.open:
                assert stands.next_at is not None
                return [settle(StepStatus.WAITING, wake_at=stands.next_at)]
            failed = None if call.return_exceptions else items.first_error(tx, map_)
            end = settle(StepStatus.COMPLETED) if failed is None else settle(StepStatus.ERRORED, **_blame(failed))
            return [end, *self._at.race_writes(branch, commit_id)]

        boundary = Boundary([settle(StepStatus.WAITING, wake_at=row.wake_at)], self._at.take_logs(), look=judge)
        self._commit(branch, map_, boundary)

    def _verdict(self, branch: Branch, fallen: Fallen, *, now: datetime) -> Verdict:
        """An item's attempt has failed: as with a body, it is tried again, or has failed for good."""
        policy, answer = branch.policy, fallen.answer
        if answer is None:
            answer = values.answer_of_error("StepTimeout", f"no answer within {policy.timeout}")
        error = values.error_in(answer)
        is_used_up = policy.max_attempts is not None and fallen.attempts >= policy.max_attempts
        if is_used_up or error is None or error.is_final:
            return Verdict(fallen, answer, None)
        pause = self._waits.span(branch, policy.delay_after(fallen.attempts), "retry")
        return Verdict(fallen, answer, now + pause)

    def _commit(self, branch: Branch, map_: Map, boundary: Boundary) -> None:
        self._at.committed(branch, self._at.guarded(lambda: self._at.committer.commit(boundary)))
        if branch.wait is not None:
            branch.wait = _until(map_, branch.wait.due_at)


def _blame(failed: tuple[int, str, int]) -> dict[str, Any]:
    """What the step's row says of the first item that has failed."""
    place, answer, attempts = failed
    error = values.error_in(answer)
    assert error is not None
    return {"error": values.storable_error(error.name, f"item {place}: {error.message}"), "attempts": attempts}


def _until(map_: Map, due_at: datetime) -> OpenWait:
    return OpenWait(due_at, look=lambda tx, now: items.wants_a_pass(tx, map_, now=now))
