"""`ReplicatedPostgresql`: a PostgreSQL with a synchronous standby, which takes its place when it fails over."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg

from tests.smoke.proc import PostgresqlCluster, free_port, until

_RECONNECT = "wal_retrieve_retry_interval=100ms"
"""How soon a standby connects again to a primary that was restarted: commits wait for it."""


class ReplicatedPostgresql(PostgresqlCluster):
    """No commit that a client was told of is lost in a fail-over: the primary waits for the standby's disk.

    The standby takes over the primary's port, as it would take over an address.
    """

    def __init__(self) -> None:
        self._number = 0
        super().__init__(_RECONNECT)
        self._standby = self._attach_standby()

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and build the next standby from it."""
        self.stop()
        old, self.data = self.data, self._standby
        self._control("promote")
        self._control("restart", "-m", "fast")  # on the port of the old primary
        shutil.rmtree(old)
        self._standby = self._attach_standby()

    def clean_up(self) -> None:
        try:
            self._control("stop", "-m", "immediate", data=self._standby)
        finally:
            super().clean_up()

    def _attach_standby(self) -> Path:
        """Copy the primary and let it wait for the copy from now on."""
        self._number += 1
        standby = self.folder / f"data-{self._number}"
        source = f"host=127.0.0.1 port={self.port} user=postgres"
        self._run("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", source, "-D", data=standby)
        self._control("start", data=standby, port=free_port())
        with psycopg.connect(f"{source} dbname=postgres", autocommit=True) as connection:

            def state() -> list[tuple[object, ...]]:
                return connection.execute("SELECT state, sync_state FROM pg_stat_replication").fetchall()

            until("the standby streams", lambda: state() == [("streaming", "async")], 60)
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            until("commits wait for the standby", lambda: state() == [("streaming", "sync")], 60)
        return standby
