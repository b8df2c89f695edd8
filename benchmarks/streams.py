"""What streams cost other requests: the median time of a read with 1,000 streams open, beside the idle one.

`python benchmarks/streams.py [streams] [instances]` serves the API from a database file in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn
from celery import Celery

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.http import asgi
from celery_durable.store.migrations import migrate

GETS = 300


def main() -> None:
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    instances = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    url = f"sqlite:///{Path(tempfile.mkdtemp(prefix='durable-bench-')) / 'shop.sqlite'}"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(url, port, instances), daemon=True)
    server.start()
    wait_for(port, server)
    idle = median_ms(port)
    clients = [follow(port, number % instances) for number in range(streams)]
    busy = median_ms(port)
    print(f"GET, idle: p50 {idle:.2f} ms; with {len(clients)} streams of {instances} instances: p50 {busy:.2f} ms")
    print(f"ratio {busy / idle:.2f}")
    for client in clients:
        client.close()
    server.terminate()
    server.join()


def serve(url: str, port: int, instances: int) -> None:
    durable = shop(url)
    migrate.upgrade(durable.internals.store)
    for number in range(instances):
        durable.internals.operations.create.instance("order", id=f"o-{number}")
    durable.tick(max_instances=100)
    uvicorn.run(asgi(durable, allow_anonymous=True), port=port, log_level="error", backlog=4096)


def shop(url: str) -> Durable:
    app = Celery("shop", broker="memory://")
    app.conf.durable_database_url = url
    durable = Durable(app)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_event("wait", "approval").payload

    return durable


def wait_for(port: int, server: BaseProcess) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except OSError:
            if time.monotonic() > end or not server.is_alive():
                raise
            time.sleep(0.1)


def follow(port: int, number: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(f"GET /workflows/order/instances/o-{number}/stream HTTP/1.1\r\nHost: shop\r\n\r\n".encode())
    assert b" 200 " in client.recv(4096)
    return client


def median_ms(port: int) -> float:
    took = []
    for _ in range(GETS):
        began = time.perf_counter()
        urllib.request.urlopen(f"http://127.0.0.1:{port}/workflows/order/instances/o-0", timeout=30).read()
        took.append((time.perf_counter() - began) * 1000)
        time.sleep(0.005)  # requests one at a time, with the followers served in between
    return statistics.median(took)


if __name__ == "__main__":
    main()
