"""The lease of a pass: its claim, how long the process may rely on it, and whether the pass makes progress.

The commits of a pass renew its lease (`claims.guard`), and so does the renewer. A lost lease may repeat a body, but it
never corrupts data.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from celery_durable.errors import Interruption, Superseded
from celery_durable.model import Claim, RunningStep, RunRef
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.time_limits import PASS
from celery_durable.store.runs import claims

logger = logging.getLogger("celery_durable.runner")


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
    """Engine code that the user code of ``owner`` calls: in the block, the pass stalls if it makes no progress."""

    __slots__ = ("_lease", "_owner")

    def __init__(self, lease: Lease, owner: object) -> None:
        self._lease, self._owner = lease, owner

    def __enter__(self) -> None:
        self._lease.exit_user_code(self._owner)

    def __exit__(self, *_: object) -> None:
        self._lease.enter_user_code(self._owner)


def release_for_shutdown(ref: RunRef, release: Callable[[], object]) -> None:
    """Call ``release``, and log if it fails. The caller then raises what stops the worker."""
    try:
        release()
    except Superseded:
        logger.info("%s was taken over before this worker could release it", ref)
    except (Interruption, Exception) as exc:  # noqa: BLE001  # what stops the worker is more important; the lease will expire
        logger.warning("%s could not be released, so its lease will expire: %s", ref, exc)
