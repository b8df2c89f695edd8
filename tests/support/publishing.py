"""What an instance has published, and the statements that it cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from tests.support.world import Instance, World


def published(instance: Instance, run: int | None = None) -> dict[str, Any]:
    found = instance.world.operations.history.published(instance.workflow, instance.id, run=run)
    return {key: each.value for key, each in found.items()}


class Statements:
    """What the worker's database is asked, and a way to have it fail."""

    def __init__(self, world: World) -> None:
        self.seen: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False
        sa.event.listen(world.worker.store.engine, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.seen.append(statement)
        if self.fails(statement):
            raise sa.exc.OperationalError(statement, {}, OSError("the database is away"))

    @property
    def of_publishing(self) -> int:
        return sum("workflow_published" in statement for statement in self.seen)
