"""The worker of `test_flask_shop`: that of the example, on keys of the test's own in a shared Redis."""

from __future__ import annotations

import os

from examples.flask_shop import create_app

prefix = os.environ["SHOP_KEY_PREFIX"]
site = create_app(
    {
        "CELERY": {
            "broker_url": os.environ["CELERY_BROKER_URL"],
            "broker_transport_options": {"global_keyprefix": prefix},
            "worker_enable_remote_control": False,
        },
        "DURABLE_POLL_SECONDS": 0.05,
        "DURABLE_GRACE_SECONDS": 0.2,
    }
)
celery = site.extensions["celery"]
