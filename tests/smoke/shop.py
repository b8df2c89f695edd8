"""``celery -A tests.smoke.shop``: the order example, with the timeouts on Redis of docs/how-to/outages.md.

Without them Celery's connection to a broker that failed over is found dead after 51 s (kombu 5.7) or never (before).
"""

from __future__ import annotations

from examples.order_approval import app

__all__ = ["app"]

app.conf.broker_transport_options = {
    **app.conf.broker_transport_options,
    "socket_timeout": 5,
    "socket_connect_timeout": 5,
    "health_check_interval": 5,
}
