"""One pass over one run: claim, load, run its steps with a commit each, end or release the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from celery_durable import notify
from celery_durable.config import Settings
from celery_durable.definitions import Definition, LinearDefinition, Registry, WorkflowDefinition
from celery_durable.errors import Superseded
from celery_durable.model import Claim, DueRun, OutboxMessage, PassResult, RunRef, WorkerProcess
from celery_durable.operations.limit_queue import LimitQueue
from celery_durable.redaction import Redaction, make_no_redaction
from celery_durable.runner.body_steps import BodyKind
from celery_durable.runner.body_timer import body_timer
from celery_durable.runner.environment import ClaimedRun, Environment
from celery_durable.runner.function_pass import FunctionPass, open_context
from celery_durable.runner.group_commit import GroupCommit
from celery_durable.runner.lanes import build_committer
from celery_durable.runner.lease import Lease
from celery_durable.runner.lease_renewer import LeaseRenewer
from celery_durable.runner.linear_pass import LinearPass
from celery_durable.runner.replay import ReplayContext
from celery_durable.runner.run_limits import RunLimits
from celery_durable.runner.step_attempt import current_attempt, current_run
from celery_durable.runner.step_commit import StepCommit
from celery_durable.runner.step_kinds import StepKind, StepKinds
from celery_durable.runner.waits import SleepKind, WaitKind
from celery_durable.runner.watermark import Watermark
from celery_durable.runtime import Runtime, is_ctrl_c
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.time_limits import LOAD, PASS
from celery_durable.store.runs import claims, step_rows
from celery_durable.store.runs.step_rows import RunState

logger = logging.getLogger("celery_durable.runner")

CORE_KINDS: tuple[StepKind[Any], ...] = (BodyKind(), SleepKind(), WaitKind())
NOT_DUE = "noop: not due, or claimed by another worker"
DECLINED = "noop: this worker takes no runs now, and leaves the run to a later sweep"


class Runner:
    """Advances runs of the workflows in ``registry``, over one store.

    ``publish_runs`` and ``send_messages`` are called after a commit; a sweep repeats a lost call. ``should_stop`` is
    called before each claim and at every step call, and returns True while the worker shuts down. ``stops_process``
    returns whether an exception, such as SystemExit, stops the process and so fails no step. ``groups_commits``:
    whether passes run at the same time, and commit together.
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
        groups_commits: bool = False,
        make_redaction: Callable[[str, str], Redaction] = make_no_redaction,
        kinds: Sequence[StepKind[Any]] = (),
    ) -> None:
        self.kinds = StepKinds([*CORE_KINDS, *kinds])
        self.env = Environment(
            store,
            settings,
            runtime,
            publish_runs,
            send_messages,
            should_stop
            if settings.execution_enabled is True
            else lambda: should_stop() or not settings.is_execution_enabled,
            stops_process,
            make_redaction,
            LimitQueue(store, settings, publish_runs),
            GroupCommit(store) if groups_commits else None,
        )
        self._store, self._settings, self.registry, self._runtime = store, settings, registry, runtime
        self._renewer = LeaseRenewer(store, settings.lease, runtime, stall=settings.stall)
        self._watermark = Watermark(store, runtime)

    def advance(self, ref: RunRef, *, task_id: str, node: str, max_steps: int | None = None) -> PassResult:
        """Run one pass: claim the run, and execute its steps until it waits, ends or is released.

        Any process may call this at any time. ``max_steps``: release the run after this many step commits, or more if
        branches are open. Raises the error that broke the pass, such as a database error; a sweep then finds the run
        again.
        """
        definition = self.registry.find(ref.workflow)
        if definition is None or self.env.should_stop():
            return self._decline(ref, definition)
        lease = self._claim(ref, definition, task_id, node)
        if lease is None:
            return PassResult(NOT_DUE, was_executed=False)
        try:
            with self._hold(lease):
                run = self._load(definition, lease, WorkerProcess(node, os.getpid(), task_id))
                pass_ = self._open_pass(run, max_steps)
                last_commit = pass_.check_limits() or self._execute(run, pass_)
                return pass_.conclude(last_commit)
        except Superseded:
            return PassResult("superseded: the instance was taken over, restarted or ended meanwhile")

    # --- the stages of a pass -------------------------------------------------------------------

    def _decline(self, ref: RunRef, definition: Definition | None) -> PassResult:
        """Leave a run to a later pass, because this worker takes none now or does not know its workflow."""
        if definition is not None:
            # Leave it to the sweep: its dispatch message is consumed, and a new one could reach this same worker again.
            self._store.transact(lambda tx: claims.postpone(tx, ref, delay=timedelta(0)))
            return PassResult(DECLINED, was_executed=False)
        self._postpone(ref)
        logger.warning(
            "This worker does not know workflow %r; instance %s is left for one that does. Import the module that "
            "defines it, or wait for the deploy to end.",
            ref.workflow,
            ref.instance_id,
        )
        return PassResult(f"noop: workflow {ref.workflow!r} is unknown to this worker", was_executed=False)

    def _claim(self, ref: RunRef, definition: Definition, task_id: str, node: str) -> Lease | None:
        requested_at, token, length = self._runtime.monotonic(), self._runtime.new_token(), self._settings.lease
        request = claims.ClaimRequest(ref, token, task_id, node, length, definition.kind)

        def find_claim(tx: Tx) -> Claim | None:
            return claims.find_claim(tx, ref, token=token, lease=length)

        claim = self._store.run_statement(
            lambda tx: claims.claim(tx, request), find_committed=find_claim, timeouts=PASS
        )
        if isinstance(claim, claims.ClaimExpired):
            claim = self._store.transact(
                lambda tx: claims.take_over(tx, request), find_committed=find_claim, timeouts=PASS
            )
        if claim is None:
            return None
        self._runtime.checkpoint("claimed")
        return Lease(claim, length, self._runtime, requested_at=requested_at)

    @contextmanager
    def _hold(self, lease: Lease) -> Iterator[None]:
        """Renew the lease, and count the claim, while the pass lasts."""
        outer_attempt = current_attempt.set(None)  # with task_always_eager, a step's body may have started this run
        outer_run = current_run.set(lease.claim.ref)
        try:
            with self._renewer.hold(lease), self._runtime.pass_context(), notify.around_pass(lease.claim):
                self._watermark.record_claim(lease.claim)
                yield
        finally:
            body_timer.release()
            current_attempt.reset(outer_attempt)
            current_run.reset(outer_run)

    def _load(self, definition: Definition, lease: Lease, worker: WorkerProcess) -> ClaimedRun:
        claim = lease.claim
        if claim.new_run is not None:
            state = RunState.of_new_run(claim.ref, claim.new_run)
        else:
            state = self._store.run_statement(lambda tx: step_rows.load(tx, claim), timeouts=LOAD)
        return ClaimedRun(
            definition, lease, state, RunLimits(definition, claim, state, self.kinds.is_satisfied), worker
        )

    def _open_pass(self, run: ClaimedRun, max_steps: int | None) -> FunctionPass | LinearPass:
        committer = build_committer(self.env, run, self.kinds)
        if isinstance(run.definition, LinearDefinition):
            return LinearPass(run.definition, self.env, run, committer, max_commits=max_steps)
        assert isinstance(run.definition, WorkflowDefinition)
        context = open_context(run.definition, self.env, run, committer, max_commits=max_steps)
        return FunctionPass(run.definition, context, ReplayContext(run.definition, context, self.kinds))

    @staticmethod
    def _execute(run: ClaimedRun, pass_: FunctionPass | LinearPass) -> StepCommit | None:
        notify.send_pass_started(run.lease.claim, is_start_recorded=run.state.is_start_recorded)
        return pass_.execute()

    # --- runs that this worker cannot run -------------------------------------------------------

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
