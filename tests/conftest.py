"""Databases for every test: SQLite always, PostgreSQL and MariaDB where they answer.

Each process has one database on each server, made and migrated when first wanted, emptied before each test, dropped at
the end; the next run drops those of a run that was killed. A server that does not answer skips its tests; with
DURABLE_REQUIRE_SERVICES=1 they fail.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

import hypothesis
import pytest
import sqlalchemy as sa

from celery_durable import signals
from celery_durable.definitions import SHARED, Definition, LinearDefinition
from celery_durable.event_loop import event_loop
from celery_durable.model import to_us
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store, drivers
from celery_durable.store.migrations import migrate
from celery_durable.values import limits
from tests import rings
from tests.support import leftovers
from tests.support.databases import IS_FIRST, OwnDatabase, on_databases, own_database
from tests.support.services import DATABASES, missing

pytest_plugins = ["tests.support.answers", "tests.support.celery_apps", "tests.support.limits", "tests.support.worlds"]

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=50)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=200)
hypothesis.settings.load_profile("quick")  # unless --hypothesis-profile names the other

# A shell has what it starts in the background ignore SIGINT; tests are about what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Where this is set (as in many containers), each process that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test of this process cuts the power.
drivers.SQLITE_SYNCHRONOUS = "OFF"


class PlainImports(MetaPathFinder):
    """Imports what the threads of a test import without pytest, which rewrites the asserts of plugins' distributions.

    Rewriting parses the module with ast. CPython before 3.11.8 and 3.12.2 raises "SystemError: AST constructor
    recursion depth mismatch" if two threads do that at once (gh-106905), and the threads of a worker import too.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        is_plain = name.startswith(("celery_durable.", "schemathesis."))
        return PathFinder.find_spec(name, path, target) if is_plain else None


sys.meta_path.insert(0, PlainImports())

gc.disable()  # until the tests are collected, which leaves little garbage

os.environ[leftovers.OWNER] = str(os.getpid())  # for the processes that tests start


class MovableRuntime(Runtime):
    """A runtime whose clock stands still until a test moves it, and that never waits."""

    def __init__(self) -> None:
        self.now_us = to_us(datetime(2030, 1, 1, tzinfo=UTC))

    def clock(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)

    def back_off(self, times: int) -> None:
        pass


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """DURABLE_SHARD=2/6 keeps the second of six parts of the tests, for machines that share the work."""
    rings.mark_what_waits(items)
    yield  # -m chooses
    if shard := os.environ.get("DURABLE_SHARD"):
        part, count = map(int, shard.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == part - 1]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Hide the modules and the tests from the garbage collector, and let it run less often.

    With the usual thresholds it takes a tenth of the CPU, because each full collection visits what earlier tests left.
    What little garbage there is by now is hidden too: to find it takes half a second in each process.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.fixture(autouse=True)
def own_registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test knows the workflows of its module, of its room's helpers and of what the room tests; no others."""
    here = request.module.__name__
    tested = here.removeprefix("tests.")

    def is_known(definition: Definition) -> bool:
        module = definition.module if isinstance(definition, LinearDefinition) else definition.fn.__module__
        room, _, name = module.rpartition(".")
        if name.startswith("test_"):
            return module == here
        if module.startswith(("examples.", "celery_durable.contrib.")):
            return tested.startswith(room.removeprefix("celery_durable."))
        return not module.startswith("tests.") or here.startswith(room)

    known = {name: each for name, each in SHARED._definitions.items() if is_known(each)}
    monkeypatch.setattr(SHARED, "_definitions", known)


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test connects, as Flask's integration does for good, and its event loop, ends with the test."""
    for hook in (signals.around_pass, signals.around_step):
        monkeypatch.setattr(hook, "managers", list(hook.managers))
    for name in ("start_hooks", "stop_hooks", "_pending_hooks"):
        monkeypatch.setattr(event_loop, name, [])
    yield
    event_loop.stop()


@pytest.fixture(autouse=True)
def own_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may define limits as it likes, whatever the modules of other tests define."""
    here = request.module.__file__
    of_modules = {name: (limit, place) for name, (limit, place) in limits._of_modules.items() if place[0] == here}
    monkeypatch.setattr(limits, "_of_modules", of_modules)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated SQLite file to copy."""
    path = str(tmp_path_factory.mktemp("template") / "durable.sqlite3")
    store = Store(f"sqlite:///{path}")
    migrate.upgrade(store)
    store.close()  # the last connection to go takes the log of WAL with it: one file is left
    return path


@pytest.fixture(scope="session")
def postgresql_database() -> Iterator[OwnDatabase]:
    with own_database("postgresql") as own:
        yield own


@pytest.fixture(scope="session")
def mariadb_database() -> Iterator[OwnDatabase]:
    with own_database("mariadb") as own:
        yield own


database = on_databases("sqlite", "postgresql", "mariadb")
"""The databases that a test runs on. A room, a module or a test may have fewer."""


@pytest.fixture
def store_url(database: str, request: pytest.FixtureRequest, tmp_path) -> str:
    """The URL of an empty, migrated database."""
    if database == "sqlite":
        copy = tmp_path / "durable.sqlite3"
        shutil.copy(request.getfixturevalue("sqlite_template"), copy)
        return f"sqlite:///{copy}"
    own: OwnDatabase = request.getfixturevalue(f"{database}_database")
    own.empty()
    return own.url


@pytest.fixture
def inspector(database: str, request: pytest.FixtureRequest) -> sa.Engine | None:
    """An engine for queries about the database of this test. Its connection has planned those of earlier tests."""
    return None if database == "sqlite" else request.getfixturevalue(f"{database}_database").inspector


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A store with the database's own clock."""
    store = Store(store_url)
    yield store
    store.close()


@pytest.fixture
def clocked_store(store_url: str) -> Iterator[Store]:
    """A store whose clock the test moves: `clocked_store.runtime.advance(seconds)`."""
    store = Store(store_url, runtime=MovableRuntime())
    yield store
    store.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here, not with the tests that read it: pytest wants options before it looks into folders.
    parser.addoption(
        "--durable-nodes",
        choices=["local", "docker"],
        default="local",
        help="tests/pytest_celery: nodes as processes of this machine, or in containers",
    )


def pytest_sessionstart() -> None:
    if IS_FIRST:
        leftovers.kill_processes_of_the_dead()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here, not in a fixture: the summary then folds the skips of one server into one line.
    params = getattr(item, "callspec", None)
    name = params.params.get("database") if params else None
    if name in DATABASES and (why := _unreachable(name)):
        missing(name, f"{sa.make_url(DATABASES[name])} does not answer: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make what a test has logged text that a test process can send: errors may have half a surrogate pair."""
    report = yield
    report.sections = [(title, text.encode(errors="replace").decode()) for title, text in report.sections]
    return report


@functools.cache
def _unreachable(name: str) -> str | None:
    admin = sa.create_engine(DATABASES[name], connect_args={"connect_timeout": 3})
    try:
        admin.connect().close()
    except sa.exc.OperationalError as error:
        return str(error.orig).splitlines()[0]
    finally:
        admin.dispose()
    return None
