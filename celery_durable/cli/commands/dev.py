"""`dev`: worker, dispatcher, broker and database in one process, for writing workflows without any server."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from kombu.utils.url import maybe_sanitize_url

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.cli.backends.stored import StoreBackend, attached_durable, database_now, reaching_database
from celery_durable.cli.command import Output, command
from celery_durable.cli.commands.dashboard import PORT, open_server
from celery_durable.cli.commands.follow import Follower
from celery_durable.cli.commands.start import start_command
from celery_durable.cli.errors import CliError, command_line
from celery_durable.cli.inputs import Context, Option
from celery_durable.cli.output import render
from celery_durable.cli.output.console import Cell, Console, Styled
from celery_durable.errors import InstanceNotFound
from celery_durable.model import RunRef
from celery_durable.store.migrations import migrate
from celery_durable.testing import databases
from celery_durable.testing.code import CodeWatcher, find_syntax_error
from celery_durable.testing.local_worker import LocalWorker

if TYPE_CHECKING:  # the pages need packages of an extra
    from celery_durable.dashboard.local import LocalServer

Replacement = tuple[str, Cell, Cell]
"""A name, the part that `dev` uses, and the configured part that it replaces."""

_VISITOR = "CELERY_DURABLE_DEV_VISITOR"
"""The environment variable that hands the secret of the browser's cookie over to the process after a reload."""
_LEVELS = ("debug", "info", "warning", "error")


@command("dev", "dev --concurrency 2 --loglevel info", "dev --no-reload", "dev --dashboard")
def dev(
    ctx: Context,
    console: Output,
    concurrency: Annotated[
        int, Option("-c", "--concurrency", type=click.IntRange(1), default=8, help="Number of worker threads.")
    ],
    loglevel: Annotated[
        str, Option("-l", "--loglevel", type=click.Choice(_LEVELS), default="warning", help="Level of Celery's log.")
    ],
    no_reload: Annotated[bool, Option("--no-reload", help="Do not restart when you edit the code.")],
    dashboard: Annotated[bool, Option("--dashboard", help="Serve the dashboard, too, and print its link.")],
) -> None:
    """Run worker, dispatcher, broker and database in this process.

    Use it while you write workflows. It creates the tables, runs instances, and shows each step as it is recorded.
    Messages stay in memory. The database is durable_database_url, or else a SQLite file in this directory. When you
    edit a module in this directory that it has imported, it restarts after the current steps. Not for production.
    """
    durable = attached_durable(ctx)
    replacements = _replace_servers(durable)
    with reaching_database():
        migrate.upgrade(durable.internals.store)
    app: Any = durable.app
    app.loader.import_default_modules()
    app.log.setup(loglevel=loglevel.upper(), redirect_stdouts=False, colorize=console.has_color)
    printer = _RunPrinter(durable, console)
    reloader = None if no_reload else _Reloader(console)
    pages = _open_pages(durable) if dashboard else None

    def on_start() -> None:
        if pages is not None:
            console.print_line(Styled("dashboard", "dim", 9), pages.link)
            threading.Thread(target=pages.run, name="durable-dashboard", daemon=True).start()
        _print_summary(ctx, console, durable, replacements)

    def on_progress(runs: AbstractSet[RunRef]) -> None:
        printer.print_updates(runs)
        if reloader is not None and reloader.must_reload():
            worker.stop()

    def on_stop() -> None:
        if reloader is not None:
            reloader.disable()
        console.print_note("Stopping after the current steps. Press Ctrl-C again to stop at once.")

    worker = LocalWorker(durable, concurrency=concurrency, on_start=on_start, on_progress=on_progress, on_stop=on_stop)
    if exit_code := worker.run():
        ctx.exit(exit_code)
    if reloader is not None and reloader.is_due:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # the same command again
    console.print_line("Stopped. Unfinished instances continue when you start it again.")


def _open_pages(durable: Durable) -> LocalServer:
    """Open the dashboard. The browser that has opened it stays logged in when the code is reloaded."""
    visitor = os.environ.setdefault(_VISITOR, durable.internals.runtime.new_secret())
    try:
        return open_server(durable, port=PORT, read_only=False, visitor=visitor)
    except CliError:
        return open_server(durable, port=0, read_only=False, visitor=visitor)


def _replace_servers(durable: Durable) -> list[Replacement]:
    app: Any = durable.app
    broker = databases.use_memory_broker(app)
    replaced = "" if broker is None else _note(f"not {maybe_sanitize_url(broker)}, your broker_url")
    replacements: list[Replacement] = [("broker", "this process's memory", replaced)]
    with reaching_database():
        if databases.is_without_store(durable):
            databases.use_dev_store(durable)
            replacements.append(("store", f"./{databases.DEV_FILE}", _note("durable_database_url is not set")))
        else:
            replacements.append(("store", durable.internals.store.engine.url.render_as_string(), ""))
    configured = durable.internals.settings.lease_seconds
    databases.run_dispatcher_in_worker(durable)
    lease = durable.internals.settings.lease_seconds
    if lease != configured:
        replacements.append(("lease", f"{lease:g} s", _note(f"durable_lease_seconds is {configured:g}")))
    if app.conf.task_always_eager:
        app.conf.task_always_eager = False
        replacements.append(("eager", "off", _note("task_always_eager is on in your settings")))
    others = sorted(name for name in app.conf.beat_schedule if name != tasks.SWEEP)
    if others:
        replacements.append(("beat", "none", _note(f"not run here: {', '.join(others)}")))
    return replacements


def _note(text: str) -> Styled:
    return Styled(f"({text})", "dim")


def _print_summary(ctx: click.Context, console: Console, durable: Durable, replacements: list[Replacement]) -> None:
    workflows = sorted(durable.workflows)
    for name, *rest in [*replacements, ("workflows", ", ".join(workflows) or Styled("none", "red"), "")]:
        console.print_line(Styled(name, "dim", 9), *rest)
    if workflows:
        first = durable.internals.registry.get(workflows[0])
        start = start_command(first.name, first.params.parameters)
        console.print_line(Styled("start one", "dim"), command_line(ctx, start))
    else:
        console.print_line(
            "Import the modules that define workflows in your app's module, or name them in its `imports`."
        )
    console.print_line(Styled("stop", "dim", 9), "Ctrl-C")
    click.echo()


class _Reloader:
    """Notices that the code was edited. A file with a syntax error must be edited again before it counts."""

    def __init__(self, console: Console) -> None:
        self._console, self._watcher = console, CodeWatcher(Path.cwd())
        self._broken: set[Path] = set()
        self._is_enabled = True
        self._has_found_changes = False

    @property
    def is_due(self) -> bool:
        return self._is_enabled and self._has_found_changes

    def disable(self) -> None:
        """Reload no more, because the user has stopped the process, also if changes were found before."""
        self._is_enabled = False

    def must_reload(self) -> bool:
        """Look at the files. Returns whether this call found changed code that can be compiled."""
        if not self._is_enabled or self._has_found_changes or not (changed := self._watcher.find_changed()):
            return False
        self._broken = {path for path in self._broken.difference(changed) if path.exists()}
        for path in changed:
            if (flaw := find_syntax_error(path)) is not None:
                self._broken.add(path)
                self._console.print_note(f"Not reloaded: {flaw}")
        self._has_found_changes = not self._broken
        if self.is_due:  # the signal to stop may have come while the files were read
            names = ", ".join(str(path.relative_to(Path.cwd())) for path in changed)
            self._console.print_note(f"Reloading after the current steps: {names} changed.")
        return self.is_due


class _RunPrinter:
    def __init__(self, durable: Durable, console: Console) -> None:
        self._durable, self._console = durable, console
        self._since = database_now(durable)
        self._followers: dict[RunRef, Follower] = {}
        """Ended runs stay here, so that a repeated message does not print their updates again."""

    def print_updates(self, runs: AbstractSet[RunRef]) -> None:
        for ref in sorted(runs, key=str):
            if ref not in self._followers:
                self._followers[ref] = Follower(StoreBackend(self._durable), ref, since=self._since)
            with contextlib.suppress(InstanceNotFound):  # a message may name an instance that was deleted
                for update in self._followers[ref].read_updates():
                    when = render.format_clock_time(update.at, exact=not self._console.is_for_people)
                    self._console.print_entry([when, Styled(str(ref), "bold"), *update.cells])
