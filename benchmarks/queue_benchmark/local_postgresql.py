"""A PostgreSQL of its own on a free port of 127.0.0.1, which can be stopped, started and made anew.

It is a child of this process, not a daemon: so its CPU time is known, also after it has ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

USER = "bench"
START_SECONDS = 60


class LocalPostgresql:
    """Its programs refuse to run as root, so then they run as postgres. ``settings``: the text of a postgresql.conf."""

    def __init__(self, settings: str) -> None:
        self._programs = find_programs()
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self._settings, self._folder = settings, None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = find_port()

    def make(self) -> None:
        """An empty cluster, running; nothing if it exists."""
        if self._folder is not None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="queue-benchmark-postgresql-"))
        if self._as_user:
            shutil.chown(self._folder, "postgres")
        self._run("initdb", "--auth=trust", f"--username={USER}", "--encoding=UTF8", "--no-locale")
        own = f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{self._folder}'\n"
        with (self._folder / "data" / "postgresql.conf").open("a") as file:
            file.write(f"{self._settings}\n{own}")
        self.start()

    def start(self) -> None:
        """Return when it accepts connections."""
        assert self._folder is not None
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres"), cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(f"postgres://{USER}@127.0.0.1:{self.port}/postgres").close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """As Docker stops it: connections are closed, running transactions are rolled back."""
        self._end("fast")

    def remove(self) -> None:
        if self._folder is None:
            return
        self._end("immediate")
        shutil.rmtree(self._folder)
        self._folder = None

    def _end(self, mode: str) -> None:
        if self._process is not None:
            self._run("pg_ctl", "stop", "-m", mode, "-w", "-t", "60")
            self._process.wait()
            self._process = None

    def _run(self, program: str, *options: str) -> None:
        assert self._folder is not None
        argv = self._command(program, *options)
        with (self._folder / "control.log").open("ab") as log:
            subprocess.run(argv, check=True, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _command(self, program: str, *options: str) -> list[str]:
        return [*self._as_user, str(self._programs / program), *options, "-D", f"{self._folder}/data"]


def find_programs() -> Path:
    """Where initdb and pg_ctl are: on the PATH, or where Debian puts them."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"))


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
