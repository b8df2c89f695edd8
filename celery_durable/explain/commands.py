"""The commands that a diagnosis suggests, and the Python calls that do the same."""

from __future__ import annotations

import shlex

from celery_durable.model import InstanceRow

YOUR_APP = "<your app>"
"""The app in the commands of a diagnosis: ``celery -A <your app> ...``. A caller that knows the app replaces it."""

_COMMAND = f"celery -A {YOUR_APP} durable "
_CALLS = {
    "explain": "explain()",
    "logs": "logs()",
    "restart": "restart()",
    "resume": "resume()",
    "retry": "retry()",
    "send-event": "send_event({0!r}, {{...}})",
    "show": "history()",
}


def instance_command(row: InstanceRow, command: str, rest: str = "") -> str:
    """Return the command that applies ``command`` to the instance."""
    target = f"{shlex.quote(row.workflow)} {shlex.quote(row.instance_id)}"
    return f"{_COMMAND}{command} {target} {rest}".rstrip()


def find_python_call(command: str) -> str | None:
    """Return the call of `WorkflowInstance` that does the same as a command; None if there is none."""
    words = shlex.split(command.removeprefix(_COMMAND))
    if not command.startswith(_COMMAND) or words[0] not in _CALLS or len(words) < 3:
        return None
    name, workflow, instance_id, *rest = words
    return f"durable.workflows[{workflow!r}].get({instance_id!r}).{_CALLS[name].format(*rest)}"
