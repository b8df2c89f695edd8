"""The clients of a simulation: they create, send, emit, pause, resume, restart, cancel and terminate by the dice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from celery_durable.errors import InstanceNotErrored, InstanceTerminal, ValueRefused
from celery_durable.model import to_us
from tests.simulation import invariants
from tests.simulation.linear import LINEAR, is_linear, make_params
from tests.simulation.programs import EVENTS, TOPICS, make_program


def workflow_of(name: str) -> str:
    """The workflow of an instance."""
    return LINEAR if is_linear(name) else "program"


class Clients:
    """What comes from outside, and what was promised in answer."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._dice, self._story = schedule, schedule.dice, schedule.story
        world = schedule.world
        self._operations, self._raw, self._clock = world.operations, world.raw, world.clock
        self._sent = 0
        self._emitted: list[tuple[str, str, str | None]] = []

    def create(self, name: str) -> None:
        program = make_params(self._dice) if is_linear(name) else make_program(self._dice, self._schedule.names)
        later = self._dice.choice([None, None, None, None, 100])
        run_at = None if later is None else self._clock.now + timedelta(seconds=later)
        self._operations.create.instance(workflow_of(name), program, id=name, run_at=run_at)
        self._story.accepted.append(name)
        self._has_plan(name, 1)
        self._story.not_before[name, 1] = 0 if run_at is None else to_us(run_at)
        self._schedule.tell(f"create {name}: {program}")

    def _has_plan(self, name: str, run: int) -> None:
        if is_linear(name):
            self._story.plans[name, run] = [step for step, _ in self._schedule.plan]

    def act(self) -> None:
        actions = [self._event, self._pause, self._resume, self._restart, self._terminate]
        actions += [self._rewind, self._retry, self._fork, self._emit, self._cancel]
        name, weights = self._dice.choice(self._schedule.names), [6, 2, 2, 0.7, 0.3, 0.7, 0.3, 0.3, 3, 1]
        query = "SELECT instance_id FROM workflow_instance WHERE parent_pk IS NOT NULL ORDER BY id"
        if (made := self._raw.execute(query).fetchall()) and self._dice.random() < 0.25:
            (name,), weights = self._dice.choice(made), [2, 2, 2, 2, 4, 0.7, 0.7, 0.3, 0, 2]
        self._do(self._dice.choices(actions, weights)[0], name)

    def answer(self) -> None:
        """Send or emit something, as clients do also in calm times."""
        action = self._dice.choice([self._event, self._event, self._emit])
        self._do(action, self._dice.choice(self._schedule.names))

    def _do(self, action: Callable[[str], str], name: str) -> None:
        try:
            said = action(name)
        except (InstanceTerminal, InstanceNotErrored) as error:
            said = f"refused: it is {error.status}"
        except ValueRefused:
            said = "refused: a linear run has not come to this step"
            if not is_linear(name):
                raise
        self._schedule.tell(f"{action.__name__[1:]} {name}: {said}")
        self._story.stats[action.__name__[1:]] += 1

    def _event(self, name: str) -> str:
        if self._sent and self._dice.random() < 0.2:
            number = self._dice.randrange(self._sent)  # a client that repeats itself
        else:
            number = self._sent
            wanted = self._wanted("NOT LIKE '%:%'")
            if wanted is not None:  # else few events would be waited for
                name, type_ = wanted
                number += EVENTS[number % len(EVENTS)] != type_
            self._sent = number + 1
        event_id, type_ = f"{name}-event-{number}", EVENTS[number % len(EVENTS)]
        waits = self._waits(name, type_)
        is_new = self._operations.events.send(workflow_of(name), name, type_, f"payload {number}", id=event_id)
        if is_new and len(waits) == 1:
            self._story.promised[waits[0]] = event_id
        accepted = event_id, self._run_of(name)
        if is_new is not (accepted not in self._story.accepted_events):
            self._story.wrongs.append(f"I12b {event_id} is said to be new: {is_new}")
        self._story.accepted_events.add(accepted)
        return f"{event_id} {is_new}"

    def _wanted(self, types: str) -> tuple[str, str] | None:
        """An instance that waits for such an event, and its type; at times None, as where none waits."""
        query = f"""
            SELECT i.instance_id, s.wait_event_type FROM workflow_step s
            JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
            WHERE s.status IN ('waiting', 'WAITING') AND i.status NOT IN ('complete', 'errored', 'terminated')
              AND s.wait_event_type {types} ORDER BY 1, s.seq"""
        found = self._raw.execute(query).fetchall()
        return self._dice.choice(found) if found and self._dice.random() < 0.6 else None

    def _waits(self, name: str, type_: str) -> list[tuple[str, int, str]]:
        """The waits that an event of this type would be in time for, the deadline included."""
        query = """
            SELECT i.instance_id, s.run_number, s.step_key FROM workflow_step s
            JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
            WHERE i.instance_id = ? AND s.wait_event_type = ? AND s.status IN ('waiting', 'WAITING')
              AND s.wake_at >= ?"""
        return self._raw.execute(query, (name, type_, self._clock.read())).fetchall()

    def _run_of(self, name: str) -> int:
        (run,) = self._raw.execute("SELECT run_number FROM workflow_instance WHERE instance_id = ?", (name,)).fetchone()
        return int(run)

    def _pause(self, name: str) -> str:
        self._operations.lifecycle.pause(workflow_of(name), name)
        return "accepted"

    def _resume(self, name: str) -> str:
        self._operations.lifecycle.resume(workflow_of(name), name)
        return "accepted"

    def _cancel(self, name: str) -> str:
        """Ask it to stop; at times the same client asks again."""
        self._operations.lifecycle.cancel(workflow_of(name), name, reason="sold twice")
        self._story.terminated.add(name)
        said = "ended" if self.note_end(name) else "asked"
        if said == "asked" and self._dice.random() < 0.15:
            self._operations.lifecycle.cancel(workflow_of(name), name, reason="at once")
            said = "asked, then ended" if self.note_end(name) else "asked twice"
        self._story.stats[f"cancel: {said}"] += 1
        return said

    def _terminate(self, name: str) -> str:
        self._operations.lifecycle.terminate(workflow_of(name), name)
        self._story.terminated.add(name)
        self.note_end(name)
        return "accepted"

    def note_end(self, name: str) -> bool:
        """Note whether an operation has ended a run: its worker has lost it, and its cleanup does not go on."""
        query = "SELECT run_number FROM workflow_instance WHERE instance_id = ? AND status = 'terminated'"
        found = self._raw.execute(query, (name,)).fetchone()
        if found is not None:
            self._story.ended.add((name, found[0]))
            self._story.faults[name, found[0]] += 1
        return found is not None

    def _emit(self, _: str) -> str:
        """From outside; at times it is repeated under its id, while it is under way or after."""
        if self._emitted and self._dice.random() < 0.3:
            topic, payload, id_ = self._dice.choice(self._emitted)
        else:
            wanted = self._wanted("LIKE 'topic:%'")
            topic = self._dice.choice(TOPICS) if wanted is None else wanted[1].split(":", 2)[2]
            number = len(self._emitted)
            payload, id_ = f"outside {number}", self._dice.choice([None, f"emission-{number}"])
            self._emitted.append((topic, payload, id_))
        return f"{payload} to {topic} under {id_}: {self._schedule.errands.emit(topic, payload, id_)}"

    def _restart(self, name: str) -> str:
        said = self._run_started(name, lambda: self._operations.rewind.restart(workflow_of(name), name))
        self._has_plan(name, self._run_of(name))
        return said

    def _rewind(self, name: str) -> str:
        step = self._some_step(name)
        if step is None:
            return "refused: it has no steps"
        said = self._run_started(name, lambda: self._operations.rewind.restart(workflow_of(name), name, from_step=step))
        return f"from {step}: {said}"

    def _retry(self, name: str) -> str:
        return self._run_started(name, lambda: self._operations.rewind.retry(workflow_of(name), name))

    def _fork(self, name: str) -> str:
        step = self._some_step(name)
        if step is None or len(self._schedule.names) > 6:
            return "refused: it has no steps, or enough forks"
        made = f"{name}f{len(self._schedule.names)}"
        self._operations.rewind.fork(workflow_of(name), name, step, id=made)
        self._schedule.names.append(made)
        self._story.accepted.append(made)
        self._story.not_before[made, 1] = 0
        self._take_events_along(made, 1)
        if name in self._story.terminated:  # it may continue a cleanup
            self._story.terminated.add(made)
        self._goes_along(name, self._run_of(name), made, 1)
        return f"from {step}: {made}"

    def _some_step(self, name: str) -> str | None:
        query = """
            SELECT s.step_key FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk
            WHERE i.instance_id = ? AND s.run_number = i.run_number ORDER BY s.seq"""
        keys = [key for (key,) in self._raw.execute(query, (name,))]
        return self._dice.choice(keys) if keys else None

    def _goes_along(self, name: str, run: int, other: str, number: int) -> None:
        """A linear run that goes on from a step has the list of the one before."""
        if (name, run) in self._story.plans:
            self._story.plans[other, number] = self._story.plans[name, run]

    def _take_events_along(self, name: str, run: int) -> None:
        """A run that goes on from a step has the events of the one before."""
        query = """
            SELECT e.event_id FROM workflow_event e JOIN workflow_instance i ON i.id = e.instance_pk
            WHERE i.instance_id = ? AND e.run_number = ? AND e.event_id LIKE '%-event-%'"""
        self._story.accepted_events |= {(event, run) for (event,) in self._raw.execute(query, (name, run))}

    def _run_started(self, name: str, begin: Callable[[], int]) -> str:
        before = self._run_of(name)
        number = begin()
        if number != before + 1:
            self._story.wrongs.append(f"I12c the restart of {name} led from run {before} to {number}")
        self._take_events_along(name, number)
        self._goes_along(name, before, name, number)
        self._story.faults[name, before] += 1
        self._story.prior_runs[name, before] = invariants.of_run(self._raw, name, before)
        return f"run {number}"
