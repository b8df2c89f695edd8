"""Labels in a harness and in scenarios."""

from __future__ import annotations

from celery_durable import CreateOptions, Step, WorkflowEvent
from celery_durable.testing import DurableHarness
from celery_durable.testing.scenario import (
    assert_,
    create,
    define_scenario,
    initialize_and_run_until_idle,
    run_scenario,
    run_until_idle,
)


def pack(event: WorkflowEvent, step: Step):
    step.do("pack", lambda tx: tx.set_labels({"stage": "packed", "hold": None}))


def test_a_harness_creates_with_labels_and_shows_what_steps_made_of_them() -> None:
    with DurableHarness([pack]) as harness:
        handle = harness.create(pack, id="p-1", labels={"tenant": "acme", "hold": "customs"})
        assert handle.labels == {"hold": "customs", "tenant": "acme"}
        harness.run_until_idle()
        assert handle.labels == {"stage": "packed", "tenant": "acme"}
        packs = harness.workflow("pack")
        packs.create_batch([CreateOptions("p-2", labels={"tenant": "acme"}), CreateOptions("p-3")])
        assert [item.id for item in packs.list(labels={"tenant": "acme"}).items] == ["p-2", "p-1"]


def test_a_scenario_creates_with_labels() -> None:
    run_scenario(
        define_scenario(
            "labels",
            workflows=[pack],
            steps=[
                create(pack, labels={"tenant": "acme"}),
                run_until_idle(),
                assert_(lambda ctx: ctx.instance().labels == {"stage": "packed", "tenant": "acme"}),
                initialize_and_run_until_idle(pack, labels=lambda _: {"hold": "customs"}),
                assert_(lambda ctx: ctx.instance().labels == {"stage": "packed"}),
            ],
        )
    )
