"""What is said of runs that wait: for a retry, an event, a task, a child."""

from __future__ import annotations

from dataclasses import replace

from celery_durable.insight.explain import Code
from celery_durable.model import Child, ErrorInfo, ItemCounts, Status, StepType
from tests.insight.explain.builders import (
    ASLEEP,
    CHILD,
    DURABLE,
    INSPECT,
    MINUTE,
    NAP,
    NOW,
    OUTBOX,
    RETRY,
    SEND,
    WAIT,
    run,
    step,
    task,
    told,
    worker,
)

WAITS = {
    "retry, besides others": (
        told(ASLEEP, open_steps=(WAIT, NAP, RETRY)),
        Code.RETRY_SCHEDULED,
        'Tries step "charge" again in 1 min; attempt 2/6 failed: ConnectionError: the gateway is away. Also: '
        'step "nap" sleeps; step "await approval" waits for event "approval".',
        [f"{DURABLE} show order o-1 --full"],
    ),
    "retry after an error without a message": (
        told(ASLEEP, open_steps=(replace(RETRY, error=ErrorInfo("AssertionError", "")),)),
        Code.RETRY_SCHEDULED,
        'Tries step "charge" again in 1 min; attempt 2/6 failed: AssertionError.',
        [f"{DURABLE} show order o-1 --full"],
    ),
    "limits": (
        told(ASLEEP, open_steps=(replace(RETRY, next_retry_at=None, error=None, attempts=0),)),
        Code.LIMITED,
        'Step "charge" waits until it gets its limits.',
        [],
    ),
    "limits of a task": (
        told(ASLEEP, open_steps=(replace(RETRY, type=StepType.TASK, next_retry_at=None, attempts=0),)),
        Code.LIMITED,
        'Step "charge" waits until it gets its limits.',
        [],
    ),
    "event": (
        told(ASLEEP, open_steps=(WAIT,)),
        Code.WAITING_EVENT,
        'Waits for event "approval" at step "await approval"; times out in 1 h 30 min.',
        [SEND],
    ),
    "event, with a limit of the workflow": (
        told(ASLEEP, open_steps=(WAIT,), max_run_duration=MINUTE * 31),
        Code.WAITING_EVENT,
        'Waits for event "approval" at step "await approval"; times out in 1 h 30 min. It is terminated in 30 min '
        "unless it ends before: its max_run_duration is 31 min.",
        [SEND],
    ),
    "event, past the limit of the instance": (
        told(replace(ASLEEP, max_run=MINUTE), open_steps=(WAIT,), max_run_duration=MINUTE * 31),
        Code.WAITING_EVENT,
        'Waits for event "approval" at step "await approval"; times out in 1 h 30 min. It has taken longer than its '
        "max_run of 1 min, so it is terminated before its next step.",
        [SEND],
    ),
    "scheduled, with a limit": (
        told(replace(ASLEEP, max_run=MINUTE), of=run(started_at=None)),
        Code.SCHEDULED,
        "It was created to start later, and starts in 1 h. From its start it may take 1 min, its max_run.",
        [],
    ),
    "event, others buffered": (
        told(ASLEEP, open_steps=(WAIT,), buffered=("paid",)),
        Code.WAITING_EVENT,
        'Waits for event "approval" at step "await approval"; times out in 1 h 30 min. Buffered for later waits: '
        '"paid".',
        [SEND],
    ),
    "tasks: the oldest, and whose time is over first": (
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
    ),
    "tasks, some of which have not left": (
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
    ),
    "a task whose queue no worker consumes": (
        told(ASLEEP, open_steps=(task(sent=MINUTE),), task_queues={"thumb": "media"}, heartbeats=(worker(),)),
        Code.TASK_NOT_CONSUMED,
        'Waits for Celery task media.resize (id-1), under way for 1 min, at step "thumb"; times out in 59 min. No '
        "worker of this app consumes its queue 'media'. If no other application does, start one.",
        ["celery -A <your app> worker -Q media", INSPECT],
    ),
    "a map whose worker is silent": (
        told(
            ASLEEP,
            open_steps=(step("thumbs", StepType.MAP, task="media.resize", items=ItemCounts(9, 2, 1)),),
            task_queues={"thumbs": "media"},
            heartbeats=(worker(queues=("media",), seen_at=NOW - 2 * MINUTE),),
        ),
        Code.TASK_NOT_CONSUMED,
        'Waits for Celery tasks media.resize, 3 of 9 have answered (1 of them failed), at step "thumbs"; the next '
        "deadline is now. No worker of this app consumes its queue 'media' any more; celery@a has been silent for 2 "
        "min, since 2029-12-31T23:58:00.000Z. If no other application does, start one.",
        ["celery -A <your app> worker -Q media", f"{DURABLE} show order o-1"],
    ),
    "a map over a workflow": (
        told(
            ASLEEP,
            open_steps=(
                step(
                    "bills",
                    StepType.MAP,
                    workflow="billing",
                    items=ItemCounts(9, 2, 1, children=(Child("billing", "b-4"), Child("billing", "b-5"))),
                ),
            ),
        ),
        Code.WAITING_CHILD,
        'Waits for instances of workflow billing, 3 of 9 have answered (1 of them failed), at step "bills"; the next '
        "deadline is now. One that has not ended is b-4.",
        ["celery -A <your app> durable explain billing b-4", f"{DURABLE} show order o-1"],
    ),
    "a task whose queue has a worker": (
        told(
            ASLEEP,
            open_steps=(task(sent=MINUTE),),
            task_queues={"thumb": "media"},
            heartbeats=(worker(queues=("media",)),),
        ),
        Code.WAITING_TASKS,
        'Waits for Celery task media.resize (id-1), under way for 1 min, at step "thumb"; times out in 59 min.',
        [INSPECT],
    ),
    "task, besides others": (
        told(ASLEEP, open_steps=(WAIT, task(sent=MINUTE), CHILD)),
        Code.WAITING_TASKS,
        'Waits for Celery task media.resize (id-1), under way for 1 min, at step "thumb"; times out in 59 min. '
        'Also: step "await approval" waits for event "approval"; step "bill" waits for instance '
        "billing/b 1.",
        [INSPECT],
    ),
    "task that was sent again: since then": (
        told(
            ASLEEP,
            open_steps=(task(attempts=2, max_attempts=3, created_at=NOW - 600 * MINUTE, wake_at=NOW + 50 * MINUTE),),
        ),
        Code.WAITING_TASKS,
        'Waits for Celery task media.resize (id-1), under way for 10 min, at step "thumb"; times out in 50 min.',
        [INSPECT],
    ),
    "task that is to be sent again": (
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
        [f"{DURABLE} show order o-1 --full"],
    ),
    "child, besides what is due before": (
        told(ASLEEP, open_steps=(NAP, CHILD), children={Child("billing", "b 1"): Status.ACTIVE}),
        Code.SLEEPING,
        'Sleeps at step "nap"; wakes in 1 h. Also: step "bill" waits for instance billing/b 1.',
        [],
    ),
    "child that is gone": (
        told(ASLEEP, open_steps=(CHILD,)),
        Code.WAITING_CHILD,
        'Waits for instance billing/b 1, which no longer exists, at step "bill"; times out in 1 h 30 min.',
        [],
    ),
    "kind of another package": (
        told(ASLEEP, open_steps=(step("all loaded", StepType("barrier"), wake_at=NOW + 60 * MINUTE), WAIT)),
        Code.WAITING_STEP,
        'Waits at step "all loaded", of kind "barrier"; times out in 1 h. Also: step "await approval" waits for '
        'event "approval".',
        [],
    ),
}
