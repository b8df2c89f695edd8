"""The Django shop with real workers on PostgreSQL: its connections are cut, and it is behind PgBouncer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.docs.blocks import ROOT
from tests.examples.test_django_shop import LOOK, PLACE, SHOP, environment, manage, worker
from tests.smoke.proc import Proc, free_port, until
from tests.support.databases import on_databases
from tests.support.services import DATABASES, missing_tool

__all__ = ["environment"]

pytestmark = [pytest.mark.smoke, pytest.mark.slow]
SECONDS = 100


database = on_databases("postgresql")


class Shop:
    """The shop in a database of its own; its servers are looked at from outside."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        settings = environment.get("DJANGO_SETTINGS_MODULE", "proj.settings")
        self.environment = environment | {
            "DJANGO_SETTINGS_MODULE": settings,
            "PYTHONPATH": f"{ROOT}:{SHOP}:{folder}",
            "SHOP_LEASE_SECONDS": "2",
        }
        name = environment["SHOP_DATABASE"]
        self._engine = sa.create_engine(
            sa.make_url(DATABASES["postgresql"]).set(database=name), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
        )
        manage(self.environment, "migrate")

    def run(self, code: str, *args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=SHOP, env=self.environment, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.strip()

    def place(self, orders: int) -> None:
        self.run(PLACE, str(orders))

    def limit_locks(self) -> None:
        """Set the lock timeout on the server, for new connections to the shop's database alone."""
        with self._engine.connect() as connection:
            connection.execute(sa.text(f"ALTER DATABASE {connection.engine.url.database} SET lock_timeout = '5s'"))
        self.cut_connections()

    def query(self, text: str) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(sa.text(text)).scalar_one())

    def count_complete(self) -> int:
        return self.query("SELECT count(*) FROM workflow_instance WHERE status = 'complete'")

    def wait_until_complete(self, orders: int) -> None:
        until(f"{orders} complete", lambda: self.count_complete() >= orders, SECONDS)

    def cut_connections(self) -> int:
        """Terminate the connections of all other clients to this database; returns how many there were."""
        return self.query(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def check_all_shipped_once(self, orders: int) -> None:
        assert self.run(LOOK) == f"{orders} {orders} {orders} {orders}"


@pytest.fixture
def shop(environment: dict[str, str], tmp_path: Path) -> Shop:
    return Shop(environment, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_worker_whose_connections_are_cut_goes_on(shop: Shop, pool: str) -> None:
    shop.place(30)
    with worker(shop.environment, "-P", pool):
        for number in range(5):  # while it works: each time it has done more since the last
            shop.wait_until_complete(5 * number + 1)
            until("there are connections", shop.cut_connections)
        shop.wait_until_complete(30)
        until("there are connections", shop.cut_connections)  # while it has nothing to do but to sweep
        shop.place(3)
        shop.wait_until_complete(33)
    shop.check_all_shipped_once(33)


POOLED = """
from proj.settings import *
DATABASES["default"].update(HOST="127.0.0.1", PORT={port}, DISABLE_SERVER_SIDE_CURSORS=True)
CELERY_DURABLE_PREPARED_STATEMENTS = False
"""
PGBOUNCER = """
[databases]
{name} = host={host} port={port} dbname={name} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
max_client_conn = 200
{more}
"""


@pytest.fixture
def pooler(environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """A PgBouncer in transaction mode before the shop's database; its port. A parameter is one line for its file."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        missing_tool("pgbouncer")
    server, port = sa.make_url(DATABASES["postgresql"]), free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pgbouncer.ini"
        name, its_port = environment["SHOP_DATABASE"], server.port or 5432
        more = getattr(request, "param", "")
        file.write_text(
            PGBOUNCER.format(
                name=name, host=server.host, port=its_port, user=server.username, listen_port=port, more=more
            )
        )
        Path(folder).chmod(0o755)
        as_user = ["-u", "nobody"] if os.geteuid() == 0 else []  # it refuses to run as root
        process = Proc([program, *as_user, str(file)], log=tmp_path / "pgbouncer.log")
        try:
            process.wait_for_log("process up")
            yield port
        finally:
            process.clean_up()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_behind_pgbouncer_every_order_is_shipped_once(
    environment: dict[str, str], tmp_path: Path, pooler: int, pool: str
) -> None:
    (tmp_path / "pooled_settings.py").write_text(POOLED.format(port=pooler))
    shop = Shop(environment | {"DJANGO_SETTINGS_MODULE": "pooled_settings"}, tmp_path)
    assert "(celery_durable.W008) Statements of workflows outside a transaction wait for locks" in manage(
        shop.environment, "check", "--database", "default"
    )
    shop.limit_locks()
    assert "no issues" in manage(shop.environment, "check", "--database", "default")
    with worker(shop.environment, "-P", pool):
        shop.place(20)
        shop.wait_until_complete(10)
        shop.cut_connections()  # those of PgBouncer
        shop.wait_until_complete(20)
    shop.check_all_shipped_once(20)


def test_behind_pgbouncer_a_missing_setting_is_named(environment: dict[str, str], tmp_path: Path, pooler: int) -> None:
    settings = POOLED.format(port=pooler).replace("CELERY_DURABLE_PREPARED_STATEMENTS = False", "")
    (tmp_path / "pooled_settings.py").write_text(settings.replace(", DISABLE_SERVER_SIDE_CURSORS=True", ""))
    variables = environment | {"DJANGO_SETTINGS_MODULE": "pooled_settings", "PYTHONPATH": f"{ROOT}:{SHOP}:{tmp_path}"}
    said = manage(variables, "check", "--database", "default")
    assert "(celery_durable.W003) The database 'default' is behind a pooler in transaction mode: " in said
    assert "HINT: Set CELERY_DURABLE_PREPARED_STATEMENTS = False." in said
    done = subprocess.run(
        [sys.executable, "manage.py", "durable", "doctor"], cwd=SHOP, env=variables, capture_output=True, text=True
    )
    assert "unsupported startup parameter: options\tBehind PgBouncer in transaction mode, set " in done.stdout


def test_behind_pgbouncer_a_migration_names_the_missing_setting(
    environment: dict[str, str], tmp_path: Path, pooler: int
) -> None:
    settings = POOLED.format(port=pooler).replace("CELERY_DURABLE_PREPARED_STATEMENTS = False", "")
    (tmp_path / "pooled_settings.py").write_text(settings)
    variables = environment | {"DJANGO_SETTINGS_MODULE": "pooled_settings", "PYTHONPATH": f"{ROOT}:{SHOP}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "manage.py", "migrate"], cwd=SHOP, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("CommandError") :]
    assert "Traceback" not in done.stderr
    assert error.splitlines()[0].startswith("CommandError: The database 'default' cannot be used: ")
    assert error.splitlines()[0].endswith("FATAL:  unsupported startup parameter: options")
    assert error.splitlines()[1:] == [
        "HINT: Behind PgBouncer in transaction mode, set CELERY_DURABLE_PREPARED_STATEMENTS = False."
    ]


@pytest.mark.parametrize("pooler", ["ignore_startup_parameters = options"], indirect=True)
def test_behind_pgbouncer_a_setting_that_it_ignores_is_named(
    environment: dict[str, str], tmp_path: Path, pooler: int
) -> None:
    """PgBouncer takes the connection, and drops its lock timeout without an error."""
    settings = POOLED.format(port=pooler).replace("CELERY_DURABLE_PREPARED_STATEMENTS = False", "")
    (tmp_path / "pooled_settings.py").write_text(settings.replace(", DISABLE_SERVER_SIDE_CURSORS=True", ""))
    variables = environment | {"DJANGO_SETTINGS_MODULE": "pooled_settings", "PYTHONPATH": f"{ROOT}:{SHOP}:{tmp_path}"}
    said = manage(variables, "check", "--database", "default")
    assert "(celery_durable.W008) Statements of workflows outside a transaction wait for locks" in said
    assert "also set CELERY_DURABLE_PREPARED_STATEMENTS = False." in said
    done = subprocess.run(
        [sys.executable, "manage.py", "durable", "doctor"], cwd=SHOP, env=variables, capture_output=True, text=True
    )
    assert "wait for locks forever: lock_timeout is 0.\tRun: ALTER ROLE CURRENT_USER SET lock_timeout" in done.stdout
