"""The commands that pages offer as buttons. Each is the command of the HTTP API and of the command line."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

from celery_durable.all_operations import Operations
from celery_durable.commands import COMMANDS, Command, Target
from celery_durable.conditions import SELECTED_STATUSES
from celery_durable.errors import ValueRefused
from celery_durable.insight.explain import YOUR_APP
from celery_durable.model import Status
from celery_durable.wire.requests import RequestModel
from celery_durable.wire.responses import Response

logger = logging.getLogger("celery_durable.dashboard")

_PROGRAM = f"celery -A {YOUR_APP} durable"
_PROGRAMS = ("celery ", "psql ", "mariadb ")
_MAX_REASON = 1000
"""Characters of a reason. A longer one would cut off the name of the user."""


@dataclass(frozen=True, slots=True)
class Change:
    """A command without more input than a reason. ``label``: the text of its button; ``done``: what was done."""

    name: str
    label: str
    done: str

    @property
    def command(self) -> Command[RequestModel, Response]:
        """The command of the API."""
        return COMMANDS[self.name]

    @property
    def takes_reason(self) -> bool:
        """Whether the command stores a reason."""
        return "reason" in self._fields

    @property
    def _fields(self) -> set[str]:
        return {each.name for each in fields(self.command.request)}

    def is_possible(self, status: Status) -> bool:
        """Return whether the command changes something in an instance with this status."""
        return status in SELECTED_STATUSES[self.name]

    def make_body(self, reason: str, actor: str | None) -> RequestModel:
        """Return the request. If the command does not store the user's name by itself, the reason has it."""
        given, text = self._fields, reason.strip()[:_MAX_REASON]
        if "by" not in given and actor is not None:
            text = f"{text} (by {actor})" if text else f"by {actor}"
        known = {"reason": text or None, "by": actor}
        return self.command.request(**{name: value for name, value in known.items() if name in given})

    def apply(self, operations: Operations, target: Target, body: RequestModel) -> None:
        """Do it, as the API does; raises DurableError."""
        self.command.run(operations, target, body)

    def format_command(self, *, where: str) -> str:
        """Return the command line that changes all instances of a filter."""
        return f"{_PROGRAM} {self.name} --where {shlex.quote(where)} --yes"


CHANGES = {
    each.name: each
    for each in (
        Change("retry", "Retry", "Retried"),
        Change("restart", "Restart", "Restarted"),
        Change("resume", "Resume", "Resumed"),
        Change("pause", "Pause", "Paused"),
        Change("wake", "Wake", "Woken"),
        Change("cancel", "Cancel", "Cancelled"),
        Change("terminate", "Terminate", "Terminated"),
    )
}


def find_change(name: str) -> Change:
    """Return the change of this name; raises ValueRefused."""
    if name not in CHANGES:
        raise ValueRefused(f"{name!r} is not one of {', '.join(CHANGES)}")
    return CHANGES[name]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A command that a diagnosis or a finding suggests, and the change that is the same as a button."""

    command: str
    change: Change | None

    @property
    def is_command(self) -> bool:
        """Whether a person can type it; other remedies of findings are sentences."""
        return self.command.startswith(_PROGRAMS) and ";" not in self.command


def read_remedies(actions: Sequence[str]) -> list[Remedy]:
    """Return the suggested commands. Those with options have no button."""
    found = []
    for action in actions:
        words = shlex.split(action.removeprefix(_PROGRAM)) if action.startswith(_PROGRAM) else []
        is_plain = len(words) == 3  # the command, the workflow and the id
        found.append(Remedy(action, CHANGES.get(words[0]) if is_plain else None))
    return found


def log_change(actor: str | None, change: Change, what: str, reason: str) -> None:
    """Record in the log who changed what. The reason is stored with the run, too."""
    logger.info("%s by %s: %s%s", change.name, actor or "an unnamed user", what, f" ({reason})" if reason else "")
