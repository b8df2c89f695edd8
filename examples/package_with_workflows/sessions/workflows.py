"""The workflow of a session: keep what the user says, and close the session when nothing comes for a week."""

from __future__ import annotations

import sqlalchemy as sa
from pydantic import BaseModel

from celery_durable import EventTimeout, Step, StepTx, WorkflowEvent, durable_workflow
from examples.package_with_workflows.sessions import tables


class SessionIn(BaseModel):
    session_id: str


class UserMessage(BaseModel):
    text: str


def keep_message(tx: StepTx, session_id: str, text: str) -> None:
    """The message and the record that this step has ended are one commit."""
    tx.mutate(lambda db: db.execute(sa.insert(tables.message).values(session_id=session_id, text=text)))


def close(tx: StepTx, session_id: str) -> None:
    mine = tables.session.c.id == session_id
    tx.mutate(lambda db: db.execute(sa.update(tables.session).where(mine).values(status="closed")))


@durable_workflow(name="session")
def conversation(event: WorkflowEvent[SessionIn], step: Step) -> int:
    """Answers with the number of messages."""
    session_id, count = event.payload.session_id, 0
    while True:
        try:
            said = step.wait_for_event(f"message {count}", "user_message", timeout="7 days", schema=UserMessage)
        except EventTimeout:
            break
        step.do(f"keep message {count}", keep_message, session_id, said.payload.text)
        count += 1
    step.do("close", close, session_id)
    return count


required_workflows = {"SESSION": conversation}
