"""One pass over one run: claim, load, replay the author's function, commit at every step, settle or let go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_durable import teller, values
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
from celery_durable.ledger import Ledger
from celery_durable.lineage import Failure
from celery_durable.model import Claim, Due, Kind, Outgoing, Ref, Status, WorkflowEvent
from celery_durable.runner.board import Board
from celery_durable.runner.bodies import current_body
from celery_durable.runner.boundary import Committer
from celery_durable.runner.branches import Stopped
from celery_durable.runner.endings import Farewell
from celery_durable.runner.lease import Keeper, Lease
from celery_durable.runner.linear import LinearPass
from celery_durable.runner.passage import Pass
from celery_durable.runner.patience import Patience
from celery_durable.runner.progress import Environment, Progress
from celery_durable.runner.recorded import Recorded, read_run
from celery_durable.runner.rehearsal import Onlooker, Rehearsal, Rehearsing, judge
from celery_durable.runner.watermark import Watermark
from celery_durable.runtime import Runtime, is_ctrl_c
from celery_durable.step import Step
from celery_durable.store import claims, journal
from celery_durable.store.claims import After, Ending
from celery_durable.store.engine import Store
from celery_durable.store.watchdog import LOAD, PASS

logger = logging.getLogger("celery_durable.runner")

NOT_DUE = "noop: not due, or another worker is at it"
STOPPING = "noop: this worker stops, the run is left to the next"


class Runner:
    """Advances runs of the workflows in ``registry``, over one store.

    ``should_stop`` is asked before each claim and at every step boundary (a worker that shuts down).
    ``is_from_outside`` says whether an exception stops the process and is no failure of the code in which it came up.
    ``wake`` and ``post`` are told after a commit what is due and what it left in the outbox; what they miss, a sweep
    finds.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        registry: Registry,
        runtime: Runtime,
        wake: Callable[[Sequence[Due]], None],
        *,
        post: Callable[[Sequence[Outgoing]], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        is_from_outside: Callable[[BaseException], bool] = is_ctrl_c,
    ) -> None:
        self._env = Environment(store, settings, runtime, wake, post, should_stop, is_from_outside)
        self._store, self._settings, self._registry, self._runtime = store, settings, registry, runtime
        self._keeper = Keeper(store, settings.lease, runtime, stall=settings.stall)
        self._watermark = Watermark(store, runtime)

    def advance(self, ref: Ref, *, claimed_by: str, max_steps: int | None = None) -> str:
        """Advance a run as far as it goes now; any number of times, anywhere: superfluous calls change nothing.

        ``max_steps``: hand it on after so many commits of steps; branches that run at the same time end together.
        Answers with a short sentence for people. Raises what broke the pass from outside, such as the
        database; the run is then found again by the sweep.
        """
        definition = self._registry.find(ref.workflow)
        if definition is None:
            return self._leave_unknown(ref)
        if self._env.should_stop():
            return self._leave(ref)
        asked_at = self._runtime.monotonic()
        claim = self._claim(ref, claimed_by, definition.kind)
        if claim is None:
            return NOT_DUE
        self._runtime.checkpoint("claimed")
        lease = Lease(claim, self._settings.lease, self._runtime, asked_at=asked_at)
        outer = current_body.set(None)  # under task_always_eager a body may have started this run
        try:
            with self._keeper.hold(lease), teller.around_pass(claim):
                self._watermark.claimed(claim)
                return self._pass(definition, lease, max_steps)
        except Superseded:
            return "superseded: the instance was taken over, restarted or ended meanwhile"
        finally:
            current_body.reset(outer)

    def rehearse(self, recorded: Recorded) -> Rehearsal:
        """Follow a recorded run with the code of today, as far as the record goes; runs no body, and writes nothing.

        Raises WorkflowNotFound; ValueRefused for a linear workflow.
        """
        definition = self._registry.get(recorded.ref.workflow)
        if not isinstance(definition, WorkflowDefinition):
            raise ValueRefused(
                f"Workflow {definition.name!r} is linear and has no code to replay: a run follows the rows that it "
                "began with."
            )
        claim, loaded = recorded.claim, recorded.loaded
        ledger = Ledger(
            loaded.steps,
            workflow=definition.name,
            crash_count=0,
            max_steps=definition.max_steps or self._settings.max_steps,
        )
        committer = Onlooker()
        at = Progress(
            replace(self._env, should_stop=lambda: False),
            Lease(claim, self._settings.lease, self._runtime, asked_at=self._runtime.monotonic()),
            ledger,
            committer,
            patience=Patience(definition, claim, loaded),
            lineage=loaded.lineage,
        )
        host = Rehearsing(definition, at)
        outer = current_body.set(None)
        try:
            self._play(definition, host, at, loaded.params)
        finally:
            current_body.reset(outer)
        return judge(recorded, ledger, host, committer.ending)

    def recorded(self, workflow: str, instance_id: str, *, run: int | None = None) -> Recorded:
        """A run of this store, by default the current one; raises InstanceNotFound, RunNotFound."""
        return self._store.read(lambda tx: read_run(tx, workflow, instance_id, run))

    # --- claim and load -------------------------------------------------------------------------

    def leave_to_other_pools(self, ref: Ref, *, pool: str) -> str:
        """As an unknown workflow: this worker's pool runs none, and another worker of the same queue may."""
        self._postpone(ref)
        logger.warning(
            "This worker's pool, %r, runs no workflows; instance %s is left for a worker on another one. Give workflow "
            "%r a queue that workers with -P prefork, threads or solo consume.",
            pool,
            ref.instance_id,
            ref.workflow,
        )
        return f"noop: the {pool!r} pool runs no workflows"

    def _postpone(self, ref: Ref) -> None:
        delay = timedelta(seconds=self._settings.unknown_workflow_seconds)
        self._store.transact(lambda tx: claims.postpone(tx, ref, delay=delay))

    def _leave_unknown(self, ref: Ref) -> str:
        self._postpone(ref)
        logger.warning(
            "This worker does not know workflow %r; instance %s is left for one that does. Import the module that "
            "defines it, or wait for the deploy to end.",
            ref.workflow,
            ref.instance_id,
        )
        return f"noop: workflow {ref.workflow!r} is unknown to this worker"

    def _leave(self, ref: Ref) -> str:
        """The message is used up, and another might come back here as long as this worker consumes: sweeps send it."""
        self._store.transact(lambda tx: claims.postpone(tx, ref, delay=timedelta(0)))
        return STOPPING

    def _claim(self, ref: Ref, claimed_by: str, kind: Kind) -> Claim | None:
        token, length = self._runtime.new_token(), self._settings.lease
        return self._store.transact(
            lambda tx: claims.claim(tx, ref, token=token, claimed_by=claimed_by, lease=length, kind=kind),
            resolve=lambda tx: claims.find_claim(tx, ref, token=token, lease=length),
            single=True,
            bound=PASS,
        )

    def _pass(self, definition: Definition, lease: Lease, max_steps: int | None) -> str:
        claim = lease.claim
        loaded = self._store.transact(lambda tx: journal.load(tx, claim), single=True, bound=LOAD)
        patience = Patience(definition, claim, loaded)
        committer = Committer(
            self._store,
            self._settings,
            lease,
            patience,
            Board(self._store, self._settings, lease, is_from_outside=self._env.is_from_outside),
            has_started=loaded.has_started,
            log_room=self._settings.max_logs - loaded.logs,
            began=loaded.created_at,
            is_from_outside=self._env.is_from_outside,
            farewell=Farewell(definition, claim, self._settings.limits),
            post=self._env.post,
            wake=self._env.wake,
        )
        if isinstance(definition, LinearDefinition):
            return LinearPass(definition, self._env, lease, committer, loaded, max_turns=max_steps).run()
        assert isinstance(definition, WorkflowDefinition)
        if claim.crash_count >= self._settings.max_crashes:
            committer.settle(ending := _errored(WorkerCrashLoop(claim.crash_count)), [])
            return _sentence(ending)
        if definition.is_limited and (reason := self._store.read(patience.reason_to_end)) is not None:
            committer.terminate(reason)
            return f"terminated: {reason}"
        teller.began(claim, has_started=loaded.has_started)
        ledger = Ledger(
            loaded.steps,
            workflow=definition.name,
            crash_count=claim.crash_count,
            max_steps=definition.max_steps or self._settings.max_steps,
        )
        at = Progress(
            self._env,
            lease,
            ledger,
            committer,
            patience=patience,
            lineage=loaded.lineage,
            max_boundaries=max_steps,
        )
        return self._play(definition, Pass(definition, at), at, loaded.params)

    def _play(self, definition: WorkflowDefinition, host: Pass, at: Progress, params: str) -> str:
        """Call the function, and do what follows from how it ends; answers with a sentence."""
        try:
            output = self._call(definition, host, at, params)
        except BaseException as error:
            if isinstance(error, Interruption) and (at.over is not None or isinstance(error, Superseded)):
                return self._after_interruption(host, at, at.over or error)
            if self._env.is_from_outside(error):
                self._hand_on(at)
                raise
            if at.over is not None:
                return self._after_ignoring(definition, host, at, at.over)
            return _settle(at, _errored(error))
        if at.over is not None:
            return self._after_ignoring(definition, host, at, at.over)
        return self._complete(definition, at, output)

    def _call(self, definition: WorkflowDefinition, host: Pass, at: Progress, params: str) -> Any:
        try:
            payload = definition.params.decode(params)
        except values.Misfit as exc:
            raise WorkflowParamsInvalid(definition.name, exc.problems) from exc
        claim = at.lease.claim
        event = WorkflowEvent(payload, claim.created_at, claim.ref.instance_id, claim.ref.run_number)
        at.lease.author_begins(definition)
        try:
            output = definition.fn(event, Step(host))
        finally:
            at.lease.author_ends(definition)
        if at.over is None:
            host.check_end()
        return output

    # --- the ends of a pass ---------------------------------------------------------------------

    def _complete(self, definition: WorkflowDefinition, at: Progress, output: Any) -> str:
        try:
            text = definition.output.encode(
                output, what=f"Output of workflow {definition.name!r}", limits=self._settings.limits
            )
            definition.output.decode(text)
        except values.Misfit as exc:
            return _settle(at, _errored(WorkflowOutputInvalid(definition.name, exc.problems)))
        except DurableError as exc:
            return _settle(at, _errored(exc))
        return _settle(at, Ending(Status.COMPLETE, output=text))

    def _after_interruption(self, host: Pass, at: Progress, reason: Interruption) -> str:
        """The function was interrupted: by a suspension, by losing the claim, or by something that broke."""
        match reason:
            case Suspend():
                return self._suspend(host, at)
            case Superseded():
                raise reason
            case Stopped(error=error):
                self._hand_on(at)
                raise error
            case PassBroken():
                logger.error("A pass over %s broke off: %s", at.lease.claim.ref, reason)
                cause = reason.__cause__
                raise cause if isinstance(cause, Exception) else RuntimeError(str(reason))
            case _:
                raise reason

    def _suspend(self, host: Pass, at: Progress) -> str:
        if at.deferred is not None:
            committed = at.finish(at.deferred)
            after, until = committed.after, committed.until
        else:
            after = at.committer.let_go(at.logs, host.waits)
            until = min((wait.due_at for wait in host.waits), default=None)
            if after is After.DUE:
                self._wake_self(at.lease.claim)
        match after:
            case After.WAITING | None:
                return "waiting" if until is None else f"waiting until {until:%Y-%m-%d %H:%M:%S} UTC"
            case After.PAUSED:
                return "paused"
            case After.DUE:
                return "handed on: due again"

    def _hand_on(self, at: Progress) -> None:
        """The worker is being stopped: release the claim, which is no crash, and have somebody else go on."""
        try:
            if at.deferred is not None:  # the function was unwinding already: what it waits for is decided
                at.finish(at.deferred)
            elif at.committer.let_go(at.logs, [], at.uncounted()) is After.DUE:
                self._wake_self(at.lease.claim)
        except Superseded:
            logger.info("%s was taken over before it could be handed on", at.lease.claim.ref)
        except Exception as exc:  # noqa: BLE001  # what stops the worker is being raised; the lease will end
            logger.warning("%s could not be handed on, its lease will end: %s", at.lease.claim.ref, exc)

    def _after_ignoring(self, definition: WorkflowDefinition, host: Pass, at: Progress, reason: Interruption) -> str:
        """The function went on after it was interrupted. For a suspension that is its error; else the reason counts."""
        if not isinstance(reason, Suspend):
            return self._after_interruption(host, at, reason)
        return _settle(at, _errored(SuspensionSwallowed(definition.name)))

    def _wake_self(self, claim: Claim) -> None:
        self._env.wake([Due(claim.ref, claim.queue)])


def _settle(at: Progress, ending: Ending) -> str:
    at.committer.settle(ending, at.logs)
    return _sentence(ending)


def _sentence(ending: Ending) -> str:
    return str(ending.status) if ending.error_name is None else f"{ending.status}: {ending.error_name}"


def _errored(error: BaseException) -> Ending:
    """An uncaught error ends the instance under its own name; a failed step's under that of its original error."""
    if isinstance(error, StepFailed):
        name, message = error.error_name, error.error_message
    else:
        name, message = values.described(error)
    name, message = values.storable_error(name, message)
    failure = _failure_in(error)
    return Ending(
        Status.ERRORED, error_name=name, error_message=message, failure=None if failure is None else failure.text
    )


def _failure_in(error: BaseException | None) -> Failure | None:
    """The failed step that an error is, or was raised because of; None where it was no step's."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, StepFailed) and error.failed_keys:
            return Failure(error.failed_keys, error.failed_place)
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
