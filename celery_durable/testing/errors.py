"""The errors of `celery_durable.testing`: misuse of the harness, and failed assertions."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors import DurableError
from celery_durable.model import RunRef


class HarnessError(DurableError):
    """The base class of the errors of this package."""

    code = "HARNESS_ERROR"


class HarnessMisuse(HarnessError):
    """A call of the harness makes no sense. The message says what to do instead."""

    code = "HARNESS_MISUSE"


class HeldOutside(BaseException):
    """A barrier would hold the test's own thread. Not an Exception, so it is no failure of the step."""


class SampledSchedules(UserWarning):
    """`assert_crash_safe` ran only a sample, because there are more schedules than ``schedules``."""


class UncheckedTables(UserWarning):
    """`assert_crash_safe` does not compare some tables that the workflow has written to."""


class PendingHooks(UserWarning):
    """Messages wait for a commit that a test inside a transaction never makes. So the harness has not got them."""


class OpenStepChanged(UserWarning):
    """An open step waits for something else than the new code asks for. The run continues as stored."""


class GoldenHistoryMissing(HarnessError, AssertionError):
    """No run has been recorded for `GoldenHistories.check`."""

    code = "GOLDEN_HISTORY_MISSING"

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"There is no golden history {path}. Record it, and commit it: pytest --durable-update")


class HarnessBusy(HarnessError, AssertionError):
    """`run_until_idle` has used all its ticks, and there is still work."""

    code = "HARNESS_BUSY"

    def __init__(self, ticks: int, busy: Sequence[str]) -> None:
        self.ticks, self.busy = ticks, tuple(busy)
        super().__init__(
            f"Still busy after {ticks} ticks: {', '.join(busy)}. A workflow that never comes to rest? "
            "If it only has that much to do, raise max_ticks."
        )


class NotEnded(HarnessError, AssertionError):
    """A test asked for the result of an instance that has not ended."""

    code = "NOT_ENDED"

    def __init__(self, workflow: str, instance_id: str, status: str, open_steps: Sequence[str]) -> None:
        self.workflow, self.instance_id, self.status = workflow, instance_id, status
        what = "; ".join(open_steps) or "nothing; call run_until_idle()"
        super().__init__(f"Instance {instance_id!r} of workflow {workflow!r} is {status}. Open: {what}.")


class NothingDue(HarnessError):
    """The code under test waits for a result, and nothing will ever be due."""

    code = "NOTHING_DUE"

    def __init__(self) -> None:
        super().__init__(
            "The code under test waits for a result, and no instance has anything to do or a time to wait for: send "
            "the event, resume the instance or release the barrier that it waits for first."
        )


class StoreNotEmpty(HarnessError):
    """The database that the test gave to a harness has instances already."""

    code = "STORE_NOT_EMPTY"

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(
            f"{url} holds workflow instances, and a harness would run them. Give it a database of its own; "
            "if this is one, DurableHarness(..., wipe=True) deletes all instances in it first."
        )


class ScenarioFailed(HarnessError, AssertionError):
    """A step of a scenario failed. ``__cause__`` is its error."""

    code = "SCENARIO_FAILED"

    def __init__(self, scenario: str, number: int, action: str, reason: str) -> None:
        self.scenario, self.number, self.action, self.reason = scenario, number, action, reason
        super().__init__(f"Scenario {scenario!r}, step {number} ({action}): {reason}")


class NotCrashSafe(HarnessError, AssertionError):
    """`assert_crash_safe` found a schedule in which crashes change the result of a workflow."""

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
    """`assert_replays` found that the new code takes other steps than a stored run."""

    code = "NOT_REPLAYED"

    def __init__(self, ref: RunRef, differences: Sequence[tuple[str, str]]) -> None:
        self.ref, self.differences = ref, tuple(differences)
        lines = "".join(f"\n  {sentence} {advice}" for sentence, advice in differences)
        super().__init__(
            f"Workflow {ref.workflow!r} does not follow what is recorded of run {ref.run_number} of instance "
            f"{ref.instance_id!r}:{lines}"
        )


class WorkersNotStarted(HarnessError):
    """A chaos run could not start one of its workers."""

    code = "WORKERS_NOT_STARTED"

    def __init__(self, last_log_line: str) -> None:
        super().__init__(f"A worker could not be started. Its last log line: {last_log_line}")
        self.last_log_line = last_log_line
