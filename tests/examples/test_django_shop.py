"""The Django shop: its own tests, the checks of Django, and a worker that is killed in the middle of its steps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.docs.blocks import ROOT
from tests.support.services import BROKERS, DATABASES

SHOP = ROOT / "examples" / "django_shop"
SQLITE_IN_GATE = pytest.mark.parametrize(
    "database",
    [pytest.param("sqlite", marks=pytest.mark.gate), pytest.param("postgresql", marks=pytest.mark.slow)],
    indirect=True,
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def environment(database: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the settings of the shop read: a database and queues of this test alone."""
    unique = uuid.uuid4().hex[:8]
    variables = {
        "PYTHONPATH": str(ROOT),
        "CELERY_BROKER_URL": BROKERS["redis"],
        "SHOP_SQLITE": str(tmp_path / "shop.sqlite3"),
        "SHOP_QUEUE": f"durable-{unique}",
        "SHOP_TASK_QUEUE": f"celery-{unique}",
    }
    if database == "sqlite":
        yield os.environ | variables
        return
    server = sa.make_url(DATABASES["postgresql"])
    name = f"django_shop_{unique}"
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    variables |= {"SHOP_DATABASE": name, "SHOP_DATABASE_HOST": server.host or ""}
    variables |= {"SHOP_DATABASE_USER": server.username or ""}
    yield os.environ | variables
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    admin.dispose()


def manage(environment: dict[str, str], *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "manage.py", *args],
        cwd=SHOP,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@SQLITE_IN_GATE
def test_the_tests_of_the_shop_pass(environment: dict[str, str]) -> None:
    assert "Ran 9 tests" in manage(environment, "test")


@pytest.mark.slow
def test_the_tests_of_the_shop_pass_without_migrations(environment: dict[str, str], tmp_path: Path) -> None:
    text = 'from proj.settings import *\nDATABASES["default"].setdefault("TEST", {})["MIGRATE"] = False\n'
    (tmp_path / "unmigrated.py").write_text(text)
    named = {"DJANGO_SETTINGS_MODULE": "unmigrated", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    said = manage(environment | named, "test", "--verbosity", "2")
    assert "Ran 9 tests" in said
    assert "Applying celery_durable" not in said
    assert "Synchronizing apps without migrations" in said


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--migrations", "--nomigrations"])
def test_the_tests_of_the_shop_pass_with_pytest_django(environment: dict[str, str], option: str) -> None:
    assert "9 passed" in run_pytest_django(environment, option, "shop/tests.py")


NO_TEST_DATABASE = """
import pytest
from django.test import SimpleTestCase
from celery_durable.contrib.django.testing import assert_crash_safe, make_harness
from celery_durable.testing import HarnessMisuse
from shop.models import Order
from shop.workflows import order

NOT_ALLOWED = "Database (access not allowed, use the .django_db. mark|.* are not allowed in SimpleTestCase subclasses)"

def use_a_harness():
    with pytest.raises(Exception, match=NOT_ALLOWED):
        make_harness([order])
    with pytest.raises(Exception, match=NOT_ALLOWED):
        assert_crash_safe(order, 1, side_effects=[Order])

def test_without_the_mark():
    use_a_harness()

class WithoutTransactions(SimpleTestCase):
    def test_a_simple_test_case(self):
        use_a_harness()

@pytest.fixture(scope="session")
def django_db_setup():
    "As pytest-django documents it for tests on an existing database."

@pytest.mark.django_db(transaction=True)
def test_on_an_existing_database():
    with pytest.raises(HarnessMisuse) as refused:
        assert_crash_safe(order, 1, side_effects=[Order])
    assert str(refused.value) == (
        "The database 'default' is not a test database, and assert_crash_safe() deletes all instances in its database. "
        "Run the test with Django's test runner or pytest-django, on a database with another name."
    )
"""


@pytest.mark.gate
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_no_harness_gets_the_database_of_the_project(environment: dict[str, str], tmp_path: Path) -> None:
    manage(environment, "migrate", "--verbosity", "0")
    manage(environment, "shell", "-c", "from shop.workflows import order; order.create(1, id='real')")
    (tmp_path / "test_misuse.py").write_text(NO_TEST_DATABASE)
    assert "3 passed" in run_pytest_django(environment, tmp_path)
    assert "real" in manage(environment, "durable", "ls")


def run_pytest_django(environment: dict[str, str], *arguments: object) -> str:
    """Run pytest in the shop's folder, and return what it printed."""
    options = ["-q", "--ds=proj.settings", "-c", os.devnull, "--rootdir=.", *map(str, arguments)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=SHOP,
        env=environment | {"PYTHONPATH": f"{ROOT}:{SHOP}"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.stdout + done.stderr


@pytest.mark.gate
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_django_finds_nothing_to_complain_about(environment: dict[str, str]) -> None:
    assert manage(environment, "check") == "System check identified no issues (0 silenced).\n"
    assert manage(environment, "makemigrations", "--check") == "No changes detected\n"


@SQLITE_IN_GATE
def test_the_tables_are_made_by_migrate_and_taken_over_from_durable_migrate(environment: dict[str, str]) -> None:
    plan = manage(environment, "migrate", "--plan")
    assert "Bring the tables of workflows to revision 0002" in plan
    manage(environment, "durable", "migrate")
    assert "Applying celery_durable.0001_initial... OK" in manage(environment, "migrate")
    assert "No migrations to apply." in manage(environment, "migrate")
    manage(environment, "migrate", "celery_durable", "zero")
    assert manage(environment, "durable", "ls") == "No instances.\n"


def test_a_check_asks_for_migrate(environment: dict[str, str]) -> None:
    assert "(celery_durable.W002) The tables of workflows do not exist; this version needs revision " in manage(
        environment, "check", "--database", "default"
    )


PLACE = """
import sys, django; django.setup()
from shop.models import Order
from shop.workflows import order
for number in range(int(sys.argv[1])):
    placed = Order.objects.create(customer="ada@example.com", amount=500)
    order.create(placed.pk, id=f"order-{placed.pk}")
"""
LOOK = """
import django; django.setup()
from shop.models import Email, Order, Payment
from shop.workflows import order
ended = sum(each.status == "complete" for each in order.list(limit=100).items)
shipped = Order.objects.filter(state="shipped").count()
print(ended, Payment.objects.count(), Email.objects.count(), shipped)
"""


@pytest.mark.smoke
@pytest.mark.slow
def test_no_order_is_charged_twice_or_lost_when_workers_are_killed(environment: dict[str, str]) -> None:
    orders, settings = 20, {"DJANGO_SETTINGS_MODULE": "proj.settings", "PYTHONPATH": f"{ROOT}:{SHOP}"}
    manage(environment, "migrate")
    env = environment | settings | {"SHOP_LEASE_SECONDS": "2"}
    subprocess.run([sys.executable, "-c", PLACE, str(orders)], cwd=SHOP, env=env, check=True, timeout=60)
    deadline, kills = time.monotonic() + 120, 0
    seen = ""
    while seen != f"{orders} {orders} {orders} {orders}":
        assert time.monotonic() < deadline, seen
        with worker(env) as process:
            # The first workers get little time, so that they die in the middle; the later ones get more.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3 + kills)
            kills += 1
        done = subprocess.run(
            [sys.executable, "-c", LOOK], cwd=SHOP, env=env, check=True, capture_output=True, text=True, timeout=60
        )
        seen = done.stdout.strip()
    assert kills >= 1


@contextlib.contextmanager
def worker(env: dict[str, str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker, killed with its pool processes at the end."""
    queues = f"{env['SHOP_QUEUE']},{env['SHOP_TASK_QUEUE']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "proj", "worker", "-Q", queues, "-c", "2", "-l", "warning", *options],
        cwd=SHOP,
        env=env,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
