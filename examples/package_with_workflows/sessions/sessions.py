"""What the application calls: sessions are opened and told things, and that a workflow does the rest is our affair."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_durable import WorkflowService, require_workflows
from examples.package_with_workflows.sessions import tables
from examples.package_with_workflows.sessions.workflows import conversation


class Sessions:
    """Support sessions. ``workflows``: the application's `durable.service`; raises WorkflowsRequired without one."""

    def __init__(self, workflows: WorkflowService | None) -> None:
        self._workflows = require_workflows(workflows, package="sessions")

    def open(self, db: Session, session_id: str, *, agent: str) -> None:
        """Open a session in the caller's transaction: its row and its workflow are there together, or neither is."""
        db.execute(sa.insert(tables.session).values(id=session_id, agent=agent, status="open"))
        self._workflows.create_instance(conversation.name, {"session_id": session_id}, id=session_id, session=db)

    def say(self, session_id: str, text: str, *, message_id: str | None = None) -> None:
        """Tell a session something; with a ``message_id`` any number of times."""
        self._workflows.send_event(conversation.name, session_id, "user_message", {"text": text}, id=message_id)

    def is_open(self, session_id: str) -> bool:
        """Whether the session still listens."""
        return not self._workflows.get_instance_status(conversation.name, session_id).status.is_terminal

    def steps(self, session_id: str) -> list[str]:
        """What the session has done so far."""
        page = self._workflows.list_history(conversation.name, session_id)
        return [step.name for step in page.steps.items]
