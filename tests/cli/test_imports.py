"""What a call of each program does not import, because imports are most of its time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Shop
from tests.cli.connections import served

DATABASE = "sqlite:///durable.sqlite3"
SHOP = f"""
from celery import Celery
from celery_durable import Durable

app = Celery("shop", broker="memory://")
app.conf.durable_database_url = "{DATABASE}"
durable = Durable(app)


@durable.workflow
def order(event, step):
    pass
"""
PROGRAM = """
import gc, sys
from {module} import main
status = None
try:
    main()
except SystemExit as exit:
    status = exit.code
print("FROZEN", gc.get_freeze_count() > 0)
print("EXIT", status)
print(*sys.modules)
"""
TERMINAL = {"rich"}
"""For tables on a terminal only."""
HTTP_CLIENT = {"httpx", "httpcore", "h11", "anyio"}
MODELS = {"celery_durable.wire.requests", "celery_durable.wire.responses"}
"""For JSON and for changes only."""
SERVER = {"fastapi", "starlette", "uvicorn", "celery_durable.http"}
TESTING = {"pytest", "celery_durable.testing.harness", "celery_durable.testing.local_worker"}
PASSES = {"celery_durable.runner", "sqlalchemy.orm"}
"""What advances runs, in workers only."""
OTHER_DATABASES = {"sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql", "psycopg", "pymysql"}
"""Those that the app does not use."""
APP = {
    "celery", "kombu", "sqlalchemy", "alembic", "psycopg", "pymysql", "celery_durable.app", "celery_durable.store",
    "celery_durable.operations", "celery_durable.runner", "celery_durable.tasks", "celery_durable.definitions",
}  # fmt: skip
"""What a machine without the app does not need."""


def call(folder: Path, module: str, *words: str) -> tuple[str, set[str]]:
    """Return the exit code, and the names of the modules that a call has imported.

    Garbage collection never examines them: they stay until the process ends.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module), *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])},
        capture_output=True, text=True,
    )  # fmt: skip
    *_, frozen, status, modules = done.stdout.splitlines()
    assert frozen == "FROZEN True"
    return status, set(modules.split())


@pytest.mark.parametrize("words", [("show", "order", "o-1"), ("pause", "order", "o-1"), ("--help",)])
def test_a_call_over_http_imports_neither_app_nor_database_nor_terminal(
    order: Shop, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The help of all commands imports all of them."""
    api = served(order)
    status, modules = call(tmp_path, "celery_durable.cli.remote", "-b", api.url, "-H", "X-Api-Key: sesame", *words)
    assert status == "EXIT 0"
    requests = {"celery_durable.commands", "celery_durable.wire.requests"} if "show" in words else set()
    assert modules & (APP | TERMINAL | SERVER | TESTING | requests | {"pygments"}) == set()


@pytest.mark.parametrize("words", [("ls",), ("explain", "order", "o-1")])
def test_a_call_on_the_database_imports_no_http_and_no_terminal(
    order: Shop, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "shop.py").write_text(SHOP.replace(DATABASE, order.app.conf.durable_database_url))
    status, modules = call(tmp_path, "celery.bin.celery", "-A", "shop", "durable", *words)
    assert status == "EXIT 0"
    assert "celery_durable.store" in modules
    unused = HTTP_CLIENT | TERMINAL | SERVER | TESTING | MODELS | PASSES | OTHER_DATABASES | {"alembic"}
    assert modules & unused == set()


def test_a_command_in_the_process_of_an_application_leaves_its_garbage_collection_alone(shop: Shop) -> None:
    before = gc.get_freeze_count()
    assert shop.pipe("ls").code == 0
    assert gc.get_freeze_count() <= before


def test_a_worker_has_imported_what_passes_need_before_its_pool_forks(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    program = """
import sys
from shop import app

print(*sys.modules)
app.Worker(pool="prefork", loglevel="ERROR", quiet=True)  # made, not started: the pool has not forked
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert PASSES & before == set()
    assert after >= PASSES
