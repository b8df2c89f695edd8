"""A pass over a run of a workflow function: call the function, and turn the way it ended into the last commit."""

from __future__ import annotations

import logging
from typing import Any

from celery_durable import values
from celery_durable.ancestry import RunFailure
from celery_durable.definitions import WorkflowDefinition
from celery_durable.errors import (
    CancellationSwallowed,
    Cancelled,
    DurableError,
    Interruption,
    PassBroken,
    StepFailed,
    Superseded,
    Suspend,
    SuspensionSwallowed,
    WorkerCrashLoop,
    WorkflowOutputInvalid,
    WorkflowParamsInvalid,
)
from celery_durable.model import PassResult, RunOutcome, Status, WorkflowEvent
from celery_durable.replay_state import ReplayState
from celery_durable.runner.commit_parts import FailedAttempts
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.execution_context import ExecutionContext
from celery_durable.runner.failed_attempts import record_run_error
from celery_durable.runner.lease import release_for_shutdown
from celery_durable.runner.replay import ReplayContext
from celery_durable.runner.step_commit import Committer, StepCommit, build_release_commit
from celery_durable.runner.step_execution import PassInterrupted
from celery_durable.step import Step

logger = logging.getLogger("celery_durable.runner")


def open_context(
    definition: WorkflowDefinition,
    env: Environment,
    run: ClaimedRun,
    committer: Committer,
    *,
    max_commits: int | None = None,
) -> ExecutionContext:
    """Build the state of a pass over a claimed run. ``max_commits``: as in `ExecutionContext`."""
    replay_state = ReplayState(
        run.state.steps,
        workflow=definition.name,
        crash_count=run.lease.claim.crash_count,
        max_steps=definition.max_steps or env.settings.max_steps,
    )
    return ExecutionContext(env, run, replay_state, committer, max_commits=max_commits)


class FunctionPass:
    """A pass over a workflow function. ``replay``: executes the step calls of the function."""

    def __init__(self, definition: WorkflowDefinition, context: ExecutionContext, replay: ReplayContext) -> None:
        self._definition, self._context, self._replay = definition, context, replay
        self._env = context.env

    def check_limits(self) -> StepCommit | None:
        """Return the commit that ends a run that has killed too many workers or took too long, else None."""
        context = self._context
        if context.claim.crash_count >= self._env.settings.max_crashes:
            return StepCommit(ending=build_error_outcome(WorkerCrashLoop(context.claim.crash_count)))
        if not context.run.limits.is_limited:
            return None
        reason = self._env.store.read(context.run.limits.termination_reason)
        return None if reason is None else StepCommit(ending=RunOutcome(Status.TERMINATED, reason=reason))

    def execute(self) -> StepCommit:
        """Call the function; returns the commit that ends the pass. Raises what broke the pass or stops the process."""
        context = self._context
        try:
            output = self._call_workflow()
            if context.interruption is None:
                if context.is_cancelled:
                    return StepCommit(ending=build_error_outcome(CancellationSwallowed(self._definition.name)))
                return StepCommit(ending=self._build_outcome(output))  # calls the serializers of the output
        except BaseException as error:
            if isinstance(error, Superseded) or (isinstance(error, Interruption) and context.interruption is not None):
                return self._end_after_interruption(context.interruption or error)
            if self._env.stops_process(error):
                release_for_shutdown(context.claim.ref, self._release)
                raise
            if context.interruption is not None:
                return self._end_after_swallowing(context.interruption)
            return self._fail(error)
        assert context.interruption is not None  # the function has swallowed it
        return self._end_after_swallowing(context.interruption)

    def conclude(self, last_commit: StepCommit | None) -> PassResult:
        assert last_commit is not None
        return self._context.commit_last(last_commit).pass_result

    def _call_workflow(self) -> Any:
        context, definition = self._context, self._definition
        try:
            payload = definition.params.decode(context.run.state.params)
        except values.ValidationFailed as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems) from exc
        ref = context.claim.ref
        event = WorkflowEvent(payload, context.claim.created_at, ref.instance_id, ref.run_number)
        context.event = event
        if definition.limits:
            self._replay.take_limits(definition.limits)
        context.lease.enter_user_code(definition)
        try:
            output = definition.fn(event, Step(self._replay))
        finally:
            context.lease.exit_user_code(definition)
            context.end_function()
        if context.interruption is None:
            self._replay.check_end()
        return output

    def _fail(self, error: BaseException) -> StepCommit:
        """Return the last commit of a function that raised. The attempt of a failed step is recorded already."""
        if isinstance(error, Cancelled) and self._context.is_cancelled:
            return StepCommit(ending=RunOutcome(Status.TERMINATED, reason=str(error), exception=error))
        step_commit = StepCommit(ending=build_error_outcome(error))
        if not isinstance(error, StepFailed):
            step_commit.parts = [FailedAttempts([record_run_error(self._env, self._context.run, error)])]
        return step_commit

    def _build_outcome(self, output: Any) -> RunOutcome:
        codec, name = self._definition.output, self._definition.name
        try:
            text, _ = codec.convert(output, what=f"Output of workflow {name!r}", limits=self._context.limits)
        except values.ValidationFailed as exc:
            return build_error_outcome(WorkflowOutputInvalid(name, exc.problems))
        except DurableError as exc:
            return build_error_outcome(exc)
        return RunOutcome(Status.COMPLETE, output=text)

    def _end_after_interruption(self, reason: Interruption) -> StepCommit:
        """Return the last commit after a suspension; raise what another interruption stands for."""
        context = self._context
        match reason:
            case Suspend():
                # A step whose worker died may wait for its limits, and then kill the next one.
                waits, rows = self._replay.waits, context.replay_state.rows.values()
                shows_progress = bool(waits) and not any(row.waits_for_limits and row.attempts for row in rows)
                return context.pending_suspension or build_release_commit(waits, shows_progress=shows_progress)
            case PassInterrupted(error=error):
                release_for_shutdown(context.claim.ref, self._release)
                raise error
            case PassBroken(__cause__=cause):
                logger.error("A pass over %s broke off: %s", context.claim.ref, reason)
                raise cause if isinstance(cause, Exception) else RuntimeError(str(reason))
        raise reason

    def _end_after_swallowing(self, reason: Interruption) -> StepCommit:
        """Return the last commit of a function that swallowed its interruption: for a Suspend, an error."""
        if isinstance(reason, Suspend):
            return StepCommit(ending=build_error_outcome(SuspensionSwallowed(self._definition.name)))
        return self._end_after_interruption(reason)

    def _release(self) -> None:
        """Release the run so that another worker continues it. It counts as no crash."""
        context = self._context
        if context.pending_suspension is not None:  # the function was already unwinding from this suspension
            context.commit_last(context.pending_suspension)
            return
        context.attempts.record_interrupted()
        writes = context.build_uncounting_writes()
        commit_id = writes[0].commit_id if writes else ""
        context.commit_last(build_release_commit([], commit_id=commit_id, writes=writes))


def build_error_outcome(error: BaseException) -> RunOutcome:
    """Build the outcome of a run that failed with ``error``. For a StepFailed, it has the name of the step's error."""
    if isinstance(error, StepFailed):
        name, message = error.error_name, error.error_message
    else:
        name, message = values.describe_error(error)
    name, message = values.sanitize_error(name, message)
    failure = _find_step_failure(error)
    return RunOutcome(
        Status.ERRORED,
        error_name=name,
        error_message=message,
        failed_steps=None if failure is None else failure.text,
        exception=error,
    )


def _find_step_failure(error: BaseException | None) -> RunFailure | None:
    """Find the failed step in an error's chain of causes; None if no step caused it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, StepFailed) and error.failed_keys:
            return RunFailure(error.failed_keys, error.failed_at_seq)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
