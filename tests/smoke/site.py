"""One application with its processes, and the questions a test asks when the dust has settled."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable, Workflow, WorkflowInstance
from celery_durable.model import Status
from celery_durable.store.migrations import migrate
from tests.smoke import flows
from tests.smoke.proc import PATIENCE_SECONDS, ROOT, Proc, python, until
from tests.support.invariants import QUERIES

# Workers that do not talk to each other start sooner.
_REDIS, _RABBITMQ = ("redis", "postgresql"), ("rabbitmq", "mariadb")
PAIRS = pytest.mark.parametrize(("broker", "database"), [_REDIS, _RABBITMQ], indirect=True)
REDIS_AND_POSTGRESQL = pytest.mark.parametrize(("broker", "database"), [_REDIS], indirect=True)
REDIS_IN_GATE, RABBITMQ_IN_GATE = (
    pytest.mark.parametrize(
        ("broker", "database"),
        [pytest.param(*gate, marks=pytest.mark.gate), pytest.param(*night, marks=pytest.mark.slow)],
        indirect=True,
    )
    for gate, night in ((_REDIS, _RABBITMQ), (_RABBITMQ, _REDIS))
)
"""Both pairs, of which the gate has one and the nightly run the other."""
POSTGRESQL = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO")


class Site:
    """An application, its folder, its processes. A kind of its own may have more workflows: `project`, `build`."""

    project = "tests.smoke.project"
    build = staticmethod(flows.build)
    detoured: Collection[str] = ("worker",)
    """Who goes through a proxy: with nobody else there, the next request that comes through it is theirs."""

    def __init__(
        self,
        name: str,
        folder: Path,
        broker_url: str,
        database_url: str,
        settings: dict[str, Any],
        *,
        control_port: int = 0,
        bodies_url: str | None = None,
    ) -> None:
        for each in ("orders", "done"):
            (folder / each).mkdir()
        direct = bodies_url or database_url
        self.config = flows.Config(
            name, str(folder), broker_url, database_url, direct, control_port, "client", settings
        )
        self.folder = folder
        # The test itself takes no detours.
        self.app: Celery = self.build(dataclasses.replace(self.config, database_url=direct, role="test"))
        self.durable: Durable = vars(self.app)["durable"]
        # No pool: the database may have been restarted between two questions.
        self.engine = sa.create_engine(direct, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        migrate.upgrade(self.durable.internals.store)
        flows.drop_tables(self.engine)  # another ring of tests may have left its own on this server
        flows.create_tables(self.engine)
        self.procs: list[Proc] = []
        self.instances: list[WorkflowInstance[Any]] = []

    def close(self) -> None:
        for proc in self.procs:
            proc.clean_up()
        flows.drop_tables(self.engine)
        self.engine.dispose()
        self.durable.close()
        self.app.close()

    # --- processes ------------------------------------------------------------------------------

    def worker(self, *options: str, concurrency: int = 2, wait: bool = True) -> Proc:
        """Start a prefork worker."""
        argv = [
            "worker",
            "--concurrency",
            str(concurrency),
            "-n",
            f"w{len(self.procs)}-{self.config.name}@smoke",
            *QUIET,
        ]
        worker = self._start("worker", *argv, *options)
        if wait:
            worker.wait_for_log(r"ready\.")
        return worker

    def foreign(self) -> Proc:
        """Start a worker of an application that does not know celery_durable."""
        options = ("--pool", "solo", "-n", f"foreign-{self.config.name}@smoke", *QUIET)
        return self._start("foreign", "worker", *options, project="tests.smoke.foreign")

    def beat(self, *, wait: bool = True) -> Proc:
        schedule = self.folder / f"schedule-{len(self.procs)}"
        beat = self._start("beat", "beat", "--schedule", str(schedule), "--pidfile=", "--loglevel=INFO")
        if wait:
            beat.wait_for_log("The durable dispatcher is running")
        return beat

    def flower(self, port: int) -> Proc:
        return self._start(
            "flower", "flower", "--address=127.0.0.1", f"--port={port}", FLOWER_UNAUTHENTICATED_API="true"
        )

    def _start(self, role: str, *argv: str, project: str | None = None, **environment: str) -> Proc:
        url = self.config.database_url if role in self.detoured else self.config.bodies_url
        config = dataclasses.replace(self.config, role=role, database_url=url)
        proc = Proc(
            python("-m", "celery", "-A", project or self.project, *argv),
            log=self.folder / f"{role}-{len(self.procs)}.log",
            env={
                **config.environment(),
                **environment,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}",
                "C_FORCE_ROOT": "1",
            },
        )
        self.procs.append(proc)
        return proc

    def client(self, program: str) -> int:
        """Run a program of a client of its own, which may die of an order; answers with its exit code."""
        program = f"from tests.smoke.project import app; durable = app.durable; {program}"
        return subprocess.run(
            python("-c", program),
            cwd=ROOT,
            env={**os.environ, **self.config.environment(), "PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        ).returncode

    # --- orders ---------------------------------------------------------------------------------

    def order(self, what: str) -> None:
        """Have the next process that comes there die, as ``child.after-commit`` says."""
        (self.folder / "orders" / what).touch()

    def wait_until_done(self, what: str) -> None:
        until(f"{what} is carried out", (self.folder / "done" / what).exists)

    def let_go(self, attempt: int | None = None) -> None:
        """Let bodies that are held go on, or only those of an attempt of this number."""
        (self.folder / ("go" if attempt is None else f"go-{attempt}")).touch()

    def hold_again(self) -> None:
        (self.folder / "go").unlink()

    # --- workflows ------------------------------------------------------------------------------

    def workflow(self, name: str) -> Workflow[Any, Any]:
        return self.durable.workflows[name]

    def create(self, workflow: str, params: Any = None, id: str | None = None) -> WorkflowInstance[Any]:
        self.instances.append(self.workflow(workflow).create(params, id=id))
        return self.instances[-1]

    def wait_for_body(self, instance: WorkflowInstance[Any], step: str, attempt: int = 1) -> int:
        """Wait until the body of a step runs; answers with its process."""
        b = flows.bodies.c
        query = sa.select(b.pid).where(b.instance == instance.id, b.step == step, b.attempt == attempt)

        def look() -> int | None:
            with self.engine.connect() as connection:
                return connection.execute(query.limit(1)).scalar()

        return int(until(f"a body of {step!r}, attempt {attempt}", look) or 0)

    def open_instances(self) -> int:
        """How many instances have not ended, be they known to the test or not."""
        i = self.durable.internals.store.tables.instance.c
        with self.engine.connect() as connection:
            live = sa.select(sa.func.count()).where(i.status.in_(("active", "waiting")))
            return int(connection.execute(live).scalar_one())

    # --- when the dust has settled --------------------------------------------------------------

    def finish(self, seconds: float = PATIENCE_SECONDS, *, reruns: int | None = 0) -> None:
        """Everything that was created completes, and nothing was lost or done twice; see `check`."""
        waiting = {instance.id: instance for instance in self.instances}

        def all_over() -> bool:
            for instance in list(waiting.values()):
                status = instance.status()
                if not status.status.is_terminal:
                    return False
                assert status.status is Status.COMPLETE, f"{instance}: {status}\n{self.logs()}"
                del waiting[instance.id]
            return True

        try:
            until(f"the end of {len(waiting)} instances", all_over, seconds, pause=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\nopen: {[*waiting][:5]} {self.rows()}\n{self.logs()}") from None
        self.check(reruns=reruns)

    def check(self, *, reruns: int | None = 0) -> None:
        """Fail with whatever breaks the invariants; see `broken`."""
        broken = self.broken(reruns=reruns)
        assert not broken, "\n".join(broken) + "\n" + self.logs()

    def broken(self, *, reruns: int | None = 0) -> list[str]:
        """Whatever breaks the invariants.

        ``reruns``: how many bodies had to run again within their attempt; None where chance decides.
        """
        broken = []
        with self.engine.connect() as connection:
            for name, query in QUERIES.items():
                given = {"now": 2**62} if ":now" in query else {}
                broken += [f"{name}: {tuple(row)}" for row in connection.execute(sa.text(query), given)]
            ran = Counter(tuple(row) for row in connection.execute(sa.select(*_ATTEMPT)))
        again = {attempt: times for attempt, times in ran.items() if times > 1}
        if reruns is not None and sum(again.values()) - len(again) != reruns:
            broken.append(f"I9 bodies that ran again within their attempt: {again}, expected {reruns}")
        known = {(instance.workflow.name, instance.id) for instance in self.instances}
        i = self.durable.internals.store.tables.instance.c
        with self.engine.connect() as connection:
            recorded = {tuple(row) for row in connection.execute(sa.select(i.workflow, i.instance_id))}
        return broken + [f"I12 create was answered, and is gone: {each}" for each in known - recorded]

    def bodies(self, instance: WorkflowInstance[Any]) -> list[tuple[str, int]]:
        """Which steps' bodies ran, in order, with the number of the attempt."""
        b = flows.bodies.c
        query = sa.select(b.step, b.attempt).where(b.instance == instance.id).order_by(b.id)
        with self.engine.connect() as connection:
            return [(row.step, row.attempt) for row in connection.execute(query)]

    def rows(self) -> list[Any]:
        i = self.durable.internals.store.tables.instance
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(i).limit(5)).mappings())

    def logs(self) -> str:
        """The ends of all logs, for people."""
        return "\n".join(f"--- {proc.log.name}\n{proc.text()[-1500:]}" for proc in self.procs)


_ATTEMPT = (flows.bodies.c.instance, flows.bodies.c.run, flows.bodies.c.step, flows.bodies.c.attempt)


def outputs(instances: Iterable[WorkflowInstance[Any]]) -> list[Any]:
    return [instance.status().output for instance in instances]
