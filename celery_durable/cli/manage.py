"""The verbs that steer: migrate for the tables; pause, resume, terminate and restart for instances."""

from __future__ import annotations

import click

from celery_durable.cli.screen import Screen, Styled
from celery_durable.cli.verb import Verb, open_durable, reaching_database, stored_durable
from celery_durable.model import Status
from celery_durable.store import migrate as migrations


@click.command(cls=Verb, examples=["migrate", "migrate --check", "migrate --sql"])
@click.option("--sql", is_flag=True, help="Print the statements for an empty database instead of running them.")
@click.option("--check", is_flag=True, help="Change nothing; fail where the tables are older than this version needs.")
@click.pass_context
def migrate(ctx: click.Context, sql: bool, check: bool) -> None:
    """Make the tables, or bring them up to date.

    Use it once per deploy, before the new workers start. Only adds: workers of the older version go on meanwhile.
    """
    if sql and check:
        raise click.UsageError("--sql and --check exclude each other.")
    durable, screen = stored_durable(ctx), Screen.of(ctx)
    with reaching_database():
        if sql:
            click.echo(migrations.sql(durable.store), nl=False)
        elif check:
            migrations.check(durable.store)
            screen.entry(["Up to date", f"revision {migrations.current(durable.store)}"])
        else:
            before, after = migrations.upgrade(durable.store)
            change = f"revision {after}" if before == after else f"revision {before or 'none'} -> {after}"
            screen.entry(["Up to date" if before == after else "Migrated", change])


@click.command(cls=Verb, examples=["pause order order-42"])
@click.argument("workflow")
@click.argument("id")
@click.pass_context
def pause(ctx: click.Context, workflow: str, id: str) -> None:
    """Stop an instance at its next step boundary.

    Use it to hold something back while you look into it. A running step ends first; timers and deadlines go on
    counting.
    """
    durable = open_durable(ctx)
    durable.operations.pause(workflow, id)
    row = durable.operations.get(workflow, id).instance
    _tell(ctx, "Paused" if row.status is Status.PAUSED else "Pauses when the running step ends", workflow, id)


@click.command(cls=Verb, examples=["resume order order-42"])
@click.argument("workflow")
@click.argument("id")
@click.pass_context
def resume(ctx: click.Context, workflow: str, id: str) -> None:
    """Let a paused instance go on.

    Use it after pause. A pause that has not taken effect yet is taken back; on anything else it does nothing.
    """
    durable = open_durable(ctx)
    was = durable.operations.get(workflow, id).instance
    durable.operations.resume(workflow, id)
    is_paused = was.status is Status.PAUSED or was.pause_requested
    _tell(ctx, "Resumed" if is_paused else "Was not paused", workflow, id)


@click.command(cls=Verb, examples=["terminate order order-42", "terminate order order-42 --reason 'sold twice'"])
@click.argument("workflow")
@click.argument("id")
@click.option("--reason", help="Why; it is kept with the run.")
@click.pass_context
def terminate(ctx: click.Context, workflow: str, id: str, reason: str | None) -> None:
    """End an instance for good, without a result.

    Use it for what must not go on. A step that is running may run to its end, but nothing of it is recorded.
    """
    open_durable(ctx).operations.terminate(workflow, id, reason=reason)
    _tell(ctx, "Terminated", workflow, id)


@click.command(cls=Verb, examples=["restart order order-42", "restart order order-42 --reason 'the bug is fixed'"])
@click.argument("workflow")
@click.argument("id")
@click.option("--reason", help="Why; it is kept with the new run.")
@click.pass_context
def restart(ctx: click.Context, workflow: str, id: str, reason: str | None) -> None:
    """Run an instance again from the beginning.

    Use it after mending what made it fail. It gets the same parameters; all steps run again, with their effects.
    Earlier runs stay readable.
    """
    run = open_durable(ctx).operations.restart(workflow, id, reason=reason)
    _tell(ctx, "Restarted", workflow, id, f"run {run}")


def _tell(ctx: click.Context, done: str, workflow: str, instance_id: str, *more: str) -> None:
    Screen.of(ctx).entry([done, Styled(f"{workflow}/{instance_id}", "bold"), *more])
