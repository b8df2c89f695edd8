"""Facts in, one diagnosis out: every code, its whole sentence, and what to type."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.explain import Code, Diagnosis, Facts, explain
from celery_durable.model import (
    Child,
    ErrorInfo,
    Heartbeat,
    InstanceRow,
    Outage,
    RunRow,
    Status,
    StepRecord,
    StepStatus,
    StepType,
    WakeReason,
    WorkflowKind,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DURABLE = "celery -A <your app> durable"


def instance(status: Status = Status.ACTIVE, **given: Any) -> InstanceRow:
    row = InstanceRow(
        pk=1,
        workflow="order",
        instance_id="o-1",
        run_number=1,
        status=status,
        claim_token=None,
        claim_task_id=None,
        claimed_by=None,
        lease_until=None,
        run_at=NOW - MINUTE,
        next_check_at=NOW + MINUTE,
        wake_reason=WakeReason.START,
        priority=1,
        dispatch_count=0,
        crash_count=0,
        pause_requested=False,
        version=1,
        queue="durable",
        created_at=NOW - MINUTE,
        updated_at=NOW - MINUTE,
    )
    return replace(row, **given)


def run(**given: Any) -> RunRow:
    return replace(RunRow(1, "{}", None, None, None, None, NOW - MINUTE, NOW - MINUTE, None, 0), **given)


def step(name: str = "charge", type_: StepType = StepType.DO, **given: Any) -> StepRecord:
    base = StepRecord(
        name, name, type_, StepStatus.WAITING, 0, None, None, None, None, None, None, None, NOW, None, None
    )
    return replace(base, **given)


def worker(**given: Any) -> Heartbeat:
    beat = Heartbeat("w", "worker", "celery@a", 7, ("durable",), ("order",), NOW - MINUTE, NOW, None, None)
    return replace(beat, **given)


def dispatcher(**given: Any) -> Heartbeat:
    return replace(Heartbeat("d", "dispatcher", "beat@a", 8, (), (), NOW - MINUTE, NOW, NOW, None), **given)


REFUSED = Outage(
    "queue", "durable", NOW - 2 * MINUTE, "PreconditionFailed: (406) inequivalent arg 'x-max-priority'.", 7
)
BROKER_AWAY = Outage("broker", "redis://:**@mq:6379/0", NOW - MINUTE, "ConnectionError: refused", 60)


def told(row: InstanceRow, *, of: RunRow | None = None, **given: Any) -> Diagnosis:
    return explain(Facts(NOW, row, of or run(), **given))


RUNNING = {
    "claim_token": "t",
    "claim_task_id": "task-1",
    "claimed_by": "celery@a",
    "lease_until": NOW + timedelta(seconds=20),
}
ASLEEP = instance(Status.WAITING, run_at=NOW + 60 * MINUTE, next_check_at=NOW + 60 * MINUTE)
NAP = step("nap", StepType.SLEEP, wake_at=NOW + 60 * MINUTE)
WAIT = step("await approval", StepType.WAIT, wake_at=NOW + 90 * MINUTE, wait_event_type="approval")
RETRY = step(
    attempts=2, max_attempts=6, next_retry_at=NOW + MINUTE, error=ErrorInfo("ConnectionError", "the gateway is away.")
)


def task(name: str = "thumb", id_: str = "id-1", *, sent: timedelta = timedelta(0), **given: Any) -> StepRecord:
    """A step that has waited since ``sent`` ago for a Celery task, which has an hour."""
    times = {"timeout": 60 * MINUTE, "created_at": NOW - sent, "wake_at": NOW - sent + 60 * MINUTE}
    return step(name, StepType.TASK, **{**times, "attempts": 1, "task": "media.resize", "task_id": id_, **given})


CHILD = step("bill", StepType.CHILD, wake_at=NOW + 90 * MINUTE, child=Child("billing", "b 1"))
INSPECT = "celery -A <your app> inspect query_task id-1"
OUTBOX = [f"{DURABLE} outbox", f"{DURABLE} doctor"]
SEND = f"{DURABLE} send-event order o-1 approval --payload '{{...}}'"
OVERDUE = instance(next_check_at=NOW - timedelta(seconds=30))
BEAT, WORKER = "celery -A <your app> beat", "celery -A <your app> worker -Q durable"


@pytest.mark.parametrize(
    ("found", "code", "sentence", "actions"),
    [
        pytest.param(
            told(instance(Status.COMPLETE), of=run(completed_at=NOW - 120 * MINUTE)),
            Code.DONE,
            "It completed 2 h ago.",
            [],
            id="done",
        ),
        pytest.param(
            told(instance(Status.TERMINATED), of=run(reason="sold twice")),
            Code.TERMINATED,
            "It was terminated: sold twice.",
            [f"{DURABLE} restart order o-1"],
            id="terminated",
        ),
        pytest.param(
            told(
                instance(Status.ERRORED),
                of=run(error_name="CardDeclined", error_message="no money", completed_at=NOW - MINUTE),
                last_step=step(status=StepStatus.ERRORED, attempts=6, error=ErrorInfo("CardDeclined", "no money")),
            ),
            Code.FAILED,
            'It failed 1 min ago with CardDeclined: no money (step "charge", 6 attempts).',
            [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
            id="failed",
        ),
        pytest.param(
            told(
                instance(Status.ERRORED, kind=WorkflowKind.LINEAR),
                of=run(error_name="CardDeclined", error_message="no"),
            ),
            Code.FAILED,
            "It failed with CardDeclined: no.",
            [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
            id="failed, linear",
        ),
        pytest.param(
            told(instance(Status.ERRORED), of=run(error_name="StepLimitExceeded", error_message="too many steps.")),
            Code.STEP_LIMIT,
            "It failed with StepLimitExceeded: too many steps.",
            [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
            id="step limit",
        ),
        pytest.param(
            told(instance(Status.ERRORED), of=run(error_name="StepTypeMismatch", error_message="another kind")),
            Code.NONDETERMINISTIC,
            "It failed with StepTypeMismatch: another kind. The workflow's code does not match the recorded steps.",
            [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
            id="nondeterministic",
        ),
        pytest.param(
            told(instance(Status.PAUSED), open_steps=(NAP,)),
            Code.PAUSED,
            'It has been paused for 1 min; its timers keep running. Unfinished: step "nap" sleeps.',
            [f"{DURABLE} resume order o-1"],
            id="paused",
        ),
        pytest.param(
            told(instance(**RUNNING, pause_requested=True)),
            Code.PAUSED,
            "A pause is requested; it takes effect when the running step ends, on the worker celery@a, which has "
            "held it for 1 min.",
            [f"{DURABLE} resume order o-1"],
            id="pause requested",
        ),
        pytest.param(
            told(instance(**RUNNING), last_step=step("count"), heartbeats=(worker(),)),
            Code.RUNNING,
            'It runs the code after step "count", on the worker celery@a, which has held it for 1 min; the lease is '
            "valid for 20 s.",
            [f"{DURABLE} logs order o-1 --follow"],
            id="running",
        ),
        pytest.param(
            told(
                instance(**RUNNING, crash_count=2),
                open_steps=(step("a", status=StepStatus.PENDING), step("b", status=StepStatus.PENDING)),
                heartbeats=(worker(seen_at=NOW - MINUTE),),
            ),
            Code.RUNNING,
            'It runs steps "a", "b", on the worker celery@a, which has held it for 1 min; the lease is valid for 20 '
            "s. Before that, 2 workers in a row died or lost their lease, without finishing a step. That worker was "
            "last seen 1 min ago; if it is dead, another worker takes over when the lease ends.",
            [f"{DURABLE} logs order o-1 --follow"],
            id="running on a worker that is silent",
        ),
        pytest.param(
            told(instance(**{**RUNNING, "lease_until": NOW - MINUTE}), heartbeats=(dispatcher(),)),
            Code.LEASE_EXPIRED,
            "The worker celery@a stopped renewing its lease, which ended 1 min ago. A dispatcher will let another "
            "worker take over; a dispatcher that has just started first waits for the length of one lease.",
            [],
            id="lease expired",
        ),
        pytest.param(
            told(instance(**{**RUNNING, "lease_until": NOW - MINUTE})),
            Code.LEASE_EXPIRED,
            "The worker celery@a stopped renewing its lease, which ended 1 min ago. No dispatcher has been seen: is "
            "celery beat running?",
            [BEAT],
            id="lease expired, nobody looks",
        ),
        pytest.param(
            told(instance(run_at=NOW + timedelta(seconds=4), crash_count=3)),
            Code.CRASHING,
            "It is delayed after a crash and continues in 4.0 s: 3 workers in a row died or lost their lease, "
            "without finishing a step.",
            [f"{DURABLE} logs order o-1 --level warn"],
            id="crashing",
        ),
        pytest.param(
            told(ASLEEP, of=run(started_at=None)),
            Code.SCHEDULED,
            "It was created to start later, and starts in 1 h.",
            [],
            id="scheduled",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(NAP,)),
            Code.SLEEPING,
            'Sleeps at step "nap"; wakes in 1 h.',
            [],
            id="sleeping",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(WAIT, NAP, RETRY)),
            Code.RETRY_SCHEDULED,
            'Tries step "charge" again in 1 min; attempt 2/6 failed: ConnectionError: the gateway is away. Also: '
            'step "nap" sleeps; step "await approval" waits for event "approval".',
            [f"{DURABLE} logs order o-1 --level warn"],
            id="retry, besides others",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(WAIT,)),
            Code.WAITING_EVENT,
            'Waits for event "approval" at step "await approval"; times out in 1 h 30 min.',
            [SEND],
            id="event",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(NAP, WAIT), buffered=("Aproval", "paid")),
            Code.WAITING_EVENT,
            'Waits for event "approval" at step "await approval"; times out in 1 h 30 min. An event "Aproval" is '
            'buffered, but the wait is for "approval": a typing mistake? Also: step "nap" sleeps.',
            [SEND],
            id="event, nearly",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(WAIT,), buffered=("paid",)),
            Code.WAITING_EVENT,
            'Waits for event "approval" at step "await approval"; times out in 1 h 30 min. Buffered for later waits: '
            '"paid".',
            [SEND],
            id="event, others buffered",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(task(sent=10 * MINUTE),)),
            Code.WAITING_TASKS,
            'Waits for Celery task media.resize (id-1), under way for 10 min, at step "thumb"; times out in 50 min.',
            [INSPECT],
            id="task",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(task(sent=10 * MINUTE),), unsent=frozenset({"id-1"})),
            Code.WAITING_TASKS,
            'Waits for Celery task media.resize (id-1), under way for 10 min, at step "thumb"; times out in 50 min. '
            "It has not been sent yet: the broker does not accept it, or no dispatcher sends it.",
            OUTBOX,
            id="task that has not left",
        ),
        pytest.param(
            told(
                ASLEEP,
                open_steps=(
                    task("page 1", "id-2", sent=2 * MINUTE, wake_at=NOW + MINUTE, timeout=3 * MINUTE),
                    task("page 2", sent=10 * MINUTE),
                    task("page 3", "id-3"),
                ),
                answered=4,
            ),
            Code.WAITING_TASKS,
            "Waits for 3 Celery tasks, 4 of 7 have answered; the oldest is media.resize (id-1), under way for 10 min, "
            'at step "page 2"; the next times out in 1 min.',
            [INSPECT],
            id="tasks: the oldest, and whose time is over first",
        ),
        pytest.param(
            told(
                ASLEEP,
                open_steps=(task("page 1"), task("page 2", "id-2"), task("page 3", "id-3")),
                unsent=frozenset({"id-2", "id-3"}),
            ),
            Code.WAITING_TASKS,
            "Waits for 3 Celery tasks, 0 of 3 have answered; the oldest is media.resize (id-1), under way for 0 ms, "
            'at step "page 1"; the next times out in 1 h. 2 of them have not been sent yet: the broker does not '
            "accept them, or no dispatcher sends them.",
            OUTBOX,
            id="tasks, some of which have not left",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(WAIT, task(sent=MINUTE), CHILD)),
            Code.WAITING_TASKS,
            'Waits for Celery task media.resize (id-1), under way for 1 min, at step "thumb"; times out in 59 min. '
            'Also: step "await approval" waits for event "approval"; step "bill" waits for instance "b 1" of '
            'workflow "billing".',
            [INSPECT],
            id="task, besides others",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(WAIT, replace(NAP, wake_at=NOW + MINUTE), task(), task("page 2"))),
            Code.SLEEPING,
            'Sleeps at step "nap"; wakes in 1 min. Also: step "thumb" waits for Celery task media.resize; step '
            '"page 2" waits for Celery task media.resize; step "await approval" waits for event "approval".',
            [],
            id="tasks, besides what is due before",
        ),
        pytest.param(
            told(
                ASLEEP,
                open_steps=(
                    task(attempts=2, max_attempts=3, created_at=NOW - 600 * MINUTE, wake_at=NOW + 50 * MINUTE),
                ),
            ),
            Code.WAITING_TASKS,
            'Waits for Celery task media.resize (id-1), under way for 10 min, at step "thumb"; times out in 50 min.',
            [INSPECT],
            id="task that was sent again: since then",
        ),
        pytest.param(
            told(
                ASLEEP,
                open_steps=(
                    task(
                        attempts=1,
                        max_attempts=2,
                        wake_at=None,
                        next_retry_at=NOW + MINUTE,
                        task=None,
                        task_id=None,
                        error=ErrorInfo("OSError", "disk full"),
                    ),
                    task("page 2", "id-1"),
                ),
            ),
            Code.RETRY_SCHEDULED,
            'Tries step "thumb" again in 1 min; attempt 1/2 failed: OSError: disk full. Also: step "page 2" waits '
            "for Celery task media.resize.",
            [f"{DURABLE} logs order o-1 --level warn"],
            id="task that is to be sent again",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(CHILD,), children={Child("billing", "b 1"): Status.WAITING}),
            Code.WAITING_CHILD,
            'Waits for instance "b 1" of workflow "billing", which is waiting, at step "bill"; times out in '
            "1 h 30 min.",
            [f"{DURABLE} explain billing 'b 1'"],
            id="child that waits",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(NAP, CHILD), children={Child("billing", "b 1"): Status.ACTIVE}),
            Code.SLEEPING,
            'Sleeps at step "nap"; wakes in 1 h. Also: step "bill" waits for instance "b 1" of workflow "billing".',
            [],
            id="child, besides what is due before",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(CHILD, WAIT), children={Child("billing", "b 1"): Status.ACTIVE}),
            Code.WAITING_CHILD,
            'Waits for instance "b 1" of workflow "billing", which is active, at step "bill"; times out in 1 h 30 '
            'min. Also: step "await approval" waits for event "approval".',
            [f"{DURABLE} explain billing 'b 1'"],
            id="child that is active",
        ),
        pytest.param(
            told(ASLEEP, open_steps=(CHILD,)),
            Code.WAITING_CHILD,
            'Waits for instance "b 1" of workflow "billing", which no longer exists, at step "bill"; times out in 1 '
            "h 30 min.",
            [],
            id="child that is gone",
        ),
        pytest.param(
            told(instance(Status.PAUSED), open_steps=(task(), CHILD)),
            Code.PAUSED,
            'It has been paused for 1 min; its timers keep running. Unfinished: step "thumb" waits for Celery task '
            'media.resize; step "bill" waits for instance "b 1" of workflow "billing".',
            [f"{DURABLE} resume order o-1"],
            id="paused, with others at work",
        ),
        pytest.param(
            told(instance(run_at=NOW), heartbeats=(worker(), dispatcher())),
            Code.DUE,
            "It is due; a worker should claim it at any moment.",
            [],
            id="due",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(worker(),)),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, and no message for it has been sent. No dispatcher has been seen: is celery "
            "beat running?",
            [BEAT],
            id="nobody sweeps",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(dispatcher(seen_at=NOW - 4 * MINUTE, swept_at=NOW - 5 * MINUTE),)),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, and no message for it has been sent. No dispatcher has swept since "
            "2029-12-31T23:55:00.000Z: is celery beat running? Also, no worker consumes queue 'durable'.",
            [BEAT, WORKER],
            id="nobody sweeps any more",
        ),
        pytest.param(
            told(replace(OVERDUE, dispatch_count=1), heartbeats=(worker(),)),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, and its message was sent once. No dispatcher has been seen: is celery beat "
            "running?",
            [BEAT],
            id="sent, and nobody sends it again",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(worker(), dispatcher())),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, but the dispatcher sends no message for it: the broker does not answer, or "
            "queue 'durable' is longer than durable_queue_high_water.",
            [f"{DURABLE} doctor"],
            id="the dispatcher cannot send",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(BROKER_AWAY, REFUSED)))),
            Code.QUEUE_REFUSED,
            "It has been due for 1 min, but queue 'durable' has refused its messages since "
            "2029-12-31T23:58:00.000Z: PreconditionFailed: (406) inequivalent arg 'x-max-priority'. The queue "
            "exists with other arguments: delete it, or declare it in task_queues with these arguments.",
            [f"{DURABLE} doctor"],
            id="its queue refuses",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(replace(REFUSED, where="other"), BROKER_AWAY)))),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, but the broker redis://:**@mq:6379/0 has accepted no messages since "
            "2029-12-31T23:59:00.000Z: ConnectionError: refused. Check the broker's log for this error.",
            [f"{DURABLE} doctor"],
            id="the broker is away",
        ),
        pytest.param(
            told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(replace(BROKER_AWAY, what="database"),)))),
            Code.DUE_NOT_DISPATCHED,
            "It has been due for 1 min, but the dispatcher has not reached the database since "
            "2029-12-31T23:59:00.000Z: ConnectionError: refused.",
            [f"{DURABLE} doctor"],
            id="the database is away",
        ),
        pytest.param(
            told(
                instance(sent_at=NOW - MINUTE),
                heartbeats=(worker(), dispatcher(outages=(BROKER_AWAY, REFUSED))),
            ),
            Code.DISPATCHED_NOT_CLAIMED,
            "It has been due for 1 min and its message was sent once, but no worker has claimed it. 1 worker "
            "consumes queue 'durable': it is busy with other work, or uses another broker than the sender. The "
            "message is sent again when its queue shows that it was lost, at the latest in 1 min.",
            [f"{DURABLE} doctor"],
            id="sent before its queue began to refuse",
        ),
        pytest.param(
            told(instance(dispatch_count=3), heartbeats=(dispatcher(), worker(queues=("celery",)))),
            Code.DISPATCHED_NOT_CLAIMED,
            "It has been due for 1 min and its message was sent 3 times, but no worker consumes queue 'durable'. "
            "The message is sent again when its queue shows that it was lost, at the latest in 1 min.",
            [WORKER, f"{DURABLE} doctor"],
            id="no worker",
        ),
        pytest.param(
            told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker())),
            Code.DISPATCHED_NOT_CLAIMED,
            "It has been due for 1 min and its message was sent once, but no worker has claimed it. 1 worker "
            "consumes queue 'durable': it is busy with other work, or uses another broker than the sender. The "
            "message is sent again when its queue shows that it was lost, at the latest in 1 min.",
            [f"{DURABLE} doctor"],
            id="busy workers",
        ),
        pytest.param(
            told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(workflows=("orders", "nap")))),
            Code.NOT_REGISTERED,
            "It has been due for 1 min, but no worker of queue 'durable' knows workflow 'order' (celery@a). Import "
            "the module that defines it in the worker, or wait for the deploy to end. A similar name is known: "
            "'orders'.",
            ["celery -A <your app> inspect registered"],
            id="not registered",
        ),
        pytest.param(
            told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(pool="gevent"))),
            Code.POOL_UNSUPPORTED,
            "It has been due for 1 min, but queue 'durable' is consumed only by workers on pools that run no "
            "workflows (celery@a: gevent). Start a worker with -P prefork, threads or solo, or give the workflow a "
            "queue of its own.",
            [WORKER],
            id="pool that runs no workflows",
        ),
        pytest.param(
            told(
                instance(dispatch_count=1),
                heartbeats=(dispatcher(), worker(pool="gevent"), worker(pool="prefork", workflows=("nap",))),
            ),
            Code.NOT_REGISTERED,
            "It has been due for 1 min, but no worker of queue 'durable' knows workflow 'order' (celery@a). Import "
            "the module that defines it in the worker, or wait for the deploy to end.",
            ["celery -A <your app> inspect registered"],
            id="not registered beside another pool",
        ),
    ],
)
def test_a_person_understands(found: Diagnosis, code: Code, sentence: str, actions: list[str]) -> None:
    assert (found.code, found.sentence, list(found.actions)) == (code, sentence, actions)


def test_every_code_has_its_sentence() -> None:
    [cases] = test_a_person_understands.pytestmark
    assert {case.values[1] for case in cases.args[1]} == set(Code)


def test_ids_and_types_are_quoted_for_the_shell() -> None:
    wait = replace(WAIT, wait_event_type="it's")
    found = told(replace(ASLEEP, workflow="my order", instance_id="$(x)"), open_steps=(wait,))
    assert found.actions == (f"{DURABLE} send-event 'my order' '$(x)' 'it'\"'\"'s' --payload '{{...}}'",)


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
        "task_id": None,
        "claimed_by": None,
        "lease_until": None,
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


# --- whatever the facts are ---------------------------------------------------------------------

names = st.sampled_from(["order", "ordre", "approval", "aproval", "", "it's", "\0\x1b[31m"]) | st.text(max_size=8)
maybe_names = st.none() | names
instants = st.datetimes(
    min_value=datetime(1971, 1, 1), max_value=datetime(2500, 1, 1), timezones=st.just(UTC)
) | st.integers(-100, 100).map(lambda seconds: NOW + timedelta(seconds=seconds))
maybe = st.none() | instants
counts = st.integers(0, 5)
errors = st.none() | st.builds(ErrorInfo, names, names)
rows = st.builds(
    InstanceRow,
    claim_token=maybe_names,
    claim_task_id=maybe_names,
    claimed_by=maybe_names,
    workflow=names,
    instance_id=names,
    queue=names,
    lease_until=maybe,
    run_at=maybe,
    next_check_at=maybe,
    dispatch_count=counts,
    crash_count=counts,
    created_at=instants,
    updated_at=instants,
)
runs = st.builds(
    RunRow,
    error_name=maybe_names | st.sampled_from(["StepLimitExceeded", "StepTypeMismatch", "StepNameReused"]),
    error_message=maybe_names,
    reason=maybe_names,
    created_at=instants,
    started_at=maybe,
    completed_at=maybe,
)
children = st.builds(Child, names, names)
steps = st.builds(
    StepRecord,
    name=names,
    attempts=counts,
    max_attempts=st.none() | counts,
    next_retry_at=maybe,
    wake_at=maybe,
    wait_event_type=maybe_names,
    result=st.none(),
    error=errors,
    timeout=st.none() | st.timedeltas(timedelta(0), timedelta(days=365)),
    created_at=maybe,
    started_at=maybe,
    finished_at=maybe,
    task=maybe_names,
    task_id=maybe_names,
    child=st.none() | children,
)
beats = st.builds(
    Heartbeat,
    node=names,
    queues=st.lists(names, max_size=3).map(tuple),
    workflows=st.lists(names, max_size=3).map(tuple),
    started_at=instants,
    seen_at=instants,
    swept_at=maybe,
    next_sweep_at=maybe,
)
facts = st.builds(
    Facts,
    now=instants,
    instance=rows,
    run=runs,
    open_steps=st.lists(steps, max_size=4).map(tuple),
    last_step=st.none() | steps,
    buffered=st.lists(names, max_size=4).map(tuple),
    heartbeats=st.lists(beats, max_size=3).map(tuple),
    answered=counts,
    unsent=st.frozensets(names, max_size=3),
    children=st.dictionaries(children, st.sampled_from(Status), max_size=3),
)


@given(facts)
def test_all_facts_have_one_diagnosis(given_facts: Facts) -> None:
    import json

    found = explain(given_facts)
    assert found.code in Code
    assert found.sentence[-1] in ".?"
    assert found == explain(given_facts)
    json.dumps(found.facts)
    assert all(action.startswith("celery -A <your app> ") for action in found.actions)
    is_over = given_facts.instance.status.is_terminal
    ends = {Code.DONE, Code.FAILED, Code.TERMINATED, Code.STEP_LIMIT, Code.NONDETERMINISTIC}
    assert (found.code in ends) is is_over
