"""The parts that all commands share: examples in the help, access to the instances, and errors with exit codes."""

from __future__ import annotations

import abc
import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from typing import IO, Any

import click

from celery_durable.cli.backends.backend import Backend
from celery_durable.cli.output.console import strip_control_characters
from celery_durable.errors import DurableError
from celery_durable.explain import YOUR_APP

REFUSED, NOT_FOUND, UNREACHABLE, NOT_ALLOWED, INTERRUPTED = 1, 3, 4, 5, 130
_EXIT_CODES = {
    401: NOT_ALLOWED, 403: NOT_ALLOWED, 404: NOT_FOUND, 408: UNREACHABLE,
    **dict.fromkeys((429, 502, 503, 504), UNREACHABLE),
}  # fmt: skip
_COMMAND_PREFIX = f"celery -A {YOUR_APP} durable"


class Connection(abc.ABC):
    """Gives access to instances without the app's database. Commands of `celery-durable` find it in ``ctx.obj``."""

    name: str
    """The program that the user typed, for the commands that we suggest."""
    no_color = False

    @abc.abstractmethod
    def open(self) -> Backend:
        """Return the backend; raises CliError."""

    @abc.abstractmethod
    def raise_if_unreadable(self, exc: Exception) -> None:
        """Raise CliError if the server sent a response that this version cannot read."""


def open_backend(ctx: click.Context) -> Backend:
    """Return the backend of this program: the database of the app given by -A, or the HTTP API."""
    if isinstance(ctx.obj, Connection):
        return ctx.obj.open()
    from celery_durable.cli.backends.stored import StoreBackend, open_durable

    return StoreBackend(open_durable(ctx))


class CliError(click.ClickException):
    """A command failed. Standard error shows the reason after ``error:`` and the remedy after ``hint:``."""

    exit_code: int  # type: ignore[misc]  # click reads it from the exception, not from its class

    def __init__(self, error: str, hint: str = "", *, exit_code: int = REFUSED) -> None:
        super().__init__(error)
        self.hint, self.exit_code = hint, exit_code
        self._ctx = click.get_current_context(silent=True)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error. Click calls this."""
        file = sys.stderr if file is None else file
        no_color = self._ctx is not None and getattr(self._ctx.obj, "no_color", False)
        for prefix, color, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:
                line = strip_control_characters(text if self._ctx is None else adapt_commands(self._ctx, text))
                click.echo(
                    f"{click.style(prefix, fg=color, bold=True)} {line}", file=file, color=False if no_color else None
                )


class Command(click.Command):
    """A command with ``examples`` in its help. Help puts the name of the program before each of them."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, with the program that the user called."""
        name = ctx.obj.name if isinstance(ctx.obj, Connection) else "celery -A proj durable"
        formatter.write_paragraph()
        formatter.write("  Examples:\n")
        for example in self.examples:
            formatter.write(f"    {name} {example}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A DurableError becomes a CliError."""
        try:
            return super().invoke(ctx)
        except DurableError as exc:
            raise convert_error(exc) from exc
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as exc:
            if isinstance(ctx.obj, Connection):
                ctx.obj.raise_if_unreadable(exc)
            else:
                from celery_durable.cli.backends import stored

                stored.raise_if_unreachable(exc)
            raise


def convert_arguments_to_options(command: Command, name: str) -> Command:
    """Return the same command with options instead of arguments.

    ``show order o-1`` becomes ``instances get --workflow order --id o-1``.
    """
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    options = {param.name: _make_option(param) for param in arguments}
    params = [options.get(param.name, param) for param in command.params]

    def rewrite_example(example: str) -> str:
        _, *words = shlex.split(example)
        given = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        remaining = words[len(given) :]
        option_words = (
            word for argument, value in zip(arguments, given, strict=False) for word in (f"--{argument.name}", value)
        )
        return f"instances {name} {shlex.join([*option_words, *remaining])}"

    examples = [
        rewrite_example(example) for example in command.examples if "--where" not in example and "/" not in example
    ]
    return Command(name, callback=command.callback, params=params, help=command.help, examples=examples)


_SHORT_OPTIONS = {"workflow": "-w", "id": "-i", "type": "-t"}


def _make_option(argument: click.Argument) -> click.Option:
    name = argument.name or ""
    short = [] if name not in _SHORT_OPTIONS else [_SHORT_OPTIONS[name]]
    return click.Option(
        [f"--{name}", *short],
        required=argument.required,
        type=argument.type,
        multiple=argument.nargs == -1,
        help=_OPTION_HELP.get(name),
    )


_OPTION_HELP = {
    "workflow": "The workflow's name.",
    "id": "The instance's id.",
    "type": "The type of the event.",
    "step": "The step's key: its name, or name and number if the step is repeated.",
    "value": "The result as JSON, from a file, or from standard input.",
}


def convert_error(exc: DurableError) -> CliError:
    """Convert a DurableError to a CliError."""
    target = [str(getattr(exc, name, "")) for name in ("workflow", "instance_id")]
    return make_cli_error(str(exc), code=exc.code, http_status=exc.http_status, target=target)


def make_cli_error(message: str, *, code: str, http_status: int, target: Sequence[str]) -> CliError:
    """Make an error from a message: its first sentence is the error, the rest is the hint.

    ``http_status`` decides the exit code. ``target``: the workflow and the instance that suggested commands name.
    """
    error, _, hint = re.sub(r"(?<=[.!?])\s+(?=[^\W\d_])", "\n", message, count=1).partition("\n")
    match code:  # the messages of these two advise Python calls
        case "INSTANCE_TERMINAL":
            hint = f"To start a new run: {_COMMAND_PREFIX} restart {shlex.join(target)}"
        case "INSTANCE_ID_ALREADY_EXISTS":
            hint = f"Use another --id, or inspect this one: {_COMMAND_PREFIX} show {shlex.join(target)}"
    return CliError(error, hint, exit_code=_EXIT_CODES.get(http_status, REFUSED))


def app_name(ctx: click.Context) -> str:
    """Return the app that the user gave with -A, or a placeholder, for the commands that we suggest."""
    given = ctx.find_root().params.get("app")
    return given if isinstance(given, str) else YOUR_APP


def adapt_commands(ctx: click.Context, text: str) -> str:
    """Replace the commands in a text by those that this user can type."""
    return text.replace(_COMMAND_PREFIX, command_line(ctx, "").rstrip()).replace(YOUR_APP, app_name(ctx))


def command_line(ctx: click.Context, arguments: str) -> str:
    """Return a command line that the user can copy."""
    name = ctx.obj.name if isinstance(ctx.obj, Connection) else f"celery -A {app_name(ctx)} durable"
    return f"{name} {arguments}"
