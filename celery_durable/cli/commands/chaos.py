"""`chaos`: tests on your staging that no instance is lost."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import OpenDurable
from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import INTERRUPTED, REFUSED, CliError
from celery_durable.cli.inputs import Context, Option
from celery_durable.cli.output.console import Column
from celery_durable.testing.chaos_run import ChaosRun

_COLUMNS = (Column("WHAT"), Column("HOW OFTEN"))


@command("chaos", "chaos --minutes 10 --workers 4", "chaos --yes --seed 7")
def chaos(
    ctx: Context,
    durable: OpenDurable,
    console: Output,
    minutes: Annotated[
        float,
        Option("--minutes", type=click.FloatRange(0, min_open=True), default=1.0, help="How long to inject faults."),
    ],
    workers: Annotated[
        int, Option("--workers", type=click.IntRange(1, 64), default=2, help="How many workers to start and kill.")
    ],
    seed: Annotated[int | None, Option("--seed", help="Seed of the random faults; random by default.")],
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")],
) -> None:
    """Kill workers and lose messages, to test recovery.

    Use it on your staging while instances run there. It starts its own workers for the queues of your workflows and
    kills them with kill -9. It also repeats messages, and drops messages of its own dispatcher. It does not touch your
    workers, other tasks or the broker. A kill counts as an attempt of the running step. At the end it shows what it
    did, how soon the interrupted runs continued, and contradictions in the tables. The exit code is 1 if there are any.
    Ctrl-C stops it and its workers. In a pipe: what, how often.
    """
    durable.app.loader.import_default_modules()
    _check_broker(durable)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    database = durable.internals.store.engine.url.render_as_string()
    if not yes:
        click.confirm(
            f"Start {workers} workers on {database}, and kill them, drop and repeat messages for {minutes:g} min?",
            abort=True,
            err=True,
        )
    console.print_note(f"seed {seed}, {workers} workers, {minutes:g} min; Ctrl-C stops it")
    app = ctx.find_root().params.get("app")
    chaos_run = ChaosRun(durable, random.Random(seed), app if isinstance(app, str) else None, console.print_note)  # noqa: S311  # no secret
    is_interrupted = chaos_run.run(workers=workers, length=timedelta(minutes=minutes))
    rows, violations = chaos_run.report()
    console.print_table(_COLUMNS, rows)
    for violation in violations:
        console.print_note(f"VIOLATION {violation}")
    chaos_run.forget_logs(keep=bool(violations))
    if violations:
        ctx.exit(REFUSED)
    if is_interrupted:
        ctx.exit(INTERRUPTED)


def _check_broker(durable: Durable) -> None:
    conf: Any = durable.app.conf
    url = str(conf.broker_read_url or "")
    if conf.task_always_eager or url.startswith("memory:"):
        raise CliError(
            "The broker does not connect processes, so there are no workers to kill.",
            "Set broker_url, and set task_always_eager to False: chaos needs workers in separate processes.",
        )
