"""A server that takes answers, and dies at a point of the next one if the file ``order`` in its folder names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from pydantic import BaseModel, field_validator

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.http import asgi
from celery_durable.signals import event_received

_ORDER = Path(os.environ.get("ANSWERING_FOLDER", ".")) / "order"
_written: list[str] = []


def _die_at(point: str) -> None:
    if _ORDER.exists() and _ORDER.read_text() == point:
        os.kill(os.getpid(), signal.SIGKILL)


class Decision(BaseModel):
    approved: bool

    @field_validator("approved")
    @classmethod
    def check(cls, approved: bool) -> bool:
        _die_at("before the transaction")
        return approved


def define(durable: Durable) -> Any:
    @durable.workflow(name="refund")
    def refund(event: WorkflowEvent[None], step: Step) -> list[Any]:
        answer = step.wait_for_event("approve", "approval", schema=Decision, ask="Refund?", to="finance")
        return [answer.payload.approved, answer.by]

    return refund


def make_site() -> Any:
    app = Celery("answering", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = os.environ["DURABLE_DATABASE_URL"]
    durable = Durable(app)
    define(durable)

    @sa.event.listens_for(durable.engine, "after_cursor_execute")
    def note(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "INTO workflow_event" in statement:
            _written.append(statement)
            _die_at("after the event is written")

    @sa.event.listens_for(durable.engine, "commit")
    def die(conn: Any) -> None:
        if _written:
            _die_at("before the commit")

    @event_received.connect(weak=False)
    def die_late(**_: Any) -> None:
        _die_at("after the commit")

    return asgi(durable, allow_anonymous=True)
