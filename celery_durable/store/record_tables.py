"""The tables of what happened, for people: log lines, manual changes, and attempts that did not succeed.

No pass reads them.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from celery_durable.store.column_types import big_id, long_text


def build(table: Callable[..., sa.Table], prefix: str) -> tuple[sa.Table, sa.Table, sa.Table]:
    """Return workflow_log, workflow_audit and workflow_attempt. ``table`` makes a table, ``prefix`` is of its names."""
    log = table(
        "workflow_log",
        sa.Column("id", big_id(), primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("attempt", sa.Integer),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("category", sa.String(255), nullable=False),
        sa.Column("message", long_text(), nullable=False),
        sa.Column("data", long_text()),
        sa.Column("is_replay", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_log_run", "instance_pk", "run_number", "id"),
        sqlite_autoincrement=True,
    )
    audit = table(
        "workflow_audit",
        sa.Column("id", big_id(), primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("reason", long_text()),
        sa.Column("step_before", long_text(), nullable=False),
        sa.Column("commit_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_audit_run", "instance_pk", "run_number", "id"),
        sqlite_autoincrement=True,
    )
    attempt = table(
        "workflow_attempt",
        sa.Column("id", big_id(), primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        # NULL for the death of a worker, because nothing is written when a body begins, and for the code between steps.
        sa.Column("step_key", sa.String(280)),
        # The position of a map's item.
        sa.Column("item", sa.Integer),
        sa.Column("attempt", sa.Integer),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("error_name", sa.String(255), nullable=False),
        sa.Column("error_message", long_text(), nullable=False),
        sa.Column("traceback", long_text()),
        # The innermost frame of the author's code.
        sa.Column("file", sa.String(255)),
        sa.Column("line", sa.Integer),
        # The worker's process and its Celery task, as far as they are known.
        sa.Column("node", sa.String(255)),
        sa.Column("pid", sa.BigInteger),
        sa.Column("task_id", sa.String(255)),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_attempt_run", "instance_pk", "run_number", "id"),
        sqlite_autoincrement=True,
    )
    return log, audit, attempt
