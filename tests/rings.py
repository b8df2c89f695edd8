"""What `make test` leaves to `make test-all`, beside the tests that are marked `slow` or `gate` one by one.

A test that also runs on SQLite is slow on PostgreSQL and MariaDB, unless its module is in `ON_SERVERS`. Most modules
are about what the engine decides, or what its callers see, with one writer at a time. `tests/store` tests the
statements on all databases, some of them at the gate. What two transactions do to each other, what a lost connection or
a cut commit does, and what a crash at each checkpoint costs stays on the servers in `make test`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ON_SERVERS = {
    "contrib/django": {"connections", "joining", "migrations", "steps"},
    "docs": {"sql"},
    "handles": {"async_sessions", "sessions"},
    "operations": {"doubt", "emissions", "lifecycle_in_doubt"},
    "pairs": {"*"},
    "runner": {
        "claims", "crashes", "group_commit", "interleavings", "leases", "lost_connections", "no_writes",
        "unlocked_user_code",
    },
    "step": {"mutate", "step_tx"},
    "store": {"*"},
    "store/engine": {"*"},
    "store/instances": {"*"},
    "store/lanes": {"*"},
    "store/migrations": {"*"},
    "store/runs": {"*"},
    "store/schema": {"*"},
    "tasks/lost": {"lost_tasks"},
}  # fmt: skip
"""By folder, the names behind `test_` of modules whose tests may differ from database to database; `*` for all."""


AT_THE_GATE = {
    "operations": {"doubt"},
    "store/instances": {"batches", "chaos_checks", "instances"},
    "store/lanes": {"groups"},
    "store/migrations": {"applications", "migrate"},
    "store/runs": {"dead_workers", "history", "leases", "new_runs", "pages", "queues", "sweep"},
}
"""Modules whose tests wait for the gate on MariaDB. In `make test` they run on SQLite and PostgreSQL.

Most have one transaction at a time, and no branch of the store is reached by them on MariaDB alone. What is peculiar to
MariaDB (locks, plans, collations, drivers, how values are stored) is tested on it by the other modules. Migrations
change rarely, and MariaDB takes a second or two to create the tables.
"""


def mark_what_waits(items: list[pytest.Item]) -> None:
    """Add the marker `slow`. It has to run before ``-m`` chooses."""
    same = [item for item in items if not _is_on_servers(item.path)]
    on_sqlite = {_function_of(item) for item in same if _database_of(item) == "sqlite"}
    for item in same:
        if _database_of(item) != "sqlite" and _function_of(item) in on_sqlite:
            item.add_marker(pytest.mark.slow)
    for item in items:
        if _database_of(item) == "mariadb" and _is_in(AT_THE_GATE, item.path):
            item.add_marker(pytest.mark.gate)
        if item.get_closest_marker("gate"):
            item.add_marker(pytest.mark.slow)


def wants_slow(config: pytest.Config) -> bool:
    """Whether this run may have slow tests, so that the items of a large product are worth making."""
    return bool(config.getoption("markexpr") != "not slow")


def _is_on_servers(module: Path) -> bool:
    return _is_in(ON_SERVERS, module)


def _is_in(names_by_folder: dict[str, set[str]], module: Path) -> bool:
    folder, name = _folder_and_name(module)
    names = names_by_folder.get(folder, set())
    return "*" in names or name in names


@functools.cache
def _folder_and_name(module: Path) -> tuple[str, str]:
    folder = module.parent.relative_to(TESTS).as_posix() if module.is_relative_to(TESTS) else ""
    return folder, module.stem.removeprefix("test_")


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _database_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return str(call.params.get("database", "sqlite")) if call else "sqlite"
