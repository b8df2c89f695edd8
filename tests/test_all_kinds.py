"""A kind of step from outside the package, through the doors of the package: nothing in it knows a `barrier`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from starlette.testclient import TestClient

from celery_durable import Durable, Step, WorkflowEvent, durable_workflow
from celery_durable.all_kinds import KINDS
from celery_durable.cli import durable as durable_command
from celery_durable.http import asgi
from celery_durable.insight.explain import Code
from celery_durable.model import StepStatus
from celery_durable.testing import DurableHarness, assert_replays
from tests.support.barrier import BarrierKind, barrier
from tests.support.databases import on_databases

database = on_databases("sqlite", "postgresql")


@pytest.fixture
def kind() -> Iterator[BarrierKind]:
    """Register the kind, as its package would."""
    kind = BarrierKind()
    KINDS.append(kind)
    yield kind
    KINDS.remove(kind)


@durable_workflow(name="all-kinds-lorry")
def lorry(event: WorkflowEvent[str], step: Step) -> list[Any]:
    loaded = step.do("load", lambda: f"{event.payload} is loaded")
    return [loaded, barrier(step, "all loaded", 2), step.do("leave", lambda: "gone")]


def test_its_steps_wait_wake_other_runs_and_replay(store_url: str, kind: BarrierKind) -> None:
    with DurableHarness([lorry], store_url=store_url, wipe=True) as harness:
        first = harness.create(lorry, "north", id="north")
        harness.run_until_idle()
        assert first.statuses() == {"load": "completed", "all loaded": "waiting"}
        diagnosis = first.explain()
        assert (diagnosis.code, diagnosis.sentence) == (
            Code.WAITING_STEP,
            'Waits at step "all loaded", of kind "barrier"; times out in 1 h.',
        )
        assert_replays(lorry, first.history())
        second = harness.create(lorry, "south", id="south")
        harness.run_until_idle()
        assert [first.result(), second.result()] == [["north is loaded", 2, "gone"], ["south is loaded", 2, "gone"]]
        assert [step.type for step in first.steps()] == ["do", "barrier", "do"]
        assert_replays(lorry, second.history())
    assert [status for _, status in kind.prepared] == [StepStatus.WAITING] * 2 + [StepStatus.COMPLETED] * 2


@pytest.fixture
def durable(store_url: str, kind: BarrierKind) -> Iterator[Durable]:
    app = Celery("lorries", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)
    yield durable
    durable.close()
    app.close()


def call(durable: Durable, *words: str) -> list[list[str]]:
    """Call a command; return the records that it prints into a pipe."""
    context = CLIContext(app=durable.app, no_color=True, workdir=None)
    done = CliRunner().invoke(durable_command, words, obj=context, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_commands_and_the_api_show_its_steps(durable: Durable) -> None:
    @durable.workflow(name="lorry")
    def waiting(event: WorkflowEvent[str], step: Step) -> int:
        return barrier(step, "all loaded", 2)

    north = waiting.create("north", id="north")
    durable.tick()
    shown = call(durable, "show", "lorry", "north")
    assert [record[:4] for record in shown[1:2]] == [["step", "all loaded", "barrier", "waiting"]]
    assert shown[1][6].startswith("barrier, times out at ")
    assert call(durable, "explain", "lorry", "north")[0][0] == "WAITING_STEP"
    assert call(durable, "ls")[0][6].startswith("all loaded: barrier, times out at ")
    assert call(durable, "history", "lorry", "north")[1][1:4] == ["step", "waiting", "all loaded"]
    assert call(durable, "replay", "lorry", "north")[1] == ["end", "The record is open at step 'all loaded'."]
    assert call(durable, "preflight") == [["workflow", "lorry", "1", "0", "0"]]
    read = TestClient(asgi(durable, allow_anonymous=True)).get("/workflows/lorry/instances/north").json()
    assert (read["meta"]["currentStep"]["type"], read["meta"]["currentStep"]["name"]) == ("barrier", "all loaded")
    north.pause()
    assert north.explain().sentence.endswith('Unfinished: step "all loaded" waits for barrier.')


def test_its_steps_are_completed_by_hand_and_run_again(durable: Durable) -> None:
    @durable.workflow(name="lorry")
    def waiting(event: WorkflowEvent[str], step: Step) -> int:
        return barrier(step, "all loaded", 2)

    north = waiting.create("north", id="north")
    durable.tick()
    assert call(durable, "set-result", "lorry", "north", "all loaded", "7")[0][0] == "Completed"
    durable.tick()
    assert north.result(timeout=1) == 7
    south = north.fork("all loaded", id="south")
    for _ in range(2):  # it arrives as the second one, and continues
        durable.tick()
    assert south.result(timeout=1) == 2


def test_a_process_without_the_kind_names_the_call(store_url: str) -> None:
    with DurableHarness([lorry], store_url=store_url, wipe=True) as harness:
        north = harness.create(lorry, "north", id="north")
        harness.run_until_idle()
        assert north.error is not None
        assert north.error.message == (
            "This process knows no kind of step for BarrierCall(name='all loaded', parties=2): register it with its "
            "package."
        )
