"""What `make test` leaves to `make test-all`, beside the tests that are marked `slow` or `gate` one by one.

A test that runs on SQLite, of a module in `SAME_ON_SERVERS`, is slow on PostgreSQL and MariaDB. Such a module is about
what the engine decides, or what its callers see, with one writer at a time. `tests/store` tests every statement that it
uses on all databases. What two transactions do to each other, what a lost connection or a cut commit does, and what a
crash at each checkpoint costs stays on the servers in `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SAME_ON_SERVERS = {
    "app": {"processes", "ticks"},
    "cli": {"*"},
    "contrib": {"flask"},
    "contrib/django": {"admin", "admin_actions", "api", "async", "task_backend"},
    "explain": {"*"},
    "handles": {"handles"},
    "http": {"*"},
    "linear": {"*"},
    "operations": {
        "create", "forks", "interventions", "labels", "lifecycle", "map_results", "max_run", "reading", "retention",
        "rewinding", "run_retries", "topic_waits", "topics",
    },
    "runner": {
        "attempt_contract", "attempt_workers", "endings", "failed_attempts", "hazards", "own_ends", "releases",
        "reliability", "suspension", "workers",
    },
    "step": {
        "branches", "children", "event_payloads", "events", "logs", "maps", "outbox", "publish", "retries", "sleeps",
        "step_labels", "step_names", "step_results", "step_sends", "steps", "tasks", "timeouts",
    },
    "tasks": {"task_tracebacks", "workers"},
    "tasks/lost": {"search"},
    "tasks/publishing": {"publishing"},
}  # fmt: skip
"""By folder, the names behind `test_` of modules whose tests say the same on every database; `*` for all of them."""


def mark_what_waits(items: list[pytest.Item]) -> None:
    """Add the marker `slow`. It has to run before ``-m`` chooses."""
    same = [item for item in items if _is_same_on_servers(item.path)]
    on_sqlite = {_function_of(item) for item in same if _database_of(item) == "sqlite"}
    for item in same:
        if _database_of(item) != "sqlite" and _function_of(item) in on_sqlite:
            item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("gate"):
            item.add_marker(pytest.mark.slow)


def _is_same_on_servers(module: Path) -> bool:
    if not module.is_relative_to(TESTS):
        return False
    names = SAME_ON_SERVERS.get(module.parent.relative_to(TESTS).as_posix(), set())
    return "*" in names or module.stem.removeprefix("test_") in names


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _database_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return str(call.params.get("database", "sqlite")) if call else "sqlite"
