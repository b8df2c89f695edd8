"""The first tables.

A released migration never changes, whatever schema.py contains later: see docs/development/migrations.md.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade(op: Operations, *, schema: str | None, prefix: str) -> None:  # noqa: PLR0915  # a statement per table
    # MariaDB commits each statement by itself. After a crash the next migration continues at the first missing part.
    is_mariadb = op.get_context().dialect.name in ("mysql", "mariadb")
    table: dict[str, Any] = {
        "schema": schema,
        "if_not_exists": is_mariadb,
        "mysql_engine": "InnoDB",
        "mysql_charset": "utf8mb4",
        "mysql_collate": "utf8mb4_nopad_bin",
        "mariadb_engine": "InnoDB",
        "mariadb_charset": "utf8mb4",
        "mariadb_collate": "utf8mb4_nopad_bin",
    }
    index: dict[str, Any] = {"schema": schema, "if_not_exists": is_mariadb}

    def partial(name: str, of: str, columns: list[str], where: str) -> None:
        condition = sa.text(where)
        op.create_index(
            f"{prefix}ix_workflow_{name}",
            f"{prefix}workflow_{of}",
            columns,
            postgresql_where=condition,
            sqlite_where=condition,
            **index,
        )

    def full(name: str, of: str, columns: list[str]) -> None:
        op.create_index(f"{prefix}ix_workflow_{name}", f"{prefix}workflow_{of}", columns, **index)

    instance = op.create_table(
        f"{prefix}workflow_instance",
        sa.Column("id", BIG_ID, primary_key=True),
        sa.Column("workflow", sa.String(255), nullable=False),
        sa.Column("instance_id", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("claim_token", sa.String(36)),
        sa.Column("claim_task_id", sa.String(255)),
        sa.Column("claimed_by", sa.String(255)),
        sa.Column("lease_until", sa.BigInteger),
        sa.Column("running_step_key", sa.String(280)),
        sa.Column("running_attempt", sa.Integer),
        sa.Column("running_since", sa.BigInteger),
        sa.Column("run_at", sa.BigInteger),
        sa.Column("next_check_at", sa.BigInteger),
        sa.Column("wake_reason", sa.String(16), nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("dispatch_count", sa.Integer, nullable=False),
        sa.Column("crash_count", sa.Integer, nullable=False),
        sa.Column("pause_requested", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("sent_at", sa.BigInteger),
        sa.Column("parent_pk", sa.BigInteger),
        sa.Column("parent_run_number", sa.Integer),
        sa.Column("parent_step_key", sa.String(280)),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("retention_us", sa.BigInteger),
        sa.Column("retention_until", sa.BigInteger),
        sa.Column("max_run_us", sa.BigInteger),
        sa.UniqueConstraint("workflow", "instance_id", name=f"{prefix}uq_workflow_instance"),
        sqlite_autoincrement=True,
        **table,
    )
    partial("instance_due", "instance", ["priority", "queue", "next_check_at"], "next_check_at IS NOT NULL")
    partial("instance_sent", "instance", ["queue", "sent_at"], "sent_at IS NOT NULL AND claim_token IS NULL")
    # While the tables are nearly empty, PostgreSQL would take a full index for a statement that reads one row: see
    # `tables.IN_LISTS`. MariaDB has no partial indexes, and always chooses the unique index of a row.
    if is_mariadb:
        full("instance_list", "instance", ["workflow", "id"])
        full("instance_status", "instance", ["workflow", "status", "id"])
    else:
        partial("instance_listed", "instance", ["workflow", "id"], "id > 0")
        partial("instance_in_status", "instance", ["workflow", "status", "id"], "id > 0")
    partial("instance_retention", "instance", ["retention_until"], "retention_until IS NOT NULL")
    if op.get_context().dialect.name == "postgresql":
        name = op.get_context().dialect.identifier_preparer.format_table(instance)
        op.execute(f"ALTER TABLE {name} SET (fillfactor = 70)")
        op.execute(f"ALTER TABLE {name} ALTER COLUMN next_check_at SET STATISTICS 1000")

    op.create_table(
        f"{prefix}workflow_run",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("params", LONG_TEXT, nullable=False),
        sa.Column("output", LONG_TEXT),
        sa.Column("error_name", sa.String(255)),
        sa.Column("error_message", LONG_TEXT),
        sa.Column("reason", LONG_TEXT),
        sa.Column("definition_version", sa.Integer),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("forked_from_instance_id", sa.String(255)),
        sa.Column("forked_from_run_number", sa.Integer),
        sa.Column("forked_from_step_key", sa.String(280)),
        sa.Column("ancestry", LONG_TEXT),
        sa.Column("failed_steps", LONG_TEXT),
        sa.Column("commit_id", sa.String(36), nullable=False),
        sa.Column("log_count", sa.Integer, nullable=False),
        sa.Column("dropped_log_count", sa.Integer, nullable=False),
        **table,
    )
    partial("run_completed", "run", ["completed_at"], "completed_at IS NOT NULL")

    op.create_table(
        f"{prefix}workflow_step",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer),
        sa.Column("timeout_ms", sa.BigInteger),
        sa.Column("next_retry_at", sa.BigInteger),
        sa.Column("wake_at", sa.BigInteger),
        sa.Column("wait_event_type", sa.String(255)),
        sa.Column("event_seq", sa.BigInteger),
        sa.Column("result", LONG_TEXT),
        sa.Column("error_name", sa.String(255)),
        sa.Column("error_message", LONG_TEXT),
        sa.Column("commit_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("payload_type", sa.String(512)),
        **table,
    )
    if not is_mariadb:  # a full index would cost more than the search for waits gains
        open_wait = "status IN ('waiting', 'WAITING') AND type IN ('waitForEvent', 'linear')"
        partial("step_waiting", "step", ["wait_event_type", "instance_pk"], open_wait)

    op.create_table(
        f"{prefix}workflow_event",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("event_id", sa.String(255), nullable=False),
        sa.Column("type", sa.String(255), nullable=False),
        sa.Column("payload", LONG_TEXT, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("delivered_at", sa.BigInteger),
        sa.Column("consumed_by_step_key", sa.String(280)),
        sa.UniqueConstraint("instance_pk", "run_number", "event_id", name=f"{prefix}uq_workflow_event_id"),
        **table,
    )
    full("event_waiting", "event", ["instance_pk", "run_number", "type", "delivered_at", "seq"])

    op.create_table(
        f"{prefix}workflow_log",
        sa.Column("id", BIG_ID, primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("attempt", sa.Integer),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("category", sa.String(255), nullable=False),
        sa.Column("message", LONG_TEXT, nullable=False),
        sa.Column("data", LONG_TEXT),
        sa.Column("is_replay", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
        **table,
    )
    full("log_run", "log", ["instance_pk", "run_number", "id"])

    op.create_table(
        f"{prefix}workflow_heartbeat",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("queues", LONG_TEXT, nullable=False),
        sa.Column("workflows", LONG_TEXT, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.Column("swept_at", sa.BigInteger),
        sa.Column("next_sweep_at", sa.BigInteger),
        sa.Column("pool", sa.String(255)),
        sa.Column("inventory", sa.BigInteger),
        sa.Column("answered_inventory", sa.BigInteger),
        sa.Column("held_tasks", LONG_TEXT),
        sa.Column("received_markers", LONG_TEXT),
        sa.Column("outages", LONG_TEXT),
        **table,
    )

    op.create_table(
        f"{prefix}workflow_topic_wait",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("topic", sa.String(100), nullable=False),
        sa.Column("opened_at", sa.BigInteger, nullable=False),
        **table,
    )
    full("topic_wait_topic", "topic_wait", ["topic", "instance_pk"])

    op.create_table(
        f"{prefix}workflow_item",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.BigInteger),
        sa.Column("task", LONG_TEXT, nullable=False),
        sa.Column("answer", LONG_TEXT),
        sa.Column("attempt_token", sa.String(32)),
        sa.Column("loss_count", sa.Integer, nullable=False),
        sa.Column("sent_at", sa.BigInteger),
        sa.Column("queue", sa.String(255)),
        sa.Column("priority", sa.SmallInteger),
        sa.Column("on_lost", sa.String(8), nullable=False),
        **table,
    )
    items = ["instance_pk", "run_number", "step_key", "status", "position"]
    if is_mariadb:
        full("item_sent", "item", ["status", "sent_at"])
        full("item_status", "item", items)
    else:
        partial("item_out", "item", ["sent_at"], "status = 'sent' AND sent_at > 0")
        partial("item_open", "item", items, "status IN ('pending', 'sent', 'failed')")

    op.create_table(
        f"{prefix}workflow_emission",
        sa.Column("id", sa.String(255), primary_key=True),
        sa.Column("topic", sa.String(100), nullable=False),
        sa.Column("payload", LONG_TEXT, nullable=False),
        sa.Column("scope", LONG_TEXT),
        sa.Column("cursor_pk", sa.BigInteger, nullable=False),
        sa.Column("end_pk", sa.BigInteger, nullable=False),
        sa.Column("delivered_count", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("next_check_at", sa.BigInteger, nullable=False),
        **table,
    )
    full("emission_due", "emission", ["next_check_at"])

    op.create_table(
        f"{prefix}workflow_audit",
        sa.Column("id", BIG_ID, primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("reason", LONG_TEXT),
        sa.Column("step_before", LONG_TEXT, nullable=False),
        sa.Column("commit_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
        **table,
    )
    full("audit_run", "audit", ["instance_pk", "run_number", "id"])

    op.create_table(
        f"{prefix}workflow_outbox",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("payload", LONG_TEXT, nullable=False),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("claim_token", sa.String(36)),
        sa.Column("run_at", sa.BigInteger),
        sa.Column("next_check_at", sa.BigInteger),
        sa.Column("last_error", LONG_TEXT),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        **table,
    )
    full("outbox_due", "outbox", ["next_check_at"])

    op.create_table(
        f"{prefix}workflow_label",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(255), nullable=False),
        **table,
    )
    full("label_value", "label", ["name", "value", "instance_pk"])

    op.create_table(
        f"{prefix}workflow_published",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", LONG_TEXT, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        **table,
    )

    op.create_table(
        f"{prefix}workflow_queue",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("claimed_sent_at", sa.BigInteger, nullable=False),
        sa.Column("previous_claimed_sent_at", sa.BigInteger),
        sa.Column("recorded_at", sa.BigInteger, nullable=False),
        **table,
    )

    op.create_table(
        f"{prefix}workflow_attempt",
        sa.Column("id", BIG_ID, primary_key=True),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("item", sa.Integer),
        sa.Column("attempt", sa.Integer),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("error_name", sa.String(255), nullable=False),
        sa.Column("error_message", LONG_TEXT, nullable=False),
        sa.Column("traceback", LONG_TEXT),
        sa.Column("file", sa.String(255)),
        sa.Column("line", sa.Integer),
        sa.Column("node", sa.String(255)),
        sa.Column("pid", sa.BigInteger),
        sa.Column("task_id", sa.String(255)),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
        **table,
    )
    full("attempt_run", "attempt", ["instance_pk", "run_number", "id"])

    database = op.create_table(
        f"{prefix}workflow_database",
        sa.Column("singleton", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("database_id", sa.String(32), nullable=False),
        **table,
    )
    _identify(op, database)


def _identify(op: Operations, database: sa.Table) -> None:
    """Give the database its random id, made by itself: a script that is run twice must make two."""
    random_id = {
        "postgresql": "replace(CAST(gen_random_uuid() AS text), '-', '')",
        "sqlite": "lower(hex(randomblob(16)))",
    }.get(op.get_context().dialect.name, "md5(concat(uuid(), rand(), now(6), connection_id()))")
    is_there = sa.exists().where(database.c.singleton == sa.literal_column("1"))
    values: Any = sa.select(sa.literal_column("1"), sa.literal_column(random_id)).where(~is_there)
    op.execute(sa.insert(database).from_select(["singleton", "database_id"], values))
