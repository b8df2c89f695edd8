"""Containers for pytest-celery that are processes of this machine, so that its tests run without a Docker engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_celery import CeleryWorkerContainer, RedisContainer

from tests.smoke.proc import ROOT, Proc, RedisServer, free_port, python


class LocalContainer:
    """What pytest-celery asks of Docker's container, answered by a process and the children that it makes."""

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, port: str = ""
    ) -> None:
        self.name, self.id = name, uuid.uuid4().hex
        self._argv, self._log = argv, folder / f"{name}.log"
        # What is run in a container finds the Python of its image.
        self._env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(env or {})}
        self._ports = {port: [{"HostPort": argv[argv.index("--port") + 1]}]} if port else {}
        self._start()

    def _start(self) -> None:
        self._proc = Proc(self._argv, log=self._log, env=self._env)

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "NetworkSettings": {"Networks": {"local": {"IPAddress": "127.0.0.1"}}, "Ports": self._ports},
            "HostConfig": {"PortBindings": {}},
            "Config": {"Hostname": "127.0.0.1", "Env": [f"{name}={value}" for name, value in self._env.items()]},
        }

    @property
    def status(self) -> str:
        return "running" if self._proc.is_running else "exited"

    def reload(self) -> None:
        """Docker's would ask the engine what is new; here nothing is kept."""

    def logs(self) -> bytes:
        return self._log.read_bytes()

    def kill(self, signal_: str | int | None = None) -> None:
        """With SIGKILL a container dies with all that is in it; other signals go to its first process."""
        number = signal.Signals[signal_] if isinstance(signal_, str) else signal.Signals(signal_ or signal.SIGKILL)
        if number is signal.SIGKILL:
            self._proc.clean_up()
        else:
            os.kill(self._proc.pid, number)

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self._start()

    def stop(self, timeout: float = 10) -> None:
        if self._proc.is_running:
            try:
                self._proc.terminate(timeout)
            except subprocess.TimeoutExpired:
                pass
        self._proc.clean_up()

    def exec_run(self, command: Sequence[str], **_: Any) -> tuple[int, bytes]:
        """Run a command with the container's environment; answers with its exit code and what it said."""
        environment = {**os.environ, **self._env}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr


class LocalRedis(RedisContainer):
    """A Redis on a free port."""

    @classmethod
    def start(cls, folder: Path) -> LocalRedis:
        assert RedisServer.program is not None
        argv = [RedisServer.program, "--port", str(free_port()), "--bind", "127.0.0.1", "--save", ""]
        return cls(LocalContainer("redis", argv, folder, port="6379/tcp"))

    @property
    def url(self) -> str:
        """Workers reach it as we do."""
        return self.host_url

    @property
    def host_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def get_addr(self, port: str) -> tuple[str, int]:
        """The address on this machine. In a container, the inherited method would return the port within an image."""
        return "127.0.0.1", int(self.ports[port][0])

    def get_open_tcp_ports(self) -> list[str]:
        """Asked for before the log is; that says when it listens."""
        return ["6379"]

    def teardown(self) -> None:
        self._container.stop()


class LocalWorker(CeleryWorkerContainer):
    """A worker, with the Python that runs the tests."""

    @classmethod
    def start(cls, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> LocalWorker:
        argv = python("-m", *command)
        return cls(LocalContainer("worker", argv, folder, env={**env, "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}))

    def teardown(self) -> None:
        self._container.stop()
