"""Restate: workflows of trivial steps on a server of its own, which keeps them in its own log, not in PostgreSQL.

Two processes of Hypercorn serve one half of the workflows each, as two services. The two workers of one Hypercorn would
share a listening socket. Then one of them may accept nearly all of the server's connections and do nearly all the work.

The workflows are created before the measurement, while the processes are stopped. When they continue, the server runs
all workflows at once. It is started for each measurement, with its data in a temporary folder of /var/tmp: /tmp may be
in memory, where fsync costs nothing. Its settings are the defaults, so it calls fsync for its log; but it listens on
Unix sockets alone, and sends no usage data.

The extra `bench` has the Python packages. npm has the server: `npm install --prefix FOLDER @restatedev/restate-server`
makes FOLDER/node_modules/.bin/restate-server, which has to be on the PATH, or in BENCH_RESTATE_SERVER.

`hypercorn "restate_peer:make_app()"` is one of the two processes.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import Answer, Question, find_program, measure, processes, program, wait_for
from peers import Peer
from servers import NAME

PROCESSES = 2
PACKAGES = ("restate-sdk", "hypercorn")
SERVER = "restate-server"
NODE = "bench"
APIS = ("admin", "ingress")
SERVICE, STEPS = "BENCH_RESTATE_SERVICE", "BENCH_RESTATE_STEPS"
"""In the environment of a process: the name of its service, and the file to which it adds a byte for each step."""
ENDED = "SELECT count(*) AS ended FROM sys_invocation WHERE completion_result = 'success'"


def questions(instances: int) -> dict[str, Question]:
    return Peer("Restate", "workflow", PACKAGES, run, (SERVER,)).speeds(instances // 2, instances // 16)


def run(steps: int, count: int) -> Answer:
    count = max(PROCESSES, count // PROCESSES * PROCESSES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=f"{NAME}_restate_", dir="/var/tmp")))
        finished = folder / "steps"
        finished.touch()
        server = stack.enter_context(start_server(folder))
        admin, ingress = (stack.enter_context(closing(Api(folder / NODE / f"{name}.sock"))) for name in APIS)
        wait_for(lambda: is_up(admin, "/health") and is_up(ingress, "/restate/health"))
        services = [f"many{number}" for number in range(PROCESSES)]
        sessions = [stack.enter_context(serve(service, admin, finished)) for service in services]
        with stopped(sessions):
            for number in range(count):
                ingress.post(f"/{services[number % PROCESSES]}/{number}/run/send", steps)
        answer = measure(lambda: finished.stat().st_size, count * steps, sessions=sessions, servers={"restate": server})
        wait_for(lambda: admin.post("/query", {"query": ENDED})["rows"] == [{"ended": count}])
        assert finished.stat().st_size == count * steps, "some workflows were replayed, and their steps counted twice"
    return answer


def start_server(folder: Path):
    path = find_program(SERVER)
    assert path is not None
    options = ("--base-dir", str(folder), "--node-name", NODE, "--listen-mode", "unix", "--no-logo")
    return program(path, *options, RESTATE_DISABLE_TELEMETRY="true")


@contextmanager
def serve(service: str, admin: Api, finished: Path) -> Iterator[int]:
    """A process that the server knows and that runs the workflows of a service."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    command = ("-m", "hypercorn", "--bind", address, "restate_peer:make_app()")
    with processes(*command, **{SERVICE: service, STEPS: str(finished)}) as pid:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            wait_for(lambda: is_up(connection, "/health"))
        admin.post("/deployments", {"uri": f"http://{address}"})
        yield pid


@contextmanager
def stopped(sessions: Sequence[int]) -> Iterator[None]:
    """The processes of these sessions do nothing meanwhile."""
    for session in sessions:
        os.killpg(session, signal.SIGSTOP)
    try:
        yield
    finally:
        for session in sessions:
            os.killpg(session, signal.SIGCONT)


class Api(http.client.HTTPConnection):
    """A connection to one of the server's APIs, over its Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

    def post(self, path: str, content: Any) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self.request("POST", path, json.dumps(content), headers)
        response = self.getresponse()
        text = response.read().decode()
        assert response.status < 300, f"{path} was answered with {response.status}: {text}"
        return json.loads(text)


def is_up(connection: http.client.HTTPConnection, path: str) -> bool:
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
    except OSError:
        connection.close()
        return False
    return response.status == 200


def make_app():
    import restate

    many = restate.Workflow(os.environ[SERVICE])
    finished = os.open(os.environ[STEPS], os.O_WRONLY | os.O_APPEND)

    async def trivial(number):  # what is no coroutine function runs on a thread, which costs more
        return number

    @many.main()
    async def run(context, steps):
        for number in range(steps):
            await context.run_typed(f"step {number}", trivial, number=number)
            os.write(finished, b".")
        return steps

    return restate.app([many])
