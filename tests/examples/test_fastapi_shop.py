"""examples/fastapi_shop.py under a real uvicorn with two processes; the test runs the workflows between requests."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from celery import Celery

from celery_durable import Durable
from examples import fastapi_shop as shop
from tests.docs.blocks import blocks
from tests.examples.databases import make_shop_database
from tests.smoke.proc import Proc, free_port, python, until

pytestmark = pytest.mark.timeout(120)

ROOT = Path(shop.__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def database_url(sqlite_template: str, folder: Path) -> str:
    return make_shop_database(sqlite_template, folder, shop.Base.metadata)


@pytest.fixture
def durable(database_url: str) -> Iterator[Durable]:
    """What runs the workflows, in the place of workers: `tick`."""
    app = Celery("runner", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = database_url
    durable = Durable(app)
    yield durable
    durable.close()
    app.close()


@pytest.fixture(scope="module")
def web(database_url: str, folder: Path) -> Iterator[httpx.Client]:
    """A client of two server processes. It keeps no connection, so each request may reach another process."""
    port, log = free_port(), folder / "uvicorn.log"
    environment = os.environ | {"DURABLE_DATABASE_URL": database_url, "CELERY_BROKER_URL": "memory://"}
    arguments = ["--workers", "2", "--port", str(port), "--log-level", "warning", "examples.fastapi_shop:site"]
    server = Proc(python("-m", "uvicorn", *arguments), log=log, env=environment)
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=30) as client:
            until("the server answers", lambda: answers(client, server), 60)
            yield client
        assert server.terminate(30) in (0, -15)
    finally:
        server.clean_up()
    assert "Traceback" not in server.text()


def answers(client: httpx.Client, server: Proc) -> bool:
    assert server.is_running, server.text()
    try:
        return client.get("/api/healthz").status_code > 0
    except httpx.TransportError:
        return False


def place(web: httpx.Client, durable: Durable) -> str:
    """Order a kettle, and run its workflow until it waits; returns the path of the order."""
    placed = web.post("/orders", json={"item": "kettle"})
    number = placed.json()["id"]
    assert (placed.status_code, placed.json()) == (201, {"id": number, "instance": f"order-{number}"})
    durable.tick()
    return f"/orders/{number}"


@pytest.mark.gate
def test_an_order_and_its_workflow_are_placed_paid_and_shipped(web: httpx.Client, durable: Durable) -> None:
    path = place(web, durable)
    assert web.get(path).json() == {"state": "placed", "workflow": "waiting"}
    assert web.post(f"{path}/payment", json={"cents": 1999}).json() == {"is_new": True}
    assert web.post(f"{path}/payment", json={"cents": 1999}).json() == {"is_new": False}
    assert web.get(path).json()["state"] == "paid"
    durable.tick()
    assert web.get(path).json() == {"state": "shipped", "workflow": "complete"}


@pytest.mark.gate
def test_a_refused_order_leaves_no_workflow(web: httpx.Client) -> None:
    before = web.get("/api/workflows/shipping/instances").json()["instances"]
    assert web.post("/orders", json={"item": "nothing"}).status_code == 400
    missing = web.get("/orders/99")
    assert (missing.status_code, missing.json()["code"]) == (404, "INSTANCE_NOT_FOUND")
    assert web.get("/api/workflows/shipping/instances").json()["instances"] == before


@pytest.mark.gate
def test_any_process_of_the_server_streams_what_the_others_do(web: httpx.Client, durable: Durable) -> None:
    path = place(web, durable)
    instance = path.replace("/orders/", "order-")
    streams: list[str] = []
    opened = threading.Semaphore(0)

    def follow() -> None:
        with web.stream("GET", f"/api/workflows/shipping/instances/{instance}/stream") as response:
            opened.release()
            streams.append(response.read().decode())

    followers = [threading.Thread(target=follow) for _ in range(6)]
    for each in followers:
        each.start()
    for _ in followers:
        assert opened.acquire(timeout=30)
    web.post(f"{path}/payment", json={"cents": 1999})
    durable.tick()
    for each in followers:
        each.join(30)
    assert [stream.count('"output":"shipped"') for stream in streams] == [1] * 6


def test_the_commands_in_its_docstring_name_routes_that_exist() -> None:
    paths: dict[str, Any] = shop.site.openapi()["paths"]
    for path in ("/orders", "/orders/{order_id}/payment", "/orders/{order_id}"):
        assert path in paths
        assert path.replace("{order_id}", "1") in (shop.__doc__ or "")


@pytest.mark.gate
@pytest.mark.smoke
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_code_of_the_page_works_with_the_driver_that_it_names(
    store_url: str, broker: dict[str, str], tmp_path: Path
) -> None:
    """A connection of asyncpg belongs to one event loop: the page once left one of asyncio.run() in the pool."""
    shop_code, client, errors = (block.text for block in blocks(ROOT / "docs" / "how-to" / "fastapi.md", "python"))
    options = f"app.conf.broker_transport_options = {{'global_keyprefix': {broker['SHOP_KEY_PREFIX']!r}}}\n"
    for old, new in {
        "postgresql+psycopg://shop@localhost/shop": store_url,
        "postgresql+asyncpg://shop@localhost/shop": store_url.replace("+psycopg", "+asyncpg"),
        "redis://localhost:6379/0": broker["CELERY_BROKER_URL"],
        "durable = Durable(app)\n": f"{options}durable = Durable(app)\n",
    }.items():
        assert shop_code.count(old) == 1, old
        shop_code = shop_code.replace(old, new)
    client, checks = re.subn(r"^(.+)  # -> (.+)$", r"assert (\1) == (\2)", client + errors, flags=re.MULTILINE)
    assert checks == 4
    (tmp_path / "shop.py").write_text(shop_code)
    (tmp_path / "client.py").write_text(f"from shop import Base, engine, shipping, site\n\n{client}")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    worker = Proc(
        python("-m", "celery", "-A", "shop", "worker", "--beat", "--without-mingle"),
        log=tmp_path / "worker.log",
        env=env,
        cwd=tmp_path,
    )
    try:
        done = subprocess.run(
            python("client.py"), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        worker.clean_up()
        engine = sa.create_engine(store_url)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE IF EXISTS shop_order")
        engine.dispose()
    assert done.returncode == 0, done.stderr + worker.text()
    assert "Traceback" not in worker.text()
