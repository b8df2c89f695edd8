"""Topics: emit one payload to all current waiters, and list them."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, cast

from celery_durable import notify, values
from celery_durable.model import EmissionProgress, Page, Waiter, plan_delivery
from celery_durable.operations.context import OperationContext, check_limit
from celery_durable.store.engine import Store, Tx
from celery_durable.store.events import emissions
from celery_durable.store.runs import topic_waits

# The delivery of an emission, batch by batch, to the waits that were open when it started.
#
# Each batch is one transaction. It locks the emission's row, then the rows of its instances in ascending key order, and
# only then reads which waits are open (LAW 2b). Each open wait gets its own event and stops being a waiter. The
# emission's cursor moves past the batch in the same transaction. If a process dies between batches, another continues
# and delivers nothing twice.


BATCH = 256
"""Instances per transaction."""


def deliver_batch(tx: Tx, emission_id: str, *, lease: timedelta, grace: timedelta) -> EmissionProgress | None:
    """Deliver one batch. Returns None if the emission is over. The sweep checks runs made due only after ``grace``."""
    emission = emissions.lock(tx, emission_id)
    if emission is None:
        return None
    batch = emissions.read_next_waiters(tx, emission, limit=BATCH)
    receivers = emissions.lock_receivers(tx, batch) if batch else {}
    waits = emissions.read_waits(tx, emission, batch) if batch else []
    delivery = plan_delivery(emission, receivers, waits)
    emissions.insert_events(tx, emission, delivery.events)
    topic_waits.close_many(tx, delivery.closed_waits)
    woken = {pk: count for pk, count in delivery.event_counts.items() if receivers[pk].needs_wake}
    others = {pk: count for pk, count in delivery.event_counts.items() if pk not in woken}
    emissions.make_due(tx, woken, grace=grace)
    emissions.bump_versions(tx, others)
    delivered_count = emission.delivered_count + len(delivery.events)
    is_over = len(batch) < BATCH
    cursor_pk = emission.end_pk if is_over else batch[-1]
    if is_over:
        emissions.delete(tx, emission)
    else:
        emissions.advance(tx, emission, cursor_pk=cursor_pk, delivered_count=delivered_count, lease=lease)
    return EmissionProgress(
        delivered_count,
        cursor_pk,
        is_over=is_over,
        due_runs=tuple(receivers[pk].due_run for pk in woken),
        received=tuple((receivers[each.wait.pk].due_run.ref, emission.topic, each.id) for each in delivery.events),
    )


_MAX_ID_LENGTH = 200
"""The longest emission id. The ids of an emission's events contain it, so it is shorter than other ids."""


class TopicOperations:
    """The operations on topics."""

    def __init__(self, context: OperationContext) -> None:
        self._context = context

    def emit(self, topic: str, payload: Any = None, *, id: str | None = None) -> int:  # the public name
        """Send a payload to all waits that are open on a topic now.

        Waits are served in batches, each once. If this process dies in between, a dispatcher continues. If `emit`
        raises an error about an argument, nothing is written.
        """
        values.check_topic(topic)
        emission_id = (
            self._context.runtime.new_id() if id is None else values.check_text_name("Emission id", id, _MAX_ID_LENGTH)
        )
        if self._context.scope is not None:  # every scope has its own ids
            emission_id = f"{self._context.scope.digest}:{emission_id}"
        text = values.encode(payload, what=f"Payload for topic {topic!r}", limits=self._context.settings.limits)

        def begin(tx: Tx) -> bool:
            return emissions.begin(
                tx,
                emission_id=emission_id,
                topic=topic,
                payload=text,
                scope=self._context.scope,
                lease=self._context.settings.lease,
            )

        if not self._context.store.transact(begin):
            return 0
        delivered_count, is_over = 0, False
        while not is_over:
            progress = self._deliver_batch(emission_id)
            if progress is None:  # another process has finished it
                return delivered_count
            self._context.after_commit(functools.partial(self._notify_and_wake, progress))
            delivered_count, is_over = progress.delivered_count, progress.is_over
        return delivered_count

    def _notify_and_wake(self, progress: EmissionProgress) -> None:
        _notify_received(progress)
        self._context.publish_runs(progress.due_runs)

    def _deliver_batch(self, emission_id: str) -> EmissionProgress | None:
        """Deliver one batch. Returns None if another process has finished the emission."""

        def work(tx: Tx) -> EmissionProgress | None:
            lease, grace = self._context.settings.lease, self._context.grace
            return deliver_batch(tx, emission_id, lease=lease, grace=grace)

        return self._context.store.transact(work)

    def waiters(self, topic: str, *, cursor: str | None = None, limit: int = 25) -> Page[Waiter]:
        """Return a page of the open waits on a topic, oldest instances first."""
        values.check_topic(topic)
        check_limit(limit)
        cursors = self._context.cursors("waiters", topic)
        after = None if cursor is None else cast("tuple[int, str]", cursors.read(cursor))
        found = self._context.read_list(
            lambda tx: topic_waits.read_page(tx, topic, after=after, limit=limit + 1, scope=self._context.scope)
        )
        items = found[:limit]
        more = cursors.write(*items[-1][0]) if len(found) > limit else None
        return Page(tuple(waiter for _, waiter in items), more)


def continue_abandoned_emission(store: Store) -> bool:
    """Deliver a batch of an emission whose emitter died; False if there is none. The sweep wakes runs."""
    abandoned = store.read(emissions.find_abandoned)
    if abandoned is None:
        return False
    at_once = timedelta(0)
    progress = store.transact(lambda tx: deliver_batch(tx, abandoned, lease=at_once, grace=at_once))
    if progress is not None:
        _notify_received(progress)
    return True


def _notify_received(progress: EmissionProgress) -> None:
    for ref, topic, event_id in progress.received:
        notify.send_event_received(notify.AcceptedEvent(ref, topic, event_id))
