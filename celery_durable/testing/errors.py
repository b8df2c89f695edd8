"""What the testing kit raises: its own misuse, and what a test should fail with."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors import DurableError
from celery_durable.model import RunRef


class HarnessError(DurableError):
    """The base of what the testing kit raises."""

    code = "HARNESS_ERROR"


class HarnessMisuse(HarnessError):
    """The harness is asked for something that makes no sense; the message says what to do instead."""

    code = "HARNESS_MISUSE"


class HeldOutside(BaseException):
    """A barrier would hold the test's own thread. No Exception: it must not look like a failure of the step."""


class SampledSchedules(UserWarning):
    """`assert_crash_safe` leaves schedules out, since there are more than ``schedules``."""


class OpenStepChanged(UserWarning):
    """An open step waits for something else than the code of today asks for; the run goes on with what is recorded."""


class HarnessBusy(HarnessError, AssertionError):
    """`run_until_idle` has used up its ticks, and there is still work."""

    code = "HARNESS_BUSY"

    def __init__(self, ticks: int, busy: Sequence[str]) -> None:
        self.ticks, self.busy = ticks, tuple(busy)
        super().__init__(
            f"Still busy after {ticks} ticks: {', '.join(busy)}. A workflow that never comes to rest? "
            "If it only has that much to do, raise max_ticks."
        )


class NotEnded(HarnessError, AssertionError):
    """The result of an instance is asked for that has not ended."""

    code = "NOT_ENDED"

    def __init__(self, workflow: str, instance_id: str, status: str, open_steps: Sequence[str]) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        what = "; ".join(open_steps) or "nothing; call run_until_idle()"
        super().__init__(f"Instance {instance_id!r} of workflow {workflow!r} is {status}. Open: {what}.")


class NothingDue(HarnessError):
    """Code under test waits, and nothing will ever be due."""

    code = "NOTHING_DUE"

    def __init__(self) -> None:
        super().__init__(
            "The code under test waits for a result, and no instance has anything to do or a time to wait for: send "
            "the event, resume the instance or release the barrier that it waits for first."
        )


class StoreNotEmpty(HarnessError):
    """The database that a harness was given holds instances already."""

    code = "STORE_NOT_EMPTY"

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(
            f"{url} holds workflow instances, and a harness would run them. Give it a database of its own; "
            "if this is one, DurableHarness(..., wipe=True) deletes all instances in it first."
        )


class ScenarioFailed(HarnessError, AssertionError):
    """A step of a scenario failed; its cause says why."""

    code = "SCENARIO_FAILED"

    def __init__(self, scenario: str, number: int, verb: str, reason: str) -> None:
        self.scenario, self.number, self.verb, self.reason = scenario, number, verb, reason
        super().__init__(f"Scenario {scenario!r}, step {number} ({verb}): {reason}")


class NotCrashSafe(HarnessError, AssertionError):
    """A workflow ends otherwise where its workers die: `assert_crash_safe` found how."""

    code = "NOT_CRASH_SAFE"

    def __init__(self, workflow: str, schedule: str, faults: Sequence[str], problems: Sequence[str]) -> None:
        self.workflow, self.schedule, self.problems = workflow, schedule, tuple(problems)
        where = "; ".join(faults) or "nobody died"
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(
            f"Workflow {workflow!r} is not crash safe ({where}):{lines}\n"
            f"Run only this again: assert_crash_safe(..., replay={schedule})"
        )


class NotReplayed(HarnessError, AssertionError):
    """The code of today does something else than a recorded run: `assert_replays` found where."""

    code = "NOT_REPLAYED"

    def __init__(self, ref: RunRef, differences: Sequence[tuple[str, str]]) -> None:
        self.ref, self.differences = ref, tuple(differences)
        lines = "".join(f"\n  {sentence} {remedy}" for sentence, remedy in differences)
        super().__init__(
            f"Workflow {ref.workflow!r} does not follow what is recorded of run {ref.run_number} of instance "
            f"{ref.instance_id!r}:{lines}"
        )
