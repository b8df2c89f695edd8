"""What ends a pass from inside. Workflow code neither catches nor raises these."""

from __future__ import annotations

from celery_durable.errors.base import DurableError


class Interruption(BaseException):
    """Unwinds author code without being an `Exception` that a workflow would catch."""


class Suspend(Interruption):
    """The pass ends here; the function will be called again. Let it through: do not catch BaseException."""


class StepInterrupted(Interruption):
    """The timer of a running attempt went off."""


class Superseded(Interruption):
    """A write under a claim found that the claim is no longer ours: roll back, stop, say nothing (LAW 2)."""


class PassStuck(DurableError):
    """A pass has not moved for `durable_stall_seconds` outside of the author's code; its claim was taken away."""

    code = "PASS_STUCK"

    def __init__(self, ref: str, seconds: float) -> None:
        self.ref, self.seconds = ref, seconds
        super().__init__(
            f"The pass over {ref} has not moved for {seconds:.0f} s, and it was not the workflow's code that ran: it "
            "waits for something outside that does not answer. The worker's process is still stuck in it; restart it "
            "if that does not end by itself."
        )


class PassBroken(Interruption):
    """Something other than author code failed, such as the database. Its cause says what."""
