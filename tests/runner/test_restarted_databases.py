"""A database that restarts under a step costs time, and no attempt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import sessionmaker

from celery_durable import Durable, Step, StepConfig, StepTx, WorkflowEvent
from tests.smoke.proc import PostgresqlCluster

RESTARTS = 5
OUTAGE_SECONDS = 3.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresqlCluster]:
    cluster = PostgresqlCluster()
    yield cluster
    cluster.clean_up()


class Restarts:
    """Stops the server, and starts it again meanwhile."""

    def __init__(self, cluster: PostgresqlCluster) -> None:
        self._cluster = cluster
        self._starts: list[threading.Timer] = []

    def begin(self, *, seconds: float = 0.0) -> None:
        self.wait()
        self._cluster.stop()
        self._starts.append(threading.Timer(seconds, self._cluster.start))
        self._starts[-1].start()

    def wait(self) -> None:
        for start in self._starts:
            start.join()


@pytest.fixture
def restarts(cluster: PostgresqlCluster) -> Iterator[Restarts]:
    restarts = Restarts(cluster)
    yield restarts
    restarts.wait()


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["own sessions", "the application's sessions"]
)
def durable(cluster: PostgresqlCluster, restarts: Restarts, request: pytest.FixtureRequest) -> Iterator[Durable]:
    app = Celery("restarted", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = cluster.url
    engine = sa.create_engine(cluster.url)
    durable = Durable(app, session_factory=sessionmaker(engine) if request.param else None)
    durable.migrate()
    yield durable
    restarts.wait()
    durable.close()
    engine.dispose()


def write(tx: StepTx) -> None:
    tx.session.execute(sa.text("SELECT pg_advisory_xact_lock(1)"))


@pytest.mark.parametrize(
    "where",
    [
        "at the commit",
        pytest.param("in the body", marks=pytest.mark.slow),
        pytest.param("between", marks=pytest.mark.slow),
    ],
)
def test_restarts_that_cut_a_steps_transaction_count_no_attempt(
    durable: Durable, restarts: Restarts, where: str
) -> None:
    attempts: list[int] = []

    def book(tx: StepTx) -> str:
        attempts.append(tx.attempt)
        if where != "between":
            write(tx)
        if len(attempts) <= RESTARTS:
            restarts.begin()
        if where != "at the commit":
            write(tx)
        return "booked"

    @durable.workflow(name=f"{where}-{id(durable)}".replace(" ", "-"))
    def order(event: WorkflowEvent[None], step: Step) -> str:
        return step.do("book", StepConfig(retries=0), book)

    handle = order.create()
    durable.tick()
    assert (handle.status().status, handle.status().output) == ("complete", "booked")
    assert attempts == [1] * (RESTARTS + 1)
    assert [step.attempts for step in handle.history().steps] == [1]


@pytest.mark.parametrize("durable", [False], indirect=True)
@pytest.mark.parametrize("writes", ["with mutate", pytest.param("nothing", marks=pytest.mark.slow)])
def test_a_step_is_recorded_after_a_restart_that_takes_seconds(
    durable: Durable, restarts: Restarts, writes: str
) -> None:
    ran: list[int] = []

    def charge(tx: StepTx) -> str:
        ran.append(tx.attempt)
        if writes == "with mutate":
            tx.mutate(lambda session: session.execute(sa.text("SELECT 1")))
        restarts.begin(seconds=OUTAGE_SECONDS)
        return "charged"

    @durable.workflow(name=writes.replace(" ", "-"))
    def order(event: WorkflowEvent[None], step: Step) -> str:
        return step.do("charge", StepConfig(retries=0), charge)

    handle = order.create()
    durable.tick()
    assert (handle.status().status, handle.status().output) == ("complete", "charged")
    assert ran == [1]
