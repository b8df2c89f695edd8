"""The indexes for lists and for the search for lost tasks get a condition that only these queries name.

So PostgreSQL cannot choose them for a statement that reads a single row (see `schema.IN_LISTS`). MariaDB has no partial
indexes, and always chooses the unique index of a row.
"""

from __future__ import annotations

from alembic.operations import Operations

from celery_durable.store import online_changes

revision = "0006"
down_revision = "0005"


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:
    if op.get_context().dialect.name not in ("postgresql", "sqlite"):
        return
    for name, replaced, kind, columns, where in (
        ("instance_listed", "instance_list", "instance", ["workflow", "id"], "id > 0"),
        ("instance_in_status", "instance_status", "instance", ["workflow", "status", "id"], "id > 0"),
        ("item_out", "item_sent", "item", ["sent_at"], "status = 'sent' AND sent_at > 0"),
    ):
        table = f"{prefix}workflow_{kind}"
        old, new = f"{prefix}ix_workflow_{replaced}", f"{prefix}ix_workflow_{name}"
        online_changes.replace_index(op, old, new, table, columns, schema=schema, where=where)
