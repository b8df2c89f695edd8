"""The name of the node that runs a task, for records of claims, attempts and heartbeats. It is never empty."""

from __future__ import annotations

import socket
from typing import Any


def get_node_name(request: Any) -> str:
    """Return the node of a task's request.

    Outside of a worker, for example in a direct call of the task, Celery sets no hostname. Then it is this machine.
    """
    return str(getattr(request, "hostname", None) or socket.gethostname())
