"""The simulated installation: a database, a clock and processes, for any number of schedules one after the other.

Store, runner, operations and sweep are those of production, over SQLite in memory and a virtual clock.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sqlite3
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from celery_durable.all_operations import Operations
from celery_durable.config import Settings
from celery_durable.linear import LinearContext
from celery_durable.model import DueRun, to_us
from celery_durable.operations import topics
from celery_durable.operations.context import OperationContext
from celery_durable.store.engine.server_info import ensure_database_id
from celery_durable.testing.clock import START, Clock
from celery_durable.testing.code import Deployed
from celery_durable.testing.databases import Database
from tests.simulation import invariants, keeping, limited, maps, witnesses
from tests.simulation.clients import workflow_of
from tests.simulation.connections import Connector
from tests.simulation.linear import Plan, make_linear, make_params
from tests.simulation.processes import Answerer, Emitter, Machine, Postman, Runtime, Sender, Worker
from tests.simulation.programs import authors, make_definition
from tests.simulation.reporting import Reporting
from tests.simulation.schedule import Schedule
from tests.simulation.upkeep import Upkeep

_RUNNERS = 3
_OF_SCHEDULES = 5
"""Of so many schedules one has the second act after the first, and another one the third."""
_OTHER_ACTS: dict[int, type[Schedule]] = {4: Upkeep, 3: Reporting}
UNEXPECTED = "Nothing but refusals may be raised: "


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule. ``broken``: the invariants that do not hold; ``digest``: of every row at the end."""

    seed: int
    broken: list[str]
    journal: list[str]
    digest: str
    stats: Counter[str]


class World:
    """A database and the processes over it, for any number of schedules, one after the other."""

    def __init__(self) -> None:
        self.clock = Clock()
        # A process that is parked at a checkpoint while the clock moves is slow, not stuck: what follows from that is
        # no fault of the schedule's. Passes that are stuck: tests/runner/test_stalled_passes.py.
        self.settings = Settings(pass_seconds=300, stall_seconds=86_400)
        self._database = Database(None, schema=None, prefix="")
        self.url = self._database.url
        self.connector = Connector(self.url.removeprefix("sqlite:///"))
        self.registry = Deployed([make_definition(self)])
        self.clients = Machine(self, "clients")
        self.workers = [Worker(self, f"runner-{number}") for number in range(_RUNNERS)]
        self.beats = [Machine(self, f"beat-{number}") for number in range(2)]
        self.emitters = [Emitter(self, f"emitter-{number}") for number in range(2)]
        self.senders = [Sender(self, f"sender-{number}") for number in range(2)]
        self.postman = Postman(self, "postman")
        self.answerer = Answerer(self, "answerer")
        self.machines = [self.clients, *self.workers, *self.beats, *self.emitters, *self.senders]
        self.machines += [self.postman, self.answerer]
        capture = functools.partial(self.capture, None)
        self.operations = Operations(
            OperationContext(self.clients.store, self.settings, self.registry, self.clients.runtime, capture)
        )
        path, more = self.url.removeprefix("sqlite:///"), 1_000  # of the cached statements: the invariants are many
        self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=more)
        self.schedule = Schedule(self, 0)
        self.schedule.is_calm = True  # until the tables are made
        authors.create_all(self.clients.store.engine)
        self.raw.create_function("author_now", 0, self.clock.read)
        self.raw.executescript(witnesses.SCRIPT + maps.SCRIPT + keeping.SCRIPT + limited.SCRIPT)
        for machine in self.machines:  # now: the first caller in a schedule would take a number from its chance
            machine.store.transact(ensure_database_id)

    def run(self, seed: int) -> Outcome:
        """Run the schedule of a seed, and in a share of them another act."""
        first, another = self._act(Schedule, seed), _OTHER_ACTS.get(seed % _OF_SCHEDULES)
        if first.broken or another is None:
            return first
        second = self._act(another, seed)
        return Outcome(
            seed,
            second.broken,
            first.journal + second.journal,
            hashlib.sha256(f"{first.digest} {second.digest}".encode()).hexdigest(),
            first.stats + second.stats,
        )

    def _act(self, kind: type[Schedule], seed: int) -> Outcome:
        self._wipe()
        self.clock._now_us = to_us(START)
        self.clock._timers.clear()
        for machine in self.machines:
            machine.begin(seed)
        self.schedule = kind(self, seed)
        whole_batch, topics.BATCH = topics.BATCH, self.schedule.batch
        try:
            broken = self.schedule.run()
        except Exception as error:
            traceback.print_exc()
            broken = [f"{UNEXPECTED}{type(error).__name__}: {error}"]
        finally:
            self.schedule.end()
            topics.BATCH = whole_batch
        counts = f"{witnesses.COUNTS} UNION ALL {maps.COUNTS} UNION ALL {limited.COUNTS}"
        self.schedule.story.stats.update(dict(self.raw.execute(counts)))
        digest = hashlib.sha256(repr(invariants.dump(self.raw)).encode()).hexdigest()
        return Outcome(seed, broken, self.schedule.story.journal, digest, self.schedule.story.stats)

    def close(self) -> None:
        self.raw.close()
        for machine in self.machines:
            machine.close()
        self.connector.close()
        self._database.remove()

    def capture(self, runtime: Runtime | None, due_runs: Sequence[DueRun]) -> None:
        if runtime is not None:
            runtime.checkpoint("before-publish")
        self.schedule.publish(due_runs)
        if runtime is not None:
            runtime.checkpoint("after-publish")

    def _wipe(self) -> None:
        tables = [row[0] for row in self.raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.raw.execute("BEGIN IMMEDIATE")
        for table in tables:
            if table == "workflow_database":
                continue
            if table.startswith(("workflow_", "author_")) or table == "sqlite_sequence":
                self.raw.execute(f"DELETE FROM {table}")
        self.raw.execute("COMMIT")

    # --- what bodies tell -----------------------------------------------------------------------

    def deploy(self, plan: Plan) -> None:
        """Make this the code of the linear workflow."""
        self.registry.replace(make_linear(self, plan))
        self.schedule.story.deployed.append([step for step, _ in plan])

    def attempt(self) -> int:
        return self.schedule.story.bodies[-1][3]

    def execution(self) -> int:
        return len(self.schedule.story.bodies) + len(self.schedule.story.turns)

    def workflow_of(self, instance: str) -> Any:
        return SimpleNamespace(definition=self.registry.get(workflow_of(instance)))

    def linear_params(self, seed: int) -> dict[str, Any]:
        return make_params(random.Random(seed))

    def turns(self, context: LinearContext) -> int:
        self.schedule.turns(context)
        return self.execution()

    def opens_session(self) -> None:
        self.schedule.inside.has_session = True

    def fails(self, step: str) -> None:
        ref = self.schedule.inside.ref
        assert ref is not None
        key = ref.instance_id, ref.run_number, step
        self.schedule.story.failures[key] += 1
        self.schedule.story.failed_at[key] = self.clock.read()
