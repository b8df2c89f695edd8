"""What is said of runs that are due, and why no worker takes them."""

from __future__ import annotations

from dataclasses import replace

from celery_durable.insight.explain import Code
from celery_durable.model import Status
from tests.insight.explain.builders import (
    BEAT,
    BROKER_AWAY,
    CHILD,
    DURABLE,
    FULL,
    HUNG_BROKER,
    MINUTE,
    NOW,
    OVERDUE,
    REFUSED,
    WORKER,
    dispatcher,
    instance,
    task,
    told,
    worker,
)

DUE = {
    "paused, with others at work": (
        told(instance(Status.PAUSED), open_steps=(task(), CHILD)),
        Code.PAUSED,
        'It has been paused for 1 min; its timers keep running. Unfinished: step "thumb" waits for Celery task '
        'media.resize; step "bill" waits for instance billing/b 1.',
        [f"{DURABLE} resume order o-1"],
    ),
    "due": (
        told(instance(run_at=NOW), heartbeats=(worker(), dispatcher())),
        Code.DUE,
        "It is due; a worker should claim it at any moment.",
        [],
    ),
    "no dispatcher": (
        told(OVERDUE, heartbeats=(worker(),)),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, and no message for it has been sent. No dispatcher has been seen: is celery "
        "beat running?",
        [BEAT],
    ),
    "no dispatcher, and workers should run one": (
        told(OVERDUE, dispatcher="worker"),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, and no message for it has been sent. No dispatcher has been seen, although each "
        "worker should run one (durable_dispatcher). Also, no worker consumes queue 'durable'.",
        [WORKER],
    ),
    "no dispatcher, and the worker that should run one is there": (
        told(OVERDUE, heartbeats=(worker(),), dispatcher="worker"),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, and no message for it has been sent. No dispatcher has been seen, although each "
        "worker should run one (durable_dispatcher).",
        [f"{DURABLE} doctor"],
    ),
    "no dispatcher any more": (
        told(OVERDUE, heartbeats=(dispatcher(seen_at=NOW - 4 * MINUTE, swept_at=NOW - 5 * MINUTE),)),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, and no message for it has been sent. The only dispatcher (beat@a) has been silent "
        "for 4 min, since 2029-12-31T23:56:00.000Z: it is frozen or dead, or cannot reach the database. If it "
        "continues, it sends the message. Also, no worker consumes queue 'durable'.",
        [BEAT, WORKER],
    ),
    "the dispatcher cannot send": (
        told(OVERDUE, heartbeats=(worker(), dispatcher())),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, but the dispatcher has sent no message for it, and reports no outage.",
        [f"{DURABLE} doctor"],
    ),
    "its queue refuses": (
        told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(BROKER_AWAY, REFUSED)))),
        Code.QUEUE_REFUSED,
        "It has been due for 1 min, but queue 'durable' has refused its messages since "
        "2029-12-31T23:58:00.000Z: PreconditionFailed: (406) inequivalent arg 'x-max-priority'. The queue "
        "exists with other arguments: delete it, or declare it in task_queues with these arguments.",
        [f"{DURABLE} doctor"],
    ),
    "the broker is away": (
        told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(replace(REFUSED, where="other"), BROKER_AWAY)))),
        Code.BROKER_UNAVAILABLE,
        "It has been due for 1 min, but the broker redis://:**@mq:6379/0 has accepted no messages since "
        "2029-12-31T23:59:00.000Z: ConnectionError: refused. Check the broker's log for this error.",
        [f"{DURABLE} doctor"],
    ),
    "the broker was away for a dispatcher that is silent": (
        told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(BROKER_AWAY,), seen_at=NOW - MINUTE / 3))),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, and no message for it has been sent. The only dispatcher (beat@a) has been silent "
        "for 20 s, since 2029-12-31T23:59:40.000Z: it is frozen or dead, or cannot reach the database. If it "
        "continues, it sends the message.",
        [BEAT],
    ),
    "execution is switched off": (
        told(OVERDUE, heartbeats=(worker(),), is_execution_enabled=False),
        Code.EXECUTION_DISABLED,
        "It has been due for 1 min, but workers take no runs, because durable_execution_enabled is off. It continues "
        "when the setting is on.",
        [],
    ),
    "the database takes no writes": (
        told(OVERDUE, is_read_only=True),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, but the database is read-only, so no worker can claim it. Name the server that "
        "takes writes in durable_database_url, or end the read-only mode.",
        [f"{DURABLE} doctor"],
    ),
    "the database is away": (
        told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(replace(BROKER_AWAY, what="database"),)))),
        Code.DUE_NOT_DISPATCHED,
        "It has been due for 1 min, but the dispatcher has not reached the database since "
        "2029-12-31T23:59:00.000Z: ConnectionError: refused.",
        [f"{DURABLE} doctor"],
    ),
    "sent before its queue began to refuse": (
        told(
            instance(sent_at=NOW - MINUTE),
            heartbeats=(worker(), dispatcher(outages=(REFUSED,))),
        ),
        Code.DISPATCHED_NOT_CLAIMED,
        "It has been due for 1 min and its message was sent once, but no worker has claimed it. 1 worker "
        "consumes queue 'durable': it is busy with other work, or uses another broker than the sender. The "
        "message is sent again when its queue shows that it was lost, at the latest in 1 min.",
        [f"{DURABLE} doctor"],
    ),
    "sent before the broker began to hang": (
        told(instance(sent_at=NOW - MINUTE), heartbeats=(worker(), dispatcher(outages=(HUNG_BROKER,)))),
        Code.BROKER_UNAVAILABLE,
        "It has been due for 1 min, but the broker amqp://guest:**@mq:5672// has accepted no messages since "
        "2029-12-31T23:59:00.000Z: TimeoutError: no answer within 3 s. It does not answer: check its load, its "
        "disk, and the network between. Messages that it held may be lost; they are sent again.",
        [f"{DURABLE} doctor"],
    ),
    "its queue is long": (
        told(OVERDUE, heartbeats=(worker(), dispatcher(outages=(FULL,)))),
        Code.QUEUE_FULL,
        "It has been due for 1 min, but queue 'durable' has been full since 2029-12-31T23:58:00.000Z: QueueFull: 10000 "
        "or more messages wait in it (durable_queue_high_water). Start more workers of this queue, or raise "
        "durable_queue_high_water. Until then, work waits in the database.",
        [WORKER, f"{DURABLE} doctor"],
    ),
    "its queue is at its own limit": (
        told(OVERDUE, heartbeats=(dispatcher(outages=(replace(REFUSED, error="basic.nack"),)),)),
        Code.QUEUE_FULL,
        "It has been due for 1 min, but queue 'durable' has refused its messages since 2029-12-31T23:58:00.000Z: "
        "basic.nack. The queue is full and rejects messages: start workers of this queue, or raise its x-max-length. "
        "Also, no worker consumes queue 'durable'.",
        [WORKER, f"{DURABLE} doctor"],
    ),
    "the only worker is silent": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(seen_at=NOW - 2 * MINUTE))),
        Code.WORKER_SILENT,
        "It has been due for 1 min and its message was sent once, but the only worker of queue 'durable' (celery@a) "
        "has been silent for 2 min, since 2029-12-31T23:58:00.000Z: it is frozen or dead, or cannot reach the "
        "database. If it continues, it claims the run, and so does any worker that you start. The message is sent "
        "again when its queue shows that it was lost, at the latest in 1 min.",
        [WORKER, f"{DURABLE} doctor"],
    ),
    "just due, and the only worker is silent": (
        told(instance(run_at=NOW), heartbeats=(dispatcher(), worker(seen_at=NOW - 2 * MINUTE))),
        Code.WORKER_SILENT,
        "It is due; a worker should claim it at any moment. But the only worker of queue 'durable' (celery@a) has been "
        "silent for 2 min, since 2029-12-31T23:58:00.000Z: it is frozen or dead, or cannot reach the database.",
        [WORKER],
    ),
    "known here but not there": (
        told(instance(dispatch_count=1), is_known_here=True, heartbeats=(dispatcher(), worker(workflows=("orders",)))),
        Code.NOT_REGISTERED,
        "It has been due for 1 min, but no worker of queue 'durable' knows workflow 'order' (celery@a), although this "
        "process does. The workers run older code, or do not import the module that defines it: restart them, or "
        "import it there.",
        ["celery -A <your app> inspect registered"],
    ),
    "not registered, and nothing similar is": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(workflows=("report", "trader")))),
        Code.NOT_REGISTERED,
        "It has been due for 1 min, but no worker of queue 'durable' knows workflow 'order' (celery@a). Import "
        "the module that defines it in the worker, or wait for the deploy to end.",
        ["celery -A <your app> inspect registered"],
    ),
    "no worker": (
        told(instance(dispatch_count=3), heartbeats=(dispatcher(), worker(queues=("celery",)))),
        Code.DISPATCHED_NOT_CLAIMED,
        "It has been due for 1 min and its message was sent 3 times, but no worker consumes queue 'durable'. "
        "The message is sent again when its queue shows that it was lost, at the latest in 1 min.",
        [WORKER, f"{DURABLE} doctor"],
    ),
    "busy workers": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker())),
        Code.DISPATCHED_NOT_CLAIMED,
        "It has been due for 1 min and its message was sent once, but no worker has claimed it. 1 worker "
        "consumes queue 'durable': it is busy with other work, or uses another broker than the sender. The "
        "message is sent again when its queue shows that it was lost, at the latest in 1 min.",
        [f"{DURABLE} doctor"],
    ),
    "one of two workers knows it": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(), worker(workflows=("orders",)))),
        Code.DISPATCHED_NOT_CLAIMED,
        "It has been due for 1 min and its message was sent once, but no worker has claimed it. 2 workers "
        "consume queue 'durable': they are busy with other work, or use another broker than the sender. The "
        "message is sent again when its queue shows that it was lost, at the latest in 1 min.",
        [f"{DURABLE} doctor"],
    ),
    "not registered": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(workflows=("orders", "nap")))),
        Code.NOT_REGISTERED,
        "It has been due for 1 min, but no worker of queue 'durable' knows workflow 'order' (celery@a). Import "
        "the module that defines it in the worker, or wait for the deploy to end. A similar name is known: "
        "'orders'.",
        ["celery -A <your app> inspect registered"],
    ),
    "pool that runs no workflows": (
        told(instance(dispatch_count=1), heartbeats=(dispatcher(), worker(pool="gevent"))),
        Code.POOL_UNSUPPORTED,
        "It has been due for 1 min, but queue 'durable' is consumed only by workers on pools that run no "
        "workflows (celery@a: gevent). Start a worker with -P prefork, threads or solo, or give the workflow a "
        "queue of its own.",
        [WORKER],
    ),
}
