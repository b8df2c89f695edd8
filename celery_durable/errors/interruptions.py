"""The exceptions that end a pass. Workflow code neither catches nor raises these."""

from __future__ import annotations

from celery_durable.errors.base import DurableError


class Interruption(BaseException):
    """The base class of the exceptions that unwind workflow code.

    It is not an Exception, so that ``except Exception`` does not catch it.
    """


class Suspend(Interruption):
    """Ends a pass over the workflow's function, which a later pass calls again. Do not catch it.

    A workflow that catches it fails with `SuspensionSwallowed`.
    """


class StepInterrupted(Interruption):
    """Ends the function of a step whose timeout is over.

    The attempt then fails with `StepTimeout`. Use ``finally`` to clean up.
    """


class Superseded(Interruption):
    """Ends a pass whose claim belongs to another worker now. The transaction is rolled back (LAW 2)."""


class PassStalled(DurableError):
    """A pass hung outside of workflow code for longer than ``durable_stall_seconds``. Logged, never raised.

    Another worker continues the instance. Restart the worker that hangs, if it does not recover.

    Attributes:
        ref: Workflow, instance and run.
        seconds: How long it has hung.
    """

    code = "PASS_STALLED"

    def __init__(self, ref: str, seconds: float) -> None:
        self.ref, self.seconds = ref, seconds
        super().__init__(
            f"The pass over {ref} has hung for {seconds:.0f} s outside of the workflow's code: it waits for something "
            "that does not answer. The worker's process still hangs; restart it if it does not recover by itself."
        )


class PassBroken(Interruption):
    """Ends a pass after a failure outside of workflow code, for instance of the database. ``__cause__`` says which."""
