"""`migrate`: creates or updates the tables."""

from __future__ import annotations

import click

from celery_durable.cli.command import Command
from celery_durable.cli.output.console import Console


@click.command(cls=Command, examples=["migrate", "migrate --check", "migrate --sql"])
@click.option("--sql", is_flag=True, help="Print the statements for an empty database instead of running them.")
@click.option(
    "--check",
    is_flag=True,
    help="Change nothing; fail if tables or columns are missing or outdated.",
)
@click.pass_context
def migrate(ctx: click.Context, sql: bool, check: bool) -> None:
    """Create the tables, or update them.

    Use it once per deploy, before the new workers start. It only adds tables and columns, so workers of the older
    version continue.
    """
    from celery_durable.cli.backends.stored import reaching_database, stored_durable
    from celery_durable.store import migrate as migrations

    if sql and check:
        raise click.UsageError("--sql and --check exclude each other.")
    durable, console = stored_durable(ctx), Console.from_context(ctx)
    with reaching_database():
        if sql:
            click.echo(migrations.render_sql(durable.internals.store), nl=False)
        elif check:
            migrations.check_tables(durable.internals.store)
            console.print_entry(["Up to date", f"revision {migrations.read_revision(durable.internals.store)}"])
        else:
            before, after = migrations.upgrade(durable.internals.store)
            change = f"revision {after}" if before == after else f"revision {before or 'none'} -> {after}"
            console.print_entry(["Up to date" if before == after else "Migrated", change])
