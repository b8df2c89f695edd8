"""Steps whose work is done elsewhere: by Celery tasks (`step.task`, `step.map`) and child workflows (`step.child`)."""

from __future__ import annotations

from typing import Any

from celery_durable.remote.maps import MapKind
from celery_durable.remote.steps import ChildKind, TaskKind
from celery_durable.runner.step_kinds import StepKind

KINDS: tuple[StepKind[Any], ...] = (TaskKind(), MapKind(), ChildKind())
