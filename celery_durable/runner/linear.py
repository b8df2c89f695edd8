"""One pass over a linear run: the rows say what is next, handlers say what becomes of it.

``READY -> RUNNING -> DONE | WAITING | READY | DEAD``, each arrow one commit under the claim's token. The definition is
asked for a step's handler and never for what follows it. A row that is found RUNNING belongs to a worker that died.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any, assert_never

from celery_durable import teller, values
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
    Due,
    LogLevel,
    LogLine,
    Status,
    StepRow,
    StepStatus,
)
from celery_durable.runner.attempts import SESSION_RERUNS
from celery_durable.runner.bodies import Body, Interrupted, Raised, Returned, TimedOut
from celery_durable.runner.boundary import BodyMustRunAgain, Boundary, Committed, Committer
from celery_durable.runner.handlers import Handlers
from celery_durable.runner.lease import Lease
from celery_durable.runner.makings import AuthorWriteFailed
from celery_durable.runner.progress import Environment
from celery_durable.runtime import Branch
from celery_durable.store import journal
from celery_durable.store.claims import After, Ending, Guarded, OpenWait
from celery_durable.store.engine import Tx
from celery_durable.store.journal import Loaded, StepWrite

logger = logging.getLogger("celery_durable.runner")

_SHORTEST_WAIT = timedelta(seconds=1)
_NOW = timedelta(0)


class LinearPass:
    """Advances one run as far as its rows allow now. ``max_turns``: hand it on after so many outcomes."""

    def __init__(
        self,
        definition: LinearDefinition,
        env: Environment,
        lease: Lease,
        committer: Committer,
        loaded: Loaded,
        *,
        max_turns: int | None,
    ) -> None:
        self._definition, self._env, self._lease, self._committer = definition, env, lease, committer
        self._handlers = Handlers(definition, env, lease, loaded, committer.board)
        self._max_turns = max_turns
        self._loaded, self._rows = loaded, list(loaded.steps)
        self._now = lease.claim.claimed_at  # never ahead of the database's time
        self._began, self._turns, self._pause_requested = env.runtime.monotonic(), 0, False
        self._said: str | None = None
        self._logs: list[LogLine] = []

    def run(self) -> str:
        """Turn after turn, until the run waits, ends or makes room; answers with a short sentence."""
        crashes, standing = self._lease.claim.crash_count, self._current()
        if crashes >= self._env.settings.max_crashes and standing is not None:
            error = WorkerCrashLoop(crashes)
            self._die(standing, (type(error).__name__, str(error)))
        else:
            teller.began(self._lease.claim, has_started=self._loaded.has_started)
        while self._said is None:
            row = self._current()
            if row is None:
                self._finish()
            elif row.status is StepStatus.RUNNING:
                self._recover(row)
            elif self._must_stop():
                self._let_go([])
            elif not self._handlers.knows(row):
                self._leave(row)
            elif row.status is StepStatus.LINEAR_WAITING:
                self._wake(row)
            elif row.next_retry_at is not None and row.next_retry_at > self._now:
                self._let_go([OpenWait(row.next_retry_at)])
            else:
                self._turn(self._commit(Boundary([self._begun(row)])).rows[0])
        return self._said

    def _current(self) -> StepRow | None:
        """The step that the run stands at: the first that is not done. None: all are."""
        return next((row for row in self._rows if row.status is not StepStatus.DONE), None)

    def _finish(self) -> None:
        """All are done: the last one was settled by hand.

        Or another has taken over between our claim and our look at the rows; then the claim's token stops us.
        """
        ending = Ending(Status.COMPLETE, output=self._rows[-1].result)
        self._committer.settle(ending, [])
        self._said = str(ending.status)

    def _must_stop(self) -> bool:
        has_had_its_time = self._turns and self._env.runtime.monotonic() - self._began > self._env.settings.pass_seconds
        has_had_its_turns = self._max_turns is not None and self._turns >= self._max_turns
        return bool(self._pause_requested or self._env.should_stop() or has_had_its_time or has_had_its_turns)

    # --- arrows ---------------------------------------------------------------------------------

    def _write(self, row: StepRow, status: StepStatus, **changes: Any) -> StepWrite:
        """The row with another status, and what else changes; all else stays, but for its times."""
        kept: dict[str, Any] = {
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
            **(kept | changes),
        )

    def _begun(self, row: StepRow) -> StepWrite:
        return self._write(row, StepStatus.RUNNING, ran_for=_NOW)

    def _recover(self, row: StepRow) -> None:
        """Its worker died with it: another attempt, or the end."""
        if self._is_last(row):
            self._die(row, (LEASE_EXPIRED, "the last attempt ended with its worker"))
        else:
            text = "the attempt ended with its worker"
            again: dict[str, Any] = {"attempts": row.attempts + 1, "retry_in": _NOW}
            write = self._write(row, StepStatus.READY, **again, error_name=LEASE_EXPIRED, error_message=text)
            self._commit(Boundary([write]))

    def _wake(self, row: StepRow) -> None:
        """Its event is there: READY, with it. Its time is over: RUNNING, without. Else it goes on waiting."""
        commit_id = self._env.runtime.new_token()
        due_at, type_ = row.wake_at, row.wait_event_type
        assert due_at is not None
        assert type_ is not None

        def look(tx: Tx, guarded: Guarded) -> list[StepWrite]:
            event = journal.oldest_event(tx, self._lease.claim, type_, deadline=due_at)
            if event is not None:
                journal.consume(tx, self._lease.claim, guarded, event, key=row.step_key)
                return [replace(self._woken(row, event.seq), commit_id=commit_id)]
            return [replace(self._begun(row), commit_id=commit_id)] if due_at <= guarded.now else []

        def sleep(rows: list[StepRow]) -> list[OpenWait]:
            return [] if rows else [OpenWait(due_at, type_)]

        placeholder = replace(self._begun(row), commit_id=commit_id)
        committed = self._commit(Boundary([placeholder], look=look, sleep=sleep))
        if committed.rows and committed.rows[0].status is StepStatus.RUNNING:
            self._turn(committed.rows[0])

    def _woken(self, row: StepRow, event_seq: int) -> StepWrite:
        return self._write(
            row,
            StepStatus.READY,
            event_seq=event_seq,
            event_type=None,
            wake_at=None,
            retry_in=_NOW,
            error_name=None,
            error_message=None,
        )

    def _is_last(self, row: StepRow) -> bool:
        return row.max_attempts is not None and row.attempts + 1 >= row.max_attempts

    def _die(self, row: StepRow, error: tuple[str, str], body: Body | None = None) -> None:
        name, message = values.storable_error(*error)
        write = self._write(
            row,
            StepStatus.DEAD,
            attempts=row.attempts + 1,
            error_name=name,
            error_message=message,
            ran_for=None if body is None else body.took,
        )
        ending = Ending(Status.ERRORED, error_name=name, error_message=message)
        undo = () if body is None else tuple(body.buffer.on_terminal_error)
        boundary = Boundary([write], self._take_logs(body), mutations=undo, ending=ending)
        try:
            self._commit(boundary)
        except AuthorWriteFailed as exc:  # the end is recorded all the same, with this in the log
            text = f"on_terminal_error of step {row.name!r} failed: {exc.error!r}"
            boundary.mutations, boundary.logs = (), [*boundary.logs, self._line(LogLevel.ERROR, text, row)]
            self._commit(boundary)

    # --- a turn: the handler is called, and what it answers is recorded -------------------------

    def _turn(self, row: StepRow) -> None:
        teller.attempt_begins(self._lease.claim, row.name, row.attempts + 1, type_=row.type)
        for left in reversed(range(SESSION_RERUNS + 1)):
            body = self._handlers.body(row, self._rows)
            try:
                self._record(row, body, self._run_body(row, body))
            except BodyMustRunAgain as exc:
                self._handlers.close_session(body.buffer)
                if not left:
                    times = SESSION_RERUNS + 1
                    text = f"the step's transaction was lost {times} times, at last by: {exc}"
                    self._retry(row, body, None, ("StepTransactionLost", text))
                    return
                text = f"The transaction of step {row.name!r} was lost: {exc}"
                self._logs.append(self._line(LogLevel.WARNING, text, row))
            except BaseException:
                body.abandon()
                raise
            else:
                return

    def _run_body(self, row: StepRow, body: Body) -> Any:
        """The outcome of the body; None where it took too long."""
        self._lease.check(self._env.store)
        self._env.runtime.checkpoint("before-body")
        if row.timeout is None or self._env.runtime.can_interrupt():
            outcome: Any = body.run_timed(row.timeout)
        else:
            outcomes: list[Any] = []
            self._env.runtime.run_branches([Branch(body.run, outcomes.append, row.timeout.total_seconds())])
            (outcome,) = outcomes
        self._env.runtime.checkpoint("after-body")
        return outcome

    def _record(self, row: StepRow, body: Body, outcome: Any) -> None:
        match outcome:
            case Interrupted(error):
                body.abandon()
                self._hand_back(row)
                raise error
            case TimedOut() | None:
                body.abandon()
                self._retry(row, body, None, ("StepTimeout", f"attempt {body.attempt} took longer than {row.timeout}"))
            case Raised(error):
                if body.buffer.session is not None and self._env.store.is_transient(error):
                    raise BodyMustRunAgain(values.text_of(error)) from error
                self._failed(row, body, self._as_step_error(row, body, error))
            case Returned(answer):
                try:
                    self._answer(row, body, answer)
                except AuthorWriteFailed as exc:
                    # One of ours says that the target is not there, or has ended: it would say so again.
                    self._failed(row, body, exc.error, is_final=isinstance(exc.error, DurableError))
                except (ValueRefused, HandlerAnswerInvalid) as exc:
                    self._failed(row, body, exc)

    def _answer(self, row: StepRow, body: Body, answer: Outcome) -> None:
        if not isinstance(answer, Outcome):
            raise HandlerAnswerInvalid(row.name, answer)
        match answer:
            case Completed(result):
                self._complete(row, body, result)
            case Waiting():
                self._wait(row, body, answer)
            case Retry(backoff, error):
                self._handlers.close_session(body.buffer)
                after = None if backoff is None else values.duration(backoff, maximum=self._env.settings.max_sleep)
                self._retry(row, body, after, ("Retry", error))
            case Dead(error):
                self._handlers.close_session(body.buffer)
                self._die(row, ("Dead", error), body)
            case _:
                assert_never(answer)

    def _complete(self, row: StepRow, body: Body, result: Any) -> None:
        text = values.encode(result, what=f"Result of step {row.name!r}", limits=self._env.settings.limits)
        done = self._write(
            row,
            StepStatus.DONE,
            result=text,
            ran_for=body.took,
            wake_at=None,
            event_type=None,
            error_name=None,
            error_message=None,
        )
        following = next((each for each in self._rows if each.seq == row.seq + 1), None)
        if following is None:
            boundary = self._boundary([done], body, ending=Ending(Status.COMPLETE, output=text))
        else:
            boundary = self._boundary([done, self._write(following, StepStatus.READY, retry_in=_NOW)], body)
        self._commit(boundary, body)

    def _wait(self, row: StepRow, body: Body, answer: Waiting) -> None:
        """WAITING; READY at once where the event has come before (it may have, ever since the run began)."""
        settings = self._env.settings
        type_ = values.event_type(answer.event_type, settings.max_event_type)
        length = values.duration(answer.timeout, minimum=_SHORTEST_WAIT, maximum=settings.max_sleep)
        workflow = self._lease.claim.ref.workflow
        length = self._env.runtime.span(length, purpose="event", workflow=workflow, step=row.name)
        tx = self._handlers.tx_of(row, body)
        for name, payload in answer.outbound_events:
            tx.send_outbound(name, payload)
        waiting = self._write(
            row,
            StepStatus.LINEAR_WAITING,
            wake_in=length,
            wake_at=None,
            event_type=type_,
            event_seq=None,
            ran_for=body.took,
            error_name=None,
            error_message=None,
        )

        def look(tx: Tx, guarded: Guarded) -> list[StepWrite]:
            event = journal.oldest_event(tx, self._lease.claim, type_, deadline=guarded.now + length)
            if event is None:
                return [waiting]
            journal.consume(tx, self._lease.claim, guarded, event, key=row.step_key)
            return [replace(self._woken(row, event.seq), commit_id=waiting.commit_id)]

        self._commit(self._boundary([waiting], body, look=look, sleep=_until_event), body)

    def _failed(self, row: StepRow, body: Body, error: BaseException, *, is_final: bool = False) -> None:
        """An exception: tried again as the step's policy says, unless it says itself that this is no use."""
        self._handlers.close_session(body.buffer)
        if is_final or values.forbids_retry(error):
            self._die(row, values.described(error), body)
        else:
            self._retry(row, body, None, values.described(error))

    def _retry(self, row: StepRow, body: Body, backoff: timedelta | None, error: tuple[str, str]) -> None:
        if self._is_last(row):
            self._die(row, error, body)
            return
        name, message = values.storable_error(*error)
        if backoff is None:
            policy = self._definition.policy_of(row.name, self._env.settings.step_policy)
            backoff = policy.delay_after(row.attempts + 1)
        workflow = self._lease.claim.ref.workflow
        write = self._write(
            row,
            StepStatus.READY,
            attempts=row.attempts + 1,
            retry_in=self._env.runtime.span(backoff, purpose="retry", workflow=workflow, step=row.name),
            error_name=name,
            error_message=message,
            ran_for=body.took,
        )
        self._commit(Boundary([write], self._take_logs(body), sleep=_until_retry))
        self._turns += 1

    def _as_step_error(self, row: StepRow, body: Body, error: BaseException) -> BaseException:
        if body.buffer.session is not None and self._env.store.is_unique_violation(error):
            return StepCommitConflict(row.name, values.storable(values.text_of(error), 500))
        return error

    # --- commits --------------------------------------------------------------------------------

    def _boundary(self, writes: list[StepWrite], body: Body, **how: Any) -> Boundary:
        """What a handler that got through has said, asked for and written."""
        buffer = body.buffer
        return Boundary(
            writes,
            self._take_logs(body),
            mutations=buffer.mutations,
            instances=buffer.instances,
            events=buffer.events,
            emissions=buffer.emissions,
            outgoing=buffer.outgoing,
            labels=buffer.labels,
            **how,
        )

    def _commit(self, boundary: Boundary, body: Body | None = None) -> Committed:
        committed = self._committer.commit(boundary, session=None if body is None else body.buffer.session)
        if body is not None:
            self._handlers.close_session(body.buffer)
            self._turns += 1
        self._logs.clear()
        by_key = {row.step_key: row for row in committed.rows}
        self._rows = [by_key.get(row.step_key, row) for row in self._rows]
        self._pause_requested = self._pause_requested or committed.pause_requested
        for write, row in zip(boundary.writes, committed.rows, strict=False):
            if row.status is StepStatus.READY and not write.retry_in and row.next_retry_at is not None:
                self._now = max(self._now, row.next_retry_at)
        self._tell(committed, boundary.ending)
        if committed.dues:
            self._env.wake(list(committed.dues))
        if committed.outgoing:
            self._env.post(list(committed.outgoing))
        if boundary.ending is not None:
            name = boundary.ending.error_name
            self._said = str(boundary.ending.status) + ("" if name is None else f": {name}")
        elif committed.after is not None:
            self._said = _sentence(committed.after, committed)
        return committed

    def _tell(self, committed: Committed, ending: Ending | None) -> None:
        claim = self._lease.claim
        committed.tell(claim)
        if ending is not None:
            teller.ended(claim, ending, lambda: self._lease.now - self._loaded.created_at)
        elif committed.after is not None:
            teller.let_go(claim, committed.after, committed.until)

    def _let_go(self, waits: list[OpenWait], writes: tuple[StepWrite, ...] = (), **how: Any) -> None:
        after = self._committer.let_go(self._take_logs(None), waits, writes, **how)
        if after is After.DUE:
            self._env.wake([Due(self._lease.claim.ref, self._lease.claim.queue)])
        until = min((wait.due_at for wait in waits), default=None)
        self._said = _sentence(after, Committed([], until=until))

    def _leave(self, row: StepRow) -> None:
        """Code that has no handler for the row's step: another worker's may."""
        delay = timedelta(seconds=self._env.settings.unknown_workflow_seconds)
        logger.warning(
            "This worker has no handler for step %r of linear workflow %r; instance %s is left for one that has. Keep "
            "the handlers of steps that runs in flight still have, or wait for the deploy to end.",
            row.name, self._definition.name, self._lease.claim.ref,
        )  # fmt: skip
        self._let_go([OpenWait(self._now + delay)], is_progress=False)
        self._said = f"noop: step {row.name!r} has no handler in this worker"

    def _hand_back(self, row: StepRow) -> None:
        """The worker is being stopped, which is no attempt and no crash."""
        try:
            self._let_go([], (self._write(row, StepStatus.READY, retry_in=_NOW),))
        except Superseded:
            logger.info("%s was taken over before it could be handed on", self._lease.claim.ref)
        except Exception as exc:  # noqa: BLE001  # what stops the worker is being raised; the lease will end
            logger.warning("%s could not be handed on, its lease will end: %s", self._lease.claim.ref, exc)

    # --- logs -----------------------------------------------------------------------------------

    def _line(self, level: LogLevel, text: str, row: StepRow) -> LogLine:
        message = values.storable(text, self._env.settings.max_log_message)
        return LogLine(level, "system", message, None, row.step_key, row.attempts + 1, is_replay=False)

    def _take_logs(self, body: Body | None) -> list[LogLine]:
        return [*self._logs, *(() if body is None else body.logs)]


def _until_event(rows: list[StepRow]) -> list[OpenWait]:
    """What the run waits for when this is written; nothing where the event had come before."""
    return [OpenWait(row.wake_at, row.wait_event_type) for row in rows if row.wake_at is not None]


def _until_retry(rows: list[StepRow]) -> list[OpenWait]:
    return [OpenWait(row.next_retry_at) for row in rows if row.next_retry_at is not None]


def _sentence(after: After, committed: Committed) -> str:
    match after:
        case After.WAITING:
            until = committed.until
            return "waiting" if until is None else f"waiting until {until:%Y-%m-%d %H:%M:%S} UTC"
        case After.PAUSED:
            return "paused"
        case After.DUE:
            return "handed on: due again"
