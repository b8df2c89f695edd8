"""The application under test: workflows whose bodies leave traces, and a runtime that dies where a file tells it to.

Traces: `author_ledger`, written by tx.session and without a unique key, so that a step done twice shows;
`bodies`, written over a connection of its own, so that a body that ran shows even if nothing of it was kept.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery, signature
from celery.exceptions import SoftTimeLimitExceeded

from celery_durable import Durable, Limit, Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent, current_step
from tests.smoke.config import Config
from tests.smoke.dying import Treacherous

_metadata = sa.MetaData()


def _table(name: str, *more: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        _metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("instance", sa.String(100), nullable=False),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("step", sa.String(256), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        *more,
    )


ledger = _table("author_ledger")
bodies = _table("author_bodies", sa.Column("pid", sa.Integer, nullable=False))
HELD_SECONDS = 60.0


def build(config: Config) -> Celery:
    """The application, for a worker, a beat, or the test itself."""
    app = Celery("smoke", broker=config.broker_url, set_as_current=False)
    name = config.name
    transport: dict[str, Any] = {"global_keyprefix": f"{name}:"} if config.broker_url.startswith("redis") else {}
    app.conf.update(
        {
            "task_default_queue": f"celery-{name}",
            "broker_transport_options": transport,
            "broker_connection_retry_on_startup": True,
            "broker_connection_retry": True,
            "broker_connection_max_retries": None,
            "control_exchange": f"control-{name}",
            "event_exchange": f"events-{name}",
            "event_queue_prefix": f"events-{name}",
            "worker_enable_remote_control": False,
            "worker_prefetch_multiplier": 1,
            "durable_database_url": config.database_url,
            "durable_queue": f"durable-{name}",
            "durable_poll_seconds": 0.05,
            "durable_grace_seconds": 0.5,
            "durable_redispatch_seconds": 1.0,
            **copy.deepcopy(config.settings),  # Durable adds to a schedule of beat
        }
    )
    durable = Durable(app, runtime=Treacherous(config))
    traces = Traces(config)
    app.task(name="media.double", shared=False)(_double)
    app.task(name="media.fail", shared=False)(_fail)
    app.task(name="media.die", shared=False)(_die)

    @app.task(name="media.hold", shared=False)
    def hold(number: int) -> int:
        config.path("held").touch()
        wait_for(config.path("go"))
        return number

    @app.task(name="media.mark", shared=False)
    def mark(number: int) -> None:
        config.path(f"mark-{number}").touch()

    @app.task(name="media.note", bind=True, shared=False)
    def note(self: Any, number: int, seconds: float = 0.0) -> int:
        return traces.note(self.request.id, number, seconds)

    @app.task(name="media.note_late", bind=True, shared=False, acks_late=True)
    def note_late(self: Any, number: int, seconds: float = 0.0) -> int:
        return traces.note(self.request.id, number, seconds)

    for flow in (lifecycle, chain, once, long, nap, sprint, slow, notes, errands, leave, refuse, metered, crowd, paced):
        durable.workflow(name=flow.__name__)(_with(flow, traces))
    traces.errand = durable.workflow(name=errand.__name__)(_with(errand, traces))
    _delegate(app, durable)
    durable.workflow(name="elsewhere", queue=f"elsewhere-{name}")(_with(nap, traces))
    return app


def _delegate(app: Celery, durable: Durable) -> None:
    """A workflow whose steps others do: a Celery task on a queue of its own, and an instance of `chain`."""

    @app.task(name="double", shared=False)
    def double(number: int) -> int:
        return 2 * number

    @durable.workflow(name="delegate")
    def delegate(event: WorkflowEvent[Any], step: Step) -> Any:
        doubled = step.task("double", double.s(7).set(queue=event.payload))
        return [doubled, step.child("chain", durable.workflows["chain"], {"steps": 1, "hold": 0}, id="c-1")]

    @durable.workflow(name="family")
    def family(event: WorkflowEvent[int], step: Step) -> Any:
        """Each generation waits for the next; the last one rests."""
        if not event.payload:
            return step.sleep("rest", "1 hour")
        child_id = f"{event.instance_id}-{event.payload - 1}"
        return step.child("child", durable.workflows["family"], event.payload - 1, id=child_id)


def _with(flow: Any, traces: Traces) -> Any:
    def bound(event: WorkflowEvent[Any], step: Step) -> Any:
        return flow(event, step, traces)

    return bound


# --- workflows ----------------------------------------------------------------------------------


def lifecycle(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """Everything once: steps, a retry, a sleep, an event, branches."""
    here = (event.instance_id, event.run_number)
    first = step.do("book first", traces.book, *here, event.payload)
    flaky = step.do("book flaky", StepConfig(retries=Retries(limit=3, delay=0.1)), traces.flaky, *here)
    step.sleep("nap", 0.2)
    answer = step.wait_for_event("wait", "answer", timeout="2 minutes").payload
    branches = [step.submit(f"book branch {n}", traces.book, *here, n) for n in range(3)]
    branches.append(step.submit_sleep("branch nap", 0.1))  # type: ignore[arg-type]
    step.log.info("almost there")
    return {"first": first, "flaky": flaky, "answer": answer, "branches": step.gather(*branches)}


def chain(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """``steps`` steps in a row, every second one with tx.session; the body of ``hold`` waits to be let go."""
    here = (event.instance_id, event.run_number)
    given = event.payload
    config = StepConfig(on_lost=given.get("on_lost", "resend"))
    done = []
    for number in range(given["steps"]):
        is_held = given.get("hold") == number
        if number % 2 == 0:
            done.append(step.do(f"book {number}", config, traces.book, *here, number, is_held=is_held))
        else:
            done.append(step.do(f"plain {number}", config, traces.plain, *here, number, is_held=is_held))
    return done


def once(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """A step that may not be called again once its end is unknown, alone or beside another branch.

    Its first attempt raises, and the second one waits to be let go.
    """
    config = StepConfig(on_lost="fail", retries=Retries(limit=5, delay=0))
    given = (config, traces.pay, event.instance_id, event.run_number)
    if event.payload == "alone":
        return step.do("pay", *given)
    return step.gather(step.submit("pay", *given), step.submit("other", lambda: 2))[0]


def long(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """A step of a minute, which polls, is interrupted or is async; a cleanup, which asks too."""
    here = (event.instance_id, event.run_number)
    work: Any = {"polls": traces.poll, "is interrupted": traces.work, "is async": traces.work_async}[event.payload]
    config = StepConfig() if event.payload == "polls" else _ABANDONED
    try:
        return step.do("work", config, work, *here)
    finally:
        step.do("clean up", traces.clean_up, *here)


_ABANDONED = StepConfig(on_cancel="abandon", timeout=None)


def nap(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """Something only a dispatcher brings to its end."""
    step.sleep("nap", event.payload or 0.2)
    return step.do("book", traces.book, event.instance_id, event.run_number, "rested")


def sprint(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """For crowds: a step, a sleep, a step."""
    here = (event.instance_id, event.run_number)
    first = step.do("book 0", traces.book, *here, 0)
    step.sleep("nap", 0.1)
    return [first, step.do("plain 1", traces.plain, *here, 1)]


def slow(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """Code of ``code`` seconds between two steps, of which the second has a transaction open for ``write`` seconds."""
    here, given = (event.instance_id, event.run_number), event.payload
    first = step.do("plain first", traces.plain, *here, 1)
    time.sleep(given["code"])
    return [first, step.do("book slowly", traces.book_slowly, *here, given["write"])]


def leave(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """A step, a branch or the function itself that leaves by the exception that ``way`` names."""
    way, where = event.payload["way"], event.payload["where"]
    if where == "function":
        _leave(way)
    given = (StepConfig(retries=Retries(limit=1, delay=0.1)), traces.leave, event.instance_id, event.run_number, way)
    if where == "body":
        return step.do("leave", *given)
    return step.gather(step.submit("leave", *given), step.submit_sleep("nap", 0))


def refuse(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """A run that fails."""
    raise LookupError("no such order")


calls = Limit("calls", at_once=1)


def metered(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """Calls a server that counts its callers, under a limit."""
    return step.do("call", StepConfig(limits=[calls]), _call_server, event.payload, event.instance_id)


def crowd(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    return step.do(
        "call", StepConfig(limits=[Limit("crowd", at_once=3)]), _call_server, event.payload, event.instance_id
    )


def paced(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    config = StepConfig(limits=[Limit("paced", rate="90 per second")])
    return step.do("call", config, _call_server, event.payload, event.instance_id)


def _call_server(port: int, name: str) -> str:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{name} {os.getpid()}\n".encode())
        return connection.recv(100).decode()


def _leave(way: str) -> None:
    match way:
        case "exit":
            sys.exit(2)
        case "cancelled":
            asyncio.run(_cancelled())
        case "ctrl-c":
            raise KeyboardInterrupt
        case "generator":
            raise GeneratorExit
        case _:
            raise SoftTimeLimitExceeded


async def _cancelled() -> None:
    raise asyncio.CancelledError


def errands(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """Celery tasks in turn, by name, each with its queue (None: the application's own), and two children."""
    got = {}
    for name, queue in event.payload["tasks"].items():
        try:
            task = (
                signature(f"media.{name}", args=(21,)).set(queue=queue) if queue else signature(f"media.{name}", (21,))
            )
            got[name] = step.task(name, task, timeout="60 seconds")
        except StepFailed as exc:
            got[name] = [exc.error_name, exc.error_message]
    got["many"] = step.map("many", "media.double", range(12), max_concurrency=4, timeout="60 seconds")
    kids = [step.submit_child(f"kid {n}", traces.errand, n, id=f"{event.instance_id}-{n}") for n in range(2)]
    return got, step.gather(*kids)


def errand(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """The child: it rests, and books."""
    step.sleep("nap", 0.2)
    return step.do("book", traces.book, event.instance_id, event.run_number, event.payload)


def notes(event: WorkflowEvent[Any], step: Step, traces: Traces) -> Any:
    """A map of tasks that leave a trace of each of their bodies."""
    given = event.payload
    task = signature(given["task"], kwargs={"seconds": given["seconds"]})
    options = {"timeout": "10 minutes"} | given.get("options", {})
    results = step.map("notes", task, range(given["count"]), return_exceptions=True, **options)
    return [each.error_name if isinstance(each, StepFailed) else each for each in results]


def _double(number: int) -> int:
    return number * 2


def _fail(number: int) -> None:
    raise KeyError(number)


def _die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(*signs: Path) -> None:
    """Do nothing until one of these files is there."""
    end = time.monotonic() + HELD_SECONDS
    while not any(sign.exists() for sign in signs):
        assert time.monotonic() < end
        time.sleep(0.01)


class Traces:
    """The bodies of the steps."""

    errand: Any
    """The workflow whose instances are children."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: sa.Engine | None = None
        self._pid = 0

    def book(self, tx: StepTx, instance: str, run: int, value: Any, is_held: bool = False) -> Any:
        self._begin(tx, instance, run, is_held=is_held)
        tx.session.execute(sa.insert(ledger).values(instance=instance, run=run, step=tx.name, attempt=tx.attempt))
        return value

    def book_slowly(self, tx: StepTx, instance: str, run: int, seconds: float) -> float:
        self._begin(tx, instance, run, is_held=False)
        row = {"instance": instance, "run": run, "step": tx.name, "attempt": tx.attempt}

        def write(session: Any) -> None:
            session.execute(sa.insert(ledger).values(**row))
            time.sleep(seconds)

        tx.mutate(write)
        return seconds

    def plain(self, tx: StepTx, instance: str, run: int, value: Any, is_held: bool = False) -> Any:
        self._begin(tx, instance, run, is_held=is_held)
        return value

    def pay(self, tx: StepTx, instance: str, run: int) -> int:
        self._begin(tx, instance, run, is_held=tx.attempt > 1)
        if tx.attempt == 1:
            raise OSError("declined")
        return tx.attempt

    def poll(self, tx: StepTx, instance: str, run: int) -> None:
        self._begin(tx, instance, run, is_held=False)
        end = time.monotonic() + HELD_SECONDS
        while time.monotonic() < end:
            current_step().check()
            time.sleep(0.01)

    def work(self, tx: StepTx, instance: str, run: int) -> None:
        self._begin(tx, instance, run, is_held=False)
        time.sleep(HELD_SECONDS)

    async def work_async(self, tx: StepTx, instance: str, run: int) -> None:
        self._begin(tx, instance, run, is_held=False)
        await asyncio.sleep(HELD_SECONDS)

    def clean_up(self, tx: StepTx, instance: str, run: int) -> None:
        self._begin(tx, instance, run, is_held=False)
        current_step().check()

    def flaky(self, tx: StepTx, instance: str, run: int) -> str:
        self._begin(tx, instance, run, is_held=False)
        tx.session.execute(sa.insert(ledger).values(instance=instance, run=run, step=tx.name, attempt=tx.attempt))
        if tx.attempt < 3:
            raise OSError("not yet")
        return "at last"

    def leave(self, tx: StepTx, instance: str, run: int, way: str) -> None:
        self._begin(tx, instance, run, is_held=False)
        _leave(way)

    def note(self, id: str, number: int, seconds: float) -> int:
        """The body of a Celery task: ``instance`` is its id, ``run`` its number."""
        self._note({"instance": id, "run": number, "step": "note", "attempt": 1, "pid": os.getpid()})
        time.sleep(seconds)
        return number

    def _begin(self, tx: StepTx, instance: str, run: int, *, is_held: bool) -> None:
        self._note({"instance": instance, "run": run, "step": tx.name, "attempt": tx.attempt, "pid": os.getpid()})
        if is_held:
            wait_for(self._config.path("go"), self._config.path(f"go-{tx.attempt}"))

    def _note(self, row: dict[str, Any]) -> None:
        if self._pid != os.getpid():  # a pool child makes its own
            url = self._config.bodies_url
            self._engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
            self._pid = os.getpid()
        assert self._engine is not None
        end = time.monotonic() + HELD_SECONDS
        while True:
            try:
                with self._engine.connect() as connection:
                    connection.execute(sa.insert(bodies).values(row))
                return
            except sa.exc.OperationalError:  # the database is being restarted
                assert time.monotonic() < end
                time.sleep(0.1)


def create_tables(engine: sa.Engine) -> None:
    _metadata.create_all(engine)


def drop_tables(engine: sa.Engine) -> None:
    _metadata.drop_all(engine)
