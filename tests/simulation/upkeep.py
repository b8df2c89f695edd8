"""The second act of some schedules: retention, batches, interventions, labels and hooks beside the same faults.

It has chance of its own, so that what it draws changes nothing in the first act.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.simulation import invariants, keeping, messages
from tests.simulation.calm import Calm
from tests.simulation.kept import make_kept
from tests.simulation.listening import Listener
from tests.simulation.operators import Operators
from tests.simulation.schedule import Schedule

_GENERAL = {name: query for name, query in invariants.QUERIES.items() if name[0] in "IO"}
_NOT_BY_HAND = {name: query for name, query in _GENERAL.items() if name.split()[0] not in ("I1", "I3c", "I5e", "I8c")}
"""What holds also of steps that a person has settled."""


class Upkeep(Schedule):
    """One seed's second course of events."""

    STREAM = "upkeep"

    def __init__(self, world: Any, seed: int) -> None:
        super().__init__(world, seed)
        self._retention = timedelta(seconds=self.dice.choice([20, 200, 2000]))
        self.losses = self.dice.choice([0, 0, 0.3])
        self._deleted = 0
        self._listener = Listener(self)

    def _make_clients(self) -> Operators:
        self.operators = Operators(self)
        return self.operators

    def _weights(self) -> tuple[list[Callable[[], None]], list[float]]:
        some = self.dice.choice
        table: list[tuple[Callable[[], None], float]] = [
            (self._deliver, 14),
            (self._step, 18),
            (self._sweep, 3),
            (self._pass_time, 5),
            (self.operators.act, some([4, 7])),
            (self._freeze, some([0, 0, 1])),
            (self._thaw, 1.5),
            (self._kill, some([0, 0, 0.7])),
            (self.errands.sweep_outbox, some([0, 2])),
            (self._tidy, some([0.5, 3])),
        ]
        return [action for action, _ in table], [weight for _, weight in table]

    def run(self) -> list[str]:
        self.world.registry.replace(make_kept(self.world, self._retention))
        self.tell(f"second act, with a retention of {self._retention}")
        self._listener.begin()
        self.operators.begin()
        for _ in range(self.dice.choice([30, 60, 100])):
            self.dice.choices(*self._actions)[0]()
        broken = self.story.wrongs + self._broken("in the storm")
        if not broken:
            broken = Calm(self).come_to_an_end()
        if not broken:
            broken = self._broken("at the end")
        if not broken:
            broken = keeping.wrong(self) + messages.wrong(self.world.raw, self.story)
            broken += Calm(self).wake_zombies() + self._changed_runs() + self.story.wrongs
        return broken or self._kept_too_long()

    def end(self) -> None:
        """Let no lane and no receiver outlive its act."""
        super().end()
        self._listener.end()

    def _broken(self, when: str) -> list[str]:
        general = _NOT_BY_HAND if self.operators.settled else _GENERAL
        found = invariants.broken(self.world.raw, self.world.clock.read(), general | keeping.QUERIES)
        return [f"{each} ({when} of the second act)" for each in found]

    def _tidy(self) -> None:
        """A process with a dispatcher deletes what has been kept long enough."""
        deleted = self.dice.choice(self.world.beats).operations().retention.delete_expired()
        self.story.stats["deleted after its retention"] += deleted
        self.tell(f"tidied {deleted}")
        self.has_deleted()

    def has_deleted(self) -> None:
        """What is deleted may change by that, and be created again under its name."""
        query = "SELECT instance, run FROM author_deleted ORDER BY rowid LIMIT -1 OFFSET ?"
        for name, last in self.world.raw.execute(query, (self._deleted,)).fetchall():
            self._deleted += 1
            for run in range(1, last + 1):
                self.story.prior_runs.pop((name, run), None)
                self.story.faults[name, run] += 1  # a body of the old one may still fail, and count for the new one

    def _kept_too_long(self) -> list[str]:
        """All have ended: when their time is over nothing is left."""
        self.world.clock.advance(self._retention)
        self.world.beats[0].operations().retention.delete_expired()
        left = self.world.raw.execute("SELECT instance_id, status FROM workflow_instance ORDER BY id").fetchall()
        return [f"R3 {name}, {status}, is kept when its retention is over" for name, status in left] + self._broken(
            "when nothing is kept"
        )
