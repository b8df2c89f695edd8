"""Schedules: what many runners, dispatchers and clients do to a few instances, in an order that one integer decides.

A schedule has a stormy part, in which processes die or freeze at checkpoints, commits are cut with and without effect,
messages are lost, doubled and mixed, and clients do as they like; then a calm one, after which everything must have
ended.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from celery_durable.linear import LinearContext
from celery_durable.model import DueRun, RunRef, from_us
from celery_durable.store.runs import sweeps
from celery_durable.tasks.dispatcher import Sweeper
from celery_durable.tasks.outbox import Outbox
from celery_durable.tasks.publishing import PublishReport, SendState
from celery_durable.testing.cooperative import Crash, current_cooperative_thread
from tests.simulation import delegates, invariants, lines, maps, messages, once
from tests.simulation.calm import Calm
from tests.simulation.clients import Clients
from tests.simulation.errands import Errands
from tests.simulation.foreign import Foreign
from tests.simulation.limited import Limited
from tests.simulation.linear import make_plan
from tests.simulation.processes import ColdShutdown, Machine, Runtime, Worker
from tests.simulation.programs import RETRY_SECONDS
from tests.simulation.story import Story

_UNLOCKED = frozenset({"claimed", "before-body", "after-body", "after-commit", "before-publish", "after-publish"})


_AT_A_BODY = ("before-body", "after-body")


@functools.lru_cache(1)
def _show(now_us: int) -> str:
    return f"{from_us(now_us):%d %H:%M:%S.%f}"


class Schedule:
    """One seed's course of events."""

    STREAM = "schedule"
    """Whose chance it draws from."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world, self.seed = world, seed
        self.dice = random.Random(f"{seed}/{self.STREAM}")
        self.story = Story()
        self.messages: list[DueRun] = []
        self.is_calm = False
        self.inside: Runtime = world.workers[0].runtime
        self.busy: list[Worker] = []
        self.asleep: list[Worker] = []
        self.taken = 0
        self.names = [f"i{number}" for number in range(self.dice.choice([1, 1, 2, 3]))]
        self.names += [f"l{number}" for number in range(self.dice.choice([0, 1, 1, 2]))]
        self.plan = make_plan(self.dice)
        self.batch = self.dice.choice([1, 2])
        """Instances that one transaction of an emission hands out to."""
        self.clients, self.errands, self.foreign = self._make_clients(), Errands(self), Foreign(self)
        self.limited = Limited(self)
        # Each schedule has faults of its own: with all of them at once most instances would not get far.
        self._crashes = self.dice.choice([0, 0, 0.02, 0.06])
        self._cuts = self.dice.choice([0, 0, 0.03, 0.1])
        self._parks = self.dice.choice([0.1, 0.5, 1])
        self._is_attended = self.dice.random() < 0.3
        """Whether a dispatcher sweeps all the time, so that it is not blind after each gap."""
        self.losses = self.dice.choice([0, 0.2, 0.7])
        self._actions = self._weights()
        self.sweepers = [self._new_sweeper(beat) for beat in world.beats]

    def _make_clients(self) -> Any:
        return Clients(self)

    def _new_sweeper(self, beat: Machine) -> Sweeper:
        outbox = Outbox(beat.store, self.world.settings, self.errands.send)
        return Sweeper(beat.store, self.world.settings, beat.runtime, self._offer, self._queue_length, outbox=outbox)

    def _queue_length(self, queue: str) -> int | None:
        if not self.is_calm and self.dice.random() < 0.3:
            return self.dice.choice([None, None, 0, 1_000_000])
        return sum(due.queue == queue for due in self.messages)

    def _weights(self) -> tuple[list[Callable[[], None]], list[float]]:
        some = self.dice.choice
        table: list[tuple[Callable[[], None], float]] = [
            (self._deliver, 10),
            (self._step, 16),
            (self._sweep, 2),
            (self._pass_time, 4),
            (self.clients.act, some([0.5, 4, 8])),
            (self._freeze, some([0, 0, 1, 3])),
            (self._thaw, 1.5),
            (self._kill, some([0, 0, 0.7])),
            (self._stop, some([0, 0, 0.5])),
            (self._restart_beat, some([0, 0.3])),
            (self._stray, some([0, 1])),
            (self.errands.continue_abandoned_emission, 4),
            (self.errands.hand_over, 5),
            (self.errands.sweep_outbox, some([0, 3])),
            (self.foreign.act, 6),
            (self._deploy, some([0, 0.5])),
            (self.limited.act, some([0, 1, 3])),
        ]
        return [action for action, _ in table], [weight for _, weight in table]

    # --- the course -----------------------------------------------------------------------------

    def run(self) -> list[str]:
        self.world.deploy(self.plan)
        for name in self.names:
            self.clients.create(name)
        for _ in range(self.dice.choice([15, 40, 80])):
            self.dice.choices(*self._actions)[0]()
        broken = self.story.wrongs + self._broken("in the storm")
        if not broken:
            broken = Calm(self).come_to_an_end()
        if not broken:
            broken = self._broken("at the end")
        if not broken:
            broken += invariants.wrong_endings(self.world.raw, self.story)
            broken += invariants.missed_events(self.world.raw, self.story)
            broken += invariants.wrong_counts(self.world.raw, self.story)
            broken += lines.wrong(self.world.raw, self.story) + messages.wrong(self.world.raw, self.story)
            broken += delegates.wrong(self.world.raw, self.story) + maps.wrong(self.world.raw, self.story)
            broken += once.wrong(self.world.raw, self.story) + self.limited.left()
            broken += Calm(self).wake_zombies() + self._changed_runs() + self.story.wrongs
        return broken

    def _broken(self, when: str) -> list[str]:
        found = invariants.broken(self.world.raw, self.world.clock.read())
        return [f"{each} ({when})" for each in found]

    def tell(self, what: str) -> None:
        self.story.journal.append(f"{_show(self.world.clock.read())} {what}")

    def _changed_runs(self) -> list[str]:
        return [
            f"I11 run {run} of {instance} has changed after its restart"
            for (instance, run), rows in self.story.prior_runs.items()
            if invariants.of_run(self.world.raw, instance, run) != rows
        ]

    def end(self) -> None:
        """Let no lane outlive its schedule."""
        self.is_calm = True
        for worker in list(self.busy):
            worker.runtime.is_dead = True
            assert worker.thread is not None
            worker.thread.kill()
        self.busy.clear()
        self.errands.end()

    # --- faults ---------------------------------------------------------------------------------

    def reached(self, runtime: Runtime, name: str) -> None:
        """A runner has come to a checkpoint."""
        if self.is_calm:
            return
        if runtime.is_dead:
            raise Crash(name)
        self.perhaps_leave(runtime, name)
        rarity = 5 if name.endswith("publish") or runtime is self.world.answerer.runtime else 1
        if self.dice.random() < self._crashes * rarity:
            runtime.is_dead = True
            self.tell(f"{runtime.name} dies at {name}")
            self.story.stats[f"died at {name}"] += 1
            raise Crash(name)
        thread = current_cooperative_thread()
        if thread is not None and name in _UNLOCKED and not runtime.has_session and self.dice.random() < self._parks:
            thread.park(name)

    def perhaps_leave(self, runtime: Runtime, where: str) -> None:
        """Raise what a cold shutdown raises, wherever the process is, if it has been told to quit."""
        if not runtime.is_quitting or self.is_calm:
            return
        runtime.is_quitting = False
        self.tell(f"{runtime.name} leaves at {where}")
        self.story.stats[f"left at {where}"] += 1
        ref = runtime.ref
        assert ref is not None
        self._fault(ref)
        self.story.cuts[ref.instance_id, ref.run_number] += 1  # the body may run again as the same attempt
        raise ColdShutdown

    def cut(self, machine: Machine) -> str | None:
        """Whether the connection breaks in this commit, and whether the commit is applied nevertheless."""
        if self.is_calm or machine.runtime.is_dead or self.dice.random() >= self._cuts:
            return None
        how = self.dice.choice(["applied", "lost"])
        self.tell(f"a commit of {machine.name} is cut, {how}")
        self.story.stats[f"cut, {how}"] += 1
        ref = machine.runtime.ref
        if ref is not None:
            self._fault(ref)
            self.story.cuts[ref.instance_id, ref.run_number] += 1
        return how

    def begins(self, key: tuple[str, int, str], attempt: int) -> None:
        """A body begins to run."""
        self.story.bodies.append((*key, attempt))
        self._in_time(key)

    def _in_time(self, key: tuple[str, int, str]) -> None:
        now = self.world.clock.read()
        if now < self.story.not_before.get(key[:2], 0):
            self.story.wrongs.append(f"I9d {key} runs before the start that was asked for")
        if now < self.story.failed_at.get(key, 0) + RETRY_SECONDS * 1_000_000 and not self.story.faults[key[:2]]:
            self.story.wrongs.append(f"I9c {key} is tried again too early")

    def turns(self, context: LinearContext) -> None:
        """The handler of a linear step begins to run."""
        key = context.instance_id, context.run_number, context.step
        self._in_time(key)
        event = "" if context.event is None else f" {context.event.type}"
        self.story.turns.append((*key, context.attempt, f"{context.task_type}{event}"))

    def _fault(self, ref: RunRef) -> None:
        self.story.faults[ref.instance_id, ref.run_number] += 1

    # --- actions --------------------------------------------------------------------------------

    def publish(self, due_runs: Sequence[DueRun]) -> None:
        for due in due_runs:
            copies = 0 if self.dice.random() < self.losses else self.dice.choice([1, 1, 1, 2, 3])
            self.story.stats["lost" if not copies else "published"] += 1
            self.messages += [due] * (1 if self.is_calm else copies)

    def _offer(self, due_runs: Sequence[DueRun]) -> PublishReport:
        if not self.is_calm and self.dice.random() < 0.1:
            self.story.stats["refused by the broker"] += len(due_runs)
            return PublishReport.of(len(due_runs), self.dice.choice([SendState.UNSENT, SendState.REFUSED]))
        self.publish(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def _deploy(self) -> None:
        """Another list of steps: runs that have started continue along their rows."""
        self.plan = make_plan(self.dice)
        self.world.deploy(self.plan)
        self.tell(f"deploy {self.plan}")

    def _deliver(self) -> None:
        free = [worker for worker in self.world.workers if worker not in self.busy]
        if not (free and self.messages):
            return
        worker = self.dice.choice(free)
        index = self.dice.randrange(len(self.messages))
        message = self.messages[index] if self.dice.random() < 0.1 else self.messages.pop(index)
        self.taken += 1
        worker.take(message.ref, self.taken)
        self.busy.append(worker)
        self.story.stats["delivered"] += 1
        self.tell(f"{worker.name} takes {message.ref}")
        if worker.runtime.is_starved:  # whatever it takes, it may lose
            self._fault(message.ref)
        self.go(worker)

    def _step(self) -> None:
        awake = [worker for worker in self.busy if worker not in self.asleep]
        if awake:
            self.go(self.dice.choice(awake))

    def go(self, worker: Worker) -> None:
        thread, ref = worker.thread, worker.runtime.ref
        assert thread is not None
        assert ref is not None
        self.inside = worker.runtime
        thread.go()
        if thread.result is None:
            self.tell(f"{worker.name} at {thread.parked_at}")
            return
        self.tell(f"{worker.name} {ref}: {thread.result}")
        self.story.stats[thread.result.partition(":")[0].partition(" until")[0]] += 1
        self.busy.remove(worker)
        worker.thread = None
        if worker in self.asleep:
            self.asleep.remove(worker)
        if thread.result.startswith("superseded"):
            held = "SELECT 1 FROM workflow_instance WHERE instance_id = ? AND claim_task_id = ? AND claimed_by = ?"
            if self.world.raw.execute(held, (ref.instance_id, worker.task_id, worker.name)).fetchone():
                self.story.wrongs.append(f"I15 {worker.name} gives {ref} up, which it holds")
        if worker.runtime.is_dead:
            self._bury(worker, ref)
        elif worker.should_stop:
            worker.begin(self.next_seed())

    def _bury(self, worker: Worker, ref: RunRef) -> None:
        self._fault(ref)
        task_id = worker.task_id
        worker.begin(self.next_seed())
        if self.dice.random() < 0.3:  # the parent of the process has noticed
            store = self.world.clients.store
            grace = timedelta(seconds=self.world.settings.grace_seconds)
            due = store.transact(lambda tx: sweeps.release_dead_claim(tx, ref, task_id=task_id, grace=grace))
            self.tell(f"{ref} is released by the parent: {due is not None}")
            if due is not None:
                self.publish([due])

    def next_seed(self) -> int:
        return self.dice.getrandbits(64)

    def _sweep(self) -> None:
        number = self.dice.randrange(len(self.sweepers))
        published = self.sweepers[number].sweep()
        self.story.stats["swept"] += 1
        self.tell(f"beat-{number} publishes {published}")

    def _stray(self) -> None:
        """A message that nobody sent, or long ago."""
        runs = self.world.raw.execute(
            "SELECT i.workflow, i.instance_id, r.run_number, i.queue FROM workflow_instance i "
            "JOIN workflow_run r ON r.instance_pk = i.id ORDER BY 2, 3"
        ).fetchall()
        workflow, instance, run, queue = self.dice.choice(runs)
        self.messages.append(DueRun(RunRef(workflow, instance, run), queue))
        self.story.stats["stray"] += 1

    def _restart_beat(self) -> None:
        number = self.dice.randrange(len(self.sweepers))
        self.sweepers[number] = self._new_sweeper(self.world.beats[number])
        self.tell(f"beat-{number} is another one")

    def _pass_time(self) -> None:
        if self.dice.random() < 0.3:  # to the very moment at which something ends
            query = "SELECT min(wake_at) FROM workflow_step WHERE status IN ('waiting', 'WAITING') AND wake_at > ?"
            (wake_us,) = self.world.raw.execute(query, (self.world.clock.read(),)).fetchone()
            if wake_us is not None and wake_us < self.world.clock.read() + 3_600_000_000:
                self._pass((wake_us - self.world.clock.read()) / 1_000_000)
                return
        self._pass(self.dice.choice([0.5, 2, 5, 16, 31, 61, 700]))

    def _pass(self, seconds: float) -> None:
        if any(worker not in self.asleep for worker in self.busy):  # they renew their leases: that is what costs
            seconds = min(seconds, 130)
        for worker in self.busy:
            if worker.runtime.ref is not None and not worker.runner._renewer._leases:
                self._fault(worker.runtime.ref)  # its claim is committed, and nobody renews it yet
        if not self._is_attended or seconds > 100:
            self.world.clock.advance(timedelta(seconds=seconds))
            return
        while seconds > 0:
            self.world.clock.advance(timedelta(seconds=min(seconds, 10)))
            seconds -= 10
            self.sweepers[0].sweep()

    def _freeze(self) -> None:
        """Suspend a runner beyond its lease, or only keep it from renewing."""
        awake = [worker for worker in self.busy if worker not in self.asleep]
        if not awake:
            return
        worker = self.dice.choice(awake)
        assert worker.runtime.ref is not None
        self._fault(worker.runtime.ref)
        if self.dice.random() < 0.3:
            worker.runtime.is_starved = True
            self.tell(f"{worker.name} renews no lease")
            self.story.stats["starved"] += 1
            return
        worker.runtime.suspend()
        self.asleep.append(worker)
        self.tell(f"{worker.name} is suspended")
        self.story.stats["suspended"] += 1
        if self.dice.random() < 0.7:
            self._pass(31)

    def _thaw(self) -> None:
        if self.asleep:
            worker = self.asleep.pop(self.dice.randrange(len(self.asleep)))
            worker.runtime.wake_up()
            self.tell(f"{worker.name} wakes up")
            self.go(worker)

    def _kill(self) -> None:
        if self.busy:
            worker = self.dice.choice(self.busy)
            assert worker.thread is not None
            worker.runtime.is_dead = True
            self.tell(f"{worker.name} is killed at {worker.thread.parked_at}")
            self.story.stats["killed"] += 1
            self.go(worker)
            while worker in self.busy:
                self.go(worker)

    def _stop(self) -> None:
        if self.busy:
            at_a_body = [each for each in self.busy if each.thread and each.thread.parked_at in _AT_A_BODY]
            worker = self.dice.choice(at_a_body or self.busy)
            worker.should_stop = True
            worker.runtime.is_quitting = self.taken % 3 != 0
            self.tell(f"{worker.name} shuts down{', cold' if worker.runtime.is_quitting else ''}")
            self.story.stats["stopped"] += 1
