"""What is said of runs that have ended, are paused, run or sleep."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from celery_durable import Cancelled
from celery_durable.insight.explain import Code
from celery_durable.model import (
    AttemptOutcome,
    AttemptRecord,
    Child,
    ErrorInfo,
    RunningStep,
    Status,
    StepStatus,
    StepType,
    WorkflowKind,
)
from tests.insight.explain.builders import (
    ASLEEP,
    BEAT,
    DURABLE,
    MINUTE,
    NAP,
    NOW,
    RUNNING,
    WORKER,
    dispatcher,
    instance,
    run,
    step,
    told,
    worker,
)

LOST = "the worker of attempt 1 died, so it is unknown whether its function did its work; it is not called again"
KID, DECLINED = Child("billing", "b-1"), ErrorInfo("CardDeclined", "no money")
CANCELLED = run(cancel_requested_at=NOW - MINUTE, reason="sold twice")
REPORT = RunningStep("long report\x1f3", 2, NOW - timedelta(seconds=57))

RUNS = {
    "done": (
        told(instance(Status.COMPLETE), of=run(completed_at=NOW - 120 * MINUTE)),
        Code.DONE,
        "It completed 2 h ago.",
        [],
    ),
    "terminated": (
        told(instance(Status.TERMINATED), of=run(reason="sold twice")),
        Code.TERMINATED,
        "It was terminated: sold twice.",
        [f"{DURABLE} restart order o-1"],
    ),
    "failed": (
        told(
            instance(Status.ERRORED),
            of=run(error_name="CardDeclined", error_message="no money", completed_at=NOW - MINUTE),
            last_step=step(status=StepStatus.ERRORED, attempts=6, error=ErrorInfo("CardDeclined", "no money")),
        ),
        Code.FAILED,
        'It failed 1 min ago with CardDeclined: no money (step "charge", 6 attempts).',
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
    ),
    "failed because of a child": (
        told(
            instance(Status.ERRORED),
            of=run(error_name="CardDeclined", error_message="no money", completed_at=NOW - MINUTE),
            last_step=step("bill", StepType.CHILD, status=StepStatus.ERRORED, attempts=1, error=DECLINED, child=KID),
            failed_children=((KID, Status.ERRORED),),
        ),
        Code.FAILED,
        'It failed 1 min ago with CardDeclined: no money (step "bill", 1 attempt). The cause was its child '
        "billing/b-1, which is errored.",
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1 --family", f"{DURABLE} restart order o-1"],
    ),
    "outcome unknown": (
        told(
            instance(Status.ERRORED),
            of=run(error_name="OutcomeUnknown", error_message=LOST, completed_at=NOW - MINUTE),
            last_step=step(
                "charge card", status=StepStatus.ERRORED, attempts=1, error=ErrorInfo("OutcomeUnknown", LOST)
            ),
            last_attempt=AttemptRecord(
                id=1,
                outcome=AttemptOutcome.CRASHED,
                error=ErrorInfo("WorkerLostError", "signal 9"),
                worker="celery@vm",
                ended_at=NOW - 2 * MINUTE,
            ),
        ),
        Code.OUTCOME_UNKNOWN,
        "It failed 1 min ago with OutcomeUnknown: the worker of attempt 1 died, so it is unknown whether its function "
        'did its work; it is not called again (step "charge card", 1 attempt). The attempt on celery@vm '
        "was found lost 2 min ago, at 2029-12-31T23:58:00.000Z.",
        [
            f"{DURABLE} show order o-1 --full",
            f"{DURABLE} retry order o-1",
            f"{DURABLE} set-result order o-1 'charge card' '<its result as JSON>'",
            f"{DURABLE} skip order o-1 'charge card'",
        ],
    ),
    "outcome unknown, of a step that is not the last": (
        told(instance(Status.ERRORED), of=run(error_name="OutcomeUnknown", error_message=LOST)),
        Code.OUTCOME_UNKNOWN,
        f"It failed with OutcomeUnknown: {LOST}.",
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1"],
    ),
    "step limit": (
        told(instance(Status.ERRORED), of=run(error_name="StepLimitExceeded", error_message="too many steps.")),
        Code.STEP_LIMIT,
        "It failed with StepLimitExceeded: too many steps.",
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
    ),
    "nondeterministic": (
        told(instance(Status.ERRORED), of=run(error_name="StepTypeMismatch", error_message="another kind")),
        Code.NONDETERMINISTIC,
        "It failed with StepTypeMismatch: another kind. The workflow's code does not match the recorded steps.",
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
    ),
    "paused": (
        told(instance(Status.PAUSED), open_steps=(NAP,)),
        Code.PAUSED,
        'It has been paused for 1 min; its timers keep running. Unfinished: step "nap" sleeps.',
        [f"{DURABLE} resume order o-1"],
    ),
    "pause requested": (
        told(instance(**RUNNING, pause_requested=True)),
        Code.PAUSED,
        "A pause is requested; it takes effect when the running step ends. It runs the code before its first step, on "
        "celery@a, which has held it for 1 min, as of 10 s ago.",
        [f"{DURABLE} resume order o-1"],
    ),
    "cancelled while a step runs": (
        told(instance(**RUNNING, pause_requested=True), of=CANCELLED, heartbeats=(worker(),)),
        Code.RUNNING,
        "It was cancelled 1 min ago (sold twice); its workflow gets Cancelled at its next step call. It runs the code "
        "before its first step, on celery@a, which has held it for 1 min, as of 10 s ago; the lease is valid for 20 s.",
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "a linear run that is cancelled": (
        told(instance(**RUNNING, pause_requested=True, kind=WorkflowKind.LINEAR), of=replace(CANCELLED, reason=None)),
        Code.RUNNING,
        "It was cancelled 1 min ago; it ends before its next step. It runs the code before its first step, on "
        "celery@a, which has held it for 1 min, as of 10 s ago; the lease is valid for 20 s.",
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "a cleanup that sleeps": (
        told(ASLEEP, of=replace(CANCELLED, reason="retried"), cancellation=Cancelled("sold twice"), open_steps=(NAP,)),
        Code.SLEEPING,
        'It was cancelled 1 min ago (sold twice); its workflow cleans up. Sleeps at step "nap"; wakes in 1 h.',
        [],
    ),
    "a cleanup that failed": (
        told(
            instance(Status.ERRORED),
            of=replace(CANCELLED, error_name="BankClosed", error_message="on sunday"),
            cancellation=Cancelled("sold twice"),
        ),
        Code.FAILED,
        "It failed with BankClosed: on sunday. It had been cancelled, and failed in its cleanup; a retry continues the "
        "cleanup.",
        [f"{DURABLE} show order o-1 --full", f"{DURABLE} retry order o-1", f"{DURABLE} restart order o-1"],
    ),
    "cancelled": (
        told(
            instance(Status.TERMINATED),
            of=replace(CANCELLED, reason="cancelled: sold twice", completed_at=NOW - MINUTE),
        ),
        Code.TERMINATED,
        "It was cancelled 1 min ago: sold twice.",
        [f"{DURABLE} restart order o-1"],
    ),
    "terminated in its cleanup": (
        told(instance(Status.TERMINATED), of=CANCELLED),
        Code.TERMINATED,
        "It was terminated: sold twice.",
        [f"{DURABLE} restart order o-1"],
    ),
    "running": (
        told(instance(**RUNNING), last_step=step("count"), heartbeats=(worker(),)),
        Code.RUNNING,
        'It runs the code after step "count", on celery@a, which has held it for 1 min, as of 10 s ago; the lease is '
        "valid for 20 s.",
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "running a step": (
        told(instance(**RUNNING, running=REPORT), last_step=step("count"), heartbeats=(worker(),)),
        Code.RUNNING,
        'It runs step "long report", attempt 2, for 57 s, on celery@a, as of 10 s ago; the lease is valid for 20 s.',
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "running a linear step": (
        told(
            instance(**RUNNING, running=replace(REPORT, step_key="4"), kind=WorkflowKind.LINEAR),
            open_steps=(step("long report", StepType.LINEAR, status=StepStatus.RUNNING, step_key="4"),),
        ),
        Code.RUNNING,
        'It runs step "long report", attempt 2, for 57 s, on celery@a, as of 10 s ago; the lease is valid for 20 s.',
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "running after the step of the last renewal": (
        told(
            instance(**RUNNING, running=REPORT),
            last_step=step("long report", step_key=REPORT.step_key),
            heartbeats=(worker(),),
        ),
        Code.RUNNING,
        'It runs the code after step "long report", on celery@a, which has held it for 1 min, as of 10 s ago; the '
        "lease is valid for 20 s.",
        [f"{DURABLE} logs order o-1 --follow"],
    ),
    "running on a worker that is silent": (
        told(
            instance(**RUNNING, crash_count=2),
            open_steps=(step("a", status=StepStatus.PENDING), step("b", status=StepStatus.PENDING)),
            heartbeats=(worker(seen_at=NOW - timedelta(seconds=20)),),
        ),
        Code.WORKER_SILENT,
        'It runs steps "a", "b", on celery@a, which has held it for 1 min, as of 10 s ago; the lease is valid for 20 '
        "s. Before that, 2 workers in a row died or lost their lease, without finishing a step. But that worker has "
        "been silent for 20 s, since 2029-12-31T23:59:40.000Z: it is frozen or dead, or cannot reach the database. If "
        "it stays silent, another worker takes over when the lease ends.",
        ["celery -A <your app> inspect ping -d celery@a"],
    ),
    "lease expired on a worker that is silent": (
        told(
            instance(**{**RUNNING, "lease_until": NOW - MINUTE}),
            heartbeats=(dispatcher(), worker(seen_at=NOW - 2 * MINUTE)),
        ),
        Code.LEASE_EXPIRED,
        "The worker celery@a stopped renewing its lease, which ended 1 min ago, and has been silent for 2 min, since "
        "2029-12-31T23:58:00.000Z. A dispatcher will let another worker take over; a dispatcher that has just started "
        "first waits for the length of one lease.",
        [],
    ),
    "lease expired": (
        told(instance(**{**RUNNING, "lease_until": NOW - MINUTE}), heartbeats=(dispatcher(),)),
        Code.LEASE_EXPIRED,
        "The worker celery@a stopped renewing its lease, which ended 1 min ago. A dispatcher will let another "
        "worker take over; a dispatcher that has just started first waits for the length of one lease.",
        [],
    ),
    "lease expired, nobody looks": (
        told(instance(**{**RUNNING, "lease_until": NOW - MINUTE})),
        Code.LEASE_EXPIRED,
        "The worker celery@a stopped renewing its lease, which ended 1 min ago. No dispatcher has been seen: is "
        "celery beat running?",
        [BEAT],
    ),
    "lease expired, and execution is switched off": (
        told(
            instance(**{**RUNNING, "lease_until": NOW - MINUTE}), heartbeats=(dispatcher(),), is_execution_enabled=False
        ),
        Code.EXECUTION_DISABLED,
        "The worker celery@a stopped renewing its lease, which ended 1 min ago. Now workers take no runs, because "
        "durable_execution_enabled is off. It continues when the setting is on.",
        [],
    ),
    "lease expired, no worker looks": (
        told(instance(**{**RUNNING, "lease_until": NOW - MINUTE}), dispatcher="worker"),
        Code.LEASE_EXPIRED,
        "The worker celery@a stopped renewing its lease, which ended 1 min ago. No dispatcher has been seen, "
        "although each worker should run one (durable_dispatcher).",
        [WORKER],
    ),
    "crashing": (
        told(instance(run_at=NOW + timedelta(seconds=4), crash_count=3)),
        Code.CRASHING,
        "It is delayed after a crash and continues in 4.0 s: 3 workers in a row died or lost their lease, "
        "without finishing a step.",
        [f"{DURABLE} show order o-1"],
    ),
    "scheduled": (
        told(ASLEEP, of=run(started_at=None)),
        Code.SCHEDULED,
        "It was created to start later, and starts in 1 h.",
        [],
    ),
    "sleeping": (
        told(ASLEEP, open_steps=(NAP,)),
        Code.SLEEPING,
        'Sleeps at step "nap"; wakes in 1 h.',
        [],
    ),
}
