"""The commands that change instances. Each sends the command of `celery_durable.commands` with its name.

Some work on several instances: those that the user names, or all that match a condition of `--where`.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Annotated, Any

import click

from celery_durable import commands
from celery_durable.cli.backends.backend import Backend, ListQuery
from celery_durable.cli.command import Command, OpenBackend, Output, command, open_backend
from celery_durable.cli.errors import REFUSED, CliError, convert_error
from celery_durable.cli.inputs import (
    InstanceId,
    JsonInput,
    Option,
    OptionalWorkflow,
    Payload,
    RunNumber,
    Step,
    Workflow,
)
from celery_durable.cli.output.console import Console, Styled
from celery_durable.commands import Target
from celery_durable.conditions import Condition, read_condition
from celery_durable.errors import DurableError, StoreUnavailable, ValueRefused
from celery_durable.model import InstanceSummary, Status
from celery_durable.wire import requests

_PAGE = 100
_MAX_LISTED = 10


class WhereInput(click.ParamType[Condition]):
    """``key=value`` pairs, separated by spaces."""

    name = "CONDITION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        if isinstance(value, Condition):
            return value
        try:
            return read_condition(value)
        except ValueRefused as exc:
            self.fail(str(exc), param, ctx)


_TARGETS = {
    "workflow": OptionalWorkflow,
    "id": Annotated[tuple[str, ...], click.argument("id", nargs=-1)],
    "where": Annotated[
        Condition | None,
        Option(
            "--where",
            type=WhereInput(),
            help="Select all that match: workflow=, status=, error= (name), step= and message= (of the failure), "
            "older= and since= (last change), label.NAME=, separated by spaces.",
        ),
    ],
    "yes": Annotated[bool, Option("--yes", help="With --where: apply the change. Without it, only show the matches.")],
}


def find_matching(backend: Backend, where: Condition) -> Iterator[InstanceSummary]:
    """Yield the instances that match, newest first. They are read page by page."""
    now, cursor = backend.now(), None
    while True:
        page = backend.list(ListQuery(where.workflow, _PAGE, where.listed_status, cursor, where.labels))
        yield from (item for item in page.items if where.matches(item, now))
        cursor = page.cursor
        if cursor is None:
            return


def on_targets(*examples: str) -> Callable[[Callable[..., Sequence[str]]], Command]:
    """Make a command of a function that changes one instance, and returns what it did, as cells.

    It has WORKFLOW ID... and --where, with which it changes the instances that `Condition.selects` for its name.
    """

    def declare(change: Callable[..., Sequence[str]]) -> Command:
        @wraps(change)
        def run(workflow: str | None, id: tuple[str, ...], where: Condition | None, yes: bool, **options: Any) -> None:
            if (where is None) == (not id) or (where is not None and workflow is not None):
                raise click.UsageError("Name the instances, WORKFLOW ID..., or a condition, --where 'workflow=...'.")
            if yes and where is None:
                raise click.UsageError("--yes is for --where.")
            ctx = click.get_current_context()
            backend, console = open_backend(ctx), Console.from_context(ctx)
            apply = partial(_apply_to_each, console, partial(change, backend, **options))
            if where is None:
                assert workflow is not None
                apply([Target(*each.split("/")) if "/" in each else Target(workflow, each) for each in id])
                return
            matching = find_matching(backend, where)
            name = change.__name__
            found = [Target(each.workflow, each.id) for each in matching if where.selects(name, each.status)]
            if yes and found:
                apply(found)
            else:
                _print_matches(console, ctx.info_name, found)
            count = f"{len(found)} instance{'' if len(found) == 1 else 's'}"
            if found and not yes:
                console.print_note(f"Would {ctx.info_name} {count}; nothing was changed. Add --yes to do it.")
            else:
                console.print_note(f"{count}.")

        run.__annotations__ = {**_TARGETS, **change.__annotations__}
        return command(*examples)(run)

    return declare


def _print_matches(console: Console, change: str | None, found: Sequence[Target]) -> None:
    if not console.is_for_people:
        for each in found:
            console.print_record(f"Would {change}", f"{each.workflow}/{each.instance_id}")
        return
    for each in found[:_MAX_LISTED]:
        console.print_line(f"{each.workflow}/{each.instance_id}", indent=2)
    if len(found) > _MAX_LISTED:
        console.print_line(f"and {len(found) - _MAX_LISTED} more", indent=2)


def _apply_to_each(console: Console, action: Callable[[Target], Sequence[str]], targets: Sequence[Target]) -> None:
    """Apply the action to each target. If one of several fails, its error is printed and the others continue."""
    exit_code = 0
    for target in targets:
        try:
            action_done, *details = action(target)
        except StoreUnavailable:  # the other targets would wait for it, too
            raise
        except (DurableError, CliError) as exc:
            if len(targets) == 1:
                raise
            refused = exc if isinstance(exc, CliError) else convert_error(exc)
            refused.show()
            exit_code = exit_code or refused.exit_code or REFUSED
        else:
            console.print_entry([action_done, Styled(f"{target.workflow}/{target.instance_id}", "bold"), *details])
    if exit_code:
        click.get_current_context().exit(exit_code)


Reason = Annotated[str | None, Option("--reason", help="Why; stored with the run.")]
NewRunReason = Annotated[str | None, Option("--reason", help="Why; stored with the new run.")]
By = Annotated[str | None, Option("--by", help="Your name, stored with the run; by default the user of this system.")]


@on_targets("pause order order-42", "pause --where 'workflow=order status=active'")
def pause(backend: Backend, target: Target) -> Sequence[str]:
    """Stop instances at their next step boundary.

    Use it to hold instances while you investigate. A running step finishes first. Timers and deadlines continue.
    """
    backend.call(commands.pause, target, requests.EmptyRequest())
    seen = backend.read_snapshot(target.workflow, target.instance_id)
    return ["Paused" if seen.status is Status.PAUSED else "Will pause when the running step ends"]


@on_targets("resume order order-42", "resume --where 'workflow=order' --yes")
def resume(backend: Backend, target: Target) -> Sequence[str]:
    """Resume paused instances.

    Use it after pause. It withdraws a pause that has not taken effect yet. Other instances are not changed.
    """
    found = backend.call(commands.resume, target, requests.EmptyRequest())
    return ["Resumed" if found.was_paused else "Was not paused"]


@on_targets(
    "wake order order-42",
    "wake --where 'workflow=order status=active older=5m' --yes",
)
def wake(backend: Backend, target: Target) -> Sequence[str]:
    """Make a worker check instances now.

    Use it if messages were lost and you do not want to wait for the next sweep, to skip the pause after a crash, or to
    start a scheduled instance early. It does not end a sleep or a wait for an event.
    """
    found = backend.call(commands.wake, target, requests.EmptyRequest())
    return ["Woken" if found.woken else "Not woken: it is paused, or a worker holds it"]


@on_targets(
    "cancel order order-42",
    "cancel order order-42 --reason 'sold twice'",
    "cancel --where 'workflow=order status=waiting older=30d' --reason 'nobody answered' --yes",
)
def cancel(backend: Backend, target: Target, by: By, reason: Reason) -> Sequence[str]:
    """Ask instances to clean up and end.

    Use it for instances that must stop, if their workflow can undo what its steps have done. The next step call raises
    Cancelled in the workflow. A running step finishes first. A second cancel ends the instance at once.
    """
    backend.call(commands.cancel, target, requests.Cancel(reason=reason, by=by or _find_user()))
    seen = backend.read_snapshot(target.workflow, target.instance_id)
    return ["Cancelled" if seen.status.is_terminal else "Cancelling"]


@on_targets(
    "terminate order order-42",
    "terminate order order-42 --reason 'sold twice'",
    "terminate --where 'workflow=order status=waiting older=30d' --reason 'nobody answered' --yes",
)
def terminate(
    backend: Backend,
    target: Target,
    children: Annotated[
        bool,
        Option("--children/--no-children", default=True, help="Terminate open children too, or let them continue."),
    ],
    by: By,
    reason: Reason,
) -> Sequence[str]:
    """End instances permanently, without a result.

    Use it for instances that must not continue, not even to clean up. A running step may finish, but nothing of it is
    recorded.
    """
    body = requests.Terminate(reason=reason, by=by or _find_user(), children=children)
    backend.call(commands.terminate, target, body)
    return ["Terminated"]


@on_targets(
    "restart order order-42",
    "restart order order-42 --reason 'the bug is fixed'",
    "restart --where 'workflow=order status=errored error=CardDeclined since=2h' --yes",
)
def restart(backend: Backend, target: Target, reason: NewRunReason) -> Sequence[str]:
    """Run instances again from the beginning.

    Use it after you have fixed the cause of a failure. Parameters stay the same. All steps run again, with their side
    effects. Earlier runs stay readable. --where selects only ended instances, unless it names a status.
    """
    found = backend.call(commands.restart, target, requests.Reason(reason=reason))
    return ["Restarted", f"run {found.run_number}"]


@on_targets(
    "retry order order-42",
    "retry order order-42 --delay '10 minutes' --reason 'the bank is back by then'",
    "retry order order-42 --family --dry-run",
    "retry --where 'workflow=order error=BankAway since=2h' --yes",
)
def retry(
    backend: Backend,
    target: Target,
    delay: Annotated[timedelta | None, Option("--delay", help="How long to wait before the new run starts.")],
    family: Annotated[bool, Option("--family", help="Also the failed children, and the parents that failed with it.")],
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be retried, in this order.")],
    reason: NewRunReason,
) -> Sequence[str]:
    """Retry the failed step of errored instances.

    Use it after you have fixed the cause of the failure. A new run keeps the results from before the failure, and the
    failed step gets new attempts. If a failed child was the cause, the step creates another child; with --family, it
    waits for the same child, which is retried first.
    """
    if family and backend.read_snapshot(target.workflow, target.instance_id).status is not Status.ERRORED:
        return ["Not retried: it is not errored, or was retried with its family"]
    delay_ms = None if delay is None else delay // timedelta(milliseconds=1)
    request = requests.Retry(delay_ms=delay_ms, family=family, dry_run=dry_run, reason=reason)
    found = backend.call(commands.retry, target, request)
    if dry_run:
        return ["Would retry", *(f"{each.workflow}/{each.instance_id}" for each in found.instances or ())]
    return ["Retried" if not delay else "Will retry", f"run {found.run_number}"]


@command("rewind order order-42 'charge card'", "rewind order order-42 'charge card' --reason 'the price was wrong'")
def rewind(
    backend: OpenBackend, console: Output, workflow: Workflow, id: InstanceId, step: Step, reason: NewRunReason
) -> None:
    """Run an instance again from a step.

    Use it if the results before the step are right. A new run keeps all events and the finished steps that were called
    before it. The step and all later steps run again, with their side effects. Earlier runs stay readable.
    """
    found = backend.call(commands.rewind, Target(workflow, id), requests.Rewind(step=step, reason=reason))
    _print_done(console, "Rewound", workflow, id, f"run {found.run_number}", f"from {step}")


@command("fork order order-42 'charge card' --id order-42-trial")
def fork(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    step: Step,
    new_id: Annotated[
        str | None, Option("--id", "new_id", help="The new instance's id, unique per workflow; random by default.")
    ],
) -> None:
    """Create an instance that continues from a step of another.

    Use it to try a different outcome. The new instance gets the same parameters, all events, and the finished steps
    that were called before this step. The other instance is not changed.
    """
    created = backend.call(commands.fork, Target(workflow, id), requests.Fork(step=step, id=new_id))
    if console.is_for_people:
        _print_done(console, "Forked", workflow, created.id, f"from {step} of {id}")
    else:
        console.print_record(created.id)


@command("""set-result order order-42 'charge card' '"payment 17"' --reason 'paid by hand'""")
def set_result(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    step: Step,
    value: Annotated[Any, click.argument("value", type=JsonInput(), metavar=JsonInput.name)],
    by: By,
    reason: Reason,
) -> None:
    """Complete a step by hand, with a result.

    Use it if the work was done by other means. The step must be open, or its failure must have ended the instance. A
    wait gets the value as the payload of an event. The name and the reason are stored, and show displays them. Over
    HTTP, the server may replace --by with the user that it has authenticated.
    """
    body = requests.SetResult(step=step, result=value, by=require_name(by), reason=reason)
    found = backend.call(commands.set_result, Target(workflow, id), body)
    _print_done(console, "Completed", workflow, id, f"run {found.run_number}", step)


@command("skip order order-42 'cool off' --reason 'the customer waits on the phone'")
def skip(
    backend: OpenBackend, console: Output, workflow: Workflow, id: InstanceId, step: Step, by: By, reason: Reason
) -> None:
    """Complete a step by hand, without a result.

    Use it to end a sleep, or to continue without a step. The result of the step is null. The rules of set-result apply.
    """
    body = requests.Skip(step=step, by=require_name(by), reason=reason)
    found = backend.call(commands.skip, Target(workflow, id), body)
    _print_done(console, "Skipped", workflow, id, f"run {found.run_number}", step)


@command("""answer order order-42 'approve refund' '{"approved": true}' --by eve""")
def answer(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    step: Step,
    value: Annotated[Any, click.argument("value", type=JsonInput(), metavar=JsonInput.name)],
    by: By,
    run: RunNumber,
) -> None:
    """Answer a question that an instance asks a person.

    Use it for what waits --asking lists. The answer is checked before it is stored; the first one counts. The name is
    stored, and show displays it. Over HTTP, the server may replace --by with the user that it has authenticated.
    """
    body = requests.SendEvent(answers=step, payload=value, by=require_name(by), run_number=run)
    sent = backend.call(commands.send_event, Target(workflow, id), body)
    _print_done(console, "Answered" if sent.accepted else "Repeated", workflow, id, step)


def require_name(by: str | None) -> str:
    """Return the name of the person, by default the user of this system; raises UsageError if it is unknown."""
    if name := by or _find_user():
        return name
    raise click.UsageError("Your user name is unknown on this system: use --by.")


def _find_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        return None


def _print_done(console: Console, action: str, workflow: str, instance_id: str, *more: str) -> None:
    console.print_entry([action, Styled(f"{workflow}/{instance_id}", "bold"), *more])


@command(
    """send-event order order-42 approval --payload '{"approved": true, "by": "eve"}'""",
    "send-event order order-42 approval --payload @approval.json --event-id mail-7",
)
def send_event(
    backend: OpenBackend,
    console: Output,
    workflow: Workflow,
    id: InstanceId,
    type: Annotated[str, click.argument("type")],
    payload: Payload,
    event_id: Annotated[str | None, Option("--event-id", help="Makes sending idempotent: a run accepts an id once.")],
) -> None:
    """Send an event to an instance.

    Use it to answer a wait_for_event. An event that is sent early is stored until the workflow waits for its type.
    """
    body = requests.SendEvent(type=type, payload=payload, id=event_id)
    sent = backend.call(commands.send_event, Target(workflow, id), body)
    console.print_entry(["Sent" if sent.accepted else "Repeated", type, Styled(f"{workflow}/{id}", "bold")])
    if not sent.accepted:
        console.print_note(f"This run had already accepted an event with id {event_id!r}; nothing was changed.")
