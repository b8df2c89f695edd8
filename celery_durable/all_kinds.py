"""The kinds of steps beside those of the runner itself. A new kind is a room of its own, and a line here."""

from __future__ import annotations

from typing import Any

from celery_durable.remote.maps import MapKind
from celery_durable.remote.steps import ChildKind, TaskKind
from celery_durable.runner.step_kinds import StepKind

KINDS: list[StepKind[Any]] = [TaskKind(), MapKind(), ChildKind()]
"""Given to each runner: a worker's, a harness's, and the one of a replay check."""
