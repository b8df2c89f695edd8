"""Emissions from a step, and to very many waits."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from tests.support.flows import flow_of
from tests.support.topics import left
from tests.support.world import World

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)


# --- from a step ------------------------------------------------------------------------------


@everywhere
def test_a_step_emits_when_it_commits(world: World, watch) -> None:
    watched = watch.run(id="w-1")

    def tell(tx: StepTx) -> str:
        tx.emit("prices/eur.usd", {"attempt": tx.attempt})
        if tx.attempt == 1:
            raise ConnectionError("not yet")
        return "told"

    notify = flow_of(
        world, lambda step: step.do("tell", StepConfig(retries=Retries(limit=1, delay=1)), tell), name="notify"
    )
    telling = notify.run(id="t-1")
    assert (watched.status, left(world)) == ("waiting", 1)  # an attempt that failed has emitted nothing
    world.run_after(1)
    assert telling.output == "told"
    world.run_until_idle()
    assert (watched.output[1], left(world)) == ({"attempt": 2}, 0)


def test_what_a_step_emits_is_checked(world: World) -> None:
    @world.workflow
    def notify(event: WorkflowEvent, step: Step):
        step.do("tell", StepConfig(retries=0), lambda tx: tx.emit("no spaces"))

    assert notify.run().error.startswith("InvalidTopic: Topic 'no spaces' is not allowed")


# --- many ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_emission_resumes_ten_thousand_exactly_once(world: World, watch) -> None:
    t, many = world.store.tables, 10_000
    watch.run(id="w-0")
    with world.store.engine.begin() as connection:  # the first, copied: to run them all would say no more
        for table, key in (
            (t.instance, "id"),
            (t.run, "instance_pk"),
            (t.step, "instance_pk"),
            (t.topic_wait, "instance_pk"),
        ):
            [one] = connection.execute(sa.select(table)).mappings()
            copies = [{**one, key: one[key] + n} for n in range(1, many)]
            if table is t.instance:
                copies = [{**copy, "instance_id": f"w-{n}"} for n, copy in enumerate(copies, 1)]
            connection.execute(sa.insert(table), copies)
    assert world.operations.topics.emit("prices/eur.usd", 1) == many
    assert len({due.ref.instance_id for due in world.messages}) == len(world.messages) == many
    assert (world.operations.topics.emit("prices/eur.usd", 2), left(world)) == (0, 0)
    [(events, served)] = world.rows(
        sa.select(sa.func.count(), sa.func.count(sa.distinct(t.event.c.instance_pk))).select_from(t.event)
    )
    assert (events, served) == (many, many)
    due = sa.select(sa.func.count()).where(t.instance.c.status == "active", t.instance.c.run_at <= world.now_us)
    assert world.rows(due)[0][0] == many
    for message in world.messages[:: many // 10]:
        assert world.worker.advance(message.ref) == "complete"
