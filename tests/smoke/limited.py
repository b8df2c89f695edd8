"""``celery -A tests.smoke.limited``: the application of `tests.smoke.project`, whose passes have a hard time limit."""

from __future__ import annotations

from celery_durable.tasks import ADVANCE
from tests.smoke.project import app

task = app.tasks[ADVANCE]
task.time_limit, task.soft_time_limit = 2, None  # Celery begins to wait for the hard limit when the soft one has passed
