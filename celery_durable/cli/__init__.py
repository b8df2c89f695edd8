"""`celery -A proj durable ...`: the verbs for people.

Celery loads this module with every command of its own, so it imports nothing but Celery's click; a verb's module
is loaded when the verb is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

_MODULES = {
    "init": "init",
    "dev": "dev",
    "migrate": "manage",
    "doctor": "doctor",
    "workflows": "reading",
    "start": "commands",
    "ls": "reading",
    "show": "show",
    "explain": "explain",
    "history": "reading",
    "logs": "reading",
    "watch": "watch",
    "send-event": "commands",
    "emit": "topics",
    "waiters": "topics",
    "pause": "lifecycle",
    "resume": "lifecycle",
    "terminate": "lifecycle",
    "restart": "lifecycle",
    "retry": "rewinding",
    "rewind": "rewinding",
    "fork": "rewinding",
    "set-result": "rewinding",
    "skip": "rewinding",
    "wake": "overview",
    "stats": "overview",
    "waits": "overview",
    "leases": "overview",
    "sweep": "overview",
    "outbox": "outbox",
    "export": "export",
    "replay": "replay",
    "prune": "prune",
    "chaos": "chaos",
}


class CommandGroup(click.Group):
    """The verbs, in the order in which people meet them."""

    module_by_command: Mapping[str, str] = _MODULES
    """Their names, and the module of each, with its name in it where that is another: ``reading.ls``."""
    aliases: Mapping[str, str] = {"cancel": "terminate"}
    """Other names of verbs; they are not listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """All of them, without loading any."""
        return list(self.module_by_command)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """One of them, loaded now."""
        cmd_name = self.aliases.get(cmd_name, cmd_name)
        if cmd_name not in self.module_by_command:
            return None
        module, _, name = self.module_by_command[cmd_name].partition(".")
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), name or cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is called; one that does not exist is answered with the nearest that does."""
        name = self.aliases.get(args[0], args[0])
        if name not in self.module_by_command and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, self.module_by_command, n=1)
            ctx.fail(f"There is no verb {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    cls=CommandGroup,
    epilog="""\b
Try it, without any server:
  celery -A proj durable dev
  celery -A proj durable start order -P order_id=42 --id order-42
  celery -A proj durable show order order-42

\b
Exit codes: 0 done, 1 refused, 2 wrong usage, 3 not found,
4 database unreachable or timeout, 130 interrupted.
In a pipe every list is tab-separated, one record a line, times in ISO 8601.""",
)
def durable() -> None:
    """Run and look after durable workflows.

    The verbs work directly on the database of the app's Durable (durable_database_url).
    """
