"""What happened in a schedule: told by its parts, judged by the invariants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Story:
    """What happened in a schedule, for the checks."""

    journal: list[str] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)
    bodies: list[tuple[str, int, str, int]] = field(default_factory=list)
    turns: list[tuple[str, int, str, int, str]] = field(default_factory=list)
    """Of linear steps: instance, run, step, attempt and why the handler was called."""
    plans: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """The steps that a linear run was created with."""
    deployed: list[list[str]] = field(default_factory=list)
    """All the steps that linear runs may begin with, where nobody knows when a child was made."""
    given: dict[tuple[str, int, str], list[dict[str, Any]]] = field(default_factory=dict)
    """What was answered to an attempt of a task step: instance, run and event type."""
    sent: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    """Messages, by their ids: how often each was sent, and how often its handler has returned."""
    failures: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, int]] = field(default_factory=Counter)
    cuts: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    accepted_events: set[tuple[str, int]] = field(default_factory=set)
    """Ids, and the runs that were current then."""
    terminated: set[str] = field(default_factory=set)
    """Instances that may be terminated: a client has ended or cancelled them, or their parents."""
    ended: set[tuple[str, int]] = field(default_factory=set)
    """Runs that a client or the end of a parent has ended at once, without the rest of a cleanup."""
    prior_runs: dict[tuple[str, int], Any] = field(default_factory=dict)
    not_before: dict[tuple[str, int], int] = field(default_factory=dict)
    """When a run may begin."""
    promised: dict[tuple[str, int, str], str] = field(default_factory=dict)
    """Waits for which an event came in time, and its id."""
    failed_at: dict[tuple[str, int, str], int] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)
    """What was wrong at the moment it happened."""
