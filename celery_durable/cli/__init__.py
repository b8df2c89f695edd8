"""`celery -A proj durable ...`: the command group.

Celery imports this module for every `celery` command, so it imports only click, and a command's module at its call.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

MODULES = {
    "init": "init",
    "dev": "dev",
    "migrate": "maintenance",
    "doctor": "doctor",
    "dashboard": "dashboard",
    "lint": "lint",
    "workflows": "reading",
    "start": "start",
    "ls": "reading",
    "show": "show",
    "explain": "show",
    "history": "reading",
    "logs": "reading",
    "watch": "follow",
    "send-event": "changes",
    "emit": "maintenance",
    "waiters": "maintenance",
    "pause": "changes",
    "resume": "changes",
    "cancel": "changes",
    "terminate": "changes",
    "restart": "changes",
    "retry": "changes",
    "rewind": "changes",
    "fork": "changes",
    "set-result": "changes",
    "skip": "changes",
    "answer": "changes",
    "wake": "changes",
    "stats": "reading",
    "waits": "reading",
    "limits": "limits",
    "leases": "maintenance",
    "sweep": "maintenance",
    "outbox": "maintenance",
    "export": "reading",
    "replay": "replay",
    "preflight": "replay",
    "debug": "replay",
    "prune": "maintenance",
    "chaos": "chaos",
}

_MEANINGS = {"get": "show", "list": "ls", "result": "show", "status": "show"}
"""The commands to suggest for these words, whose nearest neighbours mean something else."""
_CELERY = "celery -A proj durable"


def program_name(ctx: click.Context) -> str:
    """Return what the user types before a command, as help shows it."""
    return getattr(ctx.obj, "name", None) or _CELERY


class CommandGroup(click.Group):
    """A group that imports a command's module, ``module`` or ``module.function``, when the command is called."""

    aliases: Mapping[str, str] = {"create": "start"}
    """Other names of commands. Help does not list them."""

    def __init__(self, *args: Any, module_by_command: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module_by_command = module_by_command

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return [*self.commands, *self.module_by_command]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        cmd_name = self._without_alias(cmd_name)
        if cmd_name not in self.module_by_command:
            return self.commands.get(cmd_name)
        module, _, name = self.module_by_command[cmd_name].partition(".")
        command: click.Command = getattr(
            import_module(f"{__name__}.commands.{module}"), name or cmd_name.replace("-", "_")
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command that the user typed. An unknown name fails and suggests the closest known one."""
        name, known = self._without_alias(args[0]), self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            import difflib

            meant = _MEANINGS.get(name)
            near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
            ctx.fail(f"There is no command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(self.epilog.replace(_CELERY, program_name(ctx)))

    def _without_alias(self, name: str) -> str:
        """Return the name of the command. A command of this group comes before an alias."""
        return name if name in self.module_by_command else self.aliases.get(name, name)


@click.group(
    cls=CommandGroup,
    module_by_command=MODULES,
    epilog="""\b
Try it without any server:
  celery -A proj durable dev
  celery -A proj durable start order -P order_id=42 --id order-42
  celery -A proj durable show order order-42

\b
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 not found,
4 database unreachable or timeout, 130 interrupted.
In a pipe, lists are tab-separated, with one record per line and ISO 8601 times.""",
)
@click.pass_context
def durable(ctx: click.Context) -> None:
    """Run and operate durable workflows.

    The commands work directly on the database of the app's Durable.
    """
    if ctx.parent is not None:  # the process is `celery`, and ends with the command
        gc.freeze()  # what is imported stays; to examine it again and again takes 5% of the CPU of a call
