"""Errors of the outbox."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError


class NotInOutbox(DurableError):
    """Nothing in the outbox has this id: it was sent or dropped, or never there."""

    code, http_status = "NOT_IN_OUTBOX", 404

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        super().__init__(
            f"Nothing in the outbox has the id {', '.join(map(repr, self.ids))}. What was sent is in it no more; list "
            "what is: celery -A <your app> durable outbox"
        )


class NotGivenUp(DurableError):
    """What is in the outbox under this id has attempts left, and is sent without help."""

    code, http_status = "NOT_GIVEN_UP", 409

    def __init__(self, id_: str, kind: str, name: str) -> None:
        self.id, self.kind, self.name = id_, kind, name
        what = "Task" if kind == "task" else "Outbound event"
        super().__init__(
            f"{what} {name!r} ({id_}) was not given up. It is sent without help; list what was given up: "
            "celery -A <your app> durable outbox --given-up"
        )
