"""Errors of operations on instances, and of instances that ended without a result."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError, quote


class InstanceNotFound(DurableError):
    """No instance has this id under this workflow."""

    code, http_status = "INSTANCE_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} has no instance {instance_id!r}. "
            f"List its instances: celery -A <your app> durable ls --workflow {workflow}"
        )


class RunNotFound(DurableError):
    """The instance has no run of this number."""

    code, http_status = "RUN_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, current: int) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has no run {run_number}; it has runs 1 to {current}."
        )


class InstanceAlreadyExists(DurableError):
    """The id is taken; instance ids are unique per workflow."""

    code, http_status = "INSTANCE_ID_ALREADY_EXISTS", 409

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Workflow {workflow!r} already has an instance {instance_id!r}. Use another id, "
            'create(..., if_exists="return") to get the existing one, or restart() to run it again.'
        )


class InstanceTerminal(DurableError):
    """The instance has ended, and this operation needs one that has not."""

    code, http_status = "INSTANCE_TERMINAL", 409

    def __init__(self, workflow: str, instance_id: str, status: str, operation: str) -> None:
        self.workflow, self.instance_id, self.status, self.operation = workflow, instance_id, status, operation
        super().__init__(
            f"Cannot {operation} instance {instance_id!r} of workflow {workflow!r}: it is {status}. "
            "restart() begins a new run of it."
        )


class InstanceNotErrored(DurableError):
    """The instance has not failed, and only what has failed can be tried again."""

    code, http_status = "INSTANCE_NOT_ERRORED", 409

    def __init__(self, workflow: str, instance_id: str, status: str) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Cannot retry instance {instance_id!r} of workflow {workflow!r}: it is {status}, not errored. "
            "restart() begins a new run of it, from the beginning or from a step."
        )


class StepNotFound(DurableError):
    """The current run has recorded no step of this name. ``near``: names that it has."""

    code, http_status = "STEP_NOT_FOUND", 404

    def __init__(self, workflow: str, instance_id: str, run_number: int, step: str, near: Sequence[str]) -> None:
        self.workflow, self.instance_id, self.run_number = workflow, instance_id, run_number
        self.step, self.near = step, list(near)
        known = "It has none yet." if not near else f"Did you mean {' or '.join(repr(name) for name in near)}?"
        super().__init__(
            f"Run {run_number} of instance {instance_id!r} of workflow {workflow!r} has no step {quote(step)}. {known}"
        )


class StepNotOpen(DurableError):
    """The step has ended, and did not end its instance: others may stand on its result.

    Or it is a linear step whose turn has not come; ``stands_at``: the step whose turn it is.
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
        remedy = "restart(from_step=...) runs it again."
        if stands_at is not None:
            remedy = f"its turn comes after that of step {stands_at!r}, where the run stands."
        super().__init__(
            f"Step {step!r} of run {run_number} of instance {instance_id!r} of workflow {workflow!r} is {status}. Only "
            f"an open step, or one that ended an errored instance, can be settled by hand; {remedy}"
        )


class OutOfScope(DurableError):
    """A new instance would be outside of the scope that the caller has."""

    code, http_status = "OUT_OF_SCOPE", 403

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        super().__init__(
            f"Instance {instance_id!r} would be outside of what you may reach: its id or its labels are not those of "
            "your scope."
        )


class VersionMismatch(DurableError):
    """The instance has changed since the caller looked at it; nothing was written."""

    code, http_status = "PRECONDITION_FAILED", 412

    def __init__(self, workflow: str, instance_id: str) -> None:
        self.workflow, self.instance_id = workflow, instance_id
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} has changed since its version was read. "
            "Look at it again, and repeat the operation if it is still what you want."
        )


class ResultTimeout(DurableError, TimeoutError):
    """The instance did not end within the time that the caller was ready to wait."""

    code, http_status = "RESULT_TIMEOUT", 408

    def __init__(self, workflow: str, instance_id: str, status: str, seconds: float) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        super().__init__(
            f"Instance {instance_id!r} of workflow {workflow!r} is still {status} after {seconds:g} s. "
            "It goes on by itself; ask again, or wait longer."
        )


class WorkflowFailed(DurableError):
    """The instance ended without a result: errored or terminated."""

    code, http_status = "WORKFLOW_FAILED", 409

    def __init__(
        self, workflow: str, instance_id: str, status: str, error_name: str | None, error_message: str | None
    ) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        self.error_name, self.error_message = error_name, error_message
        why = f": {error_name}: {error_message}" if error_name else (f": {error_message}" if error_message else "")
        super().__init__(f"Instance {instance_id!r} of workflow {workflow!r} ended {status}{why}")


class SuspensionSwallowed(DurableError):
    """The workflow caught the suspension and carried on."""

    code = "SUSPENSION_SWALLOWED"

    def __init__(self, workflow: str) -> None:
        super().__init__(
            f"Workflow {workflow!r} returned or raised although it is suspended: it caught celery_durable's "
            "suspension, which a bare `except:`, `except BaseException:` or a `return` in a `finally` does. "
            "Catch Exception instead, then restart the instance."
        )


class WorkerCrashLoop(DurableError):
    """The instance's workers died again and again at the same place."""

    code = "WORKER_CRASH_LOOP"

    def __init__(self, crashes: int) -> None:
        self.crashes = crashes
        super().__init__(
            f"{crashes} workers in a row died or lost their lease while they worked on this instance, without a step "
            "in between. Look at the workers' logs (out of memory, a crash in native code?), then restart it."
        )
