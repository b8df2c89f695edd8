"""Errors of the outbox."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError


class NotInOutbox(DurableError):
    """The outbox holds no message with these ids: they were sent, dropped or never existed.

    List what it holds: ``celery -A proj durable outbox``.

    Attributes:
        ids: The ids that were not found.
    """

    code, http_status = "NOT_IN_OUTBOX", 404

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        super().__init__(
            f"Nothing in the outbox has the id {', '.join(map(repr, self.ids))}. Sent messages are removed; list the "
            "others: celery -A <your app> durable outbox"
        )


class NotGivenUp(DurableError):
    """A message in the outbox cannot be retried by hand, because it is still retried automatically.

    Wait; ``celery -A proj durable outbox --given-up`` lists those that are not.

    Attributes:
        id: The message's id.
        kind: "task" or "event".
        name: The name of the task or of the outbound event.
    """

    code, http_status = "NOT_GIVEN_UP", 409

    def __init__(self, id_: str, kind: str, name: str) -> None:
        self.id, self.kind, self.name = id_, kind, name
        what = "Task" if kind == "task" else "Outbound event"
        super().__init__(
            f"{what} {name!r} ({id_}) was not given up. It is still retried automatically; list what was given up: "
            "celery -A <your app> durable outbox --given-up"
        )
