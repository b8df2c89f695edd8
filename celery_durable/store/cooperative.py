"""psycopg among cooperative threads: a statement that waits lets the tasks of the application go on (LAW 8).

psycopg sees for itself that gevent has patched ``select``, but not that eventlet has (`psycopg.waiting`): its wait in C
then stops every thread of the process. Only our own connections are changed, one by one.
"""

from __future__ import annotations

import sys
from typing import Any


def make_cooperative(connection: Any, _: object) -> None:
    """Have a new connection wait as the process's threads do; for SQLAlchemy's event ``connect``."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is None or not patcher.is_monkey_patched("select"):
        return
    from psycopg import waiting  # noqa: PLC0415  # only the processes of an eventlet worker come here

    def wait(gen: Any, *args: Any, **kwargs: Any) -> Any:
        return waiting.wait_selector(gen, connection.pgconn.socket, *args, **kwargs)

    connection.wait = wait
