"""What the statements of a dispatcher's turn read, by EXPLAIN ANALYZE on the rows as they stand."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tests.backlog.room import Room


def dispatcher_plans(room: Room) -> tuple[int, float]:
    """The most blocks that one statement of a turn reads, and how many milliseconds the slowest takes."""
    durable = room.site.durable
    engine, seen = durable.internals.store.engine, dict[str, Any]()

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if not many and statement.lstrip().upper().startswith(("SELECT", "WITH", "UPDATE", "DELETE")):
            seen[statement] = parameters

    sa.event.listen(engine, "before_cursor_execute", note)
    durable.internals.sweeper.sweep(max_rounds=1)
    durable.internals.sweeper.seconds_to_next()
    sa.event.remove(engine, "before_cursor_execute", note)
    blocks, slowest = 0, 0.0
    for statement, parameters in seen.items():
        with engine.connect() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            (found,) = plan.scalar_one()
            connection.rollback()
        read = found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"]
        blocks, slowest = max(blocks, read), max(slowest, found["Execution Time"])
    return blocks, slowest
