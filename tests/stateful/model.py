"""The public API in a hundred lines, written from its description and not from its code.

One workflow: ``a``, a wait for "go" of 100 s, a sleep of 50 s, ``b``. Times are seconds. An instance is looked at only
when the test says so; a worker that dies leaves its claim behind for 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WAIT, SLEEP, LEASE = 100, 50, 30


class Refused(Exception):
    """The operation is refused; the argument names the error."""


@dataclass
class Event:
    id: str
    type: str
    payload: Any
    at: int
    consumed_by: str | None = None


@dataclass
class Run:
    """One run: what it has recorded."""

    steps: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    deadline: int = 0
    wakes_at: int = 0
    got: Any = None
    output: Any = None


@dataclass
class Instance:
    """``due``: when somebody should look at it; ``held_until``: the lease of a worker that died."""

    due: int
    status: str = "active"
    held_until: int | None = None
    pause_asked: bool = False
    runs: list[Run] = field(default_factory=lambda: [Run()])

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @property
    def is_over(self) -> bool:
        return self.status in ("complete", "errored", "terminated")


class Model:
    """All instances, and the time."""

    def __init__(self) -> None:
        self.now = 0
        self.instances: dict[str, Instance] = {}

    def create(self, id: str) -> None:
        if id in self.instances:
            raise Refused("InstanceAlreadyExists")
        self.instances[id] = Instance(due=self.now)

    def create_batch(self, ids: list[str]) -> list[str]:
        new = [each for each in dict.fromkeys(ids) if each not in self.instances]
        for each in new:
            self.create(each)
        return new

    def _get(self, id: str, *, must_live: bool = False) -> Instance:
        if id not in self.instances:
            raise Refused("InstanceNotFound")
        if must_live and self.instances[id].is_over:
            raise Refused("InstanceTerminal")
        return self.instances[id]

    def send_event(self, id: str, type: str, payload: Any, event_id: str) -> bool:
        if event_id in [event.id for event in self._get(id).run.events]:
            return False
        it = self._get(id, must_live=True)
        it.run.events.append(Event(event_id, type, payload, self.now))
        waits = it.run.steps.get("go") == "waiting" and type == "go" and self.now < it.run.deadline
        if it.status == "waiting" and waits:
            it.status, it.due = "active", self.now
        return True

    def pause(self, id: str) -> tuple[str, bool]:
        it = self._get(id, must_live=True)
        before = (it.status, it.pause_asked)
        if it.held_until is not None:
            it.pause_asked = True
        else:
            it.status = "paused"
        return before

    def resume(self, id: str) -> tuple[str, bool]:
        it = self._get(id)
        before = (it.status, it.pause_asked)
        it.pause_asked = False
        if it.status == "paused":
            it.status, it.due = "active", self.now
        return before

    def terminate(self, id: str) -> None:
        it = self._get(id, must_live=True)
        it.status, it.held_until, it.pause_asked = "terminated", None, False
        it.run.steps = {key: "cancelled" if how == "waiting" else how for key, how in it.run.steps.items()}

    def restart(self, id: str) -> int:
        it = self._get(id)
        self.instances[id] = Instance(due=self.now, runs=[*it.runs, Run()])
        return len(it.runs) + 1

    def look(self, id: str, dies_at: str | None = None) -> None:
        """A worker gets a message about it. ``dies_at``: "claimed", or "body": before the first body is recorded."""
        it = self._get(id)
        if it.is_over or it.status == "paused" or it.pause_asked:
            return
        if self.now < (it.due if it.held_until is None else it.held_until):
            return
        it.status, it.held_until = "active", self.now + LEASE
        if dies_at == "claimed" or not self._go_on(it, dies=dies_at == "body"):
            return
        it.held_until = None

    def _go_on(self, it: Instance, *, dies: bool) -> bool:
        """Run it as far as it goes; False where the worker died."""
        run = it.run
        if "a" not in run.steps:
            if dies:
                return False
            run.steps["a"] = "completed"
        if run.steps.get("go") in (None, "waiting"):
            if "go" not in run.steps:
                run.deadline = self.now + WAIT
            fit = (e for e in run.events if e.type == "go" and e.consumed_by is None and e.at <= run.deadline)
            event = next(fit, None)
            if event is not None:
                event.consumed_by, run.steps["go"], run.got = "go", "completed", event.payload
            elif self.now >= run.deadline:
                run.steps["go"], run.got = "errored", "late"
            else:
                run.steps["go"], it.status, it.due = "waiting", "waiting", run.deadline
                return True
        if run.steps.get("rest") != "completed":
            if "rest" not in run.steps:
                run.wakes_at = self.now + SLEEP
            if self.now < run.wakes_at:
                run.steps["rest"], it.status, it.due = "waiting", "waiting", run.wakes_at
                return True
            run.steps["rest"] = "completed"
        if dies:
            return False
        run.steps["b"], run.output, it.status = "completed", ["a", run.got, "b"], "complete"
        return True
