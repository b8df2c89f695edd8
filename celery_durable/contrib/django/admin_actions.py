"""What users of Django's admin can do to instances. Each action requires a permission of the app ``celery_durable``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from celery_durable import commands
from celery_durable.commands import Target
from celery_durable.model import InstanceRow, Status
from celery_durable.operations import Operations
from celery_durable.wire.requests import Reason, Retry, SendEvent

Form = Mapping[str, str]
_MAX_REASON = 1000
"""Characters of a reason, as in the forms. A longer one would cut off the name of the user."""


class FormInvalid(Exception):
    """A field of the form has a value that cannot be used."""


class NothingChanged(Exception):
    """The action has changed nothing. The message says why."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action: ``run`` does it for the user of this name and returns what has happened, or raises NothingChanged.

    ``is_possible``: whether the page of an instance offers it. ``is_for_many``: whether the list offers it for the
    selected instances. ``is_confirmed``: whether the user is asked first.
    """

    name: str
    label: str
    permission: str
    is_possible: Callable[[InstanceRow], bool]
    run: Callable[[Operations, Target, Form, str], str]
    is_for_many: bool = True
    is_confirmed: bool = False
    takes_reason: bool = False

    def describe(self, done: str, form: Form) -> str:
        """Return the text for Django's log of changes. ``done`` is what has happened."""
        details = form.get("type", "") if self.name == "send_event" else form.get("reason", "")
        return f"{done.capitalize()}: {details}" if details else f"{done.capitalize()}."


def _pause(operations: Operations, target: Target, _: Form, __: str) -> str:
    before = operations.lifecycle.pause(target.workflow, target.instance_id)
    if before.status is Status.PAUSED:
        raise NothingChanged("It was paused before, so nothing has changed.")
    if before.pause_requested:
        raise NothingChanged("A pause was requested before, so nothing has changed.")
    return "paused" if before.claim_token is None else "will pause when the running step ends"


def _resume(operations: Operations, target: Target, _: Form, __: str) -> str:
    before = operations.lifecycle.resume(target.workflow, target.instance_id)
    if before.status is Status.PAUSED:
        return "resumed"
    if before.pause_requested:
        return "requested pause cancelled"
    raise NothingChanged("It was not paused, so nothing has changed.")


def _retry(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.retry.run(operations, target, Retry(reason=_reason(form, username).reason))
    return "retried"


def _restart(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.restart.run(operations, target, _reason(form, username))
    return "restarted"


def _terminate(operations: Operations, target: Target, form: Form, username: str) -> str:
    commands.terminate.run(operations, target, _reason(form, username))
    return "terminated"


def _reason(form: Form, username: str) -> Reason:
    """Return the reason for the history of the instance, which names the user."""
    given = form.get("reason", "").strip()[:_MAX_REASON]
    return Reason(reason=f"{given} (by {username})" if given else f"by {username}")


def _send_event(operations: Operations, target: Target, form: Form, _: str) -> str:
    text = form.get("payload", "").strip()
    try:
        payload = json.loads(text) if text else None
    except ValueError as error:
        raise FormInvalid(f"The payload is not JSON: {error}.") from None
    event = SendEvent(type=form.get("type", "").strip(), payload=payload, id=form.get("event_id", "").strip() or None)
    if not commands.send_event.run(operations, target, event).accepted:
        raise NothingChanged(f"An event with the id {event.id!r} was accepted before, so this one is ignored.")
    return "event sent"


def _is_open(row: InstanceRow) -> bool:
    return not row.status.is_terminal


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "pause", "Pause", "pause_instance",
            lambda row: row.status in (Status.ACTIVE, Status.WAITING) and not row.pause_requested, _pause,
        ),
        Action(
            "resume", "Resume", "pause_instance",
            lambda row: row.status is Status.PAUSED or row.pause_requested, _resume,
        ),
        Action(
            "retry", "Retry the failed step", "retry_instance",
            lambda row: row.status is Status.ERRORED, _retry, takes_reason=True,
        ),
        Action(
            "restart", "Restart from the beginning", "retry_instance",
            lambda row: row.status.is_terminal, _restart, is_confirmed=True, takes_reason=True,
        ),
        Action(
            "terminate", "Terminate", "terminate_instance",
            _is_open, _terminate, is_confirmed=True, takes_reason=True,
        ),
        Action(
            "send_event", "Send the event", "send_event_instance",
            _is_open, _send_event, is_for_many=False,
        ),
    )
}  # fmt: skip
"""The actions by name."""
