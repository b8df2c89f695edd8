"""What holds for a whole process, and for its forks: each test runs a small program."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.databases import on_databases

HEAD = """
import os, sys
from celery import Celery
from celery_durable import Durable, NotConfigured, durable_workflow

@durable_workflow
def order(event, step):
    return step.do("one", lambda: os.getpid())

def make(name):
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.update(durable_database_url=sys.argv[1], durable_lease_seconds=30.0)
    return app
"""


def run(program: str, url: str) -> str:
    """What a program of its own prints; it must end well."""
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program), url],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


database = on_databases("sqlite", "postgresql", "mariadb")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_workflow_finds_its_durable_or_says_what_is_missing(store_url: str) -> None:
    printed = run(
        """
        durable = Durable()
        @durable.workflow
        def other(event, step): ...

        def told(workflow=order):
            try:
                workflow.create()
            except NotConfigured as exc:
                return str(exc)
            return "created"

        print(told(other))                  # its Durable has no app
        print(told())                       # none
        first = make("first"); Durable(first)
        print(told())                       # the only one
        second = make("second"); Durable(second)
        print(told())                       # several, none current
        second.set_current()
        print(told())
        print(order.host is second.durable)
        durable.init_app(make("late"))
        print(told(other))
        """,
        store_url,
    )
    refusal = (
        " needs a Durable, and this process has none (or several and no current Celery app). "
        "Either attach one to your app, `durable = Durable(app)`, and import that module first, "
        "or make the app current with `app.set_current()`."
    )
    none, shared = f"This Durable(){refusal}", f"Workflow 'order'{refusal}"
    assert printed.splitlines() == [none, shared, "created", shared, "created", "True", "created"]


def test_a_store_that_was_used_before_a_fork_serves_parent_and_children(store_url: str) -> None:
    """A child that spoke over its parent's connections would mix up the two's answers, or hang."""
    printed = run(
        """
        app = make("app")
        durable = Durable(app)
        def advance(name):
            sentence = durable.app.tasks["celery_durable.advance"].apply(args=("order", name, 1)).get()
            return sentence, order.get(name).status().output

        order.create(id="before")
        assert advance("before") == ("complete", os.getpid())
        durable.internals.dispatcher.start()

        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                for turn in range(5):
                    name = f"c-{number}-{turn}"
                    order.create(id=name)
                    assert advance(name) == ("complete", os.getpid())
                os._exit(0)
            children.append(child)
        for turn in range(5):
            order.create(id=f"p-{turn}")
            assert advance(f"p-{turn}") == ("complete", os.getpid())
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        order.create(id="after")
        assert advance("after") == ("complete", os.getpid())
        durable.close()
        print(len(order.list(status="complete", limit=100).items))
        """,
        store_url,
    )
    assert printed == "22\n"


@pytest.mark.parametrize("is_ours", [True, False], ids=["own engine", "application's engine"])
def test_a_store_that_was_used_before_a_fork_serves_a_child_that_closes_all_files(
    store_url: str, is_ours: bool
) -> None:
    """So do the beat inside a worker, and daemons. SQLite counts on the parent's files for its locks."""
    printed = run(
        f"""
        import sqlalchemy
        app = make("app")
        durable = Durable(app{"" if is_ours else ", engine=sqlalchemy.create_engine(sys.argv[1])"})
        order.create(id="before")
        child = os.fork()
        if child == 0:
            os.closerange(3, 1024)
            order.create(id="child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        order.create(id="after")
        print(sorted(each.id for each in order.list().items))
        durable.close()
        """,
        store_url,
    )
    assert printed == "['after', 'before', 'child']\n"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_beat_does_not_start_under_settings_that_cannot_be_used(tmp_path: Path, store_url: str) -> None:
    """It would run on without a dispatcher, and nobody would notice before a sleep does not end."""
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\nfrom celery_durable import Durable\n"
        f"app = Celery('shop', broker='memory://')\napp.conf.durable_database_url = {store_url!r}\n"
        "app.conf.durable_poll_seconds = 0\ndurable = Durable(app)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "shop", "beat"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    sentence = "Setting durable_poll_seconds=0 cannot be used: use a number of seconds above 0, up to a hundred years"
    assert f"CRITICAL/MainProcess] celery beat does not start: {sentence}\n" in ended.stderr


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_worker_compiles_the_statements_of_a_pass_before_its_pool_forks(store_url: str) -> None:
    """Without a connection, which the forked processes would inherit."""
    printed = run(
        """
        from celery import signals
        from celery_durable.model import RunRef
        from celery_durable.store.engine import statements

        class Worker:
            app = make("first")

        durable = Durable(Worker.app)
        signals.worker_init.send(sender=Worker)
        store = durable.internals.store
        print(len(statements._compiled), store.engine.pool.checkedin(), store.engine.pool.checkedout())

        order.create(id="o-1")
        before = set(statements._compiled)
        print(durable.internals.runner.advance(RunRef("order", "o-1", 1), task_id="t", node="n").summary)
        compiled = set(statements._compiled) - before
        print({statement.build.__module__ for statement, *_ in compiled} - {"celery_durable.store.runs.schedule"})
        """,
        store_url,
    )
    assert printed.splitlines() == ["5 0 0", "complete", "set()"]
