"""One pass over one run: claim, load, replay the workflow function, commit at every step, end or release the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_durable import notify, values
from celery_durable.ancestry import RunFailure
from celery_durable.config import Settings
from celery_durable.definitions import Definition, LinearDefinition, Registry, WorkflowDefinition
from celery_durable.errors import (
    DurableError,
    Interruption,
    PassBroken,
    StepFailed,
    Superseded,
    Suspend,
    SuspensionSwallowed,
    ValueRefused,
    WorkerCrashLoop,
    WorkflowOutputInvalid,
    WorkflowParamsInvalid,
)
from celery_durable.model import (
    Claim,
    DueRun,
    OutboxMessage,
    ReleaseOutcome,
    RunOutcome,
    RunRef,
    Status,
    WorkflowEvent,
    WorkflowKind,
)
from celery_durable.replay_state import ReplayState
from celery_durable.runner.completion_messages import CompletionMessages
from celery_durable.runner.execution_context import Environment, ExecutionContext
from celery_durable.runner.lease import Lease, LeaseRenewer
from celery_durable.runner.linear_pass import LinearPass
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.recorded_run import RecordedRun, read_run
from celery_durable.runner.replay import ReplayContext
from celery_durable.runner.replay_check import DryRunCommitter, ReplayCheck, ReplayResult, compare
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runner.step_attempt import current_attempt
from celery_durable.runner.step_commit import Committer
from celery_durable.runner.step_execution import PassInterrupted
from celery_durable.runner.watermark import Watermark
from celery_durable.runtime import Runtime, is_ctrl_c
from celery_durable.step import Step
from celery_durable.store import claims, step_rows
from celery_durable.store.engine import Store
from celery_durable.store.watchdog import LOAD, PASS

logger = logging.getLogger("celery_durable.runner")

NOT_DUE = "noop: not due, or claimed by another worker"
STOPPING = "noop: this worker is stopping, and leaves the run to another worker"


class Runner:
    """Advances runs of the workflows in ``registry``, over one store.

    Args:
        publish_runs: Called after a commit with the runs that became due.
        send_messages: Called after a commit with the messages that it wrote to the outbox. A sweep finds the runs and
            messages for which a call of ``publish_runs`` or ``send_messages`` was lost.
        should_stop: Called before each claim and at every step call. It returns True while the worker shuts down.
        stops_process: Returns whether an exception, such as SystemExit, stops the process. Such an exception does
            not fail a step.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        registry: Registry,
        runtime: Runtime,
        publish_runs: Callable[[Sequence[DueRun]], None],
        *,
        send_messages: Callable[[Sequence[OutboxMessage]], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        stops_process: Callable[[BaseException], bool] = is_ctrl_c,
    ) -> None:
        self._env = Environment(store, settings, runtime, publish_runs, send_messages, should_stop, stops_process)
        self._store, self._settings, self._registry, self._runtime = store, settings, registry, runtime
        self._renewer = LeaseRenewer(store, settings.lease, runtime, stall=settings.stall)
        self._watermark = Watermark(store, runtime)

    def advance(self, ref: RunRef, *, task_id: str, node: str, max_steps: int | None = None) -> str:
        """Run one pass: claim the run, and execute its steps until it waits, ends or is released.

        Any process may call this at any time. If the run is not due, the call changes nothing.

        ``max_steps``: release the run after this many step commits. Concurrent branches are finished first, so the
        number may be exceeded. Returns a short sentence for the log. Raises the error that broke the pass, such as a
        database error; a sweep then finds the run again.
        """
        definition = self._registry.find(ref.workflow)
        if definition is None:
            return self._postpone_unknown_workflow(ref)
        if self._env.should_stop():
            return self._postpone_for_shutdown(ref)
        requested_at = self._runtime.monotonic()
        claim = self._claim(ref, task_id, node, definition.kind)
        if claim is None:
            return NOT_DUE
        self._runtime.checkpoint("claimed")
        lease = Lease(claim, self._settings.lease, self._runtime, requested_at=requested_at)
        outer_attempt = current_attempt.set(None)  # with task_always_eager, a step's body may have started this run
        try:
            with self._renewer.hold(lease), notify.around_pass(claim):
                self._watermark.record_claim(claim)
                return self._run_pass(definition, lease, max_steps)
        except Superseded:
            return "superseded: the instance was taken over, restarted or ended meanwhile"
        finally:
            current_attempt.reset(outer_attempt)

    def check_replay(self, recorded: RecordedRun) -> ReplayResult:
        """Replay a recorded run with the current code, up to its first unfinished step.

        It runs no body and writes nothing.

        Raises WorkflowNotFound, and ValueRefused for a linear workflow.
        """
        definition = self._registry.get(recorded.ref.workflow)
        if not isinstance(definition, WorkflowDefinition):
            raise ValueRefused(
                f"Workflow {definition.name!r} is linear and has no code to replay: a run follows the rows that it "
                "began with."
            )
        claim, run_state = recorded.claim, recorded.run_state
        replay_state = ReplayState(
            run_state.steps,
            workflow=definition.name,
            crash_count=0,
            max_steps=definition.max_steps or self._settings.max_steps,
        )
        committer = DryRunCommitter()
        context = ExecutionContext(
            replace(self._env, should_stop=lambda: False),
            Lease(claim, self._settings.lease, self._runtime, requested_at=self._runtime.monotonic()),
            replay_state,
            committer,
            run_limits=RunLimits(definition, claim, run_state),
            ancestry=run_state.ancestry,
        )
        replay_check = ReplayCheck(definition, context)
        outer_attempt = current_attempt.set(None)
        try:
            self._replay(definition, replay_check, context, run_state.params)
        finally:
            current_attempt.reset(outer_attempt)
        return compare(recorded, replay_state, replay_check, committer.run_outcome)

    def read_recorded_run(self, workflow: str, instance_id: str, *, run: int | None = None) -> RecordedRun:
        """Read a run from the store, by default the current one; raises InstanceNotFound and RunNotFound."""
        return self._store.read(lambda tx: read_run(tx, workflow, instance_id, run))

    # --- claim and load -------------------------------------------------------------------------

    def postpone_for_other_pools(self, ref: RunRef, *, pool: str) -> str:
        """Postpone a run that this worker's pool cannot run. Another worker of the same queue may claim it."""
        self._postpone(ref)
        logger.warning(
            "This worker's pool, %r, runs no workflows; instance %s is left for a worker with another pool. Give "
            "workflow %r a queue that workers with -P prefork, threads or solo consume.",
            pool,
            ref.instance_id,
            ref.workflow,
        )
        return f"noop: the {pool!r} pool runs no workflows"

    def _postpone(self, ref: RunRef) -> None:
        delay = timedelta(seconds=self._settings.unknown_workflow_seconds)
        self._store.transact(lambda tx: claims.postpone(tx, ref, delay=delay))

    def _postpone_unknown_workflow(self, ref: RunRef) -> str:
        self._postpone(ref)
        logger.warning(
            "This worker does not know workflow %r; instance %s is left for one that does. Import the module that "
            "defines it, or wait for the deploy to end.",
            ref.workflow,
            ref.instance_id,
        )
        return f"noop: workflow {ref.workflow!r} is unknown to this worker"

    def _postpone_for_shutdown(self, ref: RunRef) -> str:
        """Leave the run to the sweep, because this worker is stopping.

        Its dispatch message is consumed already. A new message could reach this same worker again.
        """
        self._store.transact(lambda tx: claims.postpone(tx, ref, delay=timedelta(0)))
        return STOPPING

    def _claim(self, ref: RunRef, task_id: str, node: str, kind: WorkflowKind) -> Claim | None:
        token, length = self._runtime.new_token(), self._settings.lease
        return self._store.transact(
            lambda tx: claims.claim(tx, ref, token=token, task_id=task_id, node=node, lease=length, kind=kind),
            find_committed=lambda tx: claims.find_claim(tx, ref, token=token, lease=length),
            is_single_statement=True,
            timeouts=PASS,
        )

    def _run_pass(self, definition: Definition, lease: Lease, max_steps: int | None) -> str:
        claim = lease.claim
        run_state = self._store.transact(lambda tx: step_rows.load(tx, claim), is_single_statement=True, timeouts=LOAD)
        run_limits = RunLimits(definition, claim, run_state)
        committer = Committer(
            self._store,
            self._settings,
            lease,
            run_limits,
            PublishedValues(self._store, self._settings, lease, stops_process=self._env.stops_process),
            is_start_recorded=run_state.is_start_recorded,
            remaining_logs=self._settings.max_logs - run_state.log_count,
            run_created_at=run_state.created_at,
            stops_process=self._env.stops_process,
            completion_messages=CompletionMessages(definition, claim, self._settings.limits),
            send_messages=self._env.send_messages,
            publish_runs=self._env.publish_runs,
        )
        if isinstance(definition, LinearDefinition):
            return LinearPass(definition, self._env, lease, committer, run_state, max_commits=max_steps).run()
        assert isinstance(definition, WorkflowDefinition)
        if claim.crash_count >= self._settings.max_crashes:
            committer.end_run(run_outcome := _build_error_outcome(WorkerCrashLoop(claim.crash_count)), [])
            return _describe_outcome(run_outcome)
        if definition.is_limited and (reason := self._store.read(run_limits.termination_reason)) is not None:
            committer.terminate(reason)
            return f"terminated: {reason}"
        notify.send_pass_started(claim, is_start_recorded=run_state.is_start_recorded)
        replay_state = ReplayState(
            run_state.steps,
            workflow=definition.name,
            crash_count=claim.crash_count,
            max_steps=definition.max_steps or self._settings.max_steps,
        )
        context = ExecutionContext(
            self._env,
            lease,
            replay_state,
            committer,
            run_limits=run_limits,
            ancestry=run_state.ancestry,
            max_commits=max_steps,
        )
        return self._replay(definition, ReplayContext(definition, context), context, run_state.params)

    def _replay(
        self, definition: WorkflowDefinition, replay: ReplayContext, context: ExecutionContext, params: str
    ) -> str:
        """Call the workflow function and commit the outcome; returns a sentence for the log."""
        try:
            output = self._call_workflow(definition, replay, context, params)
        except BaseException as error:
            if isinstance(error, Interruption) and (context.interruption is not None or isinstance(error, Superseded)):
                return self._end_after_interruption(replay, context, context.interruption or error)
            if self._env.stops_process(error):
                self._release_for_shutdown(context)
                raise
            if context.interruption is not None:
                return self._end_after_swallowing(definition, replay, context, context.interruption)
            return _end_run(context, _build_error_outcome(error))
        if context.interruption is not None:
            return self._end_after_swallowing(definition, replay, context, context.interruption)
        return self._complete(definition, context, output)

    def _call_workflow(
        self, definition: WorkflowDefinition, replay: ReplayContext, context: ExecutionContext, params: str
    ) -> Any:
        try:
            payload = definition.params.decode(params)
        except values.ValidationFailed as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems) from exc
        claim = context.lease.claim
        event = WorkflowEvent(payload, claim.created_at, claim.ref.instance_id, claim.ref.run_number)
        context.lease.enter_user_code(definition)
        try:
            output = definition.fn(event, Step(replay))
        finally:
            context.lease.exit_user_code(definition)
        if context.interruption is None:
            replay.check_end()
        return output

    # --- the ends of a pass ---------------------------------------------------------------------

    def _complete(self, definition: WorkflowDefinition, context: ExecutionContext, output: Any) -> str:
        try:
            output_text = definition.output.encode(
                output, what=f"Output of workflow {definition.name!r}", limits=self._settings.limits
            )
            definition.output.decode(output_text)
        except values.ValidationFailed as exc:
            return _end_run(context, _build_error_outcome(WorkflowOutputInvalid(definition.name, exc.problems)))
        except DurableError as exc:
            return _end_run(context, _build_error_outcome(exc))
        return _end_run(context, RunOutcome(Status.COMPLETE, output=output_text))

    def _end_after_interruption(self, replay: ReplayContext, context: ExecutionContext, reason: Interruption) -> str:
        """End the pass after an interruption: a suspension, a lost claim, a stopping process or a broken pass."""
        match reason:
            case Suspend():
                return self._suspend(replay, context)
            case Superseded():
                raise reason
            case PassInterrupted(error=error):
                self._release_for_shutdown(context)
                raise error
            case PassBroken():
                logger.error("A pass over %s broke off: %s", context.lease.claim.ref, reason)
                cause = reason.__cause__
                raise cause if isinstance(cause, Exception) else RuntimeError(str(reason))
            case _:
                raise reason

    def _suspend(self, replay: ReplayContext, context: ExecutionContext) -> str:
        """Release the instance until the earliest of its waits; returns a sentence for the log."""
        if context.pending_suspension is not None:
            committed = context.commit_suspension(context.pending_suspension)
            released, until = committed.released, committed.until
        else:
            released = context.committer.release(context.logs, replay.waits)
            until = min((wait.due_at for wait in replay.waits), default=None)
            if released is ReleaseOutcome.DUE:
                self._wake_this_run(context.lease.claim)
        match released:
            case ReleaseOutcome.WAITING | None:
                return "waiting" if until is None else f"waiting until {until:%Y-%m-%d %H:%M:%S} UTC"
            case ReleaseOutcome.PAUSED:
                return "paused"
            case ReleaseOutcome.DUE:
                return "released: due again"

    def _release_for_shutdown(self, context: ExecutionContext) -> None:
        """Release the claim because the worker is stopping, so that another worker continues. It counts as no crash."""
        try:
            if context.pending_suspension is not None:  # the function was already unwinding from this suspension
                context.commit_suspension(context.pending_suspension)
            elif context.committer.release(context.logs, [], context.build_uncounting_writes()) is ReleaseOutcome.DUE:
                self._wake_this_run(context.lease.claim)
        except Superseded:
            logger.info("%s was taken over before this worker could release it", context.lease.claim.ref)
        except Exception as exc:  # noqa: BLE001  # the caller raises what stops the worker; the lease will expire
            logger.warning("%s could not be released, so its lease will expire: %s", context.lease.claim.ref, exc)

    def _end_after_swallowing(
        self, definition: WorkflowDefinition, replay: ReplayContext, context: ExecutionContext, reason: Interruption
    ) -> str:
        """End the pass of a function that swallowed its interruption.

        If the interruption was a suspension, the run fails with SuspensionSwallowed. Any other interruption is handled
        as if the function had raised it.
        """
        if not isinstance(reason, Suspend):
            return self._end_after_interruption(replay, context, reason)
        return _end_run(context, _build_error_outcome(SuspensionSwallowed(definition.name)))

    def _wake_this_run(self, claim: Claim) -> None:
        self._env.publish_runs([DueRun(claim.ref, claim.queue)])


def _end_run(context: ExecutionContext, run_outcome: RunOutcome) -> str:
    context.committer.end_run(run_outcome, context.logs)
    return _describe_outcome(run_outcome)


def _describe_outcome(run_outcome: RunOutcome) -> str:
    return (
        str(run_outcome.status) if run_outcome.error_name is None else f"{run_outcome.status}: {run_outcome.error_name}"
    )


def _build_error_outcome(error: BaseException) -> RunOutcome:
    """Build the outcome of a run that failed with ``error``. For a StepFailed, it has the name of the step's error."""
    if isinstance(error, StepFailed):
        name, message = error.error_name, error.error_message
    else:
        name, message = values.describe_error(error)
    name, message = values.sanitize_error(name, message)
    failure = _find_step_failure(error)
    return RunOutcome(
        Status.ERRORED, error_name=name, error_message=message, failed_steps=None if failure is None else failure.text
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
