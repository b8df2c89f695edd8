"""The delivery of an emission, batch by batch, to the waits that were open when it started.

Each batch is one transaction. It locks the emission's row, then the rows of its instances in ascending key order, and
only then reads which waits are open (LAW 2b). Each open wait gets its own event and stops being a waiter. The
emission's cursor moves past the batch in the same transaction. If a process dies between batches, another continues
and delivers nothing twice.
"""

from __future__ import annotations

from datetime import timedelta

from celery_durable.model import EmissionProgress, plan_delivery
from celery_durable.store.engine import Tx
from celery_durable.store.events import emissions
from celery_durable.store.runs import topic_waits

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
