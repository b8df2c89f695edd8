"""Replaying a record against the code of today: the pass of production, which stops where it would do something.

What the code calls is answered from the record, by the same rules as ever. What it would do else is told: nothing is
run, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from celery_durable.definitions import WorkflowDefinition
from celery_durable.errors import StepNameReused, StepResultInvalid, StepTypeMismatch, Suspend
from celery_durable.ledger import Ledger
from celery_durable.model import LogLine, Ref, Status, StepRow
from celery_durable.runner.board import checked
from celery_durable.runner.boundary import Committer
from celery_durable.runner.branches import Branch, Race
from celery_durable.runner.changes import Difference, changes
from celery_durable.runner.passage import Pass
from celery_durable.runner.progress import Progress
from celery_durable.runner.recorded import Recorded
from celery_durable.step import StepCall
from celery_durable.store.claims import After, Ending, OpenWait
from celery_durable.store.journal import StepWrite

_KEEP = (
    "Keep the recorded steps and their names until no run with them is left, or give the changed workflow a new name."
)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How the code of today follows a record. All steps are in call order.

    ``replayed``: recorded, and answered from the record. ``ahead``: those that the code comes to, and has to wait
    for, or run. ``missed``: recorded, and not called. ``end``: where it came to an end, in a sentence. ``changes``: of
    open steps, which do not keep the run from going on.
    """

    ref: Ref
    replayed: tuple[StepRow, ...]
    ahead: tuple[str, ...]
    missed: tuple[StepRow, ...]
    end: str
    differences: tuple[Difference, ...]
    changes: tuple[Difference, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether the code does nothing else than the record."""
        return not self.differences


class Onlooker(Committer):
    """Commits nothing, and remembers how the run would have ended."""

    def __init__(self) -> None:
        self.ending: Ending | None = None

    def settle(self, ending: Ending, logs: list[LogLine]) -> None:  # noqa: ARG002  # the committer's signature
        self.ending = ending

    def let_go(
        self,
        logs: list[LogLine],  # noqa: ARG002
        waits: list[OpenWait],  # noqa: ARG002
        writes: Sequence[StepWrite] = (),  # noqa: ARG002
        *,
        is_progress: bool | None = None,  # noqa: ARG002
    ) -> After:
        return After.WAITING


class Rehearsing(Pass):
    """The host of such a pass."""

    def __init__(self, definition: WorkflowDefinition, at: Progress) -> None:
        super().__init__(definition, at)
        self.ahead: tuple[Branch, ...] = ()
        self.differences: dict[str, Difference] = {}
        """By the name of the step."""
        self.changes: list[Difference] = []

    def publish(self, key: str, value: Any) -> None:
        """Check the value, and show it to nobody."""
        checked(self._at.env.settings, key, value)
        if self._at.over is not None:
            raise self._at.over

    def _open(self, call: StepCall) -> Branch:
        try:
            return super()._open(call)
        except (StepTypeMismatch, StepNameReused) as exc:
            self._differs(exc.step, exc)
            raise

    def _result(self, branch: Branch, failed: Sequence[str] = ()) -> Any:
        try:
            return super()._result(branch, failed)
        except StepResultInvalid as exc:
            remedy = "Let the annotation take what is recorded until no run with it is left."
            self.differences.setdefault(branch.name, Difference(str(exc), remedy))
            raise

    def _differs(self, step: str, error: Exception) -> None:
        sentence, _, remedy = str(error).partition(". ")
        self.differences.setdefault(step, Difference(f"{sentence}.", remedy))

    def _advance(self, branches: list[Branch]) -> None:
        """Nothing is brought further than the record."""
        for branch in branches:
            branch.row = branch.row or self._at.settled_row(branch)
        ahead = [branch for branch in branches if branch.row is None]
        if ahead:
            self._stop(ahead)

    def _settle_race(self, race: Race) -> None:
        self._stop(race.branches)

    def _stop(self, branches: list[Branch]) -> NoReturn:
        self.ahead = tuple(branches)
        for branch in branches:
            row = self._at.ledger.row(branch.key)
            if row is not None and not row.is_settled:
                self.changes += changes(branch, row, self._at.env.settings)
        raise self._at.interrupt(Suspend())


def judge(recorded: Recorded, ledger: Ledger, host: Rehearsing, ending: Ending | None) -> Rehearsal:
    """What a pass that has come to its end tells of the code."""
    unseen = ledger.missed
    missed = [row for row in unseen if row.name not in host.differences]
    replayed = [row for row in recorded.loaded.steps if row.is_settled and row not in unseen]
    found = list(host.differences.values())
    if not found and (difference := _difference(recorded, ledger, host, ending, missed)) is not None:
        found.append(difference)
    return Rehearsal(
        ref=recorded.ref,
        replayed=tuple(replayed),
        ahead=tuple(branch.name for branch in host.ahead),
        missed=tuple(missed),
        end=_end(ledger, host, ending),
        differences=tuple(found),
        changes=tuple(host.changes),
    )


def _difference(
    recorded: Recorded, ledger: Ledger, host: Rehearsing, ending: Ending | None, missed: Sequence[StepRow]
) -> Difference | None:
    does = _does(ledger, host, ending)
    if missed:
        others = f", and {len(missed) - 1} more" if len(missed) > 1 else ""
        return Difference(f"The code {does}, where the record has {_step(missed[0])}{others}.", _KEEP)
    fails = ending is not None and ending.status is Status.ERRORED
    match recorded.status:
        case Status.COMPLETE if ending is None or fails:
            return Difference(f"The code {does}, where the record is complete.", _KEEP)
        case Status.ERRORED if fails and ending is not None and ending.error_name != recorded.error_name:
            sentence = f"The code {does}, where the record ends errored with {recorded.error_name}."
        case Status.ACTIVE | Status.WAITING | Status.PAUSED | Status.TERMINATED if fails:
            sentence = f"The code {does}, where the record does not end."
        case Status.ACTIVE | Status.WAITING | Status.PAUSED if host.ahead and ending is not None:
            sentence = f"The code {does}, where the record waits at {_names(host.ahead)}."
        case _:
            return None
    return Difference(sentence, "Mend the code before it is deployed: running instances would do the same.")


def _does(ledger: Ledger, host: Rehearsing, ending: Ending | None) -> str:
    if ending is None:
        kind = "open" if _is_open(ledger, host) else "not recorded"
        return f"calls {_names(host.ahead)}, {'which is' if len(host.ahead) == 1 else 'which are'} {kind}"
    if ending.status is Status.ERRORED:
        return f"ends errored with {ending.error_name}: {ending.error_message}".rstrip(": .")
    return "returns"


def _end(ledger: Ledger, host: Rehearsing, ending: Ending | None) -> str:
    if ending is not None:
        return f"The code {_does(ledger, host, ending)}."
    if _is_open(ledger, host):
        return f"The record is open at {_names(host.ahead)}."
    return f"The record ends before {_names(host.ahead)}."


def _is_open(ledger: Ledger, host: Rehearsing) -> bool:
    return all(ledger.row(branch.key) for branch in host.ahead)


def _names(branches: Sequence[Branch]) -> str:
    names = ", ".join(repr(branch.name) for branch in branches)
    return f"step {names}" if len(branches) == 1 else f"steps {names}"


def _step(row: StepRow) -> str:
    return f"step {row.name!r} ({row.type})"
