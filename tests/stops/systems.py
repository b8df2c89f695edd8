"""The systems under test: how each is started, given work, stopped, and asked what came of the work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_durable import CreateOptions
from tests.smoke.proc import ROOT, Proc, python, until
from tests.smoke.proxy import TcpProxy
from tests.stops.witness import LEASE_SECONDS, Testimony

COMPLETED, REPORTED, SILENT = "completed", "unknown end reported", "nothing reported"
LIMIT_SECONDS = 15
_QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO")


class System:
    """One system. ``size``: how many functions run at the same time, and so how many one stop of a worker hits."""

    stops: tuple[str, ...] = ()

    def __init__(self, folder: Path, environment: dict[str, str], proxy: TcpProxy, size: int) -> None:
        self.folder, self.environment, self.proxy, self.size = folder, environment, proxy, size
        self.procs: list[Proc] = []
        self.worker: Proc | None = None

    def close(self) -> None:
        for proc in self.procs:
            proc.clean_up()

    def start(self, argv: Sequence[str], **environment: str) -> Proc:
        log = self.folder / f"{len(self.procs)}.log"
        self.procs.append(Proc(argv, log=log, env={**os.environ, **self.environment, **environment}))
        return self.procs[-1]

    def start_worker(self, stop: str = "") -> Proc:
        raise NotImplementedError

    def create(self, ids: list[str], stop: str) -> None:
        raise NotImplementedError

    def states(self, ids: list[str]) -> Counter[str]:
        """How many are COMPLETED, how many report an unknown end, and how many do neither."""
        raise NotImplementedError

    def has_settled(self, ids: list[str]) -> bool:
        """Whether nothing more will happen to these."""
        raise NotImplementedError

    # --- one round ------------------------------------------------------------------------------

    def go_round(self, stop: str, prefix: str) -> tuple[Testimony, Counter[str]]:
        """Stop ``size`` calls, let the system recover, and return what the witness and the system say of them."""
        ids = [f"{prefix}-{number}" for number in range(self.size)]
        if self.worker is None or not self.worker.is_running or stop == "hard limit":
            self._replace_worker(stop)
        worker = self.worker
        assert worker is not None
        self.create(ids, stop)
        until(f"{self.size} calls", lambda: len(Testimony.read(self.folder, prefix).running) == self.size)
        getattr(self, f"_{stop.replace(' ', '_')}")(worker, ids)
        (self.folder / "go").touch()
        if stop == "warm stop":
            worker.process.wait(60)
        if self.worker is not None and (not self.worker.is_running or stop == "hard limit"):
            self._replace_worker()
        until(f"the end of {prefix}", lambda: self.has_settled(ids))
        (self.folder / "go").unlink()
        return Testimony.read(self.folder, prefix), self.states(ids)

    def _replace_worker(self, stop: str = "") -> None:
        if self.worker is not None and self.worker.is_running:
            self.worker.terminate()
        self.worker = self.start_worker(stop)
        self.worker.wait_for_log(r"ready\.")

    # --- stops ----------------------------------------------------------------------------------

    def _kill_worker(self, worker: Proc, ids: list[str]) -> None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.process.wait(60)

    def _warm_stop(self, worker: Proc, ids: list[str]) -> None:
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")

    def _freeze(self, worker: Proc, ids: list[str]) -> None:
        """Freeze a worker beyond the lease; another one meanwhile takes over what it may."""
        for pid in (pids := [worker.pid, *worker.children()]):
            os.kill(pid, signal.SIGSTOP)
        self.worker = self.start_worker()
        self.worker.wait_for_log(r"ready\.")
        time.sleep(2 * LEASE_SECONDS)
        (self.folder / "go").touch()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        worker.terminate()

    def _cut_commit(self, worker: Proc, ids: list[str]) -> None:
        """Let one function after the other return, and cut the connection of its commit, before it or after it."""
        for number, job in enumerate(ids):
            cuts = len(self.proxy.cuts)
            self.proxy.arm("cut-before" if number % 2 else "cut-after", inside=b"COMMIT")
            (self.folder / f"go-{job}").touch()
            until("the cut", lambda cuts=cuts: len(self.proxy.cuts) > cuts)


class _OnCelery(System):
    """What runs in a Celery worker."""

    queue: str

    def start_worker(self, stop: str = "") -> Proc:
        argv = ["worker", "-Q", self.queue, "-c", str(self.size), "-n", f"{self.queue}{len(self.procs)}@stops", *_QUIET]
        environment = {"STOPS_LIMIT": str(LIMIT_SECONDS)} if stop == "hard limit" else {}
        return self.start(python("-m", "celery", "-A", "tests.stops.project", *argv), C_FORCE_ROOT="1", **environment)

    def task_ids(self, ids: list[str]) -> list[str]:
        raise NotImplementedError

    def _kill_child(self, worker: Proc, ids: list[str]) -> None:
        for pid in worker.children():
            os.kill(pid, signal.SIGKILL)

    def _term_child(self, worker: Proc, ids: list[str]) -> None:
        for pid in worker.children():
            os.kill(pid, signal.SIGTERM)

    def _cold_stop(self, worker: Proc, ids: list[str]) -> None:
        os.kill(worker.pid, signal.SIGQUIT)
        worker.process.wait(60)

    def _revoke(self, worker: Proc, ids: list[str]) -> None:
        from tests.stops.project import app

        before = worker.text().count("Terminating")
        app.control.revoke(self.task_ids(ids), terminate=True)
        until("the signals", lambda: worker.text().count("Terminating") - before >= self.size)

    def _hard_limit(self, worker: Proc, ids: list[str]) -> None:
        until("the limits", lambda: worker.text().count("Hard time limit") >= self.size)


class DurableStops(_OnCelery):
    """`step.do` with on_lost="fail" and retries; a third of the first attempts raise."""

    queue = "durable"
    stops = (
        *("kill child", "kill worker", "term child", "cold stop", "warm stop", "freeze", "revoke", "hard limit"),
        "cut commit",
    )

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from tests.stops.project import durable

        self._payment = durable.workflows["payment"]
        self._engine = sa.create_engine(self.environment["STOPS_DIRECT"], isolation_level="AUTOCOMMIT")
        schedule = f"--schedule={self.folder / 'schedule'}"
        self.start(
            python("-m", "celery", "-A", "tests.stops.project", "beat", schedule, "--pidfile=", "--loglevel=INFO")
        ).wait_for_log("The durable dispatcher is running")

    def create(self, ids: list[str], stop: str) -> None:
        uses_session = stop == "cut commit"
        self._payment.create_batch([CreateOptions(id=job, params=uses_session) for job in ids])

    def task_ids(self, ids: list[str]) -> list[str]:
        return [
            row.claim_task_id for row in self._rows("SELECT instance_id, claim_task_id FROM workflow_instance", ids)
        ]

    def has_settled(self, ids: list[str]) -> bool:
        rows = self._rows("SELECT instance_id, status FROM workflow_instance", ids)
        return all(row.status in ("complete", "errored") for row in rows)

    def states(self, ids: list[str]) -> Counter[str]:
        """By the rows: what the run ended with, which is also what its one step ended with."""
        query = """
            SELECT i.instance_id, i.status, r.error_name, count(s.step_key) AS steps, max(s.error_name) AS lost
            FROM workflow_instance i JOIN workflow_run r ON r.instance_pk = i.id AND r.run_number = i.run_number
            JOIN workflow_step s ON s.instance_pk = i.id AND s.run_number = i.run_number"""
        states: Counter[str] = Counter()
        for row in self._rows(query, ids, "GROUP BY 1, 2, 3"):
            is_unknown = (row.error_name, row.lost, row.steps) == ("OutcomeUnknown", "OutcomeUnknown", 1)
            states[COMPLETED if row.status == "complete" else REPORTED if is_unknown else SILENT] += 1
        return states

    def _rows(self, query: str, ids: list[str], more: str = "") -> list[Any]:
        alias = "i." if " i " in query else ""
        with self._engine.connect() as connection:
            return list(
                connection.execute(sa.text(f"{query} WHERE {alias}instance_id = ANY(:ids) {more}"), {"ids": ids})
            )


class CeleryStops(_OnCelery):
    """A plain task, acknowledged early as by default; its result backend is Redis."""

    queue = "plain"
    stops = ("kill child", "kill worker", "term child", "cold stop", "warm stop", "freeze", "revoke", "hard limit")

    def create(self, ids: list[str], stop: str) -> None:
        from tests.stops.project import plain

        for job in ids:
            plain.apply_async((job,), task_id=job)

    def task_ids(self, ids: list[str]) -> list[str]:
        return ids

    def has_settled(self, ids: list[str]) -> bool:
        """A task that was lost says nothing: after some seconds of silence nothing more comes."""
        states = self.states(ids)
        if not states[SILENT]:
            return True
        time.sleep(5)
        return self.states(ids) == states

    def states(self, ids: list[str]) -> Counter[str]:
        from tests.stops.project import app

        names = {"SUCCESS": COMPLETED, "FAILURE": REPORTED, "REVOKED": REPORTED}
        return Counter(names.get(app.AsyncResult(job).state, SILENT) for job in ids)


class DbosStops(System):
    """DBOS Transact: a workflow with one step in a queue; ``program``: a Python that has it."""

    stops = ("kill worker", "term worker", "cut commit")
    program = "python"

    def start_worker(self, stop: str = "") -> Proc:
        return self.start(self._argv("worker"))

    def create(self, ids: list[str], stop: str) -> None:
        self._ask("enqueue", *ids)

    def has_settled(self, ids: list[str]) -> bool:
        return not self.states(ids)[SILENT]

    def states(self, ids: list[str]) -> Counter[str]:
        names = {"SUCCESS": COMPLETED, "ERROR": REPORTED}
        return Counter(names.get(state, SILENT) for state in json.loads(self._ask("states", *ids)).values())

    def _term_worker(self, worker: Proc, ids: list[str]) -> None:
        worker.terminate()

    def _argv(self, *command: str) -> list[str]:
        return [self.program, str(Path(__file__).with_name("dbos_project.py")), *command]

    def _ask(self, *command: str) -> str:
        environment = {**os.environ, **self.environment, "STOPS_DATABASE": self.environment["STOPS_DIRECT"]}
        argv = self._argv(*command)
        done = subprocess.run(argv, env=environment, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return done.stdout.strip().rpartition("\n")[2]


SYSTEMS: dict[str, Callable[..., System]] = {"durable": DurableStops, "celery": CeleryStops, "dbos": DbosStops}
