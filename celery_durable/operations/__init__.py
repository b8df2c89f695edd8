"""All that may be done to instances from outside: create, read, steer, emit, rewind, intervene.

Each verb checks its input, runs one transaction, and only then wakes the workers: a broker that is
down delays work and fails nobody (LAW 1).
"""

from __future__ import annotations

from celery_durable.operations.emitting import Emitting
from celery_durable.operations.intervening import Intervening
from celery_durable.operations.losing import Losing
from celery_durable.operations.overview import Overview
from celery_durable.operations.posting import Posting
from celery_durable.operations.pruning import Pruning
from celery_durable.operations.reading import Reading, Snapshot
from celery_durable.operations.rewinding import Rewinding
from celery_durable.operations.starting import IfExists, Starting
from celery_durable.operations.verbs import Versions, WakeUp

__all__ = ["IfExists", "Operations", "Snapshot", "Versions", "WakeUp"]


class Operations(Starting, Losing, Emitting, Rewinding, Intervening, Reading, Overview, Posting, Pruning):
    """The verbs, over one store. ``wake`` is told what became due, after the commit."""
