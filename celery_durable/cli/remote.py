"""`celery-durable`: the verbs over the HTTP API, for machines that have neither the app nor its database.

It imports no workflow, no Celery and no database driver. The same verbs as `celery -A proj durable`; beside them the
groups `workflows` and `instances`, which name everything by options.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import click

from celery_durable.cli import CommandGroup
from celery_durable.cli.api import HttpBackend
from celery_durable.cli.client import Client, RetryPolicy
from celery_durable.cli.command import UNREACHABLE, CliError, Command, Connection, convert_arguments_to_options
from celery_durable.cli.console import strip_control_characters
from celery_durable.cli.inputs import DurationInput
from celery_durable.runtime import Runtime

_URL, _HEADERS = "DURABLE_URL", "DURABLE_HEADERS"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")


class HttpConnection(Connection):
    """What the options of `celery-durable` say."""

    name = "celery-durable"

    def __init__(self) -> None:
        self.base_url: str | None = None
        self.headers: Sequence[tuple[str, str]] = ()
        self.timeout_seconds, self.retries = 15.0, RetryPolicy()
        self.is_verbose = False

    def open(self) -> HttpBackend:
        """The API's instances; nothing is asked yet."""
        if self.base_url is None:
            raise CliError(
                "No API was named.",
                f"Give its URL, -b https://shop.example/api, or set {_URL}",
                exit_code=click.UsageError.exit_code,
            )
        runtime = Runtime()
        client = Client(
            self.base_url,
            self.headers,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
            sleep=runtime.sleep,
            log_request=_print_request if self.is_verbose else None,
        )
        return HttpBackend(client, runtime)

    def raise_if_unreadable(self, exc: Exception) -> None:
        """Show no traceback without --verbose. An OSError is that of a closed pipe; click ends quietly on it."""
        if self.is_verbose or isinstance(exc, OSError):
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
    """``Name: value``; a value is never shown, it may be a secret."""

    name = "'NAME: VALUE'"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Name and value."""
        if isinstance(value, tuple):
            return value
        name, colon, text = value.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):
            self.fail("a header is written 'Name: value'", param, ctx)
        if not text.isascii():
            self.fail(f"the value of {name} has characters that no header may have", param, ctx)
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


def _shared_commands(*names: str) -> dict[str, str]:
    """Verbs that are found where those of `celery -A proj durable` are."""
    return {name: CommandGroup.module_by_command[name] for name in names}


class InstanceCommands(CommandGroup):
    """`instances ...`: the verbs that concern instances, with options in the place of operands."""

    module_by_command: Mapping[str, str] = {
        "list": "reading.ls",
        "get": "show.show",
        "create": "commands.start",
        **_shared_commands(
            "explain", "history", "logs", "watch", "pause", "resume", "restart", "retry", "rewind", "set-result",
            "skip", "terminate", "send-event",
        ),
    }  # fmt: skip

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, in its form with options."""
        found = super().get_command(ctx, cmd_name)
        return convert_arguments_to_options(found, cmd_name) if isinstance(found, Command) else None


class WorkflowCommands(CommandGroup):
    """`workflows ...`."""

    module_by_command: Mapping[str, str] = {"list": "reading.workflows"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The one there is."""
        found = super().get_command(ctx, cmd_name)
        if not isinstance(found, Command):
            return None
        return Command(
            cmd_name, callback=found.callback, params=found.params, help=found.help, examples=["workflows list"]
        )


@click.group(cls=InstanceCommands)
def instances() -> None:
    """The verbs for instances, with everything named by options.

    Use it in scripts that should be easy to read: `instances get -w order -i order-42` is `show order order-42`.
    """


@click.group(cls=WorkflowCommands)
def workflows() -> None:
    """What there is to be started.

    Use it to learn the names: `workflows list`.
    """


class RemoteCommands(CommandGroup):
    """The verbs that work over HTTP."""

    module_by_command: Mapping[str, str] = {
        "workflows": "remote",
        "instances": "remote",
        **_shared_commands(
            "start", "ls", "show", "explain", "history", "logs", "watch", "send-event", "pause", "resume", "terminate",
            "restart", "retry", "rewind", "fork", "set-result", "skip", "export",
        ),
    }  # fmt: skip


@click.group(
    cls=RemoteCommands,
    epilog=f"""\b
Examples:
  celery-durable -b https://shop.example/api workflows list
  celery-durable -b https://shop.example/api -H 'X-Api-Key: sesame' ls -w order
  celery-durable show order order-42
  celery-durable instances get --workflow order --id order-42

\b
Environment: {_URL} is the base URL; {_HEADERS} are headers, one on each line;
DURABLE_TIMEOUT, DURABLE_RETRIES and NO_COLOR.

\b
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 not found, 4 server unreachable
or timeout, 5 not allowed, 130 interrupted.
For people: programs ask the API itself, for example
  curl -H 'X-Api-Key: sesame' https://shop.example/api/workflows/order/instances/order-42""",
)
@click.option("-b", "--base-url", envvar=_URL, callback=_base_url, help="Where the API is served, as /workflows in it.")
@click.option(
    "-H", "--header", "headers", type=HeaderInput(), multiple=True, help="Sent with each request; repeatable."
)
@click.option(
    "--timeout",
    type=DurationInput(),
    envvar="DURABLE_TIMEOUT",
    default="15s",
    show_default=True,
    help="Of one request, up to the last byte of its answer.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 20),
    envvar="DURABLE_RETRIES",
    default=2,
    show_default=True,
    help="Of what can be repeated (reads; creations and events with an id), after network errors, 429, 500, 502-504.",
)
@click.option(
    "--retry-delay", type=DurationInput(), default="500ms", show_default=True, help="Before the first; doubles."
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show each request as a curl command, without header values, and tracebacks."
)
@click.option("--no-color", is_flag=True, help="No colours, as with NO_COLOR.")
@click.version_option(package_name="celery-durable")
@click.pass_context
def celery_durable(
    ctx: click.Context,
    base_url: str | None,
    headers: tuple[tuple[str, str], ...],
    timeout: Any,
    retries: int,
    retry_delay: Any,
    verbose: bool,
    no_color: bool,
) -> None:
    """Look after durable workflows over their HTTP API.

    Needs neither the app nor its database. The URL is the one under which the API is mounted, with which every route
    begins: https://shop.example/api where https://shop.example/api/workflows lists the workflows.
    """
    connection = HttpConnection()
    ctx.obj = connection
    connection.base_url = base_url
    connection.headers = [*_headers_of_environment(ctx), *headers]
    connection.timeout_seconds = timeout.total_seconds()
    connection.retries = RetryPolicy(retries, retry_delay.total_seconds())
    connection.is_verbose = verbose
    connection.no_color = no_color or bool(os.environ.get("NO_COLOR"))


def _headers_of_environment(ctx: click.Context) -> list[tuple[str, str]]:
    lines = os.environ.get(_HEADERS, "").splitlines()
    try:
        return [HeaderInput().convert(line, None, ctx) for line in lines if line.strip()]
    except click.BadParameter as exc:
        raise click.BadParameter(exc.message, ctx, param_hint=_HEADERS) from exc


def main() -> None:
    """The console script."""
    celery_durable(prog_name="celery-durable")
