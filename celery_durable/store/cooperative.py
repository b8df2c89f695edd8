"""psycopg with cooperative threads: while a statement waits, the application's other tasks run (LAW 8).

psycopg detects that gevent has patched ``select``, but not that eventlet has (`psycopg.waiting`). Its wait in C then
blocks every thread of the process. Only the store's own connections are changed, one by one.
"""

from __future__ import annotations

import sys
from typing import Any


def make_cooperative(connection: Any, _: object) -> None:
    """Make a new connection wait as the process's threads do; for SQLAlchemy's event ``connect``."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("select"):
        return
    from psycopg import waiting  # noqa: PLC0415  # only processes of an eventlet worker get here

    def wait(gen: Any, *args: Any, **kwargs: Any) -> Any:
        return waiting.wait_selector(gen, connection.pgconn.socket, *args, **kwargs)

    connection.wait = wait
