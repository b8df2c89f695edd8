"""Errors of operations on instances, and of instances that ended without a result."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from celery_durable.errors.base import DurableError, name_error, quote


class LimitNotFound(DurableError):
    """No step has asked for a limit with this name, or with this key.

    Check the name. A limit exists in the database from its first use.

    Attributes:
        name: The limit's name.
    """

    code, http_status = "LIMIT_NOT_FOUND", 404

    def __init__(self, name: str, key: str | None = None, *, has_keys: bool = False) -> None:
        self.name = name
        if has_keys:
            super().__init__(f"Limit {name!r} counts for each key. Name one: `durable limits` lists them.")
            return
        which = f"limit {name!r}" if not key else f"limit {name!r} with the key {key!r}"
        super().__init__(
            f"No step has asked for {which} yet. Check the name: `durable limits` lists those that have been used."
        )


class InstanceNotFound(DurableError):
    """The workflow has no instance with this id.

    Check the id; the transaction that created the instance may have been rolled back.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
    """

    code, http_status = "INSTANCE_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} has no instance {instance_id!r}. Check the id, or list the workflow's instances."
        )


class RunNotFound(DurableError):
    """The instance has no run with this number.

    Runs are numbered from 1; a restart or a retry adds one.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
    """

    code, http_status = "RUN_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, current: int) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has no run {run_number}; it has runs 1 to {current}."
        )


class InstanceAlreadyExists(DurableError):
    """The workflow already has an instance with this id.

    Use another id, pass ``if_exists="return"`` to get the existing instance, or restart that one.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
    """

    code, http_status = "INSTANCE_ID_ALREADY_EXISTS", 409

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} already has an instance {instance_id!r}. Use another id, "
            "or get or restart the existing instance."
        )


class InstanceTerminal(DurableError):
    """The operation needs an instance that has not ended, and this one has, or is being cancelled.

    ``restart()`` starts a new run of it.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        status: The `Status` in which it ended.
        operation: The refused operation.
    """

    code, http_status = "INSTANCE_TERMINAL", 409

    def __init__(self, workflow: str, instance_id: str, status: str, operation: str) -> None:
        self.workflow, self.instance_id, self.status, self.operation = workflow, instance_id, status, operation
        super().__init__(
            f"Cannot {operation} instance {instance_id!r} of workflow {workflow!r}: it is {status}. "
            "To start a new run, restart it."
        )


class InstanceNotErrored(DurableError):
    """Only a failed instance can be retried, and this one has not failed.

    ``restart()`` starts a new run of it, from its first step or from another.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        status: The instance's `Status`.
    """

    code, http_status = "INSTANCE_NOT_ERRORED", 409

    def __init__(self, workflow: str, instance_id: str, status: str) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Cannot retry instance {instance_id!r} of workflow {workflow!r}: it is {status}, not errored. "
            "To start a new run, restart it from its first step or from a later one."
        )


class StepNotFound(DurableError):
    """The current run has recorded no step with this name.

    The message names similar steps.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
        step: The name that was looked up.
        near: Similar names of recorded steps.
    """

    code, http_status = "STEP_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, step: str, near: Sequence[str]) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.near = step, list(near)
        known = "It has none yet." if not near else f"Did you mean {' or '.join(repr(name) for name in near)}?"
        super().__init__(
            f"Run {run_number} of instance {instance_id!r} of workflow {workflow!r} has no step {quote(step)}. {known}"
        )


class StepNotOpen(DurableError):
    """A step cannot be completed by hand, because it has ended without failing its instance.

    Later steps may depend on its result; ``restart(from_step=...)`` runs it again. Also raised for a step that a
    linear run has not reached.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
        step: The step's name.
        status: The step's status.
        stands_at: The current step of a linear run that has not reached the step; else None.
    """

    code, http_status = "STEP_NOT_OPEN", 409

    def __init__(
        self,
        workflow: str,
        instance_id: str,
        run_number: int,
        step: str,
        status: str,
        *,
        stands_at: str | None = None,
    ) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.status, self.stands_at = step, status, stands_at
        remedy = "To run it again, restart the instance from this step."
        if stands_at is not None:
            remedy = f"The current step is {stands_at!r}, which comes first."
        super().__init__(
            f"Step {step!r} of run {run_number} of instance {instance_id!r} of workflow {workflow!r} is {status}. Only "
            f"an open step, or one that ended an errored instance, can be completed by hand. {remedy}"
        )


class AnswerTooLate(DurableError):
    """A person's answer came after another one, or after the end of the wait. It was not stored.

    The message says why; for another answer, whose it is and from when.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        run_number: The number of the run, from 1.
        step: The key of the step.
        by: The name of the person whose answer counts; None if there is none.
        at: When that answer was accepted; None if there is none.
    """

    code, http_status = "ANSWER_TOO_LATE", 409

    def __init__(
        self,
        workflow: str,
        instance_id: str,
        run_number: int,
        step: str,
        why: str,
        *,
        by: str | None = None,
        at: datetime | None = None,
    ) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.by, self.at = step, by, at
        super().__init__(
            f"Step {step!r} of run {run_number} of instance {instance_id!r} of workflow {workflow!r} {why}. "
            "This answer was not stored."
        )


class AnswerLinkInvalid(DurableError):
    """A signed link to a question was changed, was signed with another key, or is too old."""

    code, http_status = "ANSWER_LINK_INVALID", 403

    def __init__(self, why: str) -> None:
        super().__init__(f"This link cannot be used: {why}.")


class AnswerUnchecked(DurableError):
    """This process cannot check the answer to a question, so it was not stored.

    Import the class of the answer, or install ``celery-durable[schema]``.

    Attributes:
        step: The key of the step.
        payload_type: The name of the class; None if the schema is no class.
    """

    code, http_status = "ANSWER_UNCHECKED", 409

    def __init__(self, step: str, payload_type: str | None, why: str) -> None:
        self.step, self.payload_type = step, payload_type
        name = "" if payload_type is None else f"has not imported {payload_type}, and "
        super().__init__(
            f"This process cannot check an answer to step {step!r}, so it was not stored: it {name}{why}. Import the "
            "workflow here, or pip install 'celery-durable[schema]'."
        )


class OutOfScope(DurableError):
    """A new instance would be outside of the caller's scope.

    Raised by the HTTP API with tenants. Use an id and labels that belong to the scope.

    Attributes:
        instance_id: The id of the new instance.
    """

    code, http_status = "OUT_OF_SCOPE", 403

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        super().__init__(
            f"Instance {instance_id!r} would be outside of your scope. Use an id and labels that belong to your scope."
        )


class VersionMismatch(DurableError):
    """The instance has changed since the caller read its version. Nothing was written.

    Read it again, then repeat the operation if it is still what you want.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
    """

    code, http_status = "PRECONDITION_FAILED", 412

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has changed since its version was read. "
            "Read it again, and repeat the operation if it is still what you want."
        )


class ResultTimeout(DurableError, TimeoutError):
    """The instance did not end within the time that the caller wanted to wait.

    It continues on its own. Wait again, or longer. Also a TimeoutError.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        status: Its `Status` when the time was over.
    """

    code, http_status = "RESULT_TIMEOUT", 408

    def __init__(self, workflow: str, instance_id: str, status: str, seconds: float) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} is still {status} after {seconds:g} s. "
            "The instance continues by itself; ask again, or wait longer."
        )


class WorkflowFailed(DurableError):
    """The result of an instance was requested that failed or was terminated.

    ``instance.history()`` shows what happened.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        status: "errored" or "terminated".
        error_name: The name of the error that ended it, or None.
        error_message: Its message, or the reason of the termination; None if there is none.
    """

    code, http_status = "WORKFLOW_FAILED", 409

    def __init__(
        self, workflow: str, instance_id: str, status: str, error_name: str | None, error_message: str | None
    ) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        self.error_name, self.error_message = error_name, error_message
        why = name_error(error_name, error_message) if error_name else error_message
        super().__init__(f"Instance {instance_id!r} of workflow {workflow!r} ended {status}{f': {why}' if why else ''}")


class SuspensionSwallowed(DurableError):
    """The workflow caught its own suspension and went on. The instance fails.

    A bare ``except:``, ``except BaseException:`` or a ``return`` in a ``finally`` does that. Catch Exception instead,
    then restart the instance.
    """

    code = "SUSPENSION_SWALLOWED"

    def __init__(self, workflow: str) -> None:
        super().__init__(
            f"Workflow {workflow!r} returned or raised although it is suspended: it caught celery_durable's "
            "suspension, which a bare `except:`, `except BaseException:` or a `return` in a `finally` does. "
            "Catch Exception instead, then restart the instance."
        )


class CancellationSwallowed(DurableError):
    """The workflow caught `Cancelled` and returned a result. The instance fails.

    Catch it to clean up, then raise it again.
    """

    code = "CANCELLATION_SWALLOWED"

    def __init__(self, workflow: str) -> None:
        super().__init__(
            f"Workflow {workflow!r} returned although it was cancelled: it caught Cancelled. Clean up in "
            "`except Cancelled:` or `finally:`, then let the exception leave the workflow with `raise`."
        )


class WorkerCrashLoop(DurableError):
    """Several workers in a row died or lost their lease at the same place of this instance. The instance fails.

    Look at the workers' logs, for instance for memory that ran out, then retry the instance. The limit is
    ``durable_max_crashes``.

    Attributes:
        crashes: How many workers in a row.
    """

    code = "WORKER_CRASH_LOOP"

    def __init__(self, crashes: int) -> None:
        self.crashes = crashes
        super().__init__(
            f"{crashes} workers in a row died or lost their lease while they worked on this instance, without a step "
            "in between. Look at the workers' logs (out of memory, a crash in native code?), then retry it."
        )
