"""The renewer of leases: one job per process renews the leases of all its passes, as long as they make progress.

It renews a lease while user code or its transaction runs, however long that takes, and in engine code only while the
pass makes progress (LAW 7 of docs/design.md). Otherwise it revokes the claim: a pass that hangs would keep it forever.
Each commit of a pass renews its lease, too (`store.runs.claims`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from celery_durable import notify
from celery_durable.errors import PassStalled, Superseded
from celery_durable.housekeeping import reset_in_child
from celery_durable.model import LogLevel, LogLine
from celery_durable.runner.lease import Lease
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.faults import describe_fault
from celery_durable.store.engine.time_limits import LOOP
from celery_durable.store.runs import claims, leases, outputs, releases

logger = logging.getLogger("celery_durable.runner")

_COOLDOWN_RATIO = 1 / 3
"""How long an instance is not due after its pass stalled, as a fraction of the lease. The pause limits how often a pass
that always stalls is repeated. With the default ``durable_stall_seconds``, a stall is detected at most 4/3 lease
lengths after the last progress. So the run is due again within two."""


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
