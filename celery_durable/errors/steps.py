"""Errors of steps: misuse that no retry can help, and failures that a step raises into its workflow."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError, join_problems


class NonRetryableError(DurableError):
    """Raise it in a step to fail the step at once, without another attempt.

    ``name`` is the error's name in status, history and `StepFailed.error_name`.
    """

    code = "NON_RETRYABLE"

    def __init__(self, message: str = "", name: str | None = None) -> None:
        self.name = name or type(self).__name__
        super().__init__(message)


class StepTypeMismatch(NonRetryableError):
    """A step name is used for two kinds of step."""

    def __init__(self, step: str, recorded: str, wanted: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} is recorded as {recorded!r}, but the code now calls it as {wanted!r}. "
            "Give the new step another name; a recorded name keeps its kind."
        )


class StepNameReused(NonRetryableError):
    """A step name is used twice in one pass for different work, or twice at the same time."""

    def __init__(self, step: str, *, concurrently: bool = False) -> None:
        self.step = step
        how = "twice at the same time" if concurrently else "again for a different function or other arguments"
        super().__init__(
            f"Step name {step!r} is used {how}. Names identify steps: put the loop index or a key in the name, "
            "or pass StepConfig(repeat=True) to count the occurrences."
        )


class StepLimitExceeded(NonRetryableError):
    """A run has more steps than allowed."""

    code = "STEP_LIMIT_EXCEEDED"

    def __init__(self, workflow: str, limit: int) -> None:
        self.limit = limit
        super().__init__(
            f"A run of workflow {workflow!r} may have {limit} steps (sleeps are free). Put several units of work "
            "in one step, start child instances, or raise max_steps on the workflow."
        )


class StepTxMisuse(NonRetryableError):
    """The step's transaction is used in a way that would break its atomicity."""


class StepMisuse(NonRetryableError):
    """A step verb is called where it cannot work: in another step's body or from another thread."""


class BranchNeverGathered(NonRetryableError):
    """A submitted branch was never handed to gather() or first(), so it never ran."""

    def __init__(self, steps: Sequence[str]) -> None:
        self.steps = list(steps)
        listed = ", ".join(repr(name) for name in steps)
        super().__init__(
            f"The workflow returned, but nobody gathered {listed}: a submitted step runs when it is handed to "
            "step.gather() or step.first(), or its result() is asked for."
        )


class StepResultInvalid(NonRetryableError):
    """What a step returned does not fit the return annotation of its function."""

    def __init__(self, step: str, problems: Sequence[tuple[str, str]]) -> None:
        self.step, self.problems = step, list(problems)
        super().__init__(
            f"The result of step {step!r} does not fit the function's return annotation: {join_problems(problems)}."
        )


class StepCancelled(NonRetryableError):
    """The branch lost a race of `first`, and its result is asked for."""

    def __init__(self, step: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} was cancelled: another branch of first() ended before it. Use first()'s result."
        )


class StepCommitConflict(NonRetryableError):
    """The step's own database writes violate a unique constraint; a retry would do so again."""

    def __init__(self, step: str, detail: str) -> None:
        self.step = step
        super().__init__(f"The writes of step {step!r} violate a constraint: {detail}")


class HandlerAnswerInvalid(NonRetryableError):
    """The handler of a linear step returned something that is no outcome."""

    def __init__(self, step: str, answer: object) -> None:
        self.step = step
        super().__init__(
            f"The handler of step {step!r} returned a {type(answer).__name__}: return Completed(result), "
            "Waiting(event_type, timeout), Retry(backoff, error) or Dead(error)."
        )


class StepFailed(DurableError):
    """A step ended in failure. The same on the first pass and on every replay.

    ``error_name`` and ``error_message`` are the original error's; ``__cause__`` is that error on the
    pass that saw it, None on a replay.
    """

    code = "STEP_FAILED"
    failed_keys: tuple[str, ...] = ()
    failed_place: int = 0
    """For `retry()`: the rows that record the failure, and how many calls the code had made when it was told."""

    def __init__(self, step: str, error_name: str, error_message: str, attempts: int) -> None:
        self.step, self.error_name, self.error_message, self.attempts = step, error_name, error_message, attempts
        after = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"Step {step!r} failed after {after}: {error_name}: {error_message}")


class StepTimeout(StepFailed, TimeoutError):
    """The last attempt of a step took longer than its timeout."""


class StepMaxAttemptsExceeded(StepFailed):
    """The step's attempts are used up by workers that died in it."""


class EventTimeout(StepFailed, TimeoutError):
    """No eligible event came before the wait's deadline."""


class EventPayloadInvalid(StepFailed):
    """The event came, but its payload does not fit the wait's schema; it is consumed."""
