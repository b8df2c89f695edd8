"""Group commit: passes of one process that commit at the same time share a statement.

A commit that finds no other under way is written alone, at once. Commits that arrive meanwhile form a group: the first
of them leads it, writes in one transaction what waits when its turn comes, and hands the lead to the first that has
arrived since. So no commit waits for a timer, and there is no thread.

What a group cannot write without waiting (`store.lanes.groups`), and each commit of a group that failed or is in
doubt, its own pass writes alone, or finds by its commit id.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.engine.time_limits import PASS
from celery_durable.store.lanes.groups import GroupedStep, write_group
from celery_durable.store.lanes.steps import WrittenStep

T = TypeVar("T")
logger = logging.getLogger("celery_durable.runner")

MAX_GROUP = 100


class _Waiting:
    """A commit that waits for its group. ``turn`` is released when it is written, or shall lead, or is left alone."""

    __slots__ = ("leads", "step", "turn", "written")

    def __init__(self, step: GroupedStep) -> None:
        self.step, self.leads = step, False
        self.written: WrittenStep | None = None
        self.turn = threading.Lock()
        self.turn.acquire()


class GroupCommit:
    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._is_one_alone, self._has_leader = False, False
        self._waiting: list[_Waiting] = []
        """In order of arrival. If it is not empty, there is a leader."""

    def commit(self, step: GroupedStep, commit_alone: Callable[[], T]) -> WrittenStep | T:
        """Commit a step, with those of other passes if they commit now. Only ``commit_alone`` raises."""
        waiting = self._join(step)
        if waiting is None:
            try:
                return commit_alone()
            finally:
                self._is_one_alone = False
        if not waiting.leads:
            waiting.turn.acquire()
        if waiting.leads:
            self._lead()
        return commit_alone() if waiting.written is None else waiting.written

    def _join(self, step: GroupedStep) -> _Waiting | None:
        """Join the commits that wait for those under way; None if there are none."""
        with self._lock:
            if not (self._is_one_alone or self._has_leader):
                self._is_one_alone = True
                return None
            waiting = _Waiting(step)
            self._waiting.append(waiting)
            waiting.leads, self._has_leader = not self._has_leader, True
            return waiting

    def _lead(self) -> None:
        """Write the group that waits now, and hand the lead on."""
        with self._lock:
            fields = self._waiting[0].step.fields
            group = [each for each in self._waiting if each.step.fields == fields][:MAX_GROUP]
            self._waiting = [each for each in self._waiting if each not in group]
        try:
            for each, written in zip(group, self._write([each.step for each in group]), strict=True):
                each.written = written
        except Exception as error:  # noqa: BLE001  # each pass commits alone now, and raises its own error
            sentence = "%d steps are committed one by one, because committing them together failed: %s"
            logger.info(sentence, len(group), describe_fault(error))
        finally:
            self._release(group)

    def _release(self, group: Sequence[_Waiting]) -> None:
        """Let the passes of a group go on, and the first that waits for the next group lead it."""
        with self._lock:
            self._has_leader = bool(self._waiting)
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].turn.release()
        for each in group:
            if not each.leads:
                each.turn.release()

    def _write(self, group: Sequence[GroupedStep]) -> list[WrittenStep | None]:
        def write(tx: Tx) -> list[WrittenStep | None]:
            return write_group(tx, group)

        def find_committed(_: Tx) -> list[WrittenStep | None]:
            """Leave a commit in doubt to the passes."""
            return [None] * len(group)

        return self._store.run_statement(write, find_committed=find_committed, timeouts=PASS)
