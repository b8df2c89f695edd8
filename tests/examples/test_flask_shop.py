"""examples/flask_shop: in this process, and with a real worker of each pool that runs workflows."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from celery._state import _set_current_app, set_default_app
from flask import Flask

from examples import flask_shop as shop
from tests.docs.blocks import blocks
from tests.examples.databases import make_shop_database
from tests.smoke.proc import ROOT, Proc, python, until


@pytest.fixture
def database_url(sqlite_template: str, tmp_path: Path) -> str:
    return make_shop_database(sqlite_template, tmp_path, shop.Base.metadata)


@pytest.fixture
def celery_settings() -> dict[str, Any]:
    return {"broker_url": "memory://"}


@pytest.fixture
def site(database_url: str, celery_settings: dict[str, Any]) -> Iterator[Flask]:
    before = current_app._get_current_object()
    site = shop.create_app({"SQLALCHEMY_DATABASE_URI": database_url, "CELERY": celery_settings})
    yield site
    site.extensions["celery_durable"].close()
    site.extensions["celery"].close()
    with site.app_context():
        shop.db.engine.dispose()
    set_default_app(before)
    _set_current_app(before)


def test_an_order_and_its_workflow_are_placed_paid_and_shipped(site: Flask) -> None:
    web, durable = site.test_client(), site.extensions["celery_durable"]
    assert web.post("/orders", json={"item": "kettle"}).json == {"id": 1, "instance": "order-1"}
    durable.tick()
    assert web.get("/orders/1").json == {"state": "placed", "is_reserved": True, "workflow": "waiting"}
    assert web.post("/orders/1/payment").json == {"is_new": True}
    assert web.post("/orders/1/payment").json == {"is_new": False}
    durable.tick()
    assert web.get("/orders/1").json == {"state": "shipped", "is_reserved": True, "workflow": "complete"}
    assert shop.shop_order.get("order-1").result() == "The Kettle Shop: one kettle"


def test_a_refused_order_leaves_no_workflow(site: Flask) -> None:
    web = site.test_client()
    assert web.post("/orders", json={"item": "nothing"}).status_code == 400
    assert web.get("/orders/1").status_code == 404
    assert shop.shop_order.list().items == ()


def test_the_commands_in_its_docstring_name_routes_that_exist(site: Flask) -> None:
    routes = {str(rule).replace("<int:order_id>", "1") for rule in site.url_map.iter_rules()}
    doc = shop.__doc__ or ""
    assert {path for path in routes if path.startswith("/orders") and f"127.0.0.1:5000{path}" in doc} == {
        "/orders", "/orders/1", "/orders/1/payment",
    }  # fmt: skip


@pytest.mark.smoke
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "pool",
    [
        pytest.param("prefork", marks=pytest.mark.gate),
        pytest.param("threads", marks=pytest.mark.slow),
        pytest.param("solo", marks=pytest.mark.slow),
    ],
)
def test_bodies_have_their_app_context_in_workers_of_every_pool(
    site: Flask, database_url: str, broker: dict[str, str], tmp_path: Path, pool: str
) -> None:
    web = site.test_client()
    for _ in range(5):
        web.post("/orders", json={"item": "kettle"})
    arguments = ["--pool", pool, "--concurrency", "2", "--beat", "--schedule", str(tmp_path / "schedule")]
    worker = Proc(
        python("-m", "celery", "-A", "tests.examples.flask_worker", "worker", *arguments, "--without-mingle"),
        log=tmp_path / "worker.log",
        env=os.environ | broker | {"DURABLE_DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)},
    )
    try:
        for number in range(1, 6):
            web.post(f"/orders/{number}/payment")

        def states() -> set[str]:
            return {web.get(f"/orders/{number}").get_json()["workflow"] for number in range(1, 6)}

        until("the end of all orders", lambda: states() == {"complete"}, seconds=60)
    finally:
        worker.clean_up()
    assert {shop.shop_order.get(f"order-{n}").result() for n in range(1, 6)} == {"The Kettle Shop: one kettle"}
    assert "Traceback" not in worker.text()


@pytest.mark.gate
@pytest.mark.smoke
@pytest.mark.timeout(120)
def test_the_commands_of_the_page_work_with_its_files(broker: dict[str, str], tmp_path: Path) -> None:
    """Celery takes an attribute `app` of the module for its app, whatever that is: the page once had Flask's there."""
    page = ROOT / "docs" / "how-to" / "flask.md"
    package, worker, client, *_ = (block.text for block in blocks(page, "python"))
    broker_url, database_url = '"redis://localhost:6379/0"', "postgresql+psycopg://shop@localhost/shop"
    assert package.count(broker_url) == package.count(database_url) == 1
    package = package.replace(database_url, f"sqlite:///{tmp_path}/shop.sqlite3").replace(
        broker_url,
        f"{broker['CELERY_BROKER_URL']!r}, "
        f'"broker_transport_options": {{"global_keyprefix": {broker["SHOP_KEY_PREFIX"]!r}}}',
    )
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text(package)
    (tmp_path / "shop" / "worker.py").write_text(worker)
    client, checks = re.subn(r"^(.+)  # -> (.+)$", r"assert (\1) == (\2)", client, flags=re.MULTILINE)
    assert checks == 2
    (tmp_path / "client.py").write_text(f"from shop import db, order\nfrom shop.worker import site\n\n{client}")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    [commands, *_] = [block.text for block in blocks(page, "console") if "worker" in block.text]
    migrate, start, _ = (line.removeprefix("$ ").split() for line in commands.splitlines())
    assert (migrate[0], start[0]) == ("flask", "celery")

    subprocess.run(python("-m", *migrate), cwd=tmp_path, env=env, check=True, timeout=60)
    process = Proc(python("-m", *start), log=tmp_path / "worker.log", env=env, cwd=tmp_path)
    try:
        done = subprocess.run(
            python("client.py"), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        process.clean_up()
    assert done.returncode == 0, done.stderr + process.text()
    assert "Traceback" not in process.text()
