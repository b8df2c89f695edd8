"""The calm part of a schedule: without faults everything comes to its end, and nothing changes after that."""

from __future__ import annotations

from typing import Any

from celery_durable.model import RunRef
from celery_durable.store.runs import schedule
from tests.simulation import invariants
from tests.simulation.processes import Worker

_MOST_CALM_TURNS = 400


class Calm:
    """Brings a schedule to its end."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def come_to_an_end(self) -> list[str]:
        """No more faults: everything must come to its end, and soon."""
        self._schedule.is_calm = True
        self._schedule.tell("calm")
        if self._schedule.dice.random() < 0.5:
            self._schedule.messages.clear()
        self._schedule.errands.calm_down()
        self._schedule.asleep = [
            worker
            for worker in self._schedule.asleep
            if worker in self._schedule.busy and self._schedule.dice.random() < 0.5
        ]
        for worker in [each for each in self._schedule.busy if each not in self._schedule.asleep]:
            worker.runtime.wake_up()
            while worker in self._schedule.busy:
                self._schedule.go(worker)
        free = next(
            worker for worker in [*self._schedule.world.workers, self._spare()] if worker not in self._schedule.busy
        )
        for _ in range(_MOST_CALM_TURNS):
            if self._turn(free) or self._resume_all() or self._schedule.limited.serve():
                continue
            if stuck := self._schedule.limited.stuck():
                return stuck
            next_at = self._schedule.world.clients.store.read(schedule.read).next_at
            if next_at is None:
                return []
            if next_at > self._schedule.world.clock.now:
                self._schedule.world.clock.set_to(next_at)
            else:
                self._schedule.world.clock.advance(1)  # a queue that was full is asked for again
        return [f"I6f still busy after {_MOST_CALM_TURNS} calm turns"]

    def _spare(self) -> Worker:
        """All runners are zombies: one of them has to wake up early."""
        if len(self._schedule.asleep) == len(self._schedule.world.workers):
            worker = self._schedule.asleep.pop()
            worker.runtime.wake_up()
            while worker in self._schedule.busy:
                self._schedule.go(worker)
        return self._schedule.world.workers[0]

    def _turn(self, worker: Worker) -> bool:
        published = self._schedule.sweepers[0].sweep()
        due, self._schedule.messages = self._schedule.messages, []
        for each in due:
            self._schedule.tell(f"calm {each.ref}: {self._advance(worker, each.ref)}")
        self._schedule.errands.hand_all_over()
        if self._schedule.dice.random() < 0.8:  # else some come too late
            self._schedule.foreign.answer_all()
        if self._schedule.dice.random() < 0.3:
            self._schedule.clients.answer()
        return bool(published or due)

    def _advance(self, worker: Worker, ref: RunRef) -> str:
        self._schedule.taken += 1
        worker.take(ref, self._schedule.taken)
        said = worker._advance()
        worker.thread = None
        return said

    def _resume_all(self) -> bool:
        query = "SELECT workflow, instance_id FROM workflow_instance WHERE status = 'paused'"
        found = self._schedule.world.raw.execute(query).fetchall()
        for workflow, name in found:
            self._schedule.world.operations.lifecycle.resume(workflow, name)
        return bool(found)

    def wake_zombies(self) -> list[str]:
        """Workers that wake up when all is over, and messages from long ago, change nothing."""
        before = invariants.dump(self._schedule.world.raw)
        for worker in list(self._schedule.busy):
            worker.runtime.wake_up()
            while worker in self._schedule.busy:
                self._schedule.go(worker)
        for workflow, instance, run in self._schedule.world.raw.execute(
            "SELECT i.workflow, i.instance_id, r.run_number FROM workflow_instance i "
            "JOIN workflow_run r ON r.instance_pk = i.id"
        ).fetchall():
            self._advance(self._schedule.world.workers[0], RunRef(workflow, instance, run))
        self._schedule.foreign.answer_all()
        self._schedule.foreign.answer_again()
        after = invariants.dump(self._schedule.world.raw)
        return [f"I14 {table} changed when all was over" for table in before if before[table] != after[table]]
