"""The codes of all diagnoses, and for each one what it means and what to do. docs/how-to/debugging.md lists them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from celery_durable.model import InstanceRow

# The commands that a diagnosis suggests, and the Python calls that do the same.


YOUR_APP = "<your app>"
"""The app in the commands of a diagnosis: ``celery -A <your app> ...``. A caller that knows the app replaces it."""

_COMMAND = f"celery -A {YOUR_APP} durable "
_CALLS = {
    "explain": "explain()",
    "logs": "logs()",
    "restart": "restart()",
    "resume": "resume()",
    "retry": "retry()",
    "retry --family": "retry(family=True)",
    "send-event": "send_event({0!r}, {{...}})",
    "set-result": "set_result({0!r}, ..., by=...)",
    "show": "history()",
    "skip": "skip({0!r}, by=...)",
}


def instance_command(row: InstanceRow, command: str, rest: str = "") -> str:
    """Return the command that applies ``command`` to the instance."""
    target = f"{shlex.quote(row.workflow)} {shlex.quote(row.instance_id)}"
    return f"{_COMMAND}{command} {target} {rest}".rstrip()


def find_python_call(command: str) -> str | None:
    """Return the call of `WorkflowInstance` that does the same as a command; None if there is none."""
    words = shlex.split(command.removeprefix(_COMMAND))
    if not command.startswith(_COMMAND) or words[0] not in _CALLS or len(words) < 3:
        return None
    name, workflow, instance_id, *rest = words
    call = _CALLS.get(" ".join([name, *rest]), _CALLS[name])
    return f"durable.workflows[{workflow!r}].get({instance_id!r}).{call.format(*rest)}"


class Code(StrEnum):
    """The codes of all diagnoses."""

    SLEEPING = "SLEEPING"
    WAITING_EVENT = "WAITING_EVENT"
    WAITING_TASKS = "WAITING_TASKS"
    TASK_NOT_CONSUMED = "TASK_NOT_CONSUMED"
    WAITING_CHILD = "WAITING_CHILD"
    WAITING_STEP = "WAITING_STEP"
    LIMITED = "LIMITED"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"
    SCHEDULED = "SCHEDULED"
    PAUSED = "PAUSED"
    RUNNING = "RUNNING"
    WORKER_SILENT = "WORKER_SILENT"
    DUE = "DUE"
    EXECUTION_DISABLED = "EXECUTION_DISABLED"
    DUE_NOT_DISPATCHED = "DUE_NOT_DISPATCHED"
    BROKER_UNAVAILABLE = "BROKER_UNAVAILABLE"
    QUEUE_REFUSED = "QUEUE_REFUSED"
    QUEUE_FULL = "QUEUE_FULL"
    DISPATCHED_NOT_CLAIMED = "DISPATCHED_NOT_CLAIMED"
    NOT_REGISTERED = "NOT_REGISTERED"
    POOL_UNSUPPORTED = "POOL_UNSUPPORTED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    CRASHING = "CRASHING"
    STEP_LIMIT = "STEP_LIMIT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    FAILED = "FAILED"
    TERMINATED = "TERMINATED"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means and what to do, as Markdown."""

    cause: str
    remedy: str


MEANINGS: Mapping[Code, Meaning] = {
    Code.SLEEPING: Meaning("The run sleeps.", "Nothing."),
    Code.WAITING_EVENT: Meaning(
        "The run waits for an event or a topic.",
        "Send the event: `durable send-event`.",
    ),
    Code.WAITING_TASKS: Meaning(
        "The run waits for the Celery tasks of `step.task` or `step.map`.",
        "Check the worker of the task.",
    ),
    Code.TASK_NOT_CONSUMED: Meaning(
        "The run waits for a Celery task, and no worker of this app consumes the task's queue.",
        "Start a worker of that queue. Workers of applications without Durable are not seen here.",
    ),
    Code.WAITING_CHILD: Meaning("Another instance does the step, or an item of it.", "`durable explain` of the child."),
    Code.WAITING_STEP: Meaning("A step of a kind from another package waits.", "Read the docs of that package."),
    Code.LIMITED: Meaning(
        "The run waits until a step, or its workflow, gets its limits.",
        "`durable limits show` names the holders. Wait, or raise the limit with `durable limits set`.",
    ),
    Code.RETRY_SCHEDULED: Meaning(
        "An attempt of a step failed, and the next one comes later.",
        "Fix the cause and wait, or `durable terminate`.",
    ),
    Code.SCHEDULED: Meaning(
        "The instance was created with `run_at=`, or retried with a delay, and the run has not started yet.", "Nothing."
    ),
    Code.PAUSED: Meaning("The instance is paused, or a pause was requested while a step runs.", "`durable resume`."),
    Code.RUNNING: Meaning(
        "A worker executes the run. What is said of its step is up to a third of a lease old, ten seconds by default.",
        "Wait. Give a step that takes too long a `timeout=`.",
    ),
    Code.WORKER_SILENT: Meaning(
        "The worker that executes the run, or the only workers of its queue, miss their heartbeats. They are frozen or "
        "dead, or cannot reach the database.",
        "Check the worker's machine, then restart the worker.",
    ),
    Code.DUE: Meaning("The run is due. A worker should claim it at any moment.", "Check again."),
    Code.EXECUTION_DISABLED: Meaning(
        "The run is due, and `durable_execution_enabled` is off: workers take no runs, and dispatchers send nothing.",
        "Turn the setting on.",
    ),
    Code.DUE_NOT_DISPATCHED: Meaning(
        "The run is due, and no process sends its message: no dispatcher runs, it cannot reach the database, or "
        "another session locks the row.",
        "Start beat. If a session locks the row, end its transaction.",
    ),
    Code.BROKER_UNAVAILABLE: Meaning(
        "The broker refuses connections or does not answer.",
        "Start the broker, or correct `broker_url`.",
    ),
    Code.QUEUE_REFUSED: Meaning(
        "The broker refuses the messages of one queue. Other queues are not affected.",
        "Follow the sentence. A dispatcher tries the queue at least once a minute.",
    ),
    Code.QUEUE_FULL: Meaning(
        "The queue is as long as `durable_queue_high_water`, or as its own limit at the broker. The run waits in the "
        "database.",
        "Start more workers of the queue.",
    ),
    Code.DISPATCHED_NOT_CLAIMED: Meaning(
        "The run's message was sent, and no worker has claimed the run.",
        "Start a worker of its queue, or more of them.",
    ),
    Code.NOT_REGISTERED: Meaning(
        "Workers consume the run's queue, but none of them knows the workflow.",
        "Import the module that defines it in the worker, or restart workers that run older code.",
    ),
    Code.POOL_UNSUPPORTED: Meaning(
        "Only workers on pools that run no workflows consume the run's queue.",
        "Start a worker of the queue with `-P prefork`, `-P threads` or `-P solo`.",
    ),
    Code.LEASE_EXPIRED: Meaning(
        "The worker that executed the run stopped renewing its lease.",
        "Nothing: a dispatcher lets another worker take over. If the sentence asks for beat, start beat.",
    ),
    Code.CRASHING: Meaning(
        "Workers died while they executed the run. The next try is delayed.",
        "Read the workers' logs: out of memory, or a crash in native code.",
    ),
    Code.STEP_LIMIT: Meaning(
        "The run failed: it has more steps than `durable_max_steps`.",
        "Put more work into each step, or raise `max_steps=`.",
    ),
    Code.NONDETERMINISTIC: Meaning(
        "The run failed: the code uses a recorded step's name for another kind of step, or one name for two steps.",
        "Give the step another name.",
    ),
    Code.OUTCOME_UNKNOWN: Meaning(
        "The run failed: the end of a step's attempt is unknown, and its function may not be called again "
        '(`on_lost="fail"`, or `retries=0`).',
        "Find out whether the function did its work. `durable retry` calls it again, `durable set-result` records its "
        "result, `durable skip` leaves it out.",
    ),
    Code.FAILED: Meaning(
        "The run failed with another error.",
        "Fix the cause, then `durable retry`.",
    ),
    Code.TERMINATED: Meaning(
        "The instance was terminated or cancelled.",
        "If it was a mistake: `durable rewind` continues from a step, and `durable restart` runs all steps again.",
    ),
    Code.DONE: Meaning("The run completed.", "Nothing."),
}
