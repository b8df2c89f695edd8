"""The third act of some schedules: published values, the durable log and limits of time beside the same faults.

It has chance of its own, so that what it draws changes nothing in the other acts.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable.errors import InstanceNotErrored, InstanceNotFound, InstanceTerminal
from tests.simulation import invariants
from tests.simulation.calm import Calm
from tests.simulation.programs import EVENTS
from tests.simulation.reported import LINE, REPORTED, make_ops, make_reported
from tests.simulation.schedule import Schedule
from tests.simulation.witnesses import IS_COPY

_GENERAL = {name: query for name, query in invariants.QUERIES.items() if name[0] in "IO"}
_WORKED = f"""
    FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk AND i.workflow = '{REPORTED}'
    WHERE s.type = 'do' AND s.status = 'completed' AND NOT {IS_COPY.format("s")}"""
_QUERIES = {
    "V1 what a step published last is written with the step": f"""
        SELECT i.instance_id, s.run_number, s.step_key, s.result, p.value {
        _WORKED.replace(
            "WHERE",
            '''
        LEFT JOIN workflow_published p
          ON p.instance_pk = s.instance_pk AND p.run_number = s.run_number AND p.key = s.step_key
        WHERE''',
            1,
        )
    } AND p.value IS NOT s.result""",
    "L1 the lines of an attempt are written once, with the attempt": f"""
        SELECT i.instance_id, s.run_number, s.step_key, s.result {_WORKED} AND 1 <> (
          SELECT count(*) FROM workflow_log l WHERE l.instance_pk = s.instance_pk AND l.run_number = s.run_number
            AND l.message = s.step_key || ' ' || s.result)""",
    "L2 no line is written twice": f"""
        SELECT instance_pk, message FROM workflow_log WHERE category = '{LINE}'
        GROUP BY instance_pk, message HAVING count(*) > 1""",
    "L3 a run counts its lines": """
        SELECT r.instance_pk, r.run_number, r.log_count FROM workflow_run r WHERE r.log_count <> (
          SELECT count(*) FROM workflow_log l WHERE l.instance_pk = r.instance_pk AND l.run_number = r.run_number)""",
}


class Reporting(Schedule):
    """One seed's third course of events."""

    STREAM = "reporting"

    def __init__(self, world: Any, seed: int) -> None:
        super().__init__(world, seed)
        self._max_run = self.dice.choice([None, None, timedelta(seconds=300), timedelta(seconds=3000)])
        self._max_suspend = self.dice.choice([None, None, timedelta(seconds=100)])
        self.losses = self.dice.choice([0, 0, 0.3])

    def _make_clients(self) -> Readers:
        self._readers = Readers(self)
        return self._readers

    def _weights(self) -> tuple[list[Callable[[], None]], list[float]]:
        some = self.dice.choice
        table: list[tuple[Callable[[], None], float]] = [
            (self._deliver, 14),
            (self._step, 20),
            (self._sweep, 3),
            (self._pass_time, 4),
            (self._readers.act, some([2, 4])),
            (self._freeze, some([0, 1, 2])),
            (self._thaw, 1.5),
            (self._kill, some([0, 0, 0.7])),
            (self._stop, some([0, 0, 0.5])),
        ]
        return [action for action, _ in table], [weight for _, weight in table]

    def run(self) -> list[str]:
        self.world.registry.replace(make_reported(self.world, self._max_run, self._max_suspend))
        self.tell(f"third act, with max_run_duration {self._max_run}, max_suspend_duration {self._max_suspend}")
        self._readers.begin()
        for _ in range(self.dice.choice([30, 60, 100])):
            self.dice.choices(*self._actions)[0]()
        broken = self.story.wrongs + self._broken("in the storm") or Calm(self).come_to_an_end()
        broken = broken or self._broken("at the end") + self._wrong_ends()
        return broken or Calm(self).wake_zombies() + self._changed_runs() + self.story.wrongs

    def _broken(self, when: str) -> list[str]:
        found = invariants.broken(self.world.raw, self.world.clock.read(), _GENERAL | _QUERIES)
        return [f"{each} ({when} of the third act)" for each in found]

    def _wrong_ends(self) -> list[str]:
        """A run that nobody terminated ended by itself, or after the limit that it names."""
        query = f"""
            SELECT i.instance_id, r.run_number, r.reason, r.completed_at - coalesce(r.started_at, r.created_at)
            FROM workflow_run r JOIN workflow_instance i ON i.id = r.instance_pk AND i.run_number = r.run_number
            WHERE i.workflow = '{REPORTED}' AND i.status = 'terminated'"""
        found = []
        for name, run, reason, took_us in self.world.raw.execute(query):
            limit = self._max_run if "max_run_duration" in (reason or "") else self._max_suspend
            self.story.stats["ended by a limit"] += reason is not None
            if reason is None and (name, run) not in self._readers.terminated:
                found.append(f"M1 {name}#{run} is terminated by nobody")
            elif reason is not None and (limit is None or took_us < limit / timedelta(microseconds=1)):
                found.append(f"M2 {name}#{run} is terminated after {took_us} us: {reason}")
        return found


class Readers:
    """What comes from outside in the third act."""

    def __init__(self, act: Reporting) -> None:
        self._act, self._dice, self._story = act, act.dice, act.story
        self._operations = act.world.operations
        self._events = 0
        self.terminated: set[tuple[str, int]] = set()

    def begin(self) -> None:
        """Create the instances."""
        for number in range(self._dice.choice([1, 2, 3])):
            self._operations.create.instance(REPORTED, make_ops(self._dice), id=f"r{number}")

    def act(self) -> None:
        """Do something to one of the instances."""
        actions = [self._event, self._retry, self._restart, self._pause, self._resume, self._terminate, self._read]
        action = self._dice.choices(actions, [5, 2, 0.7, 0.5, 1, 0.3, 2])[0]
        rows = self._act.world.raw.execute("SELECT instance_id, run_number FROM workflow_instance ORDER BY id")
        name, run = self._dice.choice(rows.fetchall())
        try:
            action(name, run)
            said = "accepted"
        except (InstanceNotFound, InstanceTerminal, InstanceNotErrored) as error:
            said = f"refused: {type(error).__name__}"
        what = action.__name__.strip("_")
        self._act.tell(f"{what} {name}#{run}: {said}")
        self._story.stats[f"{what} {said.partition(':')[0]}"] += 1

    def answer(self) -> None:
        """Send something, as clients do also in calm times."""
        query = "SELECT instance_id, run_number FROM workflow_instance WHERE status = 'waiting' ORDER BY id"
        for name, run in self._act.world.raw.execute(query).fetchall()[:1]:
            self._event(name, run)

    def _event(self, name: str, _: int) -> None:
        self._events += 1
        type_ = EVENTS[self._events % len(EVENTS)]
        self._operations.events.send(REPORTED, name, type_, self._events, id=f"event-{self._events}")

    def _retry(self, name: str, run: int) -> None:
        self._operations.rewind.retry(REPORTED, name)
        self._keep(name, run)

    def _restart(self, name: str, run: int) -> None:
        self._operations.rewind.restart(REPORTED, name)
        self._keep(name, run)

    def _keep(self, name: str, run: int) -> None:
        self._story.prior_runs[name, run] = invariants.of_run(self._act.world.raw, name, run)
        self._story.faults[name, run] += 1

    def _pause(self, name: str, _: int) -> None:
        self._operations.lifecycle.pause(REPORTED, name)

    def _resume(self, name: str, _: int) -> None:
        self._operations.lifecycle.resume(REPORTED, name)

    def _terminate(self, name: str, run: int) -> None:
        self._operations.lifecycle.terminate(REPORTED, name)
        self.terminated.add((name, run))

    def _read(self, name: str, run: int) -> None:
        """What was published, as readers see it: numbers of executions of steps with that name."""
        for key, published in self._operations.history.published(REPORTED, name).items():
            worked = {number for number, body in enumerate(self._story.bodies, 1) if body[2] == key}
            if abs(published.value) not in worked:
                self._story.wrongs.append(f"V2 {name}#{run} has published {key} = {published.value}, not of {worked}")
