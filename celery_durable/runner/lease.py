"""Leases: one job per process renews the leases of all its passes, as long as they make progress.

The commits of a pass renew its lease too (`claims.guard`). A lost lease may repeat a body, but it never corrupts data.
The renewer renews a lease while user code or its transaction runs, however long that takes, and in engine code only
while the pass makes progress (LAW 7 of docs/design.md). Otherwise it revokes the claim: a pass that hangs would keep it
forever.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from celery_durable import notify
from celery_durable.errors import Interruption, PassStalled, Superseded
from celery_durable.housekeeping import reset_in_child
from celery_durable.model import Claim, LogLevel, LogLine, RunningStep, RunRef
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.engine.time_limits import LOOP, PASS
from celery_durable.store.runs import claims, leases, outputs, releases

logger = logging.getLogger("celery_durable.runner")

_COOLDOWN_RATIO = 1 / 3
"""How long an instance is not due after its pass stalled, as a fraction of the lease. The pause limits how often a pass
that always stalls is repeated. With the default ``durable_stall_seconds``, a stall is detected at most 4/3 lease
lengths after the last progress. So the run is due again within two."""


class Lease:
    """A claim, and how long this process may rely on it, by its own monotonic clock."""

    def __init__(self, claim: Claim, length: timedelta, runtime: Runtime, *, requested_at: float) -> None:
        self.claim, self.length = claim, length
        self.is_lost = self.is_cancelled = False
        self._when_cancelled: dict[object, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._monotonic = runtime.monotonic
        # The validity starts before the claim was requested and is 10 % shorter, so the database's lease ends later.
        self._valid_seconds = length.total_seconds() * 0.9
        self._valid_until = requested_at + self._valid_seconds
        self._renewal_seconds = length.total_seconds() / 3
        self._renewal_due_at = requested_at + self._renewal_seconds
        self._requested_at = self._last_progress_at = requested_at
        # One key for each piece of user code that runs now. Bodies run concurrently on threads of their own, and the
        # pass removes the key of an abandoned body without waiting for it. Each operation is atomic: there is no lock.
        self._user_code_owners: dict[object, tuple[str, int, float] | None] = {}
        # Derived from the random token: a random id for each commit would take 3 us.
        self.commit_ids: Iterator[str] = map(f"{claim.token[:24]}{{:x}}".format, itertools.count(1))
        """New ids for the commits of this claim."""
        self.is_release_forbidden = False
        """Whether an attempt has begun that may not be repeated, and its end is not recorded: only a crash ends it."""
        self.recorded_step: RunningStep | None = None
        """The running step that the instance's row names."""

    @property
    def now(self) -> datetime:
        """An estimate of the database's time: that of the claim plus the elapsed time. No decision uses it (LAW 4)."""
        return self.claim.claimed_at + timedelta(seconds=self._monotonic() - self._requested_at)

    @property
    def is_valid(self) -> bool:
        return not self.is_lost and self._monotonic() < self._valid_until

    @property
    def is_renewal_due(self) -> bool:
        """Whether less than two thirds of the lease are left, so that the next commit has to renew it.

        The renewer passes over a locked row, and a pass with many short steps has its row locked most of the time.
        """
        return self._monotonic() >= self._renewal_due_at

    def call_if_cancelled(self, owner: object, call: Callable[[], None] | None) -> None:
        """Call ``call`` when the renewer notices that the run was cancelled, or now; None withdraws that of this owner.

        It is called under the lock, so not after it was withdrawn.
        """
        with self._lock:
            if call is None:
                self._when_cancelled.pop(owner, None)
            elif self.is_cancelled:
                call()
            else:
                self._when_cancelled[owner] = call

    def cancel(self) -> None:
        """Note that the run was cancelled, and tell the bodies that end with it."""
        with self._lock:
            self.is_cancelled = True
            for call in self._when_cancelled.values():
                call()

    def enter_user_code(self, owner: object, body: tuple[str, int, float] | None = None) -> None:
        """Mark the start of user code or its transaction. Until `exit_user_code`, the pass cannot count as stalled.

        ``body``: the key of the step whose body it is, the number of the attempt, and the monotonic time.
        """
        self._user_code_owners[owner] = body

    def exit_user_code(self, owner: object) -> None:
        """Mark that user code has ended or was abandoned. Repeated calls are allowed."""
        self._user_code_owners.pop(owner, None)
        self._last_progress_at = self._monotonic()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Run user code in the block, such as a validator that the engine calls: the pass cannot count as stalled."""
        owner = object()
        self.enter_user_code(owner)
        try:
            yield
        finally:
            self.exit_user_code(owner)

    def engine_code(self, owner: object) -> EngineCode:
        """Return a context manager for engine code that the user code of ``owner`` calls."""
        return EngineCode(self, owner)

    @property
    def running_step(self) -> RunningStep | None:
        """The step whose body runs now. Of several that run concurrently: the one that started last."""
        bodies = [body for body in list(self._user_code_owners.values()) if body is not None]
        if not bodies:
            return None
        step_key, attempt, started_at = bodies[-1]
        since = self.claim.claimed_at + timedelta(seconds=started_at - self._requested_at)
        return RunningStep(step_key, attempt, since)

    def mark_progress(self) -> float:
        """Note that the pass made progress; returns the monotonic time."""
        self._last_progress_at = now = self._monotonic()
        return now

    def measure_stall(self, limit: float) -> float | None:
        """Return for how many seconds engine code has made no progress, if more than ``limit``; otherwise None."""
        if self._user_code_owners:
            return None
        stalled = self._monotonic() - self._last_progress_at
        return stalled if stalled > limit else None

    def extend(self, *, requested_at: float) -> None:
        """Extend the validity after the database renewed the lease at or after ``requested_at``. Never shortens it."""
        self._valid_until = max(self._valid_until, requested_at + self._valid_seconds)
        self._renewal_due_at = max(self._renewal_due_at, requested_at + self._renewal_seconds)

    def ensure_held(self, store: Store) -> None:
        """Check, in the database if the lease may be over, that the claim is still held; raises Superseded."""
        if self.is_lost:
            raise Superseded(str(self.claim.ref))
        requested_at = self._monotonic()
        if requested_at >= self._valid_until:
            store.transact(self._renew, timeouts=PASS)
            self.extend(requested_at=requested_at)

    def wait_for_database(self, store: Store) -> bool:
        """Wait until the database renews the lease after a lost transaction. Returns whether it was away."""
        requested_at, was_away = self._monotonic(), False
        try:
            store.transact_once(self._renew, timeouts=PASS)
        except Exception as exc:
            if not (store.is_transient(exc) or store.is_commit_in_doubt(exc)):
                raise
            requested_at, was_away = self._monotonic(), True
            store.transact(self._renew, timeouts=PASS)
        self.extend(requested_at=requested_at)
        return was_away

    def _renew(self, tx: Tx) -> None:
        claims.guard(tx, self.claim, lease=self.length, resets_crash_count=False)


class EngineCode:
    """Engine code that user code calls: inside the block, the pass counts as stalled if it makes no progress."""

    __slots__ = ("_lease", "_owner")

    def __init__(self, lease: Lease, owner: object) -> None:
        self._lease, self._owner = lease, owner

    def __enter__(self) -> None:
        self._lease.exit_user_code(self._owner)

    def __exit__(self, *_: object) -> None:
        self._lease.enter_user_code(self._owner)


class LeaseRenewer:
    """Renews the held leases every third of their length. Its job ends when no lease is held."""

    def __init__(self, store: Store, length: timedelta, runtime: Runtime, *, stall: timedelta | None = None) -> None:
        self._store, self._length, self._runtime = store, length, runtime
        self._interval_seconds = length.total_seconds() / 3
        self._stall_seconds = (stall or length).total_seconds()
        self.reset_in_child()
        reset_in_child(self)

    def reset_in_child(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._is_running = False

    @contextmanager
    def hold(self, lease: Lease) -> Iterator[Lease]:
        """Keep ``lease`` renewed inside the block."""
        with self._lock:
            if not self._is_running:
                # A plain interval instead of a condition variable: otherwise each new pass would cause a renewal.
                self._runtime.start_periodic_job(self._interval_seconds, self._renew_all, name="durable-leases")
                self._is_running = True
            self._leases[lease.claim.token] = lease
        try:
            yield lease
        finally:
            with self._lock:
                self._leases.pop(lease.claim.token, None)

    def _renew_all(self) -> bool:
        """Renew all held leases, and revoke those of stalled passes; returns False, to end the job, if none is held.

        `hold` and this method share a lock, so no lease is added between the check and the end of the job.
        """
        with self._lock:
            held = dict(self._leases)
            if not held:
                self._is_running = False
                return False
        stalled_leases = {
            token: stalled for token, lease in held.items() if (stalled := lease.measure_stall(self._stall_seconds))
        }
        if active_leases := {token: lease for token, lease in held.items() if token not in stalled_leases}:
            self._renew(active_leases)
        started = self._runtime.monotonic()
        for token, stalled in stalled_leases.items():
            lease = held[token]
            if lease.is_release_forbidden:  # not renewed either: it expires, which counts as a crash
                continue
            if not lease.is_lost and self._runtime.monotonic() - started < self._length.total_seconds() / 6:
                self._revoke(lease, stalled)
        return True

    def _revoke(self, lease: Lease, stalled: float) -> None:
        """Revoke the claim of a pass that has stalled. If that fails, the lease expires, as no one renews it."""
        error = PassStalled(str(lease.claim.ref), stalled)
        cooldown = self._length * _COOLDOWN_RATIO
        try:
            self._store.transact_once(lambda tx: _release_stalled(tx, lease, error, cooldown=cooldown))
        except Superseded:
            lease.is_lost = True
        except Exception as exc:  # noqa: BLE001  # the thread must survive an outage
            logger.warning(
                "%s Its claim could not be revoked, so its lease will expire: %s", error, describe_fault(exc)
            )
        else:
            lease.is_lost = True
            logger.error("PassStalled: %s Its claim has been revoked, so another worker continues the run.", error)
            notify.send_pass_stalled(lease.claim.ref, timedelta(seconds=stalled))

    def _renew(self, held: dict[str, Lease]) -> None:
        requested_at = self._runtime.monotonic()
        claims_to_renew = [lease.claim for lease in held.values()]
        running = {token: lease.running_step for token, lease in held.items()}
        changed = {token: step for token, step in running.items() if step != held[token].recorded_step}
        try:
            renewal = self._store.transact(
                lambda tx: leases.renew(tx, claims_to_renew, lease=self._length, running=changed), timeouts=LOOP
            )
        except Exception as exc:  # noqa: BLE001  # the thread must survive an outage
            sentence = "The leases of %d instances could not be renewed; the next try follows: %s"
            logger.warning(sentence, len(held), describe_fault(exc))
            return
        for token, lease in held.items():
            if token in renewal.cancelled and not lease.is_cancelled:
                lease.cancel()
            if token in renewal.renewed:
                lease.extend(requested_at=requested_at)
                lease.recorded_step = running[token]
            elif token not in renewal.held:
                lease.is_lost = True
            # Otherwise another transaction has locked the row: the next renewal tries again.


def _release_stalled(tx: Tx, lease: Lease, error: PassStalled, *, cooldown: timedelta) -> None:
    """Release the claim of a stalled pass, which is no crash. The sweep publishes the run after the cooldown."""
    guard_result = claims.guard(tx, lease.claim, lease=lease.length, resets_crash_count=False)
    line = LogLine(LogLevel.ERROR, "system", f"PassStalled: {error}", None, None, None, is_replay=False)
    outputs.write_logs(tx, lease.claim, guard_result, [line], remaining=1)
    releases.release(tx, lease.claim, guard_result, grace=timedelta(0), cooldown=cooldown)


def release_for_shutdown(ref: RunRef, release: Callable[[], object]) -> None:
    """Call ``release``, and log if it fails. The caller then raises what stops the worker."""
    try:
        release()
    except Superseded:
        logger.info("%s was taken over before this worker could release it", ref)
    except (Interruption, Exception) as exc:  # noqa: BLE001  # what stops the worker is more important; the lease will expire
        logger.warning("%s could not be released, so its lease will expire: %s", ref, exc)
