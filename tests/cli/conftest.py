"""A shop whose commands are called in this process, on a clock that moves, with a pipe or a terminal as its screen."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import pty
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from pydantic import BaseModel

from celery_durable import Durable, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent, cli
from celery_durable.cli import durable as durable_command
from celery_durable.model import RunRef, to_us
from celery_durable.runtime import Runtime
from tests.support.databases import on_databases

# Commands import their modules when they run, beside the threads of a worker. pytest parses each module of a plugin
# when it is imported, and two threads that parse at once may raise SystemError (python/cpython#106905).
for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}."):
    importlib.import_module(module.name)


class Clock(Runtime):
    """Stands still until a test moves it. While a command sleeps, the world goes on: ``meanwhile`` is called."""

    def __init__(self) -> None:
        self.now_us = to_us(datetime(2030, 1, 1, tzinfo=UTC))
        self.meanwhile: Callable[[], object] | None = None
        self.slept = 0.0
        self.ids = 0

    def clock(self) -> int:
        return self.now_us

    def monotonic(self) -> float:
        return self.now_us / 1e6 + self.slept

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            super().sleep(seconds)  # the keeper of leases
            return
        self.slept += seconds
        if self.meanwhile is not None:
            self.meanwhile()

    def new_id(self) -> str:
        self.ids += 1
        return f"id-{self.ids}"

    def advance(self, **span: float) -> None:
        self.now_us += timedelta(**span) // timedelta(microseconds=1)


@dataclass(frozen=True)
class Said:
    """What a command printed, and how it ended."""

    out: str
    err: str
    code: int

    @property
    def rows(self) -> list[list[str]]:
        """The piped records."""
        return [line.split("\t") for line in self.out.splitlines()]


class OrderIn(BaseModel):
    order_id: str
    cents: int = 500


class Shop:
    """An app with a few workflows. ``pipe`` and ``terminal`` call a command, ``work`` is a worker that comes by."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.durable_database_url = url
        self.clock = Clock()
        self.durable = Durable(self.app, runtime=self.clock)
        self.no_color = False
        self._monkeypatch = monkeypatch
        self._add_workflows()

    def _add_workflows(self) -> None:
        def count(cents: int) -> dict[str, Any]:
            self.clock.advance(milliseconds=12)
            return {"cents": cents}

        def charge(order_id: str) -> str:
            self.clock.advance(milliseconds=1500)
            raise ConnectionError(f"the gateway\n\x1b[31mis away\x1b[0m for {order_id}")

        @self.durable.workflow(name="order")
        def order(event: WorkflowEvent[OrderIn], step: Step) -> str:
            step.do("count", count, event.payload.cents)
            step.log.info("order received", cents=event.payload.cents, note="two words", category="payments")
            answer = step.wait_for_event("await approval", "approval", timeout="24 hours")
            step.log.warning("decided", by=answer.payload)
            return "paid"

        @self.durable.workflow(name="charge")
        def charging(event: WorkflowEvent[None], step: Step) -> None:
            again = Retries(limit=3, delay="10s", backoff="constant")
            step.do("charge card", StepConfig(retries=again), charge, event.instance_id)

        @self.durable.workflow(name="nap")
        def nap(event: WorkflowEvent[None], step: Step) -> str:
            step.sleep("cool off", "3 days")
            return "rested"

        @self.durable.workflow(name="echo")
        def echo(event: WorkflowEvent[Any], step: Step) -> Any:
            return event.payload

        @self.durable.workflow(name="bad")
        def bad(event: WorkflowEvent[None], step: Step) -> None:
            raise NonRetryableError("out of \x1b]0;title\x07paper", name="NoPaper")

    def work(self, workflow: str, instance_id: str, run: int = 1) -> str:
        ref = RunRef(workflow, instance_id, run)
        return self.durable.internals.runner.advance(ref, task_id="task-1", node="celery@tests").summary

    def work_at_once(self) -> None:
        """From now on a command that makes something due also has it advanced."""
        self.app.conf.task_always_eager = True

    def pipe(self, *words: str, stdin: str | None = None) -> Said:
        done = CliRunner().invoke(durable_command, words, obj=self._context(), input=stdin, prog_name="celery durable")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Said(done.stdout, done.stderr, done.exit_code)

    def terminal(self, *words: str, columns: int = 100, term: str = "xterm-256color") -> str:
        """What a command shows on a real (pseudo) terminal."""
        for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR"):
            self._monkeypatch.delenv(name, raising=False)
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._monkeypatch.setenv("TERM", term)
        with _pseudo_terminal() as (console, shown):
            with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
                durable_command.main(
                    list(words), obj=self._context(), prog_name="celery durable", standalone_mode=False
                )
            console.close()
        return "\n".join(line.rstrip() for line in "".join(shown).splitlines())

    def _context(self) -> CLIContext:
        return CLIContext(app=self.app, no_color=self.no_color, workdir=None)


@contextlib.contextmanager
def _pseudo_terminal() -> Iterator[tuple[Any, list[str]]]:
    ours, theirs = pty.openpty()
    shown: list[str] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end was closed
            while data := os.read(ours, 65536):
                shown.append(data.decode())

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as console:
        yield console, shown
    reader.join()
    os.close(ours)


database = on_databases("sqlite")


@pytest.fixture
def shop(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    shop = Shop(store_url, monkeypatch)
    yield shop
    shop.durable.close()
    shop.app.close()


@pytest.fixture(params=["direct", "http"])
def connection(request: pytest.FixtureRequest, shop: Shop) -> Any:
    """Calls commands on the shop: over its store, and over HTTP."""
    from tests.cli.connections import Direct, served  # it imports this module

    return Direct(shop) if request.param == "direct" else served(shop)


@pytest.fixture
def order(shop: Shop) -> Shop:
    """The shop with an order o-1 that waits for its approval."""
    shop.pipe("start", "order", "-P", "order_id=42", "-P", "cents:=1999", "--id", "o-1")
    shop.clock.advance(seconds=2)
    shop.work("order", "o-1")
    return shop
