"""A pass over a run of a linear workflow: the rows alone decide the next step, and its handler returns the outcome."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_durable import values
from celery_durable.definitions import LinearDefinition, runs_in_orm
from celery_durable.errors import (
    Cancelled,
    HandlerAnswerInvalid,
    Interruption,
    NonRetryableError,
    ValueRefused,
    WorkerCrashLoop,
    WorkflowParamsInvalid,
)
from celery_durable.linear import Completed, Dead, LinearContext, Retry, TaskType, Waiting
from celery_durable.model import (
    LogLevel,
    LogLine,
    OpenWait,
    PassResult,
    ReceivedEvent,
    Release,
    RunOutcome,
    Status,
    StepRow,
    StepStatus,
    to_us,
)
from celery_durable.runner import linear_rows
from celery_durable.runner.attempts import Attempts, commit_terminal_failure, idempotency_key
from celery_durable.runner.commit_parts import FailedAttempts
from celery_durable.runner.environment import ClaimedRun, Environment, encode_log_data
from celery_durable.runner.failed_attempts import AttemptFailed, AttemptFailure, plan_retry, record_failure
from celery_durable.runner.lease import release_for_shutdown
from celery_durable.runner.linear_rows import LinearRows
from celery_durable.runner.published_values import encode_published_value
from celery_durable.runner.session_lock import SessionLock
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.runner.step_commit import (
    Committed,
    Committer,
    Decision,
    StepCommit,
    build_attempt_commit,
    build_release_commit,
    build_suspension,
)
from celery_durable.runner.step_execution import PassInterrupted
from celery_durable.step import StepLog, StepTx
from celery_durable.store.engine import Tx
from celery_durable.store.events import run_events
from celery_durable.store.runs.claims import GuardResult

logger = logging.getLogger("celery_durable.runner")

_PLAIN = values.Codec()
_SHORTEST_WAIT = timedelta(seconds=1)


class LinearPass:
    """Advances one run as far as its rows allow now. ``max_commits``: release it after this many handler outcomes."""

    def __init__(
        self,
        definition: LinearDefinition,
        env: Environment,
        run: ClaimedRun,
        committer: Committer,
        *,
        max_commits: int | None,
    ) -> None:
        self.definition, self.env, self.run, self.committer = definition, env, run, committer
        self.lease, self.claim = run.lease, run.lease.claim
        self.rows = LinearRows(run.state.steps, now=self.claim.claimed_at)
        self.logs: list[LogLine] = []
        self._attempts = Attempts(self)
        self._max_commits = max_commits
        self._started_at, self._commits, self._pause_requested = env.runtime.monotonic(), 0, False
        self._result: PassResult | None = None

    # --- the stages -----------------------------------------------------------------------------

    def check_limits(self) -> StepCommit | None:
        """Return the commit that ends a run that killed too many workers or took too long; None if it may continue."""
        if (cancelled := self.run.state.cancellation) is not None:
            return StepCommit(ending=RunOutcome(Status.TERMINATED, reason=str(cancelled)))
        crashes, row = self.claim.crash_count, self.rows.current
        if crashes < self.env.settings.max_crashes or row is None:
            if not self.run.limits.is_limited:
                return None
            reason = self.env.store.read(self.run.limits.termination_reason)
            return None if reason is None else StepCommit(ending=RunOutcome(Status.TERMINATED, reason=reason))
        error = WorkerCrashLoop(crashes)
        return linear_rows.build_failure_commit(row, self._new_commit_id(), (type(error).__name__, str(error)))

    def execute(self) -> StepCommit | None:
        """Run steps; returns the commit that ends the pass, None if a step's has. Raises as `FunctionPass.execute`."""
        try:
            return self._run_steps()
        except PassInterrupted as stopped:
            release_for_shutdown(self.claim.ref, self._release_before_stopping)
            raise stopped.error from None
        except BaseException as error:
            if self.env.stops_process(error):
                release_for_shutdown(self.claim.ref, self._release_before_stopping)
            raise

    def _run_steps(self) -> StepCommit | None:
        while self._result is None:
            row = self.rows.current
            if row is None:
                return self._complete_run()
            if row.status is StepStatus.RUNNING:
                policy = self.definition.policy_of(row.name, self.env.settings.step_policy)
                self.commit(
                    linear_rows.build_lost_worker_commit(row, self._new_commit_id(), may_repeat=policy.may_repeat)
                )
            elif self._should_stop():
                return build_release_commit([])
            elif row.name not in self.definition.handlers:
                return self._release_without_handler(row)
            elif row.status is StepStatus.LINEAR_WAITING:
                self._check_wait(row)
            elif row.next_retry_at is not None and row.next_retry_at > self.rows.now:
                return build_release_commit([OpenWait(row.next_retry_at)])
            else:
                write = linear_rows.build_running_write(row, self._new_commit_id())
                self._attempt(*self.commit(StepCommit(write.commit_id, [write])).rows)
        return None

    def conclude(self, last_commit: StepCommit | None) -> PassResult:
        if last_commit is not None:
            self.commit(last_commit)
        assert self._result is not None
        return self._result

    def _complete_run(self) -> StepCommit:
        """Complete the run, because all its steps are done.

        Normally the commit of the last step does. Here a person completed that step with set-result, or another worker
        took over the run before this pass read the rows: then the commit fails with Superseded.
        """
        return StepCommit(ending=RunOutcome(Status.COMPLETE, output=self.rows.rows[-1].result))

    def _should_stop(self) -> bool:
        elapsed_seconds = self.env.runtime.monotonic() - self._started_at
        is_out_of_time = self._commits > 0 and elapsed_seconds > self.env.settings.pass_seconds
        has_reached_max_commits = self._max_commits is not None and self._commits >= self._max_commits
        is_over = self.run.limits.is_over(self.lease.now)  # the next pass terminates it
        return bool(
            self._pause_requested or self.env.should_stop() or is_over or is_out_of_time or has_reached_max_commits
        )

    def _release_without_handler(self, row: StepRow) -> StepCommit:
        """Release a run whose next step has no handler in this process. Another worker's code may have the handler."""
        delay = timedelta(seconds=self.env.settings.unknown_workflow_seconds)
        logger.warning(
            "This worker has no handler for step %r of linear workflow %r; instance %s is left for a worker that has "
            "one. Keep the handlers of all steps of unfinished runs, or wait for the deploy to end.",
            row.name, self.definition.name, self.claim.ref,
        )  # fmt: skip
        self._result = PassResult(f"noop: step {row.name!r} has no handler in this worker", was_executed=False)
        return build_release_commit([OpenWait(self.rows.now + delay)], shows_progress=False)

    # --- steps ----------------------------------------------------------------------------------

    def _attempt(self, row: StepRow) -> None:
        """Call the handler of a step that is recorded as RUNNING."""
        self._attempts.run([LinearStep(self, row)])

    def _release_before_stopping(self) -> None:
        """Release the run; a RUNNING step is READY again, or fails if it may not be repeated."""
        self._attempts.record_interrupted()
        if self._result is not None:
            return
        row, commit_id = self.rows.current, self._new_commit_id()
        writes = []
        if row is not None and row.status is StepStatus.RUNNING:
            writes = [linear_rows.build_ready_write(row, commit_id)]
        committed = self._commit(build_release_commit([], commit_id=commit_id if writes else "", writes=writes))
        self.committer.announce(replace(committed, writes=()))  # it is no retry

    def _check_wait(self, row: StepRow) -> None:
        """Check a waiting step under the lock.

        If its event has arrived, the step becomes READY with it. If its deadline has passed, it becomes RUNNING without
        an event. Otherwise the same commit suspends the instance.
        """
        commit_id, due_at, event_type = self._new_commit_id(), row.wake_at, row.wait_event_type
        assert due_at is not None
        assert event_type is not None

        def decide(tx: Tx, guard_result: GuardResult) -> Decision:
            event = run_events.find_oldest_event(tx, self.claim, event_type, key=row.step_key, deadline=due_at)
            if event is not None:
                run_events.consume(tx, self.claim, guard_result, event, key=row.step_key)
                return Decision([linear_rows.build_event_write(row, commit_id, event.seq)])
            return Decision([linear_rows.build_running_write(row, commit_id)] if due_at <= guard_result.now else [])

        def find_ending(rows: Sequence[StepRow]) -> Release | None:
            return None if rows else Release([OpenWait(due_at, event_type)])

        # A handler that is called at the deadline may still kill its worker.
        step_commit = StepCommit(commit_id, decide=decide, ending=find_ending, shows_progress=False)
        for recorded in self.commit(step_commit).rows:
            if recorded.status is StepStatus.RUNNING:
                self._attempt(recorded)

    # --- commits --------------------------------------------------------------------------------

    def commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        committed = self._commit(step_commit, attempt)
        self.committer.announce(committed)
        return committed

    def _commit(self, step_commit: StepCommit, attempt: StepAttempt | None = None) -> Committed:
        logs_before = len(self.logs)
        step_commit.logs = [*self.logs, *step_commit.logs]
        committed = self.committer.commit(step_commit, attempt)
        del self.logs[:logs_before]
        self._commits += attempt is not None
        self._pause_requested = self._pause_requested or committed.pause_requested
        self._attempts.note_recorded(committed.rows)
        self.rows.apply(committed.rows)
        if committed.released is not None or committed.run_outcome is not None:
            self._result = self._result or committed.pass_result
        return committed

    def run_or_interrupt(self, operation: Callable[[], Any]) -> Any:
        return operation()

    def interrupt(self, reason: Interruption) -> Interruption:
        return reason

    def _new_commit_id(self) -> str:
        return next(self.lease.commit_ids)


class LinearStep:
    """A step whose handler is due (`AttemptedStep`). ``row``: as it is recorded, RUNNING."""

    def __init__(self, pass_: LinearPass, row: StepRow) -> None:
        self._pass, self._row, self._env = pass_, row, pass_.env
        self.name, self.key, self.type = row.name, row.step_key, row.type
        self.number, self.timeout = row.attempts + 1, row.timeout
        self.policy = pass_.definition.policy_of(row.name, pass_.env.settings.step_policy)
        self.may_repeat = self.policy.may_repeat
        self.ends_with_cancel = self.policy.on_cancel == "abandon"
        self.is_async = values.is_async_function(pass_.definition.handlers[row.name])

    # --- the handler's call ---------------------------------------------------------------------

    def build_attempt(self, session_lock: SessionLock | None) -> StepAttempt:
        handler = self._pass.definition.handlers[self.name]
        attempt = StepAttempt(self._env, self._pass.lease, self.key, self.number, session_lock, step=self.name)

        def call_handler() -> Any:
            return handler(self._build_context(attempt))

        async def call_async_handler() -> Any:
            return await handler(await asyncio.to_thread(self._build_context, attempt))  # it reads the event

        if self.is_async:
            attempt.set_body(call_async_handler, is_async=True)
        else:
            body = attempt.run_in_transaction(self.name, call_handler) if runs_in_orm(handler) else call_handler
            attempt.set_body(body, is_async=False)
        return attempt

    def _build_context(self, attempt: StepAttempt) -> LinearContext:
        row, ref, state = self._row, self._pass.claim.ref, self._pass.run.state
        event = self._read_event()
        if event is not None:
            task_type = TaskType.EVENT
        else:
            task_type = TaskType.RUN if row.wait_event_type is None else TaskType.WAITING_TIMEOUT
        earlier_rows = [each for each in self._pass.rows.rows if each.seq < row.seq]
        return LinearContext(
            task_type=task_type,
            step=row.name,
            seq=row.seq,
            attempt=self.number,
            params=self._decode_params(),
            results={each.name: _PLAIN.decode(each.result or "null") for each in earlier_rows},
            event=event,
            workflow=ref.workflow,
            instance_id=ref.instance_id,
            run_number=ref.run_number,
            version=state.definition_version or 0,
            tx=self._build_tx(attempt),
            log=StepLog(_HandlerLog(self._pass, attempt)),
            publish=functools.partial(self._publish, attempt),
        )

    def _build_tx(self, attempt: StepAttempt) -> StepTx:
        # A handler that returns Waiting is called again and commits again. The suffix gives each commit its own
        # idempotency key, from which `StepTx` derives the ids of messages, events and instances.
        suffix = ""
        if self._row.event_seq is not None:
            suffix = f"/event {self._row.event_seq}"
        elif self._row.wake_at is not None:
            suffix = f"/timeout {to_us(self._row.wake_at)}"
        return StepTx(
            name=self.name,
            attempt=self.number,
            idempotency_key=idempotency_key(self._pass.run.state.ancestry, self._row.step_key, suffix),
            buffer=attempt.buffer,
            open_transaction=attempt.open_transaction,
            limits=self._env.settings.limits,
        )

    def _publish(self, attempt: StepAttempt, key: str, value: Any) -> None:
        text = encode_published_value(self._env.settings, key, value)
        attempt.check_not_abandoned()
        self._pass.committer.publish(key, text)

    def _decode_params(self) -> Any:
        definition = self._pass.definition
        try:
            return definition.params.decode(self._pass.run.state.params)
        except values.ValidationFailed as exc:
            error = WorkflowParamsInvalid(definition.name, exc.problems)
            raise NonRetryableError(str(error), WorkflowParamsInvalid.__name__) from exc

    def _read_event(self) -> ReceivedEvent[Any] | None:
        """Read the event that the step received, for its handler; None if it received none."""
        if self._row.event_seq is None:
            return None
        query = functools.partial(run_events.read_event, claim=self._pass.claim, seq=self._row.event_seq)
        found = self._env.store.run_statement(query)
        return ReceivedEvent(found.type, _PLAIN.decode(found.payload), found.created_at, found.by)

    # --- the handler's outcome ------------------------------------------------------------------

    def succeed(self, attempt: StepAttempt, value: Any) -> None:
        try:
            match value:
                case Completed(result):
                    step_commit = self._complete(attempt, result)
                case Waiting():
                    step_commit = self._wait(attempt, value)
                case Retry(backoff, error):
                    limit = self._env.settings.max_sleep
                    delay = None if backoff is None else values.parse_pause(backoff, maximum=limit)
                    raise AttemptFailed(AttemptFailure("Retry", error, retry_in=delay))
                case Dead(error):
                    raise AttemptFailed(AttemptFailure("Dead", error, is_final=True))
                case _:
                    raise HandlerAnswerInvalid(self.name, value)  # noqa: TRY301
        except (ValueRefused, HandlerAnswerInvalid) as exc:
            raise AttemptFailed(AttemptFailure.of(exc)) from exc
        self._pass.commit(step_commit, attempt)

    def _complete(self, attempt: StepAttempt, result: Any) -> StepCommit:
        """Build the commit that records the step as DONE and the next one as READY, or ends the run."""
        row, commit_id = self._row, next(self._pass.lease.commit_ids)
        text = values.encode(result, what=f"Result of step {row.name!r}", limits=self._env.settings.limits)
        done = linear_rows.build_done_write(row, commit_id, result=text, ran_for=attempt.duration)
        next_row = self._pass.rows.find_next(row)
        if next_row is None:
            return build_attempt_commit(commit_id, [done], attempt, ending=RunOutcome(Status.COMPLETE, output=text))
        return build_attempt_commit(commit_id, [done, linear_rows.build_ready_write(next_row, commit_id)], attempt)

    def _wait(self, attempt: StepAttempt, outcome: Waiting) -> StepCommit:
        """Build the commit that records the step as WAITING, or as READY if its event has already arrived."""
        row, settings, claim = self._row, self._env.settings, self._pass.claim
        event_type = values.check_event_type(outcome.event_type, settings.max_event_type)
        timeout = values.parse_pause(outcome.timeout, minimum=_SHORTEST_WAIT, maximum=settings.max_sleep)
        timeout = self._env.runtime.wait_duration(timeout, purpose="event", workflow=claim.ref.workflow, step=row.name)
        asked = self._check_ask(outcome)
        tx = self._build_tx(attempt)
        for name, payload in outcome.outbound_events:
            tx.send_outbound(name, payload)
        commit_id = next(self._pass.lease.commit_ids)
        build_wait = functools.partial(linear_rows.build_wait_write, row, commit_id)

        def decide(tx: Tx, guard_result: GuardResult) -> Decision:
            until = guard_result.now + timeout
            event = run_events.find_oldest_event(tx, claim, event_type, key=row.step_key, deadline=until)
            if event is not None:
                run_events.consume(tx, claim, guard_result, event, key=row.step_key)
                return Decision([linear_rows.build_event_write(row, commit_id, event.seq)])
            wait = build_wait(event_type=event_type, timeout=timeout, ran_for=attempt.duration, **asked)
            return Decision([wait])

        def find_ending(rows: Sequence[StepRow]) -> Release | None:
            return build_suspension(rows) if any(row.wake_at is not None for row in rows) else None

        return build_attempt_commit(commit_id, [], attempt, decide=decide, ending=find_ending)

    def _check_ask(self, outcome: Waiting) -> dict[str, str | None]:
        """Return what the row keeps of a question; raises ValueRefused. An answer names its step: there can be one."""
        question = values.check_question(self.name, outcome.ask, outcome.to)
        schema = values.Codec(outcome.schema, what=f"The schema of wait {self.name!r}")
        asked = {"ask": None, "payload_type": values.name_class(outcome.schema)}
        if question is not None:
            find_answer = functools.partial(run_events.find_answer, run=self._pass.claim, key=self.key)
            if self._env.store.run_statement(find_answer) is not None:
                raise ValueRefused(f"Step {self.name!r} was answered in this run: ask again in a step of its own.")
            asked["ask"] = values.encode_ask(question, outcome.to, schema.json_schema)
        return asked

    def fail(self, attempt: StepAttempt, failure: AttemptFailure) -> None:
        row, commit_id = self._row, next(self._pass.lease.commit_ids)
        with self._pass.lease.user_code():
            failure, retry_in = plan_retry(
                self._env,
                self.policy,
                failure,
                attempt,
                is_last=linear_rows.is_last_attempt(self._row),
            )
        error = values.sanitize_error(failure.name, failure.message)
        failed = record_failure(self._env, self._pass.run, failure, attempt)
        if retry_in is None:
            step_commit = linear_rows.build_failure_commit(
                row, commit_id, error, ran_for=attempt.duration, exception=failure.error
            )
            step_commit.logs, step_commit.parts = list(attempt.logs), [FailedAttempts([failed])]
            commit_terminal_failure(self._env, self.name, attempt, step_commit, self._pass.commit)
            return
        write = linear_rows.build_retry_write(row, commit_id, error, retry_in=retry_in, ran_for=attempt.duration)
        parts = [FailedAttempts([failed])]
        self._pass.commit(StepCommit(commit_id, [write], list(attempt.logs), parts, ending=build_suspension))

    def cancel(self, attempt: StepAttempt, cancelled: Cancelled) -> None:
        outcome = RunOutcome(Status.TERMINATED, reason=str(cancelled))
        self._pass.commit(StepCommit(logs=list(attempt.logs), ending=outcome))


class _HandlerLog:
    """Collects the log lines of a handler, which the commit of its outcome writes."""

    def __init__(self, pass_: LinearPass, attempt: StepAttempt) -> None:
        self._settings, self._attempt = pass_.env.settings, attempt

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None:
        text = encode_log_data(self._settings, message, category, data)
        message = values.sanitize_text(message, self._settings.max_log_message)
        attempt = self._attempt
        attempt.logs.append(LogLine(level, category, message, text, attempt.step_key, attempt.number, is_replay=False))
