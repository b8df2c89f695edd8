"""A soft time limit that fires in a real worker's process while it commits the end of its task."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL
from tests.smoke.test_ends import EndsSite, answers_in, site

__all__ = ["site"]

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(120)]

WANTED: dict[str, Any] = {"is held": 42, "is held and raises": ["LookupError", "no 21"]}


@contextmanager
def locked(site: EndsSite, instance: Any) -> Iterator[Callable[[], set[int]]]:
    """Hold the row of an instance; who waits for it."""
    i = site.durable.internals.store.tables.instance
    here = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    waiting = sa.text(f"{here} AND wait_event_type = 'Lock'")

    def waiters() -> set[int]:
        with site.engine.connect() as connection:
            return set(connection.execute(waiting).scalars())

    with sa.create_engine(site.engine.url, poolclass=sa.NullPool).connect() as connection, connection.begin():
        connection.execute(sa.select(i.c.id).where(i.c.instance_id == instance.id).with_for_update()).one()
        yield waiters


@REDIS_AND_POSTGRESQL
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "until_it_is_sent"),
    [
        pytest.param("is held", False, id="committed", marks=pytest.mark.gate),
        pytest.param("is held and raises", False, id="committed-raises"),
        pytest.param("is held", True, id="sent"),
        pytest.param("is held and raises", True, id="sent-raises"),
    ],
)
def test_what_a_task_came_to_is_its_answer(site: EndsSite, name: str, *, until_it_is_sent: bool) -> None:
    """The limit fires while the commit waits for a lock; the next try gets it, or goes as a message."""
    own, worker = site.worker_of("ours", "threads", "durable"), site.worker_of("ours", "prefork", "ends")
    instance = site.create("ends", [name])
    pid = int(until("its body runs", lambda: _read(site, "body")))
    until("the pass has ended", lambda: instance.status().status == "waiting")
    with locked(site, instance) as waiters:
        site.let_go()
        first = until("its commit waits", waiters)
        os.kill(pid, signal.SIGUSR1)  # as billiard does after a task's soft_time_limit
        if until_it_is_sent:
            own.wait_for_log(r"celery_durable\.task_\w+\[\S+ received")
        else:
            until("the next one waits", lambda: waiters() - first)
    until("the end", lambda: instance.status().status.is_terminal)
    assert instance.result("1 second") == {name: WANTED[name]}
    worker.wait_for_log("soft time limit of a task of .* fired after its end")
    assert len(answers_in(own, worker)) == until_it_is_sent
    again = site.create("ends", ["returns"])  # in a worker that was not harmed
    until("the end", lambda: again.status().status.is_terminal)
    assert again.result("1 second") == {"returns": 42}
    site.finish()


def _read(site: EndsSite, name: str) -> str:
    path = site.folder / name
    return path.read_text() if path.exists() else ""
