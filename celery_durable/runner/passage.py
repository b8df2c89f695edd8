"""One pass over one run: the author's function is called, and each of its steps is replayed, run or waited for.

The pass is the `StepHost` of the Step that it lends out. Once it is over (`Suspend`, or worse) every further
step call of the function raises again and does nothing, so that ``finally: step.do(...)`` does no harm.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar, assert_never, cast

from celery_durable import values
from celery_durable.definitions import WorkflowDefinition, describe_step
from celery_durable.errors import (
    BranchNeverGathered,
    DefinitionInvalid,
    EventPayloadInvalid,
    EventTimeout,
    NonRetryableError,
    StepCancelled,
    StepFailed,
    StepMaxAttemptsExceeded,
    StepNameReused,
    StepTimeout,
    Suspend,
)
from celery_durable.ledger import Call
from celery_durable.model import EPOCH, LogLevel, ReceivedEvent, StepRow, StepStatus, StepType, from_us
from celery_durable.runner.attempts import Attempts
from celery_durable.runner.boundary import Boundary
from celery_durable.runner.branches import Branch, Race, RaceWon, Work, decoded
from celery_durable.runner.delegation import TASK_POLICY, Delegation
from celery_durable.runner.mapping import Maps
from celery_durable.runner.progress import TYPES, Progress, log_data
from celery_durable.runner.waits import Waits
from celery_durable.step import BodyCall, ChildCall, MapCall, SleepCall, StepCall, StepFuture, TaskCall, WaitCall
from celery_durable.store.claims import OpenWait
from celery_durable.values import Codec, Duration

V = TypeVar("V", bound=Callable[..., Any])
_SHORTEST_WAIT = timedelta(seconds=1)
_ERRORED = StepStatus.ERRORED
_FAILURES: dict[str, type[StepFailed]] = {
    kind.__name__: kind for kind in (StepTimeout, StepMaxAttemptsExceeded, EventTimeout, EventPayloadInvalid)
}


def _ours(verb: V) -> V:
    """Between the call of a verb and its return it is not the author's function that runs, but ours (see `Lease`)."""

    @functools.wraps(verb)
    def called(self: Pass, *args: Any, **options: Any) -> Any:
        lease = self._at.lease
        lease.author_ends(self._definition)
        try:
            return verb(self, *args, **options)
        finally:
            lease.author_begins(self._definition)

    return cast("V", called)


class Pass:
    """The host of one pass."""

    def __init__(self, definition: WorkflowDefinition, at: Progress) -> None:
        self._definition, self._at = definition, at
        self._waits, self._attempts = Waits(at), Attempts(at)
        self._delegation, self._maps = Delegation(at, self._waits), Maps(at, self._waits)
        self._policy = at.env.settings.step_policy.over(definition.step_defaults)
        self._last_end = EPOCH
        self._chances = 0
        self._submitted: dict[str, Branch] = {}
        self.waits: list[OpenWait] = []

    @_ours
    def call(self, call: StepCall) -> Any:
        self._at.enter()
        branch = self._open(call)
        self._advance([branch])
        if branch.row is None:
            self._suspend([branch])
        return self._result(branch)

    def submit(self, call: StepCall) -> StepFuture[Any]:
        self._at.enter()
        branch = self._open(call)
        self._at.ledger.hold(branch.key)
        self._submitted[branch.key] = branch
        return StepFuture(self, branch.name, branch.key, branch)

    @_ours
    def gather(self, futures: tuple[StepFuture[Any], ...], *, return_exceptions: bool) -> list[Any]:
        self._at.enter()
        branches = self._take(futures)
        self._advance(branches)
        open_ = [branch for branch in branches if branch.row is None]
        if open_:
            self._suspend(open_)
        results: list[Any] = []
        failed = [branch.key for branch in branches if branch.row is not None and branch.row.status is _ERRORED]
        for branch in branches:  # all of them, before the first failure is raised
            self._move_time(branch)
        for branch in branches:
            try:
                results.append(self._result(branch, failed))
            except (StepFailed, NonRetryableError) as exc:
                if not return_exceptions:
                    raise
                results.append(exc)
        return results

    @_ours
    def first(self, name: str, futures: tuple[StepFuture[Any], ...]) -> Any:
        self._at.enter()
        if not futures:
            raise DefinitionInvalid(f"step.first({name!r}) needs at least one branch.")
        branches = self._take(futures)
        self._check_name(name)
        entry = self._at.ledger.call(name, StepType.DO, ("first", [branch.key for branch in branches]))
        by_key = {branch.key: branch for branch in branches}
        if entry.row is None:
            self._at.race = Race(entry, branches)
            try:
                self._settle_race(self._at.race)
            finally:
                self._at.race = None
        row = self._at.ledger.row(entry.key)
        if row is None:
            # One that has ended, and no verdict: its commit was in doubt, and took it along. The next pass reads it.
            is_over = any(self._at.settled_row(branch) for branch in branches)
            self._suspend([] if is_over else branches)
            raise AssertionError("unreachable")
        key = Codec().decode(row.result or "null")
        if key not in by_key:
            raise DefinitionInvalid(
                f"step.first({name!r}) was won by branch {key!r}, which the code does not pass to it any more. "
                "Pass it again, or give the new race another name."
            )
        winner = by_key[key]
        winner.row = self._at.ledger.row(winner.key)
        return self._result(winner, [winner.key, entry.key])

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None:
        self._at.append(level, message, category, log_data(self._at.env.settings, message, category, data))

    def publish(self, key: str, value: Any) -> None:
        self._at.publish(key, value)

    def now(self) -> datetime:
        self._at.enter()
        return self._now()

    def _now(self) -> datetime:
        """When the last step ended that the code has asked for; before the first, when the run began."""
        return max(self._last_end, self._at.part.began)

    def chance(self) -> random.Random:
        self._at.enter()
        self._chances += 1
        return random.Random(f"{self._at.part.run}/{self._chances}")  # noqa: S311  # reproducible on purpose

    # --- the pass as the runner sees it ---------------------------------------------------------

    def check_end(self) -> None:
        """The function returned: nothing may be left that nobody asked for; raises BranchNeverGathered."""
        if self._submitted:
            raise BranchNeverGathered([branch.name for branch in self._submitted.values()])

    def _suspend(self, branches: list[Branch]) -> None:
        self.waits = [branch.wait for branch in branches if branch.row is None and branch.wait is not None]
        raise self._at.interrupt(Suspend())

    def _check_name(self, name: str) -> None:
        values.label("Step name", name, self._at.env.settings.max_step_name)

    def _open(self, call: StepCall) -> Branch:
        """Identify a call, check what it carries, and warn where a name is used again."""
        fn, policy, name, type_ = None, self._policy, call.name, TYPES[type(call)]
        if isinstance(call, BodyCall):
            fn = describe_step(call.fn)
            policy, name = policy.over(fn.config).over(call.config), fn.name if name is None else name
        elif isinstance(call, (TaskCall, MapCall)):
            policy = TASK_POLICY.over(call.config)
        if name is None:
            raise DefinitionInvalid("A lambda has no name of its own: step.do('name', lambda: ...).")
        identity = self._identity(call)
        self._check_name(name)
        entry = self._at.ledger.call(name, type_, identity, repeat=policy.repeat and type_ is StepType.DO)
        if isinstance(identity, datetime) and entry.row is None and identity > self._now():
            # Against a time that is the same on every pass: a refusal that is caught must not turn into a sleep.
            values.duration(identity - self._now(), maximum=self._at.env.settings.max_sleep)
        if entry.is_again:
            self._at.append(
                LogLevel.WARNING,
                f"Step name {name!r} is used again in one pass: the recorded result is returned.",
                "system",
            )
            entry = Call(entry.key, entry.name, entry.seq, self._at.ledger.row(entry.key), is_again=True)
        return Branch(call, entry, policy, fn)

    def _identity(self, call: StepCall) -> Any:
        """What a call does, comparable; what it carries is checked."""
        settings = self._at.env.settings
        match call:
            case BodyCall():
                return Work.of(call)
            case SleepCall(until=None):
                return values.duration(call.span, maximum=settings.max_sleep)
            case SleepCall(until=until):
                return values.aware(until, "sleep_until")
            case WaitCall():
                _ = Codec(call.schema, what=f"The schema of wait {call.name!r}").is_typed
                if call.is_topic:
                    values.topic(call.event_type)
                else:
                    values.event_type(call.event_type, settings.max_event_type)
                return call.event_type, call.is_topic, self._wait(call.timeout)
            case TaskCall():
                return call.signature, call.config
            case MapCall():
                return call.task, call.items, call.config, call.max_concurrency
            case ChildCall():
                timeout = None if call.timeout is None else self._wait(call.timeout)
                return call.definition.name, call.params, call.instance_id, timeout
            case _:
                assert_never(call)

    def _wait(self, timeout: Duration) -> timedelta:
        return values.duration(timeout, minimum=_SHORTEST_WAIT, maximum=self._at.env.settings.max_sleep)

    def _take(self, futures: tuple[StepFuture[Any], ...]) -> list[Branch]:
        """The branches of these futures; from here on their names are free again."""
        branches = []
        for future in futures:
            branch = future.branch
            if not isinstance(branch, Branch):
                raise DefinitionInvalid(f"{future!r} is no branch of this workflow run.")
            if branch in branches:
                raise StepNameReused(branch.name, concurrently=True)
            self._submitted.pop(branch.key, None)
            self._at.ledger.let_go(branch.key)
            branch.row = self._at.settled_row(branch)
            branches.append(branch)
        return branches

    def _move_time(self, branch: Branch) -> None:
        if branch.row is not None and branch.row.finished_at is not None:
            self._last_end = max(self._last_end, branch.row.finished_at)

    def _result(self, branch: Branch, failed: Sequence[str] = ()) -> Any:
        """Hand out what is recorded: the same on the first pass as on every other.

        ``failed``: the rows that are to go where a failure is to be tried again, by default this branch's.
        """
        self._move_time(branch)
        row = branch.row
        assert row is not None
        if row.status is StepStatus.CANCELLED:
            raise StepCancelled(branch.name)
        if row.status is StepStatus.ERRORED:
            kind = _FAILURES.get(row.error_name or "", StepFailed)
            failure = kind(branch.name, row.error_name or "", row.error_message or "", row.attempts)
            failure.failed_keys, failure.failed_place = tuple(failed) or (branch.key,), self._at.ledger.place
            raise failure from branch.cause
        match branch.call:
            case SleepCall():
                return None
            case WaitCall(schema=schema):
                return _received(branch.name, row, Codec(schema))
            case TaskCall():
                return Codec().decode(row.result or "null")
            case MapCall():
                return self._results(branch, branch.call, row)
            case ChildCall(definition=definition):
                return decoded(branch.name, definition.output, row.result or "null")
            case BodyCall():
                assert branch.fn is not None
                return decoded(branch.name, branch.fn.result, row.result or "null")

    def _results(self, branch: Branch, call: MapCall, row: StepRow) -> list[Any]:
        """What the items of a map came to; of those that failed, if failures are wanted too, the failure."""
        results: list[Any] = []
        for place, (answer, attempts) in enumerate(self._maps.answers(branch, row)):
            error = values.error_in(answer)
            if error is None:
                results.append(values.output_in(answer))
                continue
            kind = _FAILURES.get(error.name, StepFailed)
            failure = kind(f"{branch.name}[{place}]", error.name, error.message, attempts)
            if not call.return_exceptions:  # they were, when it was recorded
                failure.failed_keys, failure.failed_place = (branch.key,), self._at.ledger.place
                raise failure
            results.append(failure)
        return results

    def _advance(self, branches: list[Branch]) -> None:
        """Bring each branch as far as it goes: settled, or with a wait."""
        sole = len(branches) == 1
        # Also a step that waits is open: the commits that look after it clear the count of crashes.
        alone = sum(branch.row is None for branch in branches) == 1
        ready: list[Branch] = []
        for branch in branches:
            if branch.row is not None:
                continue
            match branch.call:
                case SleepCall():
                    self._waits.sleep(branch, branch.call, sole=sole)
                case WaitCall():
                    self._waits.event(branch, branch.call, sole=sole)
                case TaskCall():
                    self._delegation.task(branch, branch.call, sole=sole)
                case MapCall():
                    self._maps.map(branch, branch.call, sole=sole)
                case ChildCall():
                    self._delegation.child(branch, branch.call, sole=sole)
                case BodyCall():
                    ready.append(branch)
        self._attempts.advance(ready, alone=alone, sole=sole)

    def _settle_race(self, race: Race) -> None:
        ended = [branch for branch in race.branches if branch.row is not None]
        # Whoever lost an earlier race can win this one only against others that did.
        able = [branch for branch in ended if branch.row is not None and branch.row.status is not StepStatus.CANCELLED]
        if able or len(ended) == len(race.branches):  # it had ended before it was raced
            settled = (able or ended)[0]
            boundary = Boundary(self._at.race_writes(settled, self._at.env.runtime.new_token()), self._at.take_logs())
            self._at.note(self._at.guarded(lambda: self._at.committer.commit(boundary)))
            return
        with suppress(RaceWon):
            self._advance(race.branches)


def _received(step: str, row: StepRow, schema: Codec) -> ReceivedEvent[Any]:
    stored = Codec().decode(row.result or "null")
    payload = stored["payload"]
    if schema.is_typed:
        payload = decoded(step, schema, values.encode(payload, what="Event payload", limits=values.CHECKED))
    return ReceivedEvent(type=stored["type"], payload=payload, timestamp=from_us(stored["at"]))
