"""`celery-durable`: the commands over the HTTP API, for machines without the app and its database.

It imports no workflow, no Celery and no database driver. The groups `workflows` and `instances` take options instead of
arguments.
"""

from __future__ import annotations

import gc
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import click

from celery_durable.cli import MODULES, CommandGroup
from celery_durable.cli.backends.backend import Backend, Connection
from celery_durable.cli.command import Command, convert_arguments_to_options
from celery_durable.cli.errors import UNREACHABLE, CliError
from celery_durable.cli.inputs import DurationInput
from celery_durable.cli.output.console import strip_control_characters
from celery_durable.errors import DurableError
from celery_durable.insight.explain import YOUR_APP
from celery_durable.runtime import Runtime

_URL, _HEADERS = "DURABLE_URL", "DURABLE_HEADERS"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")


@dataclass(frozen=True, kw_only=True)
class HttpConnection(Connection):
    """The connection that the options of `celery-durable` describe. Its fields have the names of the options."""

    name = "celery-durable"
    list_workflows = "workflows list"
    base_url: str | None
    headers: Sequence[tuple[str, str]] = field(repr=False)
    timeout: timedelta
    retries: int
    retry_delay: timedelta
    verbose: bool
    no_color: bool

    def open(self, *, needs_database: bool = True) -> Backend:  # noqa: ARG002  # the server has the database
        """Return the backend, without sending a request; raises CliError without a base URL."""
        if self.base_url is None:
            raise CliError(
                "No base URL was given.",
                f"Give its URL, -b https://shop.example/api, or set {_URL}",
                exit_code=click.UsageError.exit_code,
            )
        try:
            from celery_durable.cli.backends.client import Client
            from celery_durable.cli.backends.http import HttpBackend
        except ModuleNotFoundError as exc:
            raise CliError(
                f"celery-durable needs {exc.name}, which is not installed.",
                'Install the extra that brings it: pip install "celery-durable[cli]"',
            ) from exc
        runtime = Runtime()
        client = Client(
            self.base_url,
            self.headers,
            timeout_seconds=self.timeout.total_seconds(),
            retries=self.retries,
            retry_delay_seconds=self.retry_delay.total_seconds(),
            sleep=runtime.sleep,
            log_request=_print_request if self.verbose else None,
        )
        click.get_current_context().call_on_close(client.close)
        return HttpBackend(client, runtime)

    def explain(self, exc: Exception) -> None:
        """Hide tracebacks without --verbose. An OSError means a closed pipe, which click handles."""
        if self.verbose or isinstance(exc, (OSError, DurableError)):
            return
        what = textwrap.shorten(f"{type(exc).__name__}: {exc}", 200)
        raise CliError(
            f"{self.base_url} sent something that this version of celery-durable cannot read: {what}",
            "Is the server of the same version? --verbose shows where it failed.",
            exit_code=UNREACHABLE,
        ) from exc


def _print_request(line: str) -> None:
    click.echo(strip_control_characters(line), err=True)


class HeaderInput(click.ParamType[tuple[str, str]]):
    """``Name: value``. Values may be secrets, so they are never shown."""

    name = "'NAME: VALUE'"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, colon, text = value.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):
            self.fail("write a header as 'Name: value'", param, ctx)
        if not text.isascii():
            self.fail(f"the value of {name} has characters that are not ASCII", param, ctx)
        return name, text.strip()


def _base_url(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    invalid_url = click.BadParameter("it must begin with http:// or https:// and name a server")
    try:
        parts = urlsplit(value)
        has_server = bool(parts.hostname) and parts.port != 0
    except ValueError as exc:
        raise invalid_url from exc
    if not has_server or parts.scheme not in ("http", "https") or re.search(r"[^!-~]", value):
        raise invalid_url
    if parts.username is not None:
        raise click.BadParameter("credentials go into a header: -H 'Authorization: Basic ...'")
    if parts.query or parts.fragment:
        raise click.BadParameter("a base URL has neither a query nor a fragment")
    return value


def _positive(_: click.Context, __: click.Parameter, value: timedelta) -> timedelta:
    if not value:
        raise click.BadParameter("it must be longer than 0")
    return value


def _shared_commands(*names: str) -> dict[str, str]:
    return {name: MODULES[name] for name in names}


class RemoteCommands(CommandGroup):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command that the user typed. No similar name is suggested for one that only the app has."""
        if args[0] in MODULES and args[0] not in self.list_commands(ctx):
            ctx.fail(f"celery-durable has no command {args[0]!r}. Use: celery -A {YOUR_APP} durable {args[0]}")
        return super().resolve_command(ctx, args)


class OptionCommands(CommandGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        return convert_arguments_to_options(found, self.name or "", cmd_name) if isinstance(found, Command) else None


_INSTANCE_COMMANDS = {
    "list": "reading.ls",
    "get": "show.show",
    "create": "start.start",
    **_shared_commands(
        "explain", "history", "logs", "watch", "pause", "resume", "wake", "restart", "retry", "rewind",
        "set-result", "skip", "cancel", "terminate", "send-event", "answer",
    ),
}  # fmt: skip


@click.group(cls=OptionCommands, module_by_command=_INSTANCE_COMMANDS)
def instances() -> None:
    """Commands on instances, with options instead of arguments.

    Use it in scripts, to make them easy to read: `instances get -w order -i order-42` is `show order order-42`.
    """


@click.group(cls=OptionCommands, module_by_command={"list": "reading.workflows"})
def workflows() -> None:
    """Commands on workflows.

    Use it to see what you can start: `workflows list`.
    """


_COMMANDS = _shared_commands(
    "start", "ls", "show", "explain", "history", "logs", "watch", "send-event", "pause", "resume", "wake",
    "cancel", "terminate", "restart", "retry", "rewind", "fork", "set-result", "skip", "answer", "stats", "waits",
    "limits", "export", "lint",
) | {"dashboard": "stored_dashboard.stored_dashboard"}  # fmt: skip


@click.group(
    cls=RemoteCommands,
    module_by_command=_COMMANDS,
    commands=[workflows, instances],
    epilog=f"""\b
Examples:
  celery-durable -b https://shop.example/api workflows list
  celery-durable -b https://shop.example/api -H 'X-Api-Key: sesame' ls -w order
  celery-durable show order order-42
  celery-durable instances get --workflow order --id order-42

\b
Environment: {_URL} is the base URL; {_HEADERS} has headers, one per line;
DURABLE_TIMEOUT, DURABLE_RETRIES and NO_COLOR.

\b
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 not found, 4 server unreachable
or timeout, 5 not allowed, 130 interrupted.
Programs should call the API directly, for example
  curl -H 'X-Api-Key: sesame' https://shop.example/api/workflows/order/instances/order-42""",
)
@click.option("-b", "--base-url", envvar=_URL, callback=_base_url, help="The URL under which /workflows is served.")
@click.option(
    "-H",
    "--header",
    "headers",
    type=HeaderInput(),
    multiple=True,
    help="A header to send with each request; repeatable.",
)
@click.option(
    "--timeout",
    type=DurationInput(),
    envvar="DURABLE_TIMEOUT",
    callback=_positive,
    default="15s",
    show_default=True,
    help="Time limit of one request, up to the last byte of its response.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    envvar="DURABLE_RETRIES",
    default=2,
    show_default=True,
    help="How often to repeat what can be repeated safely (reads; creations and events with an id), after network "
    "errors, 429, 500, 502-504.",
)
@click.option(
    "--retry-delay",
    type=DurationInput(),
    default="500ms",
    show_default=True,
    help="Pause before the first retry; doubles each time.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show each request as a curl command, without header values, and tracebacks."
)
@click.option("--no-color", is_flag=True, help="Disable colours, like NO_COLOR.")
@click.version_option(package_name="celery-durable")
@click.pass_context
def celery_durable(ctx: click.Context, /, headers: tuple[tuple[str, str], ...], no_color: bool, **options: Any) -> None:
    """Operate durable workflows over their HTTP API.

    It needs neither the app nor its database. The base URL is the one under which the API is mounted: use
    https://shop.example/api if https://shop.example/api/workflows lists the workflows.
    """
    ctx.obj = HttpConnection(
        headers=[*_headers_of_environment(ctx), *headers],
        no_color=no_color or bool(os.environ.get("NO_COLOR")),
        **options,
    )


def _headers_of_environment(ctx: click.Context) -> list[tuple[str, str]]:
    lines = os.environ.get(_HEADERS, "").splitlines()
    try:
        return [HeaderInput().convert(line, None, ctx) for line in lines if line.strip()]
    except click.BadParameter as exc:
        raise click.BadParameter(exc.message, ctx, param_hint=_HEADERS) from exc


def main() -> None:
    """Run the console script."""
    gc.freeze()  # as `celery durable` does
    celery_durable(prog_name="celery-durable")
