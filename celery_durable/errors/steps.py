"""Errors of steps: misuse that no retry can help, and failures that a step raises into its workflow."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError, join_problems, name_error, quote


class NonRetryableError(DurableError):
    """Fails a step at once, without another attempt. Raise it in a step's function.

    Errors below it are raised by celery_durable, if another attempt could not help.

    Attributes:
        name: The error's name in the status, in the history and in `StepFailed.error_name`.
    """

    code = "NON_RETRYABLE"

    def __init__(self, message: str = "", name: str | None = None) -> None:
        self.name = name or type(self).__name__
        super().__init__(message)


class StepTypeMismatch(NonRetryableError):
    """The name of a recorded step is now used for another kind of step, for instance a sleep.

    Give the new step another name.

    Attributes:
        step: The step's name.
    """

    def __init__(self, step: str, recorded: str, wanted: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} is recorded as {recorded!r}, but the code now calls it as {wanted!r}. "
            "Give the new step another name; a recorded name keeps its kind."
        )


class StepNameReused(NonRetryableError):
    """A step name is used twice in a run for different work, or twice at the same time.

    Put the loop index or a key into the name, or pass ``StepConfig(repeat=True)``.

    Attributes:
        step: The step's name.
    """

    def __init__(self, step: str, *, concurrently: bool = False) -> None:
        self.step = step
        how = "twice at the same time" if concurrently else "again for a different function or other arguments"
        super().__init__(
            f"Step name {step!r} is used {how}. Names identify steps: put the loop index or a key in the name, "
            "or pass StepConfig(repeat=True) to count the occurrences."
        )


class StepLimitExceeded(NonRetryableError):
    """A run has more steps than ``durable_max_steps`` or ``max_steps`` of its workflow allow.

    Put several units of work into one step, start child instances, or raise ``max_steps``.

    Attributes:
        limit: How many steps a run may have.
    """

    code = "STEP_LIMIT_EXCEEDED"

    def __init__(self, workflow: str, limit: int) -> None:
        self.limit = limit
        super().__init__(
            f"A run of workflow {workflow!r} may have {limit} steps (sleeps are free). Put several units of work "
            "in one step, start child instances, or raise max_steps on the workflow."
        )


class LimitKeyInvalid(NonRetryableError):
    """The function ``by`` or ``fair`` of a limit returned something that is no key.

    Return a text of 1 to 255 characters, or a whole number.

    Attributes:
        limit: The limit's name.
    """

    code = "LIMIT_KEY_INVALID"

    def __init__(self, limit: str, option: str, value: object) -> None:
        self.limit = limit
        super().__init__(
            f"The function {option}= of limit {limit!r} returned {quote(value)}: return a text of 1 to 255 characters, "
            "or a whole number."
        )


class StepTxMisuse(NonRetryableError):
    """The transaction of a step was used in a way that would break its atomicity.

    For instance ``tx.session.commit()``. Return from the step's function to commit, raise to roll back.
    """


class StepMisuse(NonRetryableError):
    """A method of `Step` was called in a step's function, on another thread, or after the workflow had returned.

    Call it in the workflow's function. For steps at the same time, use ``submit`` and ``gather``.
    """


class BranchNeverGathered(NonRetryableError):
    """The workflow returned before a submitted branch ran.

    Pass the future to ``gather`` or ``first``, or call its ``result()``.

    Attributes:
        steps: The names of these branches.
    """

    def __init__(self, steps: Sequence[str]) -> None:
        self.steps = list(steps)
        listed = ", ".join(repr(name) for name in steps)
        super().__init__(
            f"The workflow returned, but did not gather {listed}. A submitted step runs when it is passed to "
            "step.gather() or step.first(), or when its result() is called."
        )


class StepResultInvalid(NonRetryableError):
    """The result of a step does not fit the return annotation of its function.

    Correct the value or the annotation.

    Attributes:
        step: The step's name.
        problems: Pairs of a path, such as ``$.items[3]``, and what is wrong there.
    """

    def __init__(self, step: str, problems: Sequence[tuple[str, str]]) -> None:
        self.step, self.problems = step, list(problems)
        super().__init__(
            f"The result of step {step!r} does not fit the function's return annotation: {join_problems(problems)}."
        )


class RetryDelayInvalid(NonRetryableError):
    """The function in ``Retries(delay=...)`` raised, or returned no valid duration. The step is not retried.

    Correct the function. ``__cause__`` is what it raised.

    Attributes:
        step: The step's name.
    """

    def __init__(self, step: str, attempt: int, failure: str, reason: str) -> None:
        self.step = step
        super().__init__(
            f"The function delay= of step {step!r} gave no delay after attempt {attempt}: {reason}. "
            f"The attempt had failed: {failure}"
        )


class StepCancelled(NonRetryableError):
    """The result of a branch was requested that lost in ``first``, and so was cancelled.

    Use the result of ``first``.

    Attributes:
        step: The branch's name.
    """

    def __init__(self, step: str) -> None:
        self.step = step
        super().__init__(
            f"Step {step!r} was cancelled: another branch of first() ended before it. Use first()'s result."
        )


class StepCommitConflict(NonRetryableError):
    """The writes of a step violate a constraint of the database.

    Another attempt would fail in the same way. Correct the writes.

    Attributes:
        step: The step's name.
    """

    def __init__(self, step: str, detail: str) -> None:
        self.step = step
        super().__init__(f"The writes of step {step!r} violate a constraint: {detail}")


class HandlerAnswerInvalid(NonRetryableError):
    """The handler of a linear step returned something that is not an outcome.

    Return `Completed`, `Waiting`, `Retry` or `Dead`.

    Attributes:
        step: The step's name.
    """

    def __init__(self, step: str, answer: object) -> None:
        self.step = step
        super().__init__(
            f"The handler of step {step!r} returned a {type(answer).__name__}: return Completed(result), "
            "Waiting(event_type, timeout), Retry(backoff, error) or Dead(error)."
        )


class StepFailed(DurableError):
    """A step failed for good. Raised in the workflow, which may catch it, on the first pass and on every replay.

    ``__cause__`` is the original error on the pass that saw it, and None on a replay.

    Attributes:
        step: The step's name.
        error_name: The class name of the original error.
        error_message: The text of the original error.
        attempts: How many attempts were made.
    """

    code = "STEP_FAILED"
    failed_keys: tuple[str, ...] = ()
    failed_at_seq: int = 0
    """For `WorkflowInstance.retry`: the keys of the failed steps, and how many calls the code had made before."""

    def __init__(self, step: str, error_name: str, error_message: str, attempts: int) -> None:
        self.step, self.error_name, self.error_message, self.attempts = step, error_name, error_message, attempts
        after = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"Step {step!r} failed after {after}: {name_error(error_name, error_message)}")


class StepTimeout(StepFailed, TimeoutError):
    """The last attempt of a step took longer than its timeout.

    Raise the timeout or do less in one step. Also a TimeoutError. Attributes are those of `StepFailed`.
    """


class StepLost(StepFailed):
    """The end of an attempt is unknown, and ``on_lost="fail"`` or ``retries=0`` says not to call the function again.

    The worker died, lost its lease or was stopped, the timeout could not interrupt the function, or the transaction was
    lost. The function may have done its work. Find out, then use `WorkflowInstance.retry`, which calls it again,
    `set_result` or `skip`. ``error_name`` is "OutcomeUnknown". Attributes are those of `StepFailed`.
    """


class StepMaxAttemptsExceeded(StepFailed):
    """Workers died in every attempt of a step.

    Look at the workers' logs. Attributes are those of `StepFailed`.
    """


class EventTimeout(StepFailed, TimeoutError):
    """No event came before the deadline of a wait.

    Catch it to handle the absence of the event. Also a TimeoutError. Attributes are those of `StepFailed`.
    """


class EventPayloadInvalid(StepFailed):
    """An event came, but its payload does not fit the schema of the wait. The event is consumed.

    Catch it to wait for the next one. Attributes are those of `StepFailed`.
    """
