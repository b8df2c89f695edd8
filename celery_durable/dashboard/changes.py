"""The commands that pages offer as buttons. Each is the command of the HTTP API and of the command line."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
    """A command as a page offers it. ``label``: the text of its button; ``done``: what was done."""

    name: str
    label: str
    done: str

    @property
    def command(self) -> Command[RequestModel, Response]:
        """The command of the API."""
        return COMMANDS[self.name]

    @property
    def about(self) -> str:
        """What it does, in one sentence."""
        return self.command.doc.partition("\n")[0]

    @property
    def takes_reason(self) -> bool:
        """Whether the command stores a reason."""
        return "reason" in self.fields

    @property
    def fields(self) -> set[str]:
        """The names of the fields of its request."""
        return {each.name for each in fields(self.command.request)}

    def is_possible(self, status: Status) -> bool:
        """Return whether the command changes something in an instance with this status."""
        return status in SELECTED_STATUSES[self.name]

    def make_body(self, reason: str, actor: str | None, **more: Any) -> RequestModel:
        """Return the request. If the command does not store the user's name by itself, the reason has it."""
        given, text = self.fields, reason.strip()[:_MAX_REASON]
        if "by" not in given and actor is not None:
            text = f"{text} (by {actor})" if text else f"by {actor}"
        known = {"reason": text or None, "by": actor, **more}
        return self.command.request(**{name: value for name, value in known.items() if name in given})

    def apply(self, operations: Operations, target: Target, body: RequestModel) -> None:
        """Do it, as the API does; raises DurableError."""
        self.command.run(operations, target, body)

    def format_command_of(self, target: Target, *arguments: str) -> str:
        """Return the command line that changes one instance."""
        return format_command(self.name, target, *arguments) + (" --reason REASON" if self.takes_reason else "")

    def format_command(self, *, where: str, family: bool = False) -> str:
        """Return the command line that changes all instances of a filter."""
        return f"{_PROGRAM} {self.name} --where {_quote(where)} {'--family ' if family else ''}--yes"


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


STEP_CHANGES = {
    each.name: each
    for each in (
        Change("rewind", "Run again from here", "Rewound"),
        Change("fork", "Fork from here", "Forked"),
        Change("set_result", "Set the result", "Completed"),
        Change("skip", "Skip", "Skipped"),
    )
}
"""The commands that need a step."""
INSTANCE_CHANGES = CHANGES | STEP_CHANGES


def format_command(name: str, target: Target, *arguments: str) -> str:
    """Return the command line of a command on one instance."""
    words = [name.replace("_", "-"), target.workflow, target.instance_id, *arguments]
    return f"{_PROGRAM} {shlex.join(words)}"


def _quote(text: str) -> str:
    """Quote a filter for a shell. Its own quotation marks stay readable if no character forbids double ones."""
    return shlex.quote(text) if "'" not in text or set(text) & set('"$`\\!') else f'"{text}"'


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
    form: Mapping[str, str] | None = None
    """The query of the form that is the same, if it needs more than a reason; ``command`` is its name."""
    target: Target | None = None
    """The instance whose page says what the command says."""

    @property
    def operation(self) -> str:
        """The operation of the form, as the hooks know it."""
        name = (self.form or {}).get("command", "")
        return "send_event" if name == "answer" else name

    @property
    def is_command(self) -> bool:
        """Whether a person can type it; other remedies of findings are sentences."""
        return self.command.startswith(_PROGRAMS) and ";" not in self.command


def read_remedies(actions: Sequence[str]) -> list[Remedy]:
    """Return the suggested commands. Those with options have no button."""
    found = []
    for action in actions:
        words = shlex.split(action.removeprefix(_PROGRAM)) if action.startswith(_PROGRAM) else []
        name, options = (words[0].replace("-", "_"), words[3:]) if words else ("", [])
        form = None
        if options == ["--family"]:
            form = {"command": name, "family": "yes"}
        elif options and (name in STEP_CHANGES or name == "answer"):
            form = {"command": name, "step": options[0]}
        is_plain = len(words) == 3  # the command, the workflow and the id
        target = Target(words[1], words[2]) if is_plain and name == "explain" else None
        found.append(Remedy(action, CHANGES.get(name) if is_plain else None, form, target))
    return found


def log_answer(actor: str | None, what: str) -> None:
    """Record in the log who answered which question. The name is stored with the answer, too."""
    logger.info("answer by %s: %s", actor or "an unnamed user", what)


def log_change(actor: str | None, change: Change, what: str, reason: str) -> None:
    """Record in the log who changed what. The reason is stored with the run, too."""
    logger.info("%s by %s: %s%s", change.name, actor or "an unnamed user", what, f" ({reason})" if reason else "")
