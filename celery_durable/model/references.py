"""References: they say which step or map item a Celery task works for.

The message of the task carries its reference in the header `durable` and in the arguments of its callbacks. The answer
returns it. Any client of the broker can forge an answer, so `read` refuses malformed references, and the engine
compares the token with the one in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from celery_durable.model.rows import RunRef

REFERENCE_HEADER = "durable"
"""The header of a Celery message that holds the `TaskReference` of its task in JSON form."""


@dataclass(frozen=True, slots=True)
class TaskReference:
    """Identifies one attempt of a task and one delivery of that attempt.

    ``database_id``: identifies the database that waits for the answer. ``event_type``: names the step or the item, and
    the attempt. ``token``: random for each attempt, stored only in the row and in the attempt's messages. ``queue``:
    the queue for an answer that is sent as a message; None until the task is published. ``delivery``: 0 at first, plus
    1 each time the same attempt is sent again because its task was lost.
    """

    database_id: str
    ref: RunRef
    event_type: str
    token: str = field(repr=False)
    queue: str | None = None
    delivery: int = 0

    @property
    def attempt(self) -> tuple[RunRef, str]:
        """What the deliveries of one attempt have in common."""
        return (self.ref, self.event_type)

    def with_queue(self, queue: str) -> TaskReference:
        """Return a copy with the queue for answers."""
        return replace(self, queue=queue)

    def to_json(self) -> list[Any]:
        """Return the form that the message carries."""
        ref = self.ref
        fields = (ref.workflow, ref.instance_id, ref.run_number, self.event_type)
        return [self.database_id, *fields, self.token, self.queue, self.delivery]

    @classmethod
    def read(cls, value: object) -> TaskReference | None:
        """Parse the form that `to_json` returns. Returns None for anything else, because messages are not trusted.

        Further elements are ignored: a later version may append fields. Overlong values are refused here, because the
        names are logged before the row is read.
        """
        match value:
            case [
                str(database_id), str(workflow), str(instance_id), int(run_number), str(event_type), str(token),
                (str() | None) as queue, int(delivery), *_,
            ] if (
                max(map(len, (database_id, workflow, instance_id, token, queue or ""))) <= _MAX_NAME_LENGTH
                and len(event_type) <= _MAX_TYPE_LENGTH
                and max(abs(run_number), abs(delivery)) <= _MAX_INTEGER
            ):  # fmt: skip
                return cls(database_id, RunRef(workflow, instance_id, run_number), event_type, token, queue, delivery)
            case _:
                return None


_MAX_NAME_LENGTH = 255
_MAX_TYPE_LENGTH = 600
"""Larger than for names, because the event type of an item contains the step's key, which can exceed a name."""
_MAX_INTEGER = 2**31 - 1
