"""One pass over a run of a linear workflow: the rows decide the next step, and its handler returns the outcome.

``READY -> RUNNING -> DONE | WAITING | READY | DEAD``: each transition is one commit under the claim's token. The
definition provides the handlers, and never decides which step follows. If a new pass finds a row RUNNING, the worker of
that attempt has died.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any, assert_never

from celery_durable import notify, values
from celery_durable.definitions import LinearDefinition
from celery_durable.errors import (
    DurableError,
    HandlerAnswerInvalid,
    StepCommitConflict,
    Superseded,
    ValueRefused,
    WorkerCrashLoop,
)
from celery_durable.linear import Completed, Dead, Outcome, Retry, Waiting
from celery_durable.model import (
    LEASE_EXPIRED,
    DueRun,
    LogLevel,
    LogLine,
    OpenWait,
    ReleaseOutcome,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
)
from celery_durable.runner.body_runner import MAX_BODY_RERUNS
from celery_durable.runner.execution_context import Environment
from celery_durable.runner.handlers import Handlers
from celery_durable.runner.lease import Lease
from celery_durable.runner.step_attempt import PassOver, Raised, Returned, StepAttempt, TimedOut
from celery_durable.runner.step_commit import BodyRerunRequired, Committed, Committer, StepCommit
from celery_durable.runner.step_effects import StepEffectFailed
from celery_durable.runtime import ConcurrentBody
from celery_durable.store import run_events
from celery_durable.store.claims import GuardResult
from celery_durable.store.engine import Tx
from celery_durable.store.step_rows import RunState, StepWrite

logger = logging.getLogger("celery_durable.runner")

_SHORTEST_WAIT = timedelta(seconds=1)
_AT_ONCE = timedelta(0)
"""As ``retry_in`` of a READY row: the row may run from the time of the commit on, for the first time or again."""


class LinearPass:
    """Advances one run as far as its rows allow now. ``max_commits``: release it after this many handler outcomes."""

    def __init__(
        self,
        definition: LinearDefinition,
        env: Environment,
        lease: Lease,
        committer: Committer,
        run_state: RunState,
        *,
        max_commits: int | None,
    ) -> None:
        self._definition, self._env, self._lease, self._committer = definition, env, lease, committer
        self._handlers = Handlers(definition, env, lease, run_state, committer.published)
        self._max_commits = max_commits
        self._run_state, self._rows = run_state, list(run_state.steps)
        self._now = lease.claim.claimed_at  # never ahead of the database's time
        self._started_at, self._commits, self._pause_requested = env.runtime.monotonic(), 0, False
        self._summary: str | None = None
        self._logs: list[LogLine] = []

    def run(self) -> str:
        """Run steps until the run waits, ends or is released; returns a short sentence for the log."""
        crashes, current_step = self._lease.claim.crash_count, self._current_step()
        if crashes >= self._env.settings.max_crashes and current_step is not None:
            error = WorkerCrashLoop(crashes)
            self._fail_run(current_step, (type(error).__name__, str(error)))
        else:
            notify.send_pass_started(self._lease.claim, is_start_recorded=self._run_state.is_start_recorded)
        while self._summary is None:
            row = self._current_step()
            if row is None:
                self._complete_run()
            elif row.status is StepStatus.RUNNING:
                self._recover_step(row)
            elif self._should_stop():
                self._release([])
            elif not self._handlers.has_handler(row):
                self._release_without_handler(row)
            elif row.status is StepStatus.LINEAR_WAITING:
                self._check_wait(row)
            elif row.next_retry_at is not None and row.next_retry_at > self._now:
                self._release([OpenWait(row.next_retry_at)])
            else:
                self._run_step(self._commit(StepCommit([self._build_running_write(row)])).rows[0])
        return self._summary

    def _current_step(self) -> StepRow | None:
        """The first step that is not done; None if all are done."""
        return next((row for row in self._rows if row.status is not StepStatus.DONE), None)

    def _complete_run(self) -> None:
        """Complete the run, because all its steps are done.

        Normally the commit of the last step ends the run. All steps are done here if a person completed the last one
        with set-result, or if another worker took over the run before this pass read the rows. In the second case the
        commit fails with Superseded.
        """
        run_outcome = RunOutcome(Status.COMPLETE, output=self._rows[-1].result)
        self._committer.end_run(run_outcome, [])
        self._summary = str(run_outcome.status)

    def _should_stop(self) -> bool:
        is_out_of_time = (
            self._commits and self._env.runtime.monotonic() - self._started_at > self._env.settings.pass_seconds
        )
        has_reached_max_commits = self._max_commits is not None and self._commits >= self._max_commits
        return bool(self._pause_requested or self._env.should_stop() or is_out_of_time or has_reached_max_commits)

    # --- transitions ----------------------------------------------------------------------------

    def _build_write(self, row: StepRow, status: StepStatus, **changes: Any) -> StepWrite:
        """Build the row with a new status and ``changes``. Everything else stays the same, except the times."""
        unchanged: dict[str, Any] = {
            "attempts": row.attempts,
            "max_attempts": row.max_attempts,
            "timeout": row.timeout,
            "wake_at": row.wake_at,
            "event_type": row.wait_event_type,
            "event_seq": row.event_seq,
            "error_name": row.error_name,
            "error_message": row.error_message,
        }
        return StepWrite(
            key=row.step_key,
            seq=row.seq,
            name=row.name,
            type=row.type,
            status=status,
            replaces=row.commit_id,
            commit_id=self._env.runtime.new_token(),
            **(unchanged | changes),
        )

    def _build_running_write(self, row: StepRow) -> StepWrite:
        # The row's `started_at` is the time of the commit minus `ran_for`.
        return self._build_write(row, StepStatus.RUNNING, ran_for=timedelta(0))

    def _recover_step(self, row: StepRow) -> None:
        """Record that the worker of the step's attempt died: retry the step, or fail the run."""
        if self._is_last_attempt(row):
            self._fail_run(row, (LEASE_EXPIRED, "the worker of the last attempt died"))
        else:
            text = "the worker of the attempt died"
            next_attempt: dict[str, Any] = {"attempts": row.attempts + 1, "retry_in": _AT_ONCE}
            write = self._build_write(
                row, StepStatus.READY, **next_attempt, error_name=LEASE_EXPIRED, error_message=text
            )
            self._commit(StepCommit([write]))

    def _check_wait(self, row: StepRow) -> None:
        """Check a waiting step under the lock.

        If its event has arrived, the step becomes READY with that event. If its deadline has passed, it becomes RUNNING
        without an event. Otherwise it keeps waiting, and the same commit suspends the instance.
        """
        commit_id = self._env.runtime.new_token()
        due_at, type_ = row.wake_at, row.wait_event_type
        assert due_at is not None
        assert type_ is not None

        def decide(tx: Tx, guard_result: GuardResult) -> list[StepWrite]:
            event = run_events.find_oldest_event(tx, self._lease.claim, type_, deadline=due_at)
            if event is not None:
                run_events.consume(tx, self._lease.claim, guard_result, event, key=row.step_key)
                return [replace(self._build_ready_write(row, event.seq), commit_id=commit_id)]
            return [replace(self._build_running_write(row), commit_id=commit_id)] if due_at <= guard_result.now else []

        def waits_after_commit(rows: list[StepRow]) -> list[OpenWait]:
            return [] if rows else [OpenWait(due_at, type_)]

        placeholder = replace(self._build_running_write(row), commit_id=commit_id)
        committed = self._commit(StepCommit([placeholder], decide=decide, waits_after_commit=waits_after_commit))
        if committed.rows and committed.rows[0].status is StepStatus.RUNNING:
            self._run_step(committed.rows[0])

    def _build_ready_write(self, row: StepRow, event_seq: int) -> StepWrite:
        return self._build_write(
            row,
            StepStatus.READY,
            event_seq=event_seq,
            event_type=None,
            wake_at=None,
            retry_in=_AT_ONCE,
            error_name=None,
            error_message=None,
        )

    def _is_last_attempt(self, row: StepRow) -> bool:
        return row.max_attempts is not None and row.attempts + 1 >= row.max_attempts

    def _fail_run(self, row: StepRow, error: tuple[str, str], step_attempt: StepAttempt | None = None) -> None:
        name, message = values.sanitize_error(*error)
        write = self._build_write(
            row,
            StepStatus.DEAD,
            attempts=row.attempts + 1,
            error_name=name,
            error_message=message,
            ran_for=None if step_attempt is None else step_attempt.duration,
        )
        run_outcome = RunOutcome(Status.ERRORED, error_name=name, error_message=message)
        terminal_writes = () if step_attempt is None else tuple(step_attempt.buffer.on_terminal_error)
        step_commit = StepCommit(
            [write], self._pending_logs(step_attempt), user_writes=terminal_writes, run_outcome=run_outcome
        )
        try:
            self._commit(step_commit)
        except StepEffectFailed as exc:  # `on_terminal_error` failed: end the run anyway, and log this error
            text = f"on_terminal_error of step {row.name!r} failed: {exc.error!r}"
            step_commit.user_writes, step_commit.logs = (
                (),
                [*step_commit.logs, self._build_log_line(LogLevel.ERROR, text, row)],
            )
            self._commit(step_commit)

    # --- running a step: the pass calls the handler and records its outcome ---------------------

    def _run_step(self, row: StepRow) -> None:
        notify.send_attempt_started(self._lease.claim, row.name, row.attempts + 1, type_=row.type)
        for reruns_left in reversed(range(MAX_BODY_RERUNS + 1)):
            step_attempt = self._handlers.build_attempt(row, self._rows)
            try:
                self._record(row, step_attempt, self._run_body(row, step_attempt))
            except BodyRerunRequired as exc:
                self._handlers.close_session(step_attempt.buffer)
                if not reruns_left:
                    times = MAX_BODY_RERUNS + 1
                    text = f"the step's transaction was lost {times} times, at last by: {exc}"
                    self._retry_step(row, step_attempt, None, ("StepTransactionLost", text))
                    return
                text = f"The transaction of step {row.name!r} was lost: {exc}"
                self._logs.append(self._build_log_line(LogLevel.WARNING, text, row))
            except BaseException:
                step_attempt.abandon()
                raise
            else:
                return

    def _run_body(self, row: StepRow, step_attempt: StepAttempt) -> Any:
        """Run the handler and return the attempt's outcome; None if it ran past its timeout on its own thread."""
        self._lease.ensure_held(self._env.store)
        self._env.runtime.checkpoint("before-body")
        if row.timeout is None or self._env.runtime.can_interrupt():
            outcome: Any = step_attempt.run_timed(row.timeout)
        else:
            outcomes: list[Any] = []
            self._env.runtime.run_concurrently(
                [ConcurrentBody(step_attempt.run, outcomes.append, row.timeout.total_seconds())]
            )
            (outcome,) = outcomes
        self._env.runtime.checkpoint("after-body")
        return outcome

    def _record(self, row: StepRow, step_attempt: StepAttempt, outcome: Any) -> None:
        match outcome:
            case PassOver(error):
                step_attempt.abandon()
                self._release_for_shutdown(row)
                raise error
            case TimedOut() | None:
                step_attempt.abandon()
                self._retry_step(
                    row,
                    step_attempt,
                    None,
                    ("StepTimeout", f"attempt {step_attempt.number} took longer than {row.timeout}"),
                )
            case Raised(error):
                if step_attempt.buffer.session is not None and self._env.store.is_transient(error):
                    raise BodyRerunRequired(values.get_error_text(error)) from error
                self._handle_error(row, step_attempt, self._convert_to_step_error(row, step_attempt, error))
            case Returned(returned):
                try:
                    self._apply_outcome(row, step_attempt, returned)
                except StepEffectFailed as exc:
                    # A DurableError says that the target does not exist or has ended: a retry would fail again.
                    self._handle_error(
                        row, step_attempt, exc.error, is_non_retryable=isinstance(exc.error, DurableError)
                    )
                except (ValueRefused, HandlerAnswerInvalid) as exc:
                    self._handle_error(row, step_attempt, exc)

    def _apply_outcome(self, row: StepRow, step_attempt: StepAttempt, outcome: Outcome) -> None:
        if not isinstance(outcome, Outcome):
            raise HandlerAnswerInvalid(row.name, outcome)
        match outcome:
            case Completed(result):
                self._complete_step(row, step_attempt, result)
            case Waiting():
                self._start_wait(row, step_attempt, outcome)
            case Retry(backoff, error):
                self._handlers.close_session(step_attempt.buffer)
                delay = (
                    None if backoff is None else values.parse_duration(backoff, maximum=self._env.settings.max_sleep)
                )
                self._retry_step(row, step_attempt, delay, ("Retry", error))
            case Dead(error):
                self._handlers.close_session(step_attempt.buffer)
                self._fail_run(row, ("Dead", error), step_attempt)
            case _:
                assert_never(outcome)

    def _complete_step(self, row: StepRow, step_attempt: StepAttempt, result: Any) -> None:
        text = values.encode(result, what=f"Result of step {row.name!r}", limits=self._env.settings.limits)
        done = self._build_write(
            row,
            StepStatus.DONE,
            result=text,
            ran_for=step_attempt.duration,
            wake_at=None,
            event_type=None,
            error_name=None,
            error_message=None,
        )
        next_row = next((each for each in self._rows if each.seq == row.seq + 1), None)
        if next_row is None:
            step_commit = self._build_handler_commit(
                [done], step_attempt, run_outcome=RunOutcome(Status.COMPLETE, output=text)
            )
        else:
            step_commit = self._build_handler_commit(
                [done, self._build_write(next_row, StepStatus.READY, retry_in=_AT_ONCE)], step_attempt
            )
        self._commit(step_commit, step_attempt)

    def _start_wait(self, row: StepRow, step_attempt: StepAttempt, outcome: Waiting) -> None:
        """Record the step as WAITING, or as READY if its event has already arrived."""
        settings = self._env.settings
        type_ = values.check_event_type(outcome.event_type, settings.max_event_type)
        wait_length = values.parse_duration(outcome.timeout, minimum=_SHORTEST_WAIT, maximum=settings.max_sleep)
        workflow = self._lease.claim.ref.workflow
        wait_length = self._env.runtime.wait_duration(wait_length, purpose="event", workflow=workflow, step=row.name)
        tx = self._handlers.build_tx(row, step_attempt)
        for name, payload in outcome.outbound_events:
            tx.send_outbound(name, payload)
        waiting_write = self._build_write(
            row,
            StepStatus.LINEAR_WAITING,
            wake_in=wait_length,
            wake_at=None,
            event_type=type_,
            event_seq=None,
            ran_for=step_attempt.duration,
            error_name=None,
            error_message=None,
        )

        def decide(tx: Tx, guard_result: GuardResult) -> list[StepWrite]:
            event = run_events.find_oldest_event(tx, self._lease.claim, type_, deadline=guard_result.now + wait_length)
            if event is None:
                return [waiting_write]
            run_events.consume(tx, self._lease.claim, guard_result, event, key=row.step_key)
            return [replace(self._build_ready_write(row, event.seq), commit_id=waiting_write.commit_id)]

        self._commit(
            self._build_handler_commit([waiting_write], step_attempt, decide=decide, waits_after_commit=_event_waits),
            step_attempt,
        )

    def _handle_error(
        self, row: StepRow, step_attempt: StepAttempt, error: BaseException, *, is_non_retryable: bool = False
    ) -> None:
        """Record an exception: retry the step by its policy, or fail the run if the error forbids a retry."""
        self._handlers.close_session(step_attempt.buffer)
        if is_non_retryable or values.forbids_retry(error):
            self._fail_run(row, values.describe_error(error), step_attempt)
        else:
            self._retry_step(row, step_attempt, None, values.describe_error(error))

    def _retry_step(
        self, row: StepRow, step_attempt: StepAttempt, backoff: timedelta | None, error: tuple[str, str]
    ) -> None:
        if self._is_last_attempt(row):
            self._fail_run(row, error, step_attempt)
            return
        name, message = values.sanitize_error(*error)
        if backoff is None:
            policy = self._definition.policy_of(row.name, self._env.settings.step_policy)
            backoff = policy.delay_after(row.attempts + 1)
        workflow = self._lease.claim.ref.workflow
        write = self._build_write(
            row,
            StepStatus.READY,
            attempts=row.attempts + 1,
            retry_in=self._env.runtime.wait_duration(backoff, purpose="retry", workflow=workflow, step=row.name),
            error_name=name,
            error_message=message,
            ran_for=step_attempt.duration,
        )
        self._commit(StepCommit([write], self._pending_logs(step_attempt), waits_after_commit=_retry_waits))
        self._commits += 1

    def _convert_to_step_error(self, row: StepRow, step_attempt: StepAttempt, error: BaseException) -> BaseException:
        if step_attempt.buffer.session is not None and self._env.store.is_unique_violation(error):
            return StepCommitConflict(row.name, values.sanitize_text(values.get_error_text(error), 500))
        return error

    # --- commits --------------------------------------------------------------------------------

    def _build_handler_commit(self, writes: list[StepWrite], step_attempt: StepAttempt, **options: Any) -> StepCommit:
        """Build the commit after a handler returned: ``writes``, its log lines and the effects buffered in its `tx`."""
        buffer = step_attempt.buffer
        return StepCommit(
            writes,
            self._pending_logs(step_attempt),
            user_writes=buffer.user_writes,
            instances=buffer.instances,
            events=buffer.events,
            emissions=buffer.emissions,
            messages=buffer.messages,
            labels=buffer.labels,
            **options,
        )

    def _commit(self, step_commit: StepCommit, step_attempt: StepAttempt | None = None) -> Committed:
        committed = self._committer.commit(
            step_commit, session=None if step_attempt is None else step_attempt.buffer.session
        )
        if step_attempt is not None:
            self._handlers.close_session(step_attempt.buffer)
            self._commits += 1
        self._logs.clear()
        by_key = {row.step_key: row for row in committed.rows}
        self._rows = [by_key.get(row.step_key, row) for row in self._rows]
        self._pause_requested = self._pause_requested or committed.pause_requested
        for write, row in zip(step_commit.writes, committed.rows, strict=False):
            # `next_retry_at` is when a READY row may run, also for the first time. Without a delay, it is the time of
            # this commit.
            if row.status is StepStatus.READY and not write.retry_in and row.next_retry_at is not None:
                self._now = max(self._now, row.next_retry_at)
        self._notify(committed, step_commit.run_outcome)
        if committed.due_runs:
            self._env.publish_runs(list(committed.due_runs))
        if committed.messages:
            self._env.send_messages(list(committed.messages))
        if step_commit.run_outcome is not None:
            name = step_commit.run_outcome.error_name
            self._summary = str(step_commit.run_outcome.status) + ("" if name is None else f": {name}")
        elif committed.released is not None:
            self._summary = _summarize(committed.released, committed)
        return committed

    def _notify(self, committed: Committed, run_outcome: RunOutcome | None) -> None:
        claim = self._lease.claim
        committed.notify(claim)
        if run_outcome is not None:
            notify.send_run_ended(claim, run_outcome, lambda: self._lease.now - self._run_state.created_at)
        elif committed.released is not None:
            notify.send_workflow_suspended(claim, committed.released, committed.until)

    def _release(self, waits: list[OpenWait], writes: tuple[StepWrite, ...] = (), **options: Any) -> None:
        released = self._committer.release(self._pending_logs(None), waits, writes, **options)
        if released is ReleaseOutcome.DUE:
            self._env.publish_runs([DueRun(self._lease.claim.ref, self._lease.claim.queue)])
        until = min((wait.due_at for wait in waits), default=None)
        self._summary = _summarize(released, Committed([], until=until))

    def _release_without_handler(self, row: StepRow) -> None:
        """Release a run whose next step has no handler in this process. Another worker's code may have the handler."""
        delay = timedelta(seconds=self._env.settings.unknown_workflow_seconds)
        logger.warning(
            "This worker has no handler for step %r of linear workflow %r; instance %s is left for a worker that has "
            "one. Keep the handlers of all steps of unfinished runs, or wait for the deploy to end.",
            row.name, self._definition.name, self._lease.claim.ref,
        )  # fmt: skip
        self._release([OpenWait(self._now + delay)], resets_crash_count=False)
        self._summary = f"noop: step {row.name!r} has no handler in this worker"

    def _release_for_shutdown(self, row: StepRow) -> None:
        """Make the step READY again and release the run, because the worker is stopping.

        It counts neither as an attempt nor as a crash.
        """
        try:
            self._release([], (self._build_write(row, StepStatus.READY, retry_in=_AT_ONCE),))
        except Superseded:
            logger.info("%s was taken over before this worker could release it", self._lease.claim.ref)
        except Exception as exc:  # noqa: BLE001  # the caller raises what stops the worker; the lease will expire
            logger.warning("%s could not be released, so its lease will expire: %s", self._lease.claim.ref, exc)

    # --- logs -----------------------------------------------------------------------------------

    def _build_log_line(self, level: LogLevel, text: str, row: StepRow) -> LogLine:
        message = values.sanitize_text(text, self._env.settings.max_log_message)
        return LogLine(level, "system", message, None, row.step_key, row.attempts + 1, is_replay=False)

    def _pending_logs(self, step_attempt: StepAttempt | None) -> list[LogLine]:
        return [*self._logs, *(() if step_attempt is None else step_attempt.logs)]


def _event_waits(rows: list[StepRow]) -> list[OpenWait]:
    """The waits of the rows that were written; none if the event had already arrived."""
    return [OpenWait(row.wake_at, row.wait_event_type) for row in rows if row.wake_at is not None]


def _retry_waits(rows: list[StepRow]) -> list[OpenWait]:
    return [OpenWait(row.next_retry_at) for row in rows if row.next_retry_at is not None]


def _summarize(released: ReleaseOutcome, committed: Committed) -> str:
    match released:
        case ReleaseOutcome.WAITING:
            until = committed.until
            return "waiting" if until is None else f"waiting until {until:%Y-%m-%d %H:%M:%S} UTC"
        case ReleaseOutcome.PAUSED:
            return "paused"
        case ReleaseOutcome.DUE:
            return "released: due again"
