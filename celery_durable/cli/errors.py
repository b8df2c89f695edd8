"""Errors with exit codes, and the commands that their hints suggest."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from typing import IO, Any

import click

from celery_durable.cli.output.console import strip_control_characters
from celery_durable.errors import DurableError
from celery_durable.insight.explain import YOUR_APP

REFUSED, NOT_FOUND, UNREACHABLE, NOT_ALLOWED, INTERRUPTED = 1, 3, 4, 5, 130
_EXIT_CODES = {
    401: NOT_ALLOWED, 403: NOT_ALLOWED, 404: NOT_FOUND, 408: UNREACHABLE,
    **dict.fromkeys((429, 502, 503, 504), UNREACHABLE),
}  # fmt: skip
_COMMAND_PREFIX = f"celery -A {YOUR_APP} durable"


class CliError(click.ClickException):
    """A command failed. Standard error shows the reason after ``error:`` and the remedy after ``hint:``."""

    exit_code: int  # type: ignore[misc]  # click reads it from the exception, not from its class

    def __init__(self, error: str, hint: str = "", *, exit_code: int = REFUSED, code: str = "") -> None:
        super().__init__(error)
        self.hint, self.exit_code, self.code = hint, exit_code, code
        self._ctx = click.get_current_context(silent=True)

    def show(self, file: IO[Any] | None = None) -> None:
        file = sys.stderr if file is None else file
        no_color = self._ctx is not None and getattr(self._ctx.obj, "no_color", False)
        for prefix, color, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:
                line = strip_control_characters(text if self._ctx is None else adapt_commands(self._ctx, text))
                click.echo(
                    f"{click.style(prefix, fg=color, bold=True)} {line}", file=file, color=False if no_color else None
                )


def convert_error(exc: DurableError) -> CliError:
    """Convert a DurableError to a CliError."""
    target = [str(getattr(exc, name, "")) for name in ("workflow", "instance_id")]
    return make_cli_error(str(exc), code=exc.code, http_status=exc.http_status, target=target)


def make_cli_error(message: str, *, code: str, http_status: int, target: Sequence[str]) -> CliError:
    """Make an error: the first sentence of the message is the error, the rest is the hint.

    ``http_status`` decides the exit code. ``target``: the workflow and the instance that suggested commands name.
    """
    error, _, hint = re.sub(r"(?<=[.!?])\s+(?=[^\W\d_])", "\n", message, count=1).partition("\n")
    match code:  # the hints of these become commands
        case "INSTANCE_NOT_FOUND" if target:
            hint = f"List its instances: {_COMMAND_PREFIX} ls --workflow {shlex.quote(target[0])}"
        case "INSTANCE_TERMINAL" | "INSTANCE_NOT_ERRORED":
            hint = f"To start a new run: {_COMMAND_PREFIX} restart {shlex.join(target)}"
        case "STEP_NOT_OPEN":
            step = click.get_current_context().params["step"]
            rewind = f"To run it again: {_COMMAND_PREFIX} rewind {shlex.join([*target, step])}"
            hint = hint.replace("To run it again, restart the instance from this step.", rewind)
        case "INSTANCE_ID_ALREADY_EXISTS":
            hint = f"Use another --id, or inspect this one: {_COMMAND_PREFIX} show {shlex.join(target)}"
    return CliError(error, hint, exit_code=_EXIT_CODES.get(http_status, REFUSED), code=code)


def app_name(ctx: click.Context) -> str:
    """Return the app that the user gave with -A, or a placeholder, for the commands that we suggest."""
    given = ctx.find_root().params.get("app")
    return given if isinstance(given, str) else YOUR_APP


def adapt_commands(ctx: click.Context, text: str) -> str:
    """Replace the commands in a text by those that this user can type."""
    return text.replace(_COMMAND_PREFIX, command_line(ctx, "").rstrip()).replace(YOUR_APP, app_name(ctx))


def command_line(ctx: click.Context, arguments: str) -> str:
    """Return a command line that the user can copy."""
    name = getattr(ctx.obj, "name", None) or f"celery -A {app_name(ctx)} durable"
    return f"{name} {arguments}"
