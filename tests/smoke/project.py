"""``celery -A tests.smoke.project``: the application of tests/smoke/flows.py, at home where the environment says."""

from __future__ import annotations

import os

from tests.smoke import dying
from tests.smoke.config import Config
from tests.smoke.flows import build

app = dying.make_app(build)
if Config.read(os.environ).role == "worker":
    app.durable.internals.operations.queries.list()  # the pool's processes are forked from one that has used the store
