"""Attempts: running the bodies of steps, alone or side by side, and recording what came of each."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, assert_never

from celery_durable import teller, values
from celery_durable.errors import DurableError, StepCommitConflict, StepResultInvalid, ValueRefused
from celery_durable.ledger import GiveUp, Replay, Run, Wait
from celery_durable.lineage import Lineage
from celery_durable.model import LogLevel, StepRow, StepStatus
from celery_durable.runner.bodies import Body, Interrupted, Outcome, Raised, Returned, TimedOut
from celery_durable.runner.boundary import BodyMustRunAgain, Boundary
from celery_durable.runner.branches import Branch, SessionGate, Stopped, decoded
from celery_durable.runner.makings import AuthorWriteFailed
from celery_durable.runner.progress import Progress
from celery_durable.runtime import Branch as RuntimeBranch
from celery_durable.step import BodyCall, StepTx, TxBuffer, allow_to_end
from celery_durable.store.claims import OpenWait

_NAMESPACE = uuid.UUID("6f0f4b0a-6a65-5b5c-9d0e-3f3b6f6f2c11")
SESSION_RERUNS = 3


def idempotency_key(lineage: Lineage, step: str, turn: str = "") -> str:
    """What tells systems outside that it is the same step, on every attempt; ``turn``: of a step that has several."""
    return str(uuid.uuid5(_NAMESPACE, f"{lineage.identity(step)}/{step}{turn}"))


class Attempts:
    """Runs the bodies of a pass; each outcome is a commit of its own."""

    def __init__(self, at: Progress) -> None:
        self._at = at
        self._sessions = SessionGate() if at.env.store.database.has_one_writer else None
        self._lost: list[tuple[Branch, Body, str]] = []
        """Bodies whose transaction was lost, and by what."""

    def advance(self, branches: list[Branch], *, alone: bool, sole: bool) -> None:
        """Run the bodies that are due. ``alone``: no other step is open. ``sole``: nothing else is waited for."""
        runs: list[tuple[Branch, Run]] = []
        for branch in branches:
            verdict = self._at.ledger.decide_do(
                self._at.ledger.row(branch.key),
                max_attempts=branch.policy.max_attempts,
                alone=alone,
                now=self._at.now,
            )
            match verdict:
                case Replay(row):
                    branch.row = row
                case Wait(until):
                    branch.wait = OpenWait(until)
                case GiveUp(attempts):
                    error = self._exhausted(branch, attempts)
                    self._at.commit(branch, self._at.write(branch, StepStatus.ERRORED, error=error, attempts=attempts))
                case Run():
                    runs.append((branch, verdict))
                case _:
                    assert_never(verdict)
        if runs:
            self._run(runs, sole=sole)

    def _exhausted(self, branch: Branch, attempts: int) -> tuple[str, str]:
        """The error of a step that may not run again: its own, where a deploy lowered the limit, else its workers'."""
        row = self._at.ledger.row(branch.key)
        if row is not None and row.error_name is not None and row.attempts == attempts:
            return row.error_name, row.error_message or ""
        most = branch.policy.max_attempts
        text = f"{attempts} of {most} attempts are used up, and the last ended with its worker"
        return "StepMaxAttemptsExceeded", text

    def _run(self, runs: list[tuple[Branch, Run]], *, sole: bool) -> None:
        announced = [self._at.write(b, StepStatus.PENDING, attempts=run.attempt) for b, run in runs if run.announce]
        if announced:
            committed = self._at.guarded(lambda: self._at.committer.commit(Boundary(announced, self._at.take_logs())))
            self._at.note(committed)
            self._at.announced += [branch for branch, run in runs if run.announce]
        todo = [(branch, run.attempt) for branch, run in runs]
        for nth in range(SESSION_RERUNS + 1):
            self._lost.clear()
            self._at.guarded(lambda: self._at.lease.check(self._at.env.store))
            if nth == 0:
                for branch, attempt in todo:
                    teller.attempt_begins(self._at.lease.claim, branch.name, attempt)
            self._run_once([(branch, self._body(branch, attempt)) for branch, attempt in todo], sole=sole)
            todo = [(branch, body.attempt) for branch, body, _ in self._lost]
            if not todo:
                return
        for branch, body, why in self._lost:
            text = f"the step's transaction was lost {SESSION_RERUNS + 1} times, at last by: {why}"
            self._fail(branch, body, ("StepTransactionLost", text), sole=sole)

    def _run_once(self, made: list[tuple[Branch, Body]], *, sole: bool) -> None:
        """Run these bodies at the same time; those whose transaction was lost are noted, to be run again."""
        self._at.env.runtime.checkpoint("before-body")
        if len(made) == 1 and (self._at.env.runtime.can_interrupt() or made[0][0].policy.timeout is None):
            branch, body = made[0]
            self._finish(branch, body, body.run_timed(branch.policy.timeout), sole=sole)
            return
        gate = self._sessions
        jobs = [self._job(branch, body, gate, sole=sole) for branch, body in made]
        try:
            self._at.env.runtime.run_branches(jobs)
            if gate is not None:
                gate.finish_rest()
        except BaseException:
            for _, body in made:
                body.abandon()
            raise

    def _job(self, branch: Branch, body: Body, gate: SessionGate | None, *, sole: bool) -> RuntimeBranch:
        def on_done(outcome: Outcome | None) -> None:
            def finish() -> None:
                self._finish(branch, body, outcome, sole=sole)

            if gate is None:
                finish()
            else:
                gate.finish(body.buffer, finish)

        timeout = branch.policy.timeout
        return RuntimeBranch(body.run, on_done, None if timeout is None else timeout.total_seconds())

    def _body(self, branch: Branch, attempt: int) -> Body:
        call, fn = branch.call, branch.fn
        assert isinstance(call, BodyCall)
        assert fn is not None
        buffer = TxBuffer()
        ref = self._at.lease.claim.ref
        tx = None
        if fn.wants_tx:
            tx = StepTx(
                name=branch.name,
                attempt=attempt,
                idempotency_key=idempotency_key(self._at.lineage, branch.key),
                buffer=buffer,
                open_session=lambda: self._open_session(body),
                limits=self._at.env.settings.limits,
            )
        given = call.args if tx is None else (tx, *call.args)

        def run() -> Any:
            return self._at.env.runtime.attempt(
                lambda: call.fn(*given, **call.kwargs),
                workflow=ref.workflow,
                instance_id=ref.instance_id,
                step=branch.name,
                number=attempt,
            )

        body = Body(
            step_key=branch.key,
            attempt=attempt,
            call=teller.around_body(run, self._at.lease.claim, step=branch.name, attempt=attempt),
            buffer=buffer,
            close_session=self._close_session,
            abandon_session=self._abandon_session,
            is_from_outside=self._at.env.is_from_outside,
            monotonic=self._at.env.runtime.monotonic,
            lease=self._at.lease,
        )
        return body

    def _open_session(self, body: Body) -> Any:
        gate = self._sessions
        if gate is not None:
            gate.enter(body.buffer)
        try:
            body.buffer.session = self._at.env.store.open_session()
            body.check_wanted()
        except BaseException:
            if gate is not None:
                gate.leave(body.buffer)
            raise
        return body.buffer.session

    def _abandon_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._at.env.store.abandon_session(buffer.session)

    def _close_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._at.env.store.close_session(buffer.session)
            allow_to_end(buffer.session)  # a shared factory may hand the same one to the application
            if self._sessions is not None:
                self._sessions.leave(buffer)

    def _finish(self, branch: Branch, body: Body, outcome: Outcome | None, *, sole: bool) -> None:
        """Record what came of an attempt; or note that it was none, since its transaction was lost."""
        try:
            self._record(branch, body, outcome, sole=sole)
        except BodyMustRunAgain as exc:
            self._close_session(body.buffer)
            self._at.append(LogLevel.WARNING, f"The transaction of step {branch.name!r} was lost: {exc}", "system")
            self._lost.append((branch, body, str(exc)))
        except BaseException:
            body.abandon()
            raise

    def _record(self, branch: Branch, body: Body, outcome: Outcome | None, *, sole: bool) -> None:
        self._at.env.runtime.checkpoint("after-body")
        match outcome:
            case Interrupted(error):
                body.abandon()
                raise self._at.interrupt(Stopped(error))
            case TimedOut() | None:
                body.abandon()
                text = f"attempt {body.attempt} took longer than {branch.policy.timeout}"
                self._fail(branch, body, ("StepTimeout", text), sole=sole)
            case Raised(error):
                if body.buffer.session is not None and self._at.env.store.is_transient(error):
                    raise BodyMustRunAgain(values.text_of(error)) from error
                self._close_session(body.buffer)
                self._fail_with(branch, body, self._as_step_error(branch, body, error), sole=sole)
            case Returned(value):
                try:
                    self._succeed(branch, body, value)
                except AuthorWriteFailed as exc:
                    self._close_session(body.buffer)
                    # One of ours says that the target is not there, or has ended: it would say so again.
                    self._fail_with(branch, body, exc.error, is_final=isinstance(exc.error, DurableError), sole=sole)

    def _as_step_error(self, branch: Branch, body: Body, error: BaseException) -> BaseException:
        if body.buffer.session is not None and self._at.env.store.is_unique_violation(error):
            return StepCommitConflict(branch.name, values.storable(values.text_of(error), 500))
        return error

    def _succeed(self, branch: Branch, body: Body, value: Any) -> None:
        assert branch.fn is not None
        buffer = body.buffer
        try:
            what = f"Result of step {branch.name!r}"
            result = branch.fn.result.encode(value, what=what, limits=self._at.env.settings.limits)
            decoded(branch.name, branch.fn.result, result)
        except (ValueRefused, StepResultInvalid) as exc:
            raise AuthorWriteFailed(exc) from exc
        write = self._at.write(branch, StepStatus.COMPLETED, result=result, attempts=body.attempt, ran_for=body.took)
        said = list(self._at.logs)
        boundary = Boundary(
            [write, *self._at.race_writes(branch, write.commit_id)],
            self._at.take_logs(body),
            mutations=buffer.mutations,
            instances=buffer.instances,
            events=buffer.events,
            emissions=buffer.emissions,
            outgoing=buffer.outgoing,
            labels=buffer.labels,
        )
        try:
            committed = self._at.guarded(lambda: self._at.committer.commit(boundary, session=buffer.session))
        except (AuthorWriteFailed, BodyMustRunAgain):
            self._at.logs[:0] = said  # what the function said rides in the commit that comes instead
            raise
        self._close_session(buffer)
        self._at.committed(branch, committed)

    def _fail_with(
        self, branch: Branch, body: Body, error: BaseException, *, is_final: bool = False, sole: bool
    ) -> None:
        is_final = is_final or values.forbids_retry(error)
        self._fail(branch, body, values.described(error), error, is_final=is_final, sole=sole)

    def _fail(
        self,
        branch: Branch,
        body: Body,
        described: tuple[str, str],
        error: BaseException | None = None,
        *,
        is_final: bool = False,
        sole: bool,
    ) -> None:
        """Record a failed attempt: for good, or with the time of the next one."""
        policy = branch.policy
        is_final = is_final or (policy.max_attempts is not None and body.attempt >= policy.max_attempts)
        write = self._at.write(
            branch,
            StepStatus.ERRORED if is_final else StepStatus.WAITING,
            attempts=body.attempt,
            error=values.storable_error(*described),
            retry_in=None if is_final else self._pause(branch, body.attempt),
            ran_for=body.took,
        )
        branch.cause = error
        boundary = Boundary(
            [write, *(self._at.race_writes(branch, write.commit_id) if is_final else ())],
            self._at.take_logs(body),
            mutations=body.buffer.on_terminal_error if is_final else (),
            sleep=_until_retry if sole and not is_final else None,
        )
        if boundary.sleep is not None:
            self._at.defer(boundary)
            return
        try:
            committed = self._at.guarded(lambda: self._at.committer.commit(boundary))
        except AuthorWriteFailed as exc:
            # on_terminal_error itself failed: the failure is recorded all the same, with this in the log.
            self._at.append(
                LogLevel.ERROR, f"on_terminal_error of step {branch.name!r} failed: {exc.error!r}", "system"
            )
            boundary.mutations, boundary.logs = (), [*boundary.logs, *self._at.take_logs()]
            committed = self._at.guarded(lambda: self._at.committer.commit(boundary))
        self._at.committed(branch, committed)

    def _pause(self, branch: Branch, attempt: int) -> timedelta:
        """How long to wait after a failed attempt."""
        delay, workflow = branch.policy.delay_after(attempt), self._at.lease.claim.ref.workflow
        return self._at.env.runtime.span(delay, purpose="retry", workflow=workflow, step=branch.name)


def _until_retry(rows: list[StepRow]) -> list[OpenWait]:
    return [OpenWait(row.next_retry_at) for row in rows if row.next_retry_at is not None]
