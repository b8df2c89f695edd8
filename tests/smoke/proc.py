"""Processes of a test's own: started in a session of their own, their output in a file, ended by their id."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 90.0


def until(what: str, look: Callable[[], T], seconds: float = PATIENCE_SECONDS, pause: float = 0.02) -> T:
    """Look until there is something to see; fail with ``what`` was expected."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(pause)
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Has the kernel kill the process when the test's process dies, however that ends, and becomes the program.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class Proc:
    """One process, with the children it makes."""

    def __init__(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        self.log = log
        tied = python("-S", "-c", _TIED) if sys.platform == "linux" else []
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*tied, *argv],
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for_log(self, pattern: str, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait until its log matches; fail with the log's end when it does not, or when the process ends before."""

        def look() -> str | None:
            found = re.search(pattern, self.text())
            if found is None and not self.is_running:
                raise AssertionError(f"{self.log.name} ended before it said {pattern!r}:\n{self.text()[-3000:]}")
            return found and found.group(0)

        try:
            return str(until(f"{pattern!r} in {self.log.name}", look, seconds))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-3000:]}") from None

    def children(self) -> list[int]:
        """The ids of its direct children that live."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.pid and state != "Z":
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL, to this process alone: its children are orphans now."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def terminate(self, seconds: float = PATIENCE_SECONDS) -> int:
        """SIGTERM, and wait for its end; answers with the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(seconds)

    def clean_up(self) -> None:
        """End whatever is left of the group that this process leads."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)


def python(*args: str) -> list[str]:
    return [sys.executable, *args]


def kill_child(pid: int) -> None:
    """SIGKILL, to a process of a worker's pool."""
    os.kill(pid, signal.SIGKILL)


def open_connections(pid: int, *ports: int) -> set[str]:
    """The sockets of a process that are connected to servers on these ports; Linux alone tells."""
    to_ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_, inode = line.split()[:10]
        if state == _ESTABLISHED and int(remote.rpartition(":")[2], 16) in ports:
            to_ports.add(f"socket:[{inode}]")
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(fd.readlink()))
    return found & to_ports


_ESTABLISHED = "01"

# --- servers of our own, so that they may be stopped --------------------------------------------


class RedisServer:
    """A Redis on a free port that keeps nothing on disk; ``options`` as on its command line."""

    program = shutil.which("redis-server")

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self._folder, self._options = free_port(), folder, options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        assert self.program is not None
        argv = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.proc = Proc([*argv, *self._options], log=self._folder / "redis.log")
        until("Redis answers", self._answers)

    def stop(self) -> None:
        self.proc.kill()

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def size(self, key: str) -> int:
        """How many fields a hash has."""
        with redis.Redis(port=self.port) as client:
            return int(client.hlen(key))

    def _answers(self) -> bool:
        try:
            with redis.Redis(port=self.port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


class RabbitmqServer:
    """A RabbitMQ on a free port, with a port mapper of its own, so that it meets no other node."""

    # Not the one on the PATH: Debian's wrapper becomes the user rabbitmq, whose folders are another server's.
    program = next((str(path) for path in Path("/usr/lib/rabbitmq").glob("**/bin/rabbitmq-server")), None)
    mapper = shutil.which("epmd")

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        mapped = free_port()
        assert self.mapper is not None
        self._mapper = Proc(
            [self.mapper, "-port", str(mapped), "-address", "127.0.0.1"], log=folder / "epmd.log", env={"HOME": "/"}
        )
        self._env = {
            "HOME": str(folder),  # its cookie
            "ERL_EPMD_PORT": str(mapped),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"own{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_PID_FILE": str(folder / "rabbitmq.pid"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none.conf"),
        }
        self.start()

    def start(self, *, wait: bool = True) -> None:
        assert self.program is not None
        self.proc = Proc([self.program], log=self._folder / "rabbitmq.log", env=self._env)
        if wait:
            until("RabbitMQ answers", self.answers, 60, pause=0.2)

    def stop(self) -> None:
        """As by a power cut; what it has written to its folder is there again when it starts."""
        self.proc.clean_up()

    def control(self, *argv: str) -> None:
        """Run rabbitmqctl."""
        assert self.program is not None
        program = Path(self.program).with_name("rabbitmqctl")
        subprocess.run([str(program), *argv], check=True, timeout=60, env={**os.environ, **self._env})

    def clean_up(self) -> None:
        self.proc.clean_up()
        self._mapper.clean_up()

    def answers(self) -> bool:
        assert self.proc.is_running, self.proc.text()[-2000:]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
            probe.sendall(b"AMQP\x00\x00\x09\x01")
            probe.settimeout(1)
            return bool(probe.recv(1))
        return False


def postgresql_programs() -> Path | None:
    """Where initdb, pg_ctl and pg_basebackup are: on the PATH, or where Debian puts them."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


def folder_of(user: str) -> Path:
    """A folder that a server's own user can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix=f"durable-{user}-"))
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    return folder


class PostgresqlCluster:
    """A PostgreSQL on a free port, with ``settings`` as ``name=value``.

    Its programs refuse to run as root, so then they run as postgres.
    """

    def __init__(self, *settings: str) -> None:
        programs = postgresql_programs()
        assert programs is not None
        self._programs, self.port, self._settings = programs, free_port(), settings
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.folder = folder_of("postgres")
        self.data = self.folder / "data"
        self._run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "--encoding=UTF8", "--no-locale", "-D")
        self.start()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self._control("start")

    def restart(self) -> None:
        """As after a crash of the server: every connection is cut, the log is replayed."""
        self._control("restart", "-m", "immediate")

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def clean_up(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder)

    def _control(self, command: str, *options: str, data: Path | None = None, port: int | None = None) -> None:
        own = ("listen_addresses=127.0.0.1", "max_connections=200", *self._settings)
        settings = f"-p {port or self.port} -k {self.folder} " + " ".join(f"-c {each}" for each in own)
        server = ("-o", settings, "-l", f"{self.folder}/log")
        self._run("pg_ctl", command, *options, "-w", "-t", "30", *server, "-D", data=data)

    def _run(self, program: str, *options: Any, data: Path | None = None) -> None:
        """Run one of its programs on a data directory, the server's own by default."""
        argv = [*self._as_user, str(self._programs / program), *options, str(data or self.data)]
        with (self.folder / "control.log").open("ab") as log:
            subprocess.run(
                argv, check=True, timeout=60, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


class MariadbServer:
    """A MariaDB on a free port."""

    programs = (
        shutil.which("mariadb-install-db"),
        shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/libexec"),
    )

    def __init__(self) -> None:
        self.port, self.folder = free_port(), folder_of("mysql")
        self.url = f"mysql+pymysql://root@127.0.0.1:{self.port}/test"
        self._user = ["--user=mysql"] if os.geteuid() == 0 else []
        install, self._program = (str(program) for program in self.programs)
        options = ["--no-defaults", "--auth-root-authentication-method=normal", f"--datadir={self.folder}/data"]
        log = Proc([install, *options, *self._user], log=self.folder / "install.log")
        assert log.process.wait(60) == 0, log.text()
        self.start()

    def start(self) -> None:
        place = [f"--datadir={self.folder}/data", f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid"]
        options = [f"--port={self.port}", "--bind-address=127.0.0.1", "--skip-name-resolve", *self._user]
        self.proc = Proc([self._program, "--no-defaults", *place, *options], log=self.folder / "log")
        until("MariaDB answers", self._answers)

    def restart(self) -> None:
        """As after a crash of the server: every connection is cut, the log is replayed."""
        self.proc.kill()
        self.start()

    def clean_up(self) -> None:
        self.proc.clean_up()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        assert self.proc.is_running, self.proc.text()[-2000:]
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False
