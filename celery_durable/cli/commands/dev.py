"""`dev`: worker, dispatcher, broker and database in one process, for writing workflows without any server.

Dispatch messages are lost when the process stops. Instances continue at the next start, because the database has their
state (LAW 1).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import click
from celery import signals
from kombu.utils.url import maybe_sanitize_url

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.cli.backends import embedded
from celery_durable.cli.backends.backend import POLL_SECONDS
from celery_durable.cli.backends.stored import StoreBackend, attached_durable, database_now, reaching_database
from celery_durable.cli.command import Output, command
from celery_durable.cli.commands.follow import Follower
from celery_durable.cli.errors import INTERRUPTED, command_line
from celery_durable.cli.inputs import Context, option
from celery_durable.cli.output import render
from celery_durable.cli.output.console import Cell, Console, Styled
from celery_durable.errors import InstanceNotFound
from celery_durable.model import RunRef
from celery_durable.store import migrate

Replacement = tuple[str, Cell, Cell]
"""A name, the part that `dev` uses, and the configured part that it replaces."""

_LEVELS = ("debug", "info", "warning", "error")


@command("dev", "dev --concurrency 2 --loglevel info")
def dev(
    ctx: Context,
    console: Output,
    concurrency: Annotated[
        int, option("-c", "--concurrency", type=click.IntRange(1), default=8, help="Number of worker threads.")
    ],
    loglevel: Annotated[
        str, option("-l", "--loglevel", type=click.Choice(_LEVELS), default="warning", help="Level of Celery's log.")
    ],
) -> None:
    """Run worker, dispatcher, broker and database in this process.

    Use it while you write workflows. It creates the tables, runs instances, and shows each step as it is recorded.
    Messages stay in memory. The database is durable_database_url, or else a SQLite file in this directory. Not for
    production.
    """
    durable = attached_durable(ctx)
    replacements = _replace_servers(durable)
    with reaching_database():
        migrate.upgrade(durable.internals.store)
    app: Any = durable.app
    app.loader.import_default_modules()
    app.log.setup(loglevel=loglevel.upper(), redirect_stdouts=False, colorize=console.has_color)
    app.set_default()  # the pool's threads find their tasks in it
    worker = app.WorkController(
        pool="threads",
        concurrency=concurrency,
        hostname=f"dev@{os.getpid()}",
        without_mingle=True,
        without_gossip=True,
        without_heartbeat=True,
    )
    _print_summary(ctx, console, durable, replacements)
    _LocalWorker(durable, console, worker).run()
    console.print_line("Stopped. Unfinished instances continue when you start it again.")


def _replace_servers(durable: Durable) -> list[Replacement]:
    """Replace servers by embedded parts. Returns the replacements, to be printed."""
    app: Any = durable.app
    broker = embedded.use_memory_broker(app)
    replacements: list[Replacement] = [("broker", "this process's memory", _describe_replaced(broker))]
    with reaching_database():
        if embedded.is_without_store(durable):
            embedded.use_dev_store(durable)
            replacements.append(("store", f"./{embedded.DEV_FILE}", Styled("(durable_database_url is not set)", "dim")))
        else:
            replacements.append(("store", durable.internals.store.engine.url.render_as_string(), ""))
    configured = durable.internals.settings.lease_seconds
    embedded.run_dispatcher_in_worker(durable)
    if durable.internals.settings.lease_seconds != configured:
        replacements.append(
            (
                "lease",
                f"{durable.internals.settings.lease_seconds:g} s",
                Styled(f"(durable_lease_seconds is {configured:g})", "dim"),
            )
        )
    if app.conf.task_always_eager:
        app.conf.task_always_eager = False
        replacements.append(("eager", "off", Styled("(task_always_eager is on in your settings)", "dim")))
    others = sorted(name for name in app.conf.beat_schedule if name != tasks.SWEEP)
    if others:
        replacements.append(("beat", "none", Styled(f"(not run here: {', '.join(others)})", "dim")))
    return replacements


def _describe_replaced(broker: str | None) -> Styled:
    return Styled("" if broker is None else f"(not {maybe_sanitize_url(broker)}, your broker_url)", "dim")


def _print_summary(ctx: click.Context, console: Console, durable: Durable, replacements: list[Replacement]) -> None:
    workflows = sorted(durable.workflows)
    for name, *rest in [*replacements, ("workflows", ", ".join(workflows) or Styled("none", "red"), "")]:
        console.print_line(Styled(name, "dim", 9), *rest)
    if workflows:
        console.print_line(Styled("start one", "dim"), command_line(ctx, f"start {workflows[0]}"))
    else:
        console.print_line(
            "Import the modules that define workflows in your app's module, or name them in its `imports`."
        )
    console.print_line(Styled("stop", "dim", 9), "Ctrl-C")
    console.print_blank_line()


class _LocalWorker:
    """Runs the worker on its own thread and prints updates on the main thread, until a signal stops both."""

    def __init__(self, durable: Durable, console: Console, worker: Any) -> None:
        self._durable, self._console, self._worker = durable, console, worker
        self._stop = threading.Event()
        self._task_events: queue.SimpleQueue[tuple[RunRef, bool]] = queue.SimpleQueue()
        self._running: set[RunRef] = set()
        self._followers: dict[RunRef, Follower] = {}
        """Ended runs stay here, so that a repeated message does not print their updates again."""

    def run(self) -> None:
        """Run until a signal arrives or the worker exits; raises Exit if the worker failed."""
        since = database_now(self._durable)
        thread = threading.Thread(target=self._run_worker, name="durable-dev-worker", daemon=True)
        with self._signals(), self._recording_runs():
            thread.start()
            while not self._stop.wait(POLL_SECONDS):
                try:
                    self._print_updates(since)
                except Exception as exc:
                    if not self._durable.internals.store.is_transient(
                        exc
                    ):  # like the worker, wait until the database is back
                        raise
            self._worker.stop()
            thread.join()
            self._print_updates(since)
        self._durable.close()
        if self._worker.exitcode:
            raise click.exceptions.Exit(int(self._worker.exitcode))

    def _run_worker(self) -> None:
        try:
            self._worker.start()
        finally:
            self._stop.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle_signal(*_: object) -> None:
            if self._stop.is_set():
                os._exit(INTERRUPTED)  # bodies run on threads that Python would wait for
            self._durable.internals.stop_flag.set()  # running passes end at their next step boundary
            self._stop.set()
            self._console.print_note("Stopping after the current steps. Press Ctrl-C again to stop at once.")

        before = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _recording_runs(self) -> Iterator[None]:
        """Record which runs the worker starts and stops advancing, for the main thread."""

        def record_event(*, sender: Any, args: Any, signal: Any, **_: Any) -> None:
            if sender.name == tasks.ADVANCE:
                self._task_events.put((RunRef(*args), signal is signals.task_prerun))

        signals.task_prerun.connect(record_event)
        signals.task_postrun.connect(record_event)
        try:
            yield
        finally:
            signals.task_prerun.disconnect(record_event)
            signals.task_postrun.disconnect(record_event)

    def _print_updates(self, since: datetime) -> None:
        """Print updates of the runs that the worker advances, or has advanced since the last call."""
        active: set[RunRef] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                ref, is_running = self._task_events.get_nowait()
                active.add(ref)
                (self._running.add if is_running else self._running.discard)(ref)
        for ref in sorted(active | self._running, key=str):
            if ref not in self._followers:
                self._followers[ref] = Follower(
                    StoreBackend(self._durable), ref.workflow, ref.instance_id, ref.run_number, since=since
                )
            with contextlib.suppress(InstanceNotFound):  # a message may name an instance that was deleted
                for update in self._followers[ref].read_updates():
                    when = render.format_clock_time(update.at, exact=not self._console.is_for_people)
                    self._console.print_entry([when, Styled(str(ref), "bold"), *update.cells])
