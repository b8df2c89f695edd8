"""Run the python blocks of one page as one module: `python -m tests.docs.run_page README.md folder`.

`--serve` runs many pages, each in a process of its own that is forked after the imports and the first migration, which
take longer than most pages. It reads lines with a page and a folder, separated by a tab. For each it writes the files
stdout and stderr into the folder and prints the exit code.

A page names servers, and none is needed: the database becomes a SQLite file in ``folder``, messages run at once in
this process, and a wait for a result makes time jump to what is due next. An expression with a comment
``# -> value`` must have that value.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import logging
import os
import sys
import tempfile
import threading
import time
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import sqlalchemy as sa
import sqlalchemy.ext.asyncio as async_sa

import celery_durable.app
import celery_durable.app.internals
from celery_durable.model import to_us
from celery_durable.runtime import Runtime
from celery_durable.store.engine import Store
from celery_durable.store.migrations import migrate
from celery_durable.store.runs import schedule
from celery_durable.tasks.publishing import Publisher, PublishReport, SendState
from celery_durable.testing import DurableHarness
from tests.docs.blocks import Block, base_of, blocks

# Some pages show a run that fails. What the engine logs of it is no error of the page.
logging.getLogger("celery_durable.runner").addHandler(logging.NullHandler())

DATABASE = "page.sqlite3"


class JumpingRuntime(Runtime):
    """This machine's time, moved on by every wait."""

    ahead_us = 0

    def clock(self) -> int:
        return time.time_ns() // 1000 + JumpingRuntime.ahead_us

    def sleep(self, seconds: float) -> None:
        """Somebody waits for a result: let what is due next be due. (The leases' thread really waits.)"""
        if threading.current_thread() is not threading.main_thread():
            super().sleep(seconds)
            return
        durable = celery_durable.app.current_durable("The page")
        found = durable.internals.store.read(schedule.read)
        assert found.next_at is not None, "a result is waited for, and nothing will ever be due"
        JumpingRuntime.ahead_us += max(0, to_us(found.next_at) - to_us(found.now))
        durable.internals.sweeper.sweep()


def stand_in_for_servers() -> None:
    real_settings, real_engine = celery_durable.app.internals.read_settings, sa.create_engine
    real_async_engine = async_sa.create_async_engine

    def read_settings(conf: Any, **names: Any) -> Any:
        settings = real_settings(conf, **names)
        conf.task_always_eager = True  # also what Celery calls when a task has ended
        if (settings.database_url or "").startswith("sqlite") or "celery_durable.contrib.django.apps" in sys.modules:
            return settings
        return dataclasses.replace(settings, database_url=URL, database_schema=None, table_prefix="")

    def create_engine(url: Any, **options: Any) -> sa.Engine:
        return real_engine(url, **options) if str(url).startswith("sqlite") else real_engine(URL)

    def create_async_engine(_: Any, **options: Any) -> async_sa.AsyncEngine:
        return real_async_engine(URL.replace("sqlite", "sqlite+aiosqlite", 1), **options)

    def publish(self: Publisher, due_runs: Any) -> PublishReport:
        self.run_eagerly(due_runs)
        return PublishReport.of(len(due_runs), SendState.SENT)

    def send(self: Publisher, messages: Any) -> PublishReport:
        self.send_eagerly(messages)
        return PublishReport.of(len(messages), SendState.SENT)

    celery_durable.app.internals.read_settings = read_settings
    celery_durable.app.internals.Runtime = JumpingRuntime
    Publisher.queue_length = lambda *_: None
    sa.create_engine = create_engine
    sa.engine_from_config = lambda *_, **__: real_engine(URL)  # Flask-SQLAlchemy calls it
    async_sa.create_async_engine = create_async_engine
    Publisher.publish, Publisher.send = publish, send


class Checked(ast.NodeTransformer):
    """Turns an expression statement whose last line says ``# -> value`` into a comparison."""

    def __init__(self, block: Block) -> None:
        self.lines = block.text.splitlines()
        self.count = 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        _, arrow, wanted = self.lines[node.end_lineno - 1].partition("# -> ")
        if not arrow:
            return node
        self.count += 1
        value = ast.parse(wanted, mode="eval").body
        call = ast.Call(ast.Name("_is", ast.Load()), [node.value, value, ast.Constant(wanted)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))


def _is(found: Any, wanted: Any, text: str) -> None:
    assert found == wanted, f"the page says {text}, but it is {found!r}"


def run(page: Path) -> None:
    base = base_of(page)
    module = types.ModuleType("shop")  # so that a page can import from a file that it has shown, as from `shop`
    vars(module)["_is"] = _is
    sys.modules[module.__name__] = module
    checks = 0
    if base is not None:  # the page continues the file `shop.py`
        exec(compile(blocks(base, "python")[0].text, str(base), "exec"), vars(module))
    for block in blocks(page, "python"):
        tree = ast.parse(block.text, filename=str(block))
        checked = Checked(block)
        tree = checked.visit(tree)
        ast.increment_lineno(tree, block.line - 1)
        checks += checked.count
        exec(compile(tree, str(page), "exec"), vars(module))
        for name in [name for name in vars(module) if name.startswith("test_")]:
            call_test(vars(module).pop(name))
        print(f"ran {block}")
    print(f"checked {checks} values")


def call_test(test: Any) -> None:
    """Run a test that a page shows."""
    wanted = inspect.signature(test).parameters
    with ExitStack() as fixtures:
        given: dict[str, Any] = {}
        if "tmp_path" in wanted:
            given["tmp_path"] = Path(tempfile.mkdtemp(dir=".")).resolve()
        if "durable_harness" in wanted:
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "durable"]
            args, options = (marks[0].args, marks[0].kwargs) if marks else ((), {})
            given["durable_harness"] = fixtures.enter_context(DurableHarness(*args, **options))
        test(**given)


def main(page: Path, where: Path) -> None:
    global URL  # one process runs one page
    os.chdir(where)
    URL = f"sqlite:///{where}/{DATABASE}"
    make_database(URL)
    stand_in_for_servers()
    run(page)


def make_database(url: str) -> None:
    """Make the tables, unless they are there."""
    store = Store(url)
    migrate.upgrade(store)
    store.close()


def serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template.sqlite3")
        make_database(f"sqlite:///{template}")
        content = template.read_bytes()
    gc.freeze()  # a page and the end of its process collect garbage several times
    for line in sys.stdin:
        page, _, where = line.rstrip("\n").partition("\t")
        Path(where, DATABASE).write_bytes(content)
        pid = os.fork()
        if pid == 0:
            run_forked(Path(page), Path(where))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_forked(page: Path, where: Path) -> NoReturn:
    """Run a page as the child of a fork, and end as an interpreter ends: with its hooks."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # further lines belong to the parent
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(where / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    main(page, where)
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
