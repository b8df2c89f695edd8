"""`dev`: worker, dispatcher, broker and database in one process, for writing workflows without any server."""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from typing import Annotated, Any

import click
from kombu.utils.url import maybe_sanitize_url

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.cli.backends.stored import StoreBackend, attached_durable, database_now, reaching_database
from celery_durable.cli.command import Output, command
from celery_durable.cli.commands.follow import Follower
from celery_durable.cli.errors import command_line
from celery_durable.cli.inputs import Context, option
from celery_durable.cli.output import render
from celery_durable.cli.output.console import Cell, Console, Styled
from celery_durable.errors import InstanceNotFound
from celery_durable.model import RunRef
from celery_durable.store import migrate
from celery_durable.testing import local_servers
from celery_durable.testing.local_worker import LocalWorker

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
    worker = LocalWorker(
        durable,
        concurrency=concurrency,
        on_progress=_RunPrinter(durable, console).print_updates,
        on_stop=lambda: console.print_note("Stopping after the current steps. Press Ctrl-C again to stop at once."),
    )
    _print_summary(ctx, console, durable, replacements)
    if exit_code := worker.run():
        ctx.exit(exit_code)
    console.print_line("Stopped. Unfinished instances continue when you start it again.")


def _replace_servers(durable: Durable) -> list[Replacement]:
    """Replace servers by embedded parts. Returns the replacements, to be printed."""
    app: Any = durable.app
    broker = local_servers.use_memory_broker(app)
    replaced = "" if broker is None else _note(f"not {maybe_sanitize_url(broker)}, your broker_url")
    replacements: list[Replacement] = [("broker", "this process's memory", replaced)]
    with reaching_database():
        if local_servers.is_without_store(durable):
            local_servers.use_dev_store(durable)
            replacements.append(("store", f"./{local_servers.DEV_FILE}", _note("durable_database_url is not set")))
        else:
            replacements.append(("store", durable.internals.store.engine.url.render_as_string(), ""))
    configured = durable.internals.settings.lease_seconds
    local_servers.run_dispatcher_in_worker(durable)
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
        console.print_line(Styled("start one", "dim"), command_line(ctx, f"start {workflows[0]}"))
    else:
        console.print_line(
            "Import the modules that define workflows in your app's module, or name them in its `imports`."
        )
    console.print_line(Styled("stop", "dim", 9), "Ctrl-C")
    console.print_blank_line()


class _RunPrinter:
    """Prints the updates of the runs that the worker advances."""

    def __init__(self, durable: Durable, console: Console) -> None:
        self._durable, self._console = durable, console
        self._since = database_now(durable)
        self._followers: dict[RunRef, Follower] = {}
        """Ended runs stay here, so that a repeated message does not print their updates again."""

    def print_updates(self, runs: AbstractSet[RunRef]) -> None:
        for ref in sorted(runs, key=str):
            if ref not in self._followers:
                self._followers[ref] = Follower(
                    StoreBackend(self._durable), ref.workflow, ref.instance_id, ref.run_number, since=self._since
                )
            with contextlib.suppress(InstanceNotFound):  # a message may name an instance that was deleted
                for update in self._followers[ref].read_updates():
                    when = render.format_clock_time(update.at, exact=not self._console.is_for_people)
                    self._console.print_entry([when, Styled(str(ref), "bold"), *update.cells])
