"""What a killed test run leaves behind: its databases, servers and workers. The next run removes it.

A database has the process id of its run in its name. Processes that tests start inherit `OWNER`, also servers that
become daemons. Only what belongs to a process that is dead is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

PREFIX = "durable_test_"
OWNER = "DURABLE_TEST_OWNER"
_LOCK_ID = 7_331_001


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def drop_databases_of_the_dead(admin: sa.Engine) -> list[str]:
    """Drop the databases of test runs that have died, and return their names.

    Args:
        admin: An engine in autocommit. If its server is not on this machine, nothing is dropped: its databases may
            belong to processes of another machine.
    """
    if admin.url.host not in {"127.0.0.1", "localhost", "::1"}:
        return []
    is_postgresql = admin.dialect.name == "postgresql"
    force = " WITH (FORCE)" if is_postgresql else ""
    dropped = []
    with admin.connect() as connection, _alone(connection, is_postgresql=is_postgresql):
        listing = "SELECT datname FROM pg_database" if is_postgresql else "SHOW DATABASES"
        for name in connection.exec_driver_sql(listing).scalars().all():
            found = re.fullmatch(PREFIX + r"[a-z0-9]+_(\d+)", name)
            if found and not is_alive(int(found[1])):
                connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {name}{force}")
                dropped.append(name)
    return dropped


@contextmanager
def _alone(connection: sa.Connection, *, is_postgresql: bool) -> Iterator[None]:
    """Wait for other runs that begin now: two that drop the same database fail."""
    take, give = ("pg_advisory_lock", "pg_advisory_unlock") if is_postgresql else ("GET_LOCK", "RELEASE_LOCK")
    found = connection.exec_driver_sql(
        f"SELECT {take}({_LOCK_ID})" if is_postgresql else f"SELECT {take}('{_LOCK_ID}', 60)"
    ).scalar()
    assert is_postgresql or found == 1, "another test run holds the lock"
    try:
        yield
    finally:
        connection.exec_driver_sql(f"SELECT {give}({_LOCK_ID})" if is_postgresql else f"SELECT {give}('{_LOCK_ID}')")


def kill_processes_of_the_dead() -> list[int]:
    """Kill the processes of test runs that have died, and return their ids. Systems without /proc keep them."""
    killed = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            found = re.search(rb"(?:^|\0)" + OWNER.encode() + rb"=(\d+)\0", (folder / "environ").read_bytes())
            if found and not is_alive(int(found[1])):
                os.kill(int(folder.name), signal.SIGKILL)
                killed.append(int(folder.name))
    return killed
