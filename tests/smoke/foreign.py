"""``celery -A tests.smoke.foreign``: an application on the same broker that has never heard of workflows."""

from __future__ import annotations

import json
import os

from celery import Celery

_config = json.loads(os.environ["DURABLE_SMOKE"])
_is_redis = _config["broker_url"].startswith("redis")
app = Celery("foreign", broker=_config["broker_url"])
app.conf.update(
    task_default_queue=f"foreign-{_config['name']}",
    broker_transport_options={"global_keyprefix": f"{_config['name']}:"} if _is_redis else {},
    control_exchange=f"control-{_config['name']}",
    event_exchange=f"events-{_config['name']}",
    worker_enable_remote_control=False,
)


@app.task(name="media.abroad")
def abroad(number: int) -> dict[str, int]:
    return {"abroad": number}


@app.task(name="media.broken")
def broken(number: int) -> None:
    raise KeyError(number)
