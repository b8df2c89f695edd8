"""One commit of a run: what it writes, what it did, and who carries it out (LAW 3 of docs/design.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from celery_durable.model import (
    DueRun,
    Ending,
    LogLine,
    OpenWait,
    OutboxMessage,
    PassResult,
    Release,
    ReleaseOutcome,
    RunOutcome,
    StepRow,
    StepWrite,
    hot_dataclass,
)
from celery_durable.runner.commit_parts import (
    ChangeLabels,
    CommitPart,
    CreateInstances,
    EmitToTopics,
    FailedAttempts,
    RunUserWrites,
    SendEvents,
    SendMessages,
)
from celery_durable.runner.failed_attempts import FailedAttempt
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.store.engine import Tx
from celery_durable.store.runs.claims import GuardResult


class BodyRerunRequired(Exception):
    """The database lost the body's transaction, for example by a deadlock. The body has to run again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The rows and the parts that a commit writes, as decided under the lock. With no rows the step keeps its row."""

    writes: Sequence[StepWrite] = ()
    parts: Sequence[CommitPart] = ()


@dataclass(slots=True, eq=False)
class StepCommit:
    """The content of one commit. All its rows have the same ``commit_id``, which is empty if it cannot write any.

    ``parts``: what it does besides writing rows and log lines. ``decide``: called after the guard has locked the
    instance; returns what to write in addition. ``ending``: how the pass leaves the run, or a function of the recorded
    rows. ``shows_progress``: whether the commit shows that the run's crashes are over; None if its rows say so.
    """

    commit_id: str = ""
    writes: Sequence[StepWrite] = ()
    logs: Sequence[LogLine] = ()
    parts: Sequence[CommitPart] = ()
    decide: Callable[[Tx, GuardResult], Decision] | None = None
    ending: Ending | Callable[[Sequence[StepRow]], Release | None] | None = None
    shows_progress: bool | None = None

    @property
    def resets_crash_count(self) -> bool:
        if self.shows_progress is not None:
            return self.shows_progress
        return not self.writes or any(write.resets_crash_count for write in self.writes)

    @property
    def is_single_row(self) -> bool:
        """Whether the commit is one row, besides its ending and log lines."""
        if self.parts or self.decide is not None or len(self.writes) != 1:
            return False
        return not self.writes[0].releases_limits

    @property
    def runs_user_code(self) -> bool:
        """Whether the transaction contains writes of user code."""
        return any(part.runs_user_code for part in self.parts)

    @property
    def failures(self) -> list[FailedAttempt]:
        """The failed attempts that end with this commit, as far as they are known before it."""
        return [failed for part in self.parts if isinstance(part, FailedAttempts) for failed in part.failures]


def build_suspension(rows: Sequence[StepRow]) -> Release:
    """Suspend the run for the waits of the rows that a commit has recorded. It is due at once if they have none."""
    return Release([wait for row in rows if not row.is_finished and (wait := OpenWait.of(row)) is not None])


def build_release_commit(waits: Sequence[OpenWait], **options: Any) -> StepCommit:
    """Build the commit that releases the run at the end of a pass. It shows progress if the run waits for something."""
    return StepCommit(ending=Release(waits), **({"shows_progress": bool(waits)} | options))


def build_attempt_commit(
    commit_id: str, writes: Sequence[StepWrite], attempt: StepAttempt, **options: Any
) -> StepCommit:
    """Build the commit of a successful attempt: its rows, its log lines, and the effects that its body requested."""
    logs = list(attempt.logs)  # a thread of the body may outlive it
    return StepCommit(commit_id, writes, logs, _build_parts(attempt), **options)


def _build_parts(attempt: StepAttempt) -> list[CommitPart]:
    buffer = attempt.buffer
    parts: list[CommitPart] = []
    if buffer.user_writes or buffer.transaction is not None:
        parts.append(RunUserWrites(buffer.user_writes, buffer.transaction))
    if buffer.labels:
        parts.append(ChangeLabels(buffer.labels))
    if buffer.messages:
        parts.append(SendMessages(buffer.messages))
    if buffer.instances:
        parts.append(CreateInstances(buffer.instances))
    if buffer.events:
        parts.append(SendEvents(buffer.events, buffer.instances))
    if buffer.emissions:
        parts.append(EmitToTopics(buffer.emissions))
    return parts


@hot_dataclass()
class Committed:
    """What a commit did. ``rows``: as recorded, in the order of the writes.

    ``released``: the state of the instance if the commit released it. ``until``: when its earliest wait is due.
    ``writes`` and ``failures``: what `notify` sends signals for. ``announcements`` sends those of the parts.
    ``is_certain``: False if the commit was in doubt, the claim is gone, and no row shows that it happened: another
    worker may have taken over.
    """

    rows: Sequence[StepRow] = ()
    pause_requested: bool = False
    released: ReleaseOutcome | None = None
    until: datetime | None = None
    run_outcome: RunOutcome | None = None
    due_runs: Sequence[DueRun] = ()
    messages: Sequence[OutboxMessage] = ()
    writes: Sequence[StepWrite] = ()
    failures: Sequence[FailedAttempt] = ()
    announcements: Sequence[Callable[[], object]] = ()
    is_certain: bool = True
    renews_lease: bool = True

    @property
    def pass_result(self) -> PassResult:
        """How the pass left the run, if this is its last commit."""
        return PassResult(self._summary, self.run_outcome)

    @property
    def _summary(self) -> str:
        if self.run_outcome is not None:
            return self.run_outcome.summary
        match self.released:
            case ReleaseOutcome.PAUSED:
                return "paused"
            case ReleaseOutcome.DUE:
                return "released: due again"
        return "waiting" if self.until is None else f"waiting until {self.until:%Y-%m-%d %H:%M:%S} UTC"


class Committer(Protocol):
    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        """Run one commit, which ends the open transaction of ``attempt``.

        Raises Superseded, StepEffectFailed and, with a transaction, BodyRerunRequired.
        """
        ...

    def announce(self, committed: Committed) -> None:
        """Send the signals of a commit, and publish its due runs and messages. The pass has recorded the commit."""
        ...

    def publish(self, key: str, text: str) -> None: ...
