"""Facts in, one diagnosis out: every code, its whole sentence, and what to type."""

from __future__ import annotations

from dataclasses import replace

from celery_durable.insight.explain import Code, Diagnosis
from celery_durable.insight.explain.codes import find_python_call
from celery_durable.model import Child, Status
from tests.insight.explain.builders import ASLEEP, CHILD, DURABLE, WAIT, dispatcher, instance, run, task, told, worker
from tests.insight.explain.cases_due import DUE
from tests.insight.explain.cases_runs import RUNS
from tests.insight.explain.cases_waits import WAITS

CASES = RUNS | WAITS | DUE


def test_a_person_understands() -> None:
    said = {name: (found.code, found.sentence, list(found.actions)) for name, (found, *_) in CASES.items()}
    assert said == {name: tuple(wanted) for name, (_, *wanted) in CASES.items()}


def test_every_code_has_its_sentence() -> None:
    assert {code for _, code, *_ in CASES.values()} == set(Code)


def test_ids_and_types_are_quoted_for_the_shell() -> None:
    wait = replace(WAIT, wait_event_type="it's")
    found = told(replace(ASLEEP, workflow="my order", instance_id="$(x)"), open_steps=(wait,))
    assert found.actions == (f"{DURABLE} send-event 'my order' '$(x)' 'it'\"'\"'s' --payload @payload.json",)


def test_in_python_it_suggests_python_calls() -> None:
    wait = replace(WAIT, wait_event_type="it's")
    row = replace(ASLEEP, workflow="order", instance_id="o-1")
    assert str(told(row, open_steps=(wait,))).splitlines()[1:] == [
        """  durable.workflows['order'].get('o-1').send_event("it's", {...})"""
    ]
    failed = instance(Status.ERRORED, workflow="order", instance_id="o-1")
    handle = "durable.workflows['order'].get('o-1')"
    assert str(told(failed, of=run(error_name="Big"))).splitlines()[1:] == [
        f"  {handle}.history()",
        f"  {handle}.retry()",
        f"  {handle}.restart()",
    ]


def test_a_command_without_a_python_call_stays_a_command() -> None:
    for command in ("celery -A <your app> beat", f"{DURABLE} doctor", f"{DURABLE} wake order o-1"):
        assert find_python_call(command) is None
    assert str(Diagnosis(Code.DUE, "It is due.", {}, ("celery -A <your app> beat",))) == (
        "It is due.\n  celery -A <your app> beat"
    )


def test_a_long_message_is_cut() -> None:
    found = told(instance(Status.ERRORED), of=run(error_name="Big", error_message="x" * 5000))
    assert found.sentence == f"It failed with Big: {'x' * 297}."


def test_the_facts_are_ready_for_json() -> None:
    assert told(ASLEEP, open_steps=(WAIT,), buffered=("paid",), heartbeats=(worker(), dispatcher())).facts == {
        "now": "2030-01-01T00:00:00.000Z",
        "workflow": "order",
        "instance_id": "o-1",
        "run_number": 1,
        "status": "waiting",
        "queue": "durable",
        "run_at": "2030-01-01T01:00:00.000Z",
        "next_check_at": "2030-01-01T01:00:00.000Z",
        "dispatch_count": 0,
        "sent_at": None,
        "crash_count": 0,
        "pause_requested": False,
        "cancel_requested_at": None,
        "task_id": None,
        "claimed_by": None,
        "lease_until": None,
        "running": None,
        "last_step": None,
        "last_sweep": "2030-01-01T00:00:00.000Z",
        "workers": ["celery@a"],
        "step": "await approval",
        "due_at": "2030-01-01T01:30:00.000Z",
        "event_type": "approval",
        "buffered": ["paid"],
    }


def test_the_facts_of_tasks_and_of_a_child_are_ready_for_json() -> None:
    found = told(ASLEEP, open_steps=(task(), task("page 2", "id-2")), answered=1, unsent=frozenset({"id-2"})).facts
    names = ("step", "due_at", "task", "task_id", "tasks_out", "tasks_answered", "tasks_unsent")
    assert [found[name] for name in names] == ["thumb", "2030-01-01T01:00:00.000Z", "media.resize", "id-1", 2, 1, 1]
    found = told(ASLEEP, open_steps=(CHILD,), children={Child("billing", "b 1"): Status.ACTIVE}).facts
    assert found["child"] == {"workflow": "billing", "instance_id": "b 1", "status": "active"}
