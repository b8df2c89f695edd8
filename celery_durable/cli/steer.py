"""The verbs that steer: pause, resume, terminate and restart, one instance, several, or all that fit a condition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from celery_durable.cli.backend import Backend
from celery_durable.cli.screen import Screen, Styled
from celery_durable.cli.verb import REFUSED, Refusal, Verb, open_backend, refusal_of
from celery_durable.cli.where import Condition, WhereInput, matching
from celery_durable.errors import DurableError
from celery_durable.model import TERMINAL, Status

F = TypeVar("F", bound=Callable[..., Any])

Deed = Callable[[Backend, str, str], Sequence[str]]
"""Does it to one instance, and says what was done."""
_LIVE = frozenset(Status) - TERMINAL
_SHOWN = 10


def targets(fn: F) -> F:
    """WORKFLOW ID..., or --where; see `steer`."""
    for add in (
        click.option("--yes", is_flag=True, help="With --where: do it. Without it only what would be done is shown."),
        click.option(
            "--where",
            type=WhereInput(),
            help="All that fit: workflow=, status=, error= (its name), older= and since= (its last change), "
            "separated by blanks.",
        ),
        click.argument("id", nargs=-1),
        click.argument("workflow", required=False),
    ):
        fn = add(fn)
    return fn


@click.command(cls=Verb, examples=["pause order order-42", "pause --where 'workflow=order status=active'"])
@targets
@click.pass_context
def pause(ctx: click.Context, workflow: str | None, id: tuple[str, ...], where: Condition | None, yes: bool) -> None:
    """Stop instances at their next step boundary.

    Use it to hold something back while you look into it. A running step ends first; timers and deadlines go on
    counting.
    """

    def deed(backend: Backend, name: str, each: str) -> Sequence[str]:
        backend.pause(name, each)
        seen = backend.look(name, each)
        is_paused = seen is not None and seen.status is Status.PAUSED
        return ["Paused" if is_paused else "Pauses when the running step ends"]

    steer(ctx, deed, _LIVE - {Status.PAUSED}, workflow, id, where, yes=yes)


@click.command(cls=Verb, examples=["resume order order-42", "resume --where 'workflow=order' --yes"])
@targets
@click.pass_context
def resume(ctx: click.Context, workflow: str | None, id: tuple[str, ...], where: Condition | None, yes: bool) -> None:
    """Let paused instances go on.

    Use it after pause. A pause that has not taken effect yet is taken back; on anything else it does nothing.
    """

    def deed(backend: Backend, name: str, each: str) -> Sequence[str]:
        was = backend.look(name, each)
        backend.resume(name, each)
        is_paused = was is not None and (was.status is Status.PAUSED or was.is_pausing)
        return ["Resumed" if is_paused else "Was not paused"]

    steer(ctx, deed, {Status.PAUSED}, workflow, id, where, yes=yes)


@click.command(
    cls=Verb,
    examples=[
        "terminate order order-42",
        "terminate order order-42 --reason 'sold twice'",
        "terminate --where 'workflow=order status=waiting older=30d' --reason 'nobody answered' --yes",
    ],
)
@targets
@click.option("--reason", help="Why; it is kept with the run.")
@click.pass_context
def terminate(
    ctx: click.Context,
    workflow: str | None,
    id: tuple[str, ...],
    where: Condition | None,
    yes: bool,
    reason: str | None,
) -> None:
    """End instances for good, without a result.

    Use it for what must not go on. A step that is running may run to its end, but nothing of it is recorded.
    """

    def deed(backend: Backend, name: str, each: str) -> Sequence[str]:
        backend.terminate(name, each, reason=reason)
        return ["Terminated"]

    steer(ctx, deed, _LIVE, workflow, id, where, yes=yes)


@click.command(
    cls=Verb,
    examples=[
        "restart order order-42",
        "restart order order-42 --reason 'the bug is fixed'",
        "restart --where 'workflow=order status=errored error=CardDeclined since=2h' --yes",
    ],
)
@targets
@click.option("--reason", help="Why; it is kept with the new run.")
@click.pass_context
def restart(
    ctx: click.Context,
    workflow: str | None,
    id: tuple[str, ...],
    where: Condition | None,
    yes: bool,
    reason: str | None,
) -> None:
    """Run instances again from the beginning.

    Use it after mending what made them fail. They get the same parameters; all steps run again, with their effects.
    Earlier runs stay readable. With --where only what has ended, unless it names another status.
    """

    def deed(backend: Backend, name: str, each: str) -> Sequence[str]:
        return ["Restarted", f"run {backend.restart(name, each, reason=reason)}"]

    statuses = TERMINAL if where is None or where.status is None else frozenset(Status)
    steer(ctx, deed, statuses, workflow, id, where, yes=yes)


def steer(
    ctx: click.Context,
    deed: Deed,
    statuses: frozenset[Status] | set[Status],
    workflow: str | None,
    ids: tuple[str, ...],
    where: Condition | None,
    *,
    yes: bool,
) -> None:
    """Do it to the instances that are named, or to all that fit ``where`` and are in one of ``statuses``."""
    if (where is None) == (not ids) or (where is not None and workflow is not None):
        raise click.UsageError("Name the instances, WORKFLOW ID..., or a condition, --where 'workflow=...'.")
    if yes and where is None:
        raise click.UsageError("--yes is for --where.")
    backend, screen = open_backend(ctx), Screen.of(ctx)
    if where is None:
        assert workflow is not None
        _each(ctx, screen, functools.partial(deed, backend), [(workflow, each) for each in ids])
        return
    found = [(item.workflow, item.id) for item in matching(backend, where) if item.status in statuses]
    if yes and found:
        _each(ctx, screen, functools.partial(deed, backend), found)
    elif screen.is_terminal:
        for name, each in found[:_SHOWN]:
            screen.line(f"{name}/{each}", indent=2)
        if len(found) > _SHOWN:
            screen.line(f"and {len(found) - _SHOWN} more", indent=2)
    else:
        for name, each in found:
            screen.record(f"Would {ctx.info_name}", f"{name}/{each}")
    count = f"{len(found)} instance{'' if len(found) == 1 else 's'}"
    is_done = yes or not found
    screen.aside(f"{count}." if is_done else f"Would {ctx.info_name} {count}; nothing was changed. Do it: --yes")


def _each(
    ctx: click.Context, screen: Screen, deed: Callable[[str, str], Sequence[str]], chosen: Sequence[tuple[str, str]]
) -> None:
    """Do it to one after the other; of several, one that refuses does not keep the others from it."""
    exit_code = 0
    for workflow, instance_id in chosen:
        try:
            done, *more = deed(workflow, instance_id)
        except (DurableError, Refusal) as exc:
            if len(chosen) == 1:
                raise
            refused = exc if isinstance(exc, Refusal) else refusal_of(exc)
            refused.show()
            exit_code = exit_code or refused.exit_code or REFUSED
        else:
            screen.entry([done, Styled(f"{workflow}/{instance_id}", "bold"), *more])
    if exit_code:
        ctx.exit(exit_code)
