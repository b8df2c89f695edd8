"""``celery -A tests.smoke.project``: the application of tests/smoke/flows.py, at home where the environment says."""

from __future__ import annotations

import os

from celery import signals

from tests.smoke.config import Config
from tests.smoke.dying import become_child
from tests.smoke.flows import build

config = Config.read(os.environ)
app = build(config)
app.set_current()
if config.role == "worker":
    signals.worker_process_init.connect(become_child)
    app.durable.internals.operations.queries.list()  # the pool's processes are forked from one that has used the store
