"""References: what a Celery task's message says about the step, or the item of a map, that the task does.

A reference travels in the header `durable` of the message, and in the arguments of its callbacks. It comes back with
the answer, from anybody who can write to the broker: `read` refuses what is malformed, and the token in it is compared
with the one in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from celery_durable.model.rows import RunRef

REFERENCE_HEADER = "durable"
"""The header of a Celery message that holds the `TaskReference` of its task in JSON form."""


@dataclass(frozen=True, slots=True)
class TaskReference:
    """One attempt of a task, and one of its deliveries.

    ``database_id``: of the database that waits for the answer. ``event_type``: names the step or item, and the attempt.
    ``token``: random for each attempt, and known to nobody but the row and its messages. ``queue``: where an answer
    goes that comes as a message; None before it is published. ``delivery``: 0, then one more for each time that the
    same attempt is sent again because its task was lost.
    """

    database_id: str
    ref: RunRef
    event_type: str
    token: str = field(repr=False)
    queue: str | None = None
    delivery: int = 0

    def with_queue(self, queue: str) -> TaskReference:
        """The same, with the queue for answers."""
        return replace(self, queue=queue)

    def to_json(self) -> list[Any]:
        """As it travels."""
        ref = self.ref
        fields = (ref.workflow, ref.instance_id, ref.run_number, self.event_type)
        return [self.database_id, *fields, self.token, self.queue, self.delivery]

    @classmethod
    def read(cls, value: object) -> TaskReference | None:
        """Return what travelled, or None for anything else, which may come from anybody.

        A later version may append fields, which this one ignores.

        A value that is longer than any valid name is refused here: these names are logged before a row is looked for.
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
"""An item's names its step by its key, which is longer than the name that the key begins with."""
_MAX_INTEGER = 2**31 - 1
