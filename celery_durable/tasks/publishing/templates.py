"""Templates: a dispatch message is recorded once per workflow and queue, and each copy fills in the values that differ.

`send_task` takes 200 to 300 us of CPU for a message; to fill in a template takes a few. The messages are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery

from celery_durable.tasks.publishing.recorder import RecordedMessage

PLACEHOLDER_PREFIX = "@durable."
ID, ARGS, ROOT, PARENT, REPLY = (f"{PLACEHOLDER_PREFIX}{name}@" for name in ("id", "args", "root", "parent", "reply"))
_INSTANCE_PLACEHOLDER = f"{PLACEHOLDER_PREFIX}instance@"
_MAX_TEMPLATES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A recorded message with placeholders among its headers and properties; its body is split around the arguments."""

    recorded: RecordedMessage
    before: str
    after: str


Record = Callable[[tuple[Any, ...], dict[str, Any]], RecordedMessage]
"""Records a dispatch message with these arguments and options."""


class Templates:
    """The templates of one process, each made at first use."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._templates: dict[Any, Template | None] = {}
        self._queues: Any = None

    def clear(self) -> None:
        """Drop all templates in a forked child: they contain the parent's pid (`origin`)."""
        self._templates = {}

    def get_or_make(self, queue: str, workflow: str, *, has_parent: bool, record: Record) -> Template | None:
        """The template of these messages; None if the messages differ in more values than a template can fill in."""
        queues = self._app.amqp.queues
        if (
            queues is not self._queues or len(self._templates) > _MAX_TEMPLATES
        ):  # a new task_queues changes the declarations
            self._queues, self._templates = queues, {}
        # The reply queue of the calling thread is in the message too; `fill` fills it in.
        key = (queue, workflow, has_parent)
        if key not in self._templates:
            self._templates[key] = self._make(queue, workflow, has_parent=has_parent, record=record)
        return self._templates[key]

    def fill(
        self, template: Template, args: tuple[str, str, int], *, id: str, root: str, parent: str
    ) -> RecordedMessage:
        """A copy of the recorded message with these values."""
        recorded = template.recorded
        values = {ID: id, ARGS: repr(args), ROOT: root, PARENT: parent, REPLY: self._app.thread_oid}
        body = f"{template.before}{json.dumps(args)}{template.after}"
        headers, properties = _fill(recorded.headers, values), _fill(recorded.properties, values)
        prepare = (body, *recorded.prepare[1:4], headers, properties)
        return RecordedMessage(prepare, recorded.exchange, recorded.routing_key, recorded.declare)

    def _make(self, queue: str, workflow: str, *, has_parent: bool, record: Record) -> Template | None:
        if PLACEHOLDER_PREFIX in queue or PLACEHOLDER_PREFIX in workflow:
            return None
        args = (workflow, _INSTANCE_PLACEHOLDER, 0)
        ids = {"root_id": ROOT, "parent_id": PARENT} if has_parent else {}
        recorded = record(args, {"task_id": ID, "argsrepr": ARGS, "kwargsrepr": "{}", "reply_to": REPLY, **ids})
        if not isinstance(recorded.body, str):
            return None  # the body is compressed
        parts = recorded.body.split(json.dumps(args))
        if len(parts) != 2 or PLACEHOLDER_PREFIX in "".join(parts):
            return None  # task protocol 1 has the id in its body
        return Template(recorded, *parts)


def _fill(fields: dict[str, Any], values: dict[str, str]) -> dict[str, Any]:
    return {name: values.get(value, value) if type(value) is str else value for name, value in fields.items()}
