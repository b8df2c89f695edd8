"""The operators of the second act: they create, restart, settle steps by hand and prune, as the dice say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable.errors import InstanceNotErrored, InstanceNotFound, InstanceTerminal, StepNotOpen, ValueRefused
from celery_durable.model import CreateOptions
from tests.simulation import invariants
from tests.simulation.kept import KEPT, ORIGIN, make_ops
from tests.simulation.programs import EVENTS

_NAMES = ("k0", "k1", "k2")
_STANDS = "SELECT id, run_number, status FROM workflow_instance WHERE instance_id = ?"

_WANTED = {
    "_settle": """i.status = 'errored' OR i.status <> 'terminated' AND EXISTS (
        SELECT 1 FROM workflow_step s WHERE s.instance_pk = i.id AND s.run_number = i.run_number
          AND s.status IN ('pending', 'waiting'))""",
    "_retry": "i.status = 'errored'",
    "_event": "i.status = 'waiting'",
    "_restart_or_create": "i.status IN ('complete', 'errored', 'terminated')",
}
"""What an instance is like with which a action can do something."""


class Operators:
    """What comes from outside, and what was returned."""

    def __init__(self, act: Any) -> None:
        self._act, self._dice, self._story, self._raw = act, act.dice, act.story, act.world.raw
        self._operations = act.world.operations
        self._numbers: Counter[str] = Counter()
        self.origins: dict[int, str] = {}
        self.params: dict[int, list[dict[str, Any]]] = {}
        """What each instance was created with, by its key."""
        self.settled: dict[str, tuple[Any, ...]] = {}
        """The row of each step that was settled by hand, by the name of the person."""

    def begin(self) -> None:
        """Create some, so that there is something to do."""
        self._do(self._batch, "")

    def act(self) -> None:
        actions = [self._batch, self._restart_or_create, self._settle, self._restart, self._retry]
        actions += [self._terminate, self._prune, self._pause, self._event, self._cancel]
        action = self._dice.choices(actions, [1, 3, 6, 0.5, 2, 0.7, 1.5, 0.3, 3, 0.7])[0]
        self._do(action, self._some_name(_WANTED.get(action.__name__)))

    def _do(self, action: Callable[[str], str], name: str) -> None:
        try:
            said = action(name)
        except (InstanceNotFound, InstanceTerminal, InstanceNotErrored, StepNotOpen, ValueRefused) as error:
            said = f"refused: {type(error).__name__}"
        what = action.__name__.strip("_").replace("_", " ")
        self._act.tell(f"{what} {name}: {said}")
        self._story.stats[f"{what} {said.partition(' ')[0].rstrip(':')}"] += 1

    def _some_name(self, wanted: str | None) -> str:
        """Mostly of an instance with which the action can do something."""
        if wanted is not None and self._dice.random() < 0.8:
            query = f"SELECT i.instance_id FROM workflow_instance i WHERE {wanted} ORDER BY i.id"
            if found := self._raw.execute(query).fetchall():
                return str(self._dice.choice(found)[0])
        return self._dice.choice(_NAMES)

    def answer(self) -> None:
        """Send something, as clients do also in calm times."""
        waiting = self._raw.execute("SELECT instance_id FROM workflow_instance WHERE status = 'waiting' ORDER BY id")
        for (name,) in waiting.fetchall()[:1]:
            self._event(name)

    def _number(self, of: str) -> int:
        self._numbers[of] += 1
        return self._numbers[of]

    def _stands(self, name: str) -> tuple[int, int, str] | None:
        found: tuple[int, int, str] | None = self._raw.execute(_STANDS, (name,)).fetchone()
        return found

    def _must_stand(self, name: str) -> tuple[int, int, str]:
        found = self._stands(name)
        if found is None:
            raise InstanceNotFound(KEPT, name)
        return found

    def _wrong(self, what: str) -> None:
        self._story.wrongs.append(what)

    # --- creating -------------------------------------------------------------------------------

    def _batch(self, _: str) -> str:
        """Many at once: some of them exist, some come twice."""
        names = [self._dice.choice(_NAMES) for _ in range(self._dice.randint(2, 5))]
        batch = [
            CreateOptions(name, make_ops(self._dice), labels={ORIGIN: f"{name}-{self._number(ORIGIN)}"})
            for name in names
        ]
        new = [name for name in dict.fromkeys(names) if self._stands(name) is None]
        made = self._operations.create.batch(KEPT, batch)
        if made != new:
            self._wrong(f"B1 a batch of {names} creates {made}, and {new} did not exist")
        for each in reversed(batch):  # of several with one id the first counts
            if each.id in new:
                self._is_made(each.id, each.params, each.labels)
        return f"created {made} of {names}"

    def _is_made(self, name: str, params: Any, labels: Any) -> None:
        stands = self._stands(name)
        if stands is None:
            self._wrong(f"B1 {name} was created, and is not there")
        else:
            self.origins[stands[0]], self.params[stands[0]] = labels[ORIGIN], params

    def _restart_or_create(self, name: str) -> str:
        before, params = self._stands(name), make_ops(self._dice)
        labels = {ORIGIN: f"{name}-{self._number(ORIGIN)}"}
        is_over = before is not None and before[2] in ("complete", "errored", "terminated")
        if before is not None and is_over:
            self._keep_run(name, before[1])
        started = self._operations.create.restart_or_create(KEPT, params, id=name, labels=labels)
        if before is None:
            expected, number = "created", 1
            self._is_made(name, params, labels)
        else:
            expected, number = ("restarted", before[1] + 1) if is_over else ("unchanged", before[1])
        found = self._must_stand(name)[1]
        if (started.outcome, started.run_number, found) != (expected, number, number):
            self._wrong(f"B2 {name} was {before}: {started}, and it is at run {found}")
        return str(started.outcome)

    def _keep_run(self, name: str, run: int) -> None:
        self._story.prior_runs[name, run] = invariants.of_run(self._raw, name, run)

    # --- lifecycle ---------------------------------------------------------------------------------

    def _restart(self, name: str) -> str:
        _, run, status = self._must_stand(name)
        return self._run_started(name, run, status, self._operations.rewind.restart(KEPT, name))

    def _retry(self, name: str) -> str:
        _, run, status = self._must_stand(name)
        return self._run_started(name, run, status, self._operations.rewind.retry(KEPT, name))

    def _run_started(self, name: str, run: int, status: str, number: int) -> str:
        if number != run + 1:
            self._wrong(f"I12c the restart of {name} led from run {run} to {number}")
        self._keep_run(name, run)
        self._story.faults[name, run] += 1
        return f"{status} to run {number}"

    def _terminate(self, name: str) -> str:
        self._operations.lifecycle.terminate(KEPT, name)
        return "accepted"

    def _cancel(self, name: str) -> str:
        self._operations.lifecycle.cancel(KEPT, name)
        return "accepted"

    def _pause(self, name: str) -> str:
        self._operations.lifecycle.pause(KEPT, name)
        return "accepted"

    def _event(self, name: str) -> str:
        number = self._number("event")
        self._operations.events.send(KEPT, name, EVENTS[number % len(EVENTS)], number, id=f"event-{number}")
        return "accepted"

    # --- settling by hand -----------------------------------------------------------------------

    def _settle(self, name: str) -> str:
        """Some step: one that is open, one that failed, and at times one that is neither."""
        pk, run, status = self._must_stand(name)
        query = """
            SELECT step_key, status IN ('pending', 'waiting', 'errored') FROM workflow_step
            WHERE instance_pk = ? AND run_number = ? ORDER BY seq"""
        found = self._raw.execute(query, (pk, run)).fetchall()
        keys = [key for key, is_open in found if is_open or self._dice.random() < 0.2]
        if not keys:
            return "refused: it has no such step"
        key, by = self._dice.choice(keys), f"person {self._number('person')}"
        if self._dice.random() < 0.5:
            number = self._operations.interventions.skip(KEPT, name, key, by=by)
        else:
            number = self._operations.interventions.set_result(KEPT, name, key, f"by {by}", by=by)
        if number != (run + 1 if status == "errored" else run):
            self._wrong(f"A2 {by} settles {key} of {name}#{run}, which was {status}, and is told of run {number}")
        self._story.faults[name, run] += 1  # its worker may fail in a body that another runs again
        self.settled[by] = (pk, number, key, self.row(pk, number, key))
        if number != run:
            self._keep_run(name, run)
        return f"accepted {key} by {by}"

    def row(self, pk: int, run: int, key: str) -> tuple[Any, ...] | None:
        """A step as it is recorded."""
        query = "SELECT * FROM workflow_step WHERE instance_pk = ? AND run_number = ? AND step_key = ?"
        found: tuple[Any, ...] | None = self._raw.execute(query, (pk, run, key)).fetchone()
        return found

    # --- deleting -------------------------------------------------------------------------------

    def _prune(self, _: str) -> str:
        seconds = self._dice.choice([5, 30, 300])
        self._raw.execute("INSERT INTO author_pruning VALUES (?)", (seconds * 1_000_000,))
        deleted = self._operations.retention.prune(older_than=timedelta(seconds=seconds))
        self._raw.execute("DELETE FROM author_pruning")
        self._act.has_deleted()
        return f"deleted {deleted}" if deleted else "finds none"
