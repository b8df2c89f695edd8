"""Committing what a pass did: the author's writes, the guard, then our rows, in one transaction (LAW 3).

A boundary without author writes is *redoable*: after a deadlock, or a commit whose outcome is unknown
and that turns out not to have happened, it is committed again with the same result. One that holds
the body's session is not: its body runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from celery_durable import teller, values
from celery_durable.config import Settings
from celery_durable.errors import (
    StepCommitConflict,
    Superseded,
    TooManyLabels,
)
from celery_durable.model import Claim, Due, LogLine, Outgoing, Ref, Status, StepRow, StepStatus, StepType
from celery_durable.runner import endings, makings
from celery_durable.runner.board import Board
from celery_durable.runner.endings import Farewell
from celery_durable.runner.lease import Lease
from celery_durable.runner.makings import AuthorWriteFailed, Makings
from celery_durable.runner.patience import Patience
from celery_durable.step import NewEmission, NewEvent, NewInstance
from celery_durable.store import answers, claims, instances, items, journal, labels, outbox, waiters
from celery_durable.store.claims import After, Ending, Guarded, OpenWait
from celery_durable.store.engine import Store, Tx
from celery_durable.store.journal import StepWrite
from celery_durable.store.watchdog import PASS


class BodyMustRunAgain(Exception):
    """The body's transaction is known not to have happened, through no fault of its own."""


@dataclass(slots=True)
class Boundary:
    """What one commit holds. ``writes``: at least one, in order.

    ``look``: says under the lock what is written instead, of the same key and commit id; nothing leaves the row as it
    is. ``sleep``: let go in it, asleep for these waits; where there are none, go on. ``ending``: end the run with it.
    """

    writes: list[StepWrite]
    logs: list[LogLine] = field(default_factory=list)
    mutations: Sequence[Callable[[Session], object]] = ()
    instances: Sequence[NewInstance] = ()
    events: Sequence[NewEvent] = ()
    emissions: Sequence[NewEmission] = ()
    outgoing: Sequence[Outgoing] = ()
    labels: Mapping[str, str | None] = field(default_factory=dict)
    look: Callable[[Tx, Guarded], list[StepWrite]] | None = None
    sleep: Callable[[list[StepRow]], list[OpenWait]] | None = None
    ending: Ending | None = None

    @property
    def is_progress(self) -> bool:
        return any(write.is_progress for write in self.writes)

    @property
    def is_plain(self) -> bool:
        return (
            len(self.writes) == 1
            and not (self.logs or self.mutations or self.instances or self.events or self.emissions or self.outgoing)
            and self.sleep is None
            and self.look is None
            and self.ending is None
            and not self.labels
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """The rows as recorded, in the order of the writes; ``after``: what became of the instance if it was let go.

    ``until``: when the earliest of what it waits for is due. ``writes``, ``created`` and ``received`` are to be told.
    """

    rows: list[StepRow]
    pause_requested: bool = False
    after: After | None = None
    until: datetime | None = None
    dues: tuple[Due, ...] = ()
    outgoing: tuple[Outgoing, ...] = ()
    writes: Sequence[StepWrite] = ()
    created: Sequence[Ref] = ()
    received: Sequence[teller.Received] = ()

    def tell(self, claim: Claim) -> None:
        """Before others are woken, so that what they do is told after it."""
        teller.recorded(claim, self.writes)
        for ref in self.created:
            teller.created(ref)
        for event in self.received:
            teller.received(event)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The run has ended, by us unless that is not ``is_certain``, and this is due now."""

    dues: list[Due] = field(default_factory=list)
    is_certain: bool = True


class Committer:
    """Writes under one claim."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        lease: Lease,
        patience: Patience,
        board: Board,
        *,
        has_started: bool,
        log_room: int,
        began: datetime,
        is_from_outside: Callable[[BaseException], bool],
        farewell: Farewell,
        post: Callable[[list[Outgoing]], None],
        wake: Callable[[list[Due]], None],
    ) -> None:
        self._store, self._settings, self._lease, self._patience = store, settings, lease, patience
        self.board = board
        self._began, self._farewell, self._post, self._wake = began, farewell, post, wake
        self._is_from_outside = is_from_outside
        self._has_started, self._log_room = has_started, log_room
        self._grace = timedelta(seconds=settings.grace_seconds)
        self._makings = Makings(settings, store.runtime, lease.claim)

    @property
    def claim(self) -> Claim:
        return self._lease.claim

    # --- boundaries -----------------------------------------------------------------------------

    def commit(self, boundary: Boundary, *, session: Session | None = None) -> Committed:
        """Commit a boundary; raises Superseded, AuthorWriteFailed, and BodyMustRunAgain with a session."""
        asked_at = self._lease.moved()
        self._patience.progressed()
        if session is not None or boundary.mutations:
            committed = self._commit_authors(boundary, session)
        elif boundary.is_plain and not self.board.has_kept:
            committed = self._commit_plain(boundary)
        else:
            committed = self._commit_redoable(boundary)
        self._log_room -= len(boundary.logs)
        self.board.arrived()
        self._lease.renewed(asked_at=asked_at)
        if committed.after is not None:
            self._has_started = True
        return committed

    def _commit_authors(self, boundary: Boundary, session: Session | None) -> Committed:
        """Commit the author's own statements, which have no bound (LAW 7)."""
        self._lease.author_begins(boundary.writes[0].commit_id)
        try:
            if session is None:
                return self._commit_redoable(boundary)
            return self._commit_session(boundary, session)
        finally:
            self._lease.author_ends(boundary.writes[0].commit_id)

    def _commit_plain(self, boundary: Boundary) -> Committed:
        def work(tx: Tx) -> Committed:
            with self._store.losing_a_race():
                written = journal.commit_step(tx, self.claim, boundary.writes[0], lease=self._lease.length)
            return Committed([written.row], pause_requested=written.pause_requested, writes=boundary.writes)

        resolve = self._resolver(boundary)
        try:
            return self._store.transact(work, resolve=resolve, single=True, bound=PASS)
        except Superseded:
            # Perhaps by ourselves: a first try, given up with its connection, may have arrived before the second.
            found = self._store.transact(resolve)
            if found is None:
                raise
            return found

    def _in_order(self, tx: Tx, boundary: Boundary, session: Session | None) -> Committed:
        """Author rows first, mutex rows last and by ascending id.

        Guard-first deadlocks with a web transaction that updates its own row and then sends an event.
        """
        self._author_writes(tx, boundary, session)
        targets = makings.targets(tx, boundary.events, made=boundary.instances)
        if boundary.ending is not None:
            targets = sorted({*targets, *answers.waiting_parent(tx, self.claim.parent)})
        for pk, workflow, instance_id in targets:
            if pk <= self.claim.pk:  # our own too: the guard finds it by another index, see `terminate`
                instances.lock(tx, workflow, instance_id)
        with self._store.losing_a_race():
            guarded = claims.guard(tx, self.claim, lease=self._lease.length, is_progress=boundary.is_progress)
            writes = boundary.writes if boundary.look is None else boundary.look(tx, guarded)
            rows = [self._write(tx, guarded, write) for write in writes]
        self._label(tx, boundary)
        journal.write_logs(tx, self.claim, guarded, boundary.logs, room=self._log_room)
        self.board.ride(tx)
        outbox.insert(
            tx,
            boundary.outgoing,
            pk=self.claim.pk,
            run_number=self.claim.ref.run_number,
            step_key=boundary.writes[0].key,
            grace=self._grace,
        )
        for pk, workflow, instance_id in targets:
            if pk > self.claim.pk:
                instances.lock(tx, workflow, instance_id)
        received: list[teller.Received] = []
        created = self._makings.create(tx, boundary.instances, by_step=boundary.writes[0].key)
        dues = [*created, *self._makings.send(tx, boundary.events, received)]
        self._makings.emit(tx, boundary.emissions)
        after, until = None, None
        if boundary.sleep is not None and (waits := boundary.sleep(rows)):
            until = min(wait.due_at for wait in waits)
            after = self._suspend(tx, guarded, waits)
        outgoing = tuple(boundary.outgoing)
        if boundary.ending is not None:
            claims.settle(tx, self.claim, boundary.ending)
            outgoing += self._leave(tx, self._farewell.letters(boundary.ending))
            dues += self._answer(tx, boundary.ending)
        if after is After.DUE:
            dues.append(Due(self.claim.ref, self.claim.queue))
        return Committed(
            rows,
            guarded.pause_requested,
            after,
            until,
            tuple(dues),
            outgoing,
            writes=writes,
            created=[due.ref for due in created],
            received=received,
        )

    def _write(self, tx: Tx, guarded: Guarded, write: StepWrite) -> StepRow:
        if write.status is StepStatus.CANCELLED:  # it lost a race
            if write.type is StepType.WAIT:
                waiters.close_wait(tx, self.claim, key=write.key)
            elif write.type is StepType.TASK:
                items.forget(tx, self.claim.pk, self.claim.ref.run_number, write.key)
        return journal.write_step(tx, self.claim, guarded, write)

    def _label(self, tx: Tx, boundary: Boundary) -> None:
        """Change the labels of the instance, whose row the guard has locked."""
        try:
            if boundary.labels:
                labels.merge(tx, self.claim.pk, boundary.labels)
        except TooManyLabels as exc:
            raise AuthorWriteFailed(exc) from exc

    def _author_writes(self, tx: Tx, boundary: Boundary, session: Session | None) -> None:
        try:
            if session is not None:
                session.flush()
            if boundary.mutations:
                self._store.run_author_writes(tx, boundary.mutations, session)
        except BaseException as exc:
            if self._store.is_transient(exc) or isinstance(exc, Superseded) or self._is_from_outside(exc):
                raise
            raise self._author_fault(boundary, exc) from exc

    def _author_fault(self, boundary: Boundary, exc: BaseException) -> AuthorWriteFailed:
        if self._store.is_unique_violation(exc):
            return AuthorWriteFailed(
                StepCommitConflict(boundary.writes[0].name, values.storable(values.text_of(exc), 500))
            )
        return AuthorWriteFailed(exc)

    def _commit_redoable(self, boundary: Boundary) -> Committed:
        try:
            return self._store.transact(
                lambda tx: self._in_order(tx, boundary, None),
                resolve=self._resolver(boundary),
                bound=None if boundary.mutations else PASS,
            )
        except Exception as exc:
            if boundary.mutations and self._store.is_refusal(exc):  # at the commit: a deferred constraint
                raise self._author_fault(boundary, exc) from exc
            raise

    def _commit_session(self, boundary: Boundary, session: Session) -> Committed:
        """Commit in the body's own transaction; what is known not to have happened needs the body again."""
        resolve = self._resolver(boundary)
        try:
            return self._store.transact_session(session, lambda tx: self._in_order(tx, boundary, session))
        except AuthorWriteFailed:
            raise
        except Exception as exc:
            if self._store.is_unknown(exc):
                found = self._store.transact(resolve)
                if found is not None:
                    return found
            elif self._store.is_refusal(exc):  # a deferred constraint, or an error that the body ignored
                raise self._author_fault(boundary, exc) from exc
            elif not self._store.is_transient(exc):
                raise
            raise BodyMustRunAgain(str(exc)) from exc

    def _resolver(self, boundary: Boundary) -> Callable[[Tx], Committed | None]:
        """How to find out whether this boundary was applied: its commit id, once no commit is in doubt."""

        def resolve(tx: Tx) -> Committed | None:
            is_held = claims.is_held(tx, self.claim)
            rows = [
                journal.find_commit(tx, self.claim, key=write.key, commit_id=write.commit_id)
                for write in boundary.writes
            ]
            found = [row for row in rows if row is not None]
            if len(found) == len(boundary.writes):
                let_go = boundary.sleep is not None and not (is_held and boundary.look is not None)
                return Committed(found, after=After.WAITING if let_go else None, writes=boundary.writes)
            if not is_held:
                raise Superseded(str(self.claim.ref))
            return None

        return resolve

    # --- waits ----------------------------------------------------------------------------------

    def commit_wait(
        self,
        *,
        event_type: str,
        topic: str | None,
        deadline: Callable[[Guarded], datetime],
        write: Callable[[Guarded, journal.Arrived | None], list[StepWrite]],
        logs: list[LogLine],
        key: str,
        commit_id: str,
        sleeps: bool,
        recall: str | None = None,
    ) -> Committed:
        """Look for an event under the lock and record what follows from it, in one transaction.

        ``write`` makes the rows from the event that was found, or from the time; none leaves the wait as it is.
        ``topic``: what it waits on, where its events are not sent but emitted. ``sleeps``: nothing else is open, so an
        unsatisfied wait lets the instance go in the same commit. ``recall``: a letter that need not leave any more
        where the time is over.
        """

        def work(tx: Tx) -> Committed:
            with self._store.losing_a_race():
                guarded = claims.guard(tx, self.claim, lease=self._lease.length)
                until = deadline(guarded)
                event = journal.oldest_event(tx, self.claim, event_type, deadline=until)
                made = write(guarded, event)
                if made:
                    self._patience.progressed()
                if event is not None:
                    journal.consume(tx, self.claim, guarded, event, key=key)
                rows = [self._write(tx, guarded, each) for each in made]
                if recall is not None and event is None and until <= guarded.now:
                    outbox.remove(tx, [recall])
                    items.forget(tx, self.claim.pk, self.claim.ref.run_number, key)
                if topic is not None and made and not made[0].is_final:
                    waiters.open_wait(tx, self.claim, guarded, key=key, topic=topic)
                elif topic is not None and made:
                    waiters.close_wait(tx, self.claim, key=key)
            journal.write_logs(tx, self.claim, guarded, logs, room=self._log_room)
            self.board.ride(tx)
            is_open = not made or not made[0].is_final
            after = None
            if sleeps:  # an event that came since the glance: due at once, the next pass hands it out
                waits = [OpenWait(until, event_type)]
                if rows:
                    until = rows[0].next_retry_at or until
                    waits = [OpenWait(until, rows[0].wait_event_type)]
                after = self._suspend(tx, guarded, waits if is_open else [])
            dues = (Due(self.claim.ref, self.claim.queue),) if after is After.DUE else ()
            return Committed(rows, guarded.pause_requested, after, until, dues, writes=made)

        def resolve(tx: Tx) -> Committed | None:
            is_held = claims.is_held(tx, self.claim)
            row = journal.find_commit(tx, self.claim, key=key, commit_id=commit_id)
            if row is not None:
                until = row.next_retry_at or row.wake_at
                return Committed([row], after=None if is_held else After.WAITING, until=until)
            if not is_held:
                raise Superseded(str(self.claim.ref))
            return None

        asked_at = self._lease.moved()
        committed = self._store.transact(work, resolve=resolve, bound=PASS)
        self._log_room -= len(logs)
        self.board.arrived()
        self._lease.renewed(asked_at=asked_at)
        return committed

    # --- the end of a pass ----------------------------------------------------------------------

    def _suspend(self, tx: Tx, guarded: Guarded, waits: list[OpenWait]) -> After:
        if not self._has_started:
            claims.mark_started(tx, self.claim)
        if not waits:
            return claims.release(tx, self.claim, guarded, grace=self._grace)
        waits = [*waits, *self._patience.alarms(guarded.now)]
        return claims.suspend(tx, self.claim, guarded, waits, grace=self._grace)

    def let_go(
        self,
        logs: list[LogLine],
        waits: list[OpenWait],
        writes: Sequence[StepWrite] = (),
        *,
        is_progress: bool | None = None,
    ) -> After:
        """Release the instance: asleep for ``waits``, or due at once where there are none (it was only interrupted)."""
        got_further = bool(waits) if is_progress is None else is_progress

        def work(tx: Tx) -> After:
            guarded = claims.guard(tx, self.claim, lease=self._lease.length, is_progress=got_further)
            for write in writes:
                journal.write_step(tx, self.claim, guarded, write)
            journal.write_logs(tx, self.claim, guarded, logs, room=self._log_room)
            self.board.ride(tx)
            return self._suspend(tx, guarded, waits)

        is_certain = True

        def resolve(tx: Tx) -> After | None:
            nonlocal is_certain
            is_certain = claims.is_held(tx, self.claim)
            # No longer held after a commit in doubt: we let go, or somebody took it from us. Either way we stop.
            return None if is_certain else After.WAITING

        after = self._store.transact(work, resolve=resolve, bound=PASS)
        if is_certain:
            teller.let_go(self.claim, after, min((wait.due_at for wait in waits), default=None))
        return after

    def terminate(self, reason: str) -> None:
        """End the run because it overstayed."""
        ending = Ending(Status.TERMINATED)
        letters = self._farewell.letters(ending, reason=reason)

        def work(tx: Tx) -> _Ended:
            answers.lock_parent(tx, self.claim.parent)
            # InnoDB locks the index entry by which a row is found, then the row. Others find it by its id: to ask for
            # that entry after the guard, which finds it by its key, is a deadlock with whoever waits for the row.
            row = instances.lock(tx, self.claim.ref.workflow, self.claim.ref.instance_id)
            claims.guard(tx, self.claim, lease=self._lease.length)
            instances.terminate(tx, row, reason=reason)
            self._leave(tx, letters)
            return _Ended(self._answer(tx, ending, reason=reason))

        self._end(work, letters, lambda: teller.terminated(self.claim.ref, reason=reason))

    def settle(self, ending: Ending, logs: list[LogLine]) -> None:
        """End the run."""
        letters = self._farewell.letters(ending)
        is_plain = not (logs or self.board.has_kept)

        def work(tx: Tx) -> _Ended:
            answers.lock_parent(tx, self.claim.parent)
            if not is_plain:
                guarded = claims.guard(tx, self.claim, lease=self._lease.length)
                journal.write_logs(tx, self.claim, guarded, logs, room=self._log_room)
                self.board.ride(tx)
            claims.settle(tx, self.claim, ending)
            self._leave(tx, letters)
            return _Ended(self._answer(tx, ending))

        is_single = is_plain and not letters and self.claim.parent is None
        tell = functools.partial(teller.ended, self.claim, ending, lambda: self._lease.now - self._began)
        self._end(work, letters, tell, single=is_single)

    def _end(
        self,
        work: Callable[[Tx], _Ended],
        letters: list[Outgoing],
        tell: Callable[[], None],
        *,
        single: bool = False,
    ) -> None:
        """Commit what ends the run, and tell of it, unless somebody else may have ended it."""
        ended = self._store.transact(work, resolve=self._not_ours, single=single, bound=PASS)
        if not ended.is_certain:  # sweeps find what is to be sent and woken
            return
        tell()
        if letters:
            self._post(letters)
        if ended.dues:
            self._wake(ended.dues)

    def _answer(self, tx: Tx, ending: Ending, *, reason: str | None = None) -> list[Due]:
        """Tell the step whose child this is, in the transaction that ends it; its instance is locked already."""
        if self.claim.parent is None:
            return []
        payload = endings.answer(self.claim.ref, ending, reason=reason)
        event_id = self._store.runtime.new_id()
        return answers.answer_parent(tx, self.claim.parent, payload=payload, event_id=event_id, grace=self._grace)

    def _leave(self, tx: Tx, letters: list[Outgoing]) -> tuple[Outgoing, ...]:
        """Put what is sent at the end of the run into the outbox."""
        outbox.insert(
            tx, letters, pk=self.claim.pk, run_number=self.claim.ref.run_number, step_key=None, grace=self._grace
        )
        return tuple(letters)

    def _not_ours(self, tx: Tx) -> _Ended | None:
        """What is known where the claim is gone after a commit in doubt: we ended it, or somebody took it."""
        return None if claims.is_held(tx, self.claim) else _Ended(is_certain=False)
