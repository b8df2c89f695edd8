"""The tables.

workflow_instance   one narrow row per instance: identity, mutex and queue entry in one. Every change of an instance
                    locks this row first and decides from what it then reads (LAW 2 in docs/design.md).
workflow_run        the input and the outcome of a run. A restart adds a row; none is removed while the instance exists.
workflow_step       the steps of a run, one row per step key. PRIMARY KEY (instance, run, step_key) also stops the
                    loser of a race.
workflow_event      the events sent to a run. ``seq`` is the instance's version, counted under its lock, so the order
                    never depends on a clock.
workflow_log        log lines that workflow code wrote, and those of celery_durable itself; limited per run.
workflow_topic_wait the waits on topics, to find them by topic. Whether a wait is still open, its step's row decides.
workflow_item       one row per item of a map: its Celery task, its progress and its answer. Also one row, at position
                    0, for the current attempt of a task step, from when it is sent until it is answered or a pass
                    decides on it.
workflow_emission   an emission under way: its payload, and how far its delivery is.
workflow_label      the labels by which instances are found: name and text. An instance without labels has no row.
workflow_outbox     messages to send after the transaction that wrote them: Celery tasks, and named events for a
                    handler. A finished row is deleted.
workflow_queue      the progress of each queue: when the newest claimed dispatch message from it was sent.
workflow_heartbeat  one row per process that sweeps or works. It tells operators why nothing moves, and serves the
                    search for lost tasks. No other decision depends on it.
workflow_published  the newest value of each key that a run has published. No pass reads it.
workflow_database   one row: the random id by which messages name this database.
workflow_audit      what people did to a run: who, what, when and why. For a step also its key, and what it was before;
                    an entry about the whole run has an empty key and the JSON value null.
workflow_attempt    the attempts that did not succeed, and the deaths of workers, for people. No pass reads it.
workflow_limit      one row per limit and key, made at its first use: its numbers, its rate, and the lock of its key.
workflow_hold       what a step has or waits for: one row per limit. Whether a hold counts, its owner's row decides.

Instants are BIGINT microseconds since the epoch (UTC). So all three databases have one type, arithmetic and
comparison, without session time zones or rounding. Payloads are canonical JSON in text columns, because databases
differ in which JSON they accept. No foreign key points to workflow_instance: with one, each insert into another
table would lock the instance's row, and only the rules of LAW 2 may do that.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_durable.store.schema import dialects
from celery_durable.store.schema.dialects import Database, big_id, choose_options, full_index_only, long_text
from celery_durable.store.schema.step_format import STEP_COLUMNS

REVISION = "0008"
"""The migration that this version of the code needs."""

OPEN_EVENT_WAIT = "status IN ('waiting', 'WAITING') AND type IN ('waitForEvent', 'linear')"
"""The condition of the partial index over open waits for events. A query repeats it to use the index."""

OPEN_ASK = "ask IS NOT NULL AND status IN ('waiting', 'WAITING')"
"""The condition of the partial index over open waits that ask a person. A query repeats it to use the index."""

OPEN_ITEM = "status IN ('pending', 'sent', 'failed')"
"""The condition of the partial index over the open items of maps."""
SEARCHED_ITEM = "status = 'sent' AND sent_at > 0"
"""The condition of the partial index over the items that the search for lost tasks looks for."""
IN_LISTS = "id > 0"
"""The condition of the partial indexes for lists, which all instances meet. A query repeats it to use them.

While the tables are nearly empty, PostgreSQL takes any index, and keeps the plan of a prepared statement. Measured at
4,000 instances: a claim that had taken an index for lists used 0.9 ms of CPU instead of 0.2.
"""
ACTIVE_HOLD = "state IN ('held', 'granted')"
WAITING_HOLD = "state = 'waiting'"
"""The conditions of the partial indexes over holds."""
ITEM_INDEX = ("instance_pk", "run_number", "step_key", "status", "position")

BINARY = "utf8mb4_nopad_bin"
"""MariaDB's collation for keys: ids that differ in case, accents or trailing blanks are different."""

_ENGINE: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": BINARY,
    "mariadb_engine": "InnoDB",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": BINARY,
}


_POSTGRESQL_TUNING = (
    # Room for updates that stay on their page.
    "ALTER TABLE %(fullname)s SET (fillfactor = 70)",
    # With the default of 100 the planner's statistics are too coarse at some millions of rows, and it ignores the due
    # index.
    "ALTER TABLE %(fullname)s ALTER COLUMN next_check_at SET STATISTICS 1000",
)


@dataclass(frozen=True, slots=True)
class Tables:
    metadata: sa.MetaData
    instance: sa.Table
    run: sa.Table
    step: sa.Table
    event: sa.Table
    log: sa.Table
    heartbeat: sa.Table
    topic_wait: sa.Table
    emission: sa.Table
    audit: sa.Table
    outbox: sa.Table
    label: sa.Table
    published: sa.Table
    item: sa.Table
    database: sa.Table
    queue: sa.Table
    attempt: sa.Table
    limit: sa.Table
    hold: sa.Table

    @property
    def names(self) -> list[str]:
        return [table.name for table in self.metadata.tables.values()]


@functools.cache
def build_tables(schema: str | None = None, prefix: str = "", only_for: Database | None = None) -> Tables:
    """Build the tables of a schema and prefix, with the options of one database; of all databases for None."""
    metadata = sa.MetaData(schema=schema)
    partial_index = functools.partial(dialects.partial_index, only_for)
    partial_index_only = functools.partial(dialects.partial_index_only, only_for)

    def table(name: str, *columns: Any, **options: Any) -> sa.Table:
        return sa.Table(prefix + name, metadata, *columns, **choose_options(only_for, **_ENGINE, **options))

    instance = table(
        "workflow_instance",
        sa.Column("id", big_id(), primary_key=True),
        sa.Column("workflow", sa.String(255), nullable=False),
        sa.Column("instance_id", sa.String(255), nullable=False),
        # How a run is advanced: "replay" or "linear" (`model.WorkflowKind`).
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("claim_token", sa.String(36)),
        # Who holds the claim: the Celery task and its worker node.
        sa.Column("claim_task_id", sa.String(255)),
        sa.Column("claimed_by", sa.String(255)),
        sa.Column("lease_until", sa.BigInteger),
        # The step whose body runs now. The renewer of leases writes it, so it is up to a third of a lease late.
        sa.Column("running_step_key", sa.String(280)),
        sa.Column("running_attempt", sa.Integer),
        sa.Column("running_since", sa.BigInteger),
        # ``run_at`` is when the run is due. ``next_check_at`` is when the sweep reads the row next: when the run is
        # due, when its dispatch message counts as late, or when the lease ends. NULL: never.
        sa.Column("run_at", sa.BigInteger),
        sa.Column("next_check_at", sa.BigInteger),
        # For people only; nothing is decided from it.
        sa.Column("wake_reason", sa.String(16), nullable=False),
        # 0: resumed, 1: new. The sweep publishes resumed instances first.
        sa.Column("priority", sa.SmallInteger, nullable=False),
        # How often a dispatch message was sent without a claim. Of a claimed run: how often its expired lease was
        # checked.
        sa.Column("dispatch_count", sa.Integer, nullable=False),
        sa.Column("crash_count", sa.Integer, nullable=False),
        # Whether the worker that holds it leaves it at the next step boundary: for a pause, or to be cancelled.
        sa.Column("pause_requested", sa.Boolean, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        # When its last dispatch message was sent; NULL if none was. A claim keeps the value, and the worker records it
        # in workflow_queue as the progress of the queue.
        sa.Column("sent_at", sa.BigInteger),
        sa.Column("parent_pk", sa.BigInteger),
        sa.Column("parent_run_number", sa.Integer),
        sa.Column("parent_step_key", sa.String(280)),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("retention_us", sa.BigInteger),
        sa.Column("retention_until", sa.BigInteger),
        # How long each run of the instance may take. NULL: as long as its workflow says.
        sa.Column("max_run_us", sa.BigInteger),
        # The run that starts when the current one ends (`next_runs.NextRun`); NULL: none. The end checks it under its
        # lock of the row, so neither can miss the other.
        sa.Column("next_run", long_text()),
        sa.UniqueConstraint("workflow", "instance_id", name=f"{prefix}uq_workflow_instance"),
        # The guard, one per step, updates no indexed column, so the new row version stays on its page (HOT). No index
        # contains lease_until or version, and claim_token changes only with the claim.
        partial_index(
            f"{prefix}ix_workflow_instance_due",
            "priority",
            "queue",  # a queue that accepts no messages costs nothing, however much is due there
            "next_check_at",
            where="next_check_at IS NOT NULL",
        ),
        # Dispatch messages under way, oldest first. A guard changes none of these columns.
        partial_index(
            f"{prefix}ix_workflow_instance_sent",
            "queue",
            "sent_at",
            where="sent_at IS NOT NULL AND claim_token IS NULL",
        ),
        # For lists, newest first. Only they name the condition, which all rows meet: see `IN_LISTS`.
        partial_index_only(f"{prefix}ix_workflow_instance_listed", "workflow", "id", where=IN_LISTS),
        partial_index_only(f"{prefix}ix_workflow_instance_in_status", "workflow", "status", "id", where=IN_LISTS),
        full_index_only(f"{prefix}ix_workflow_instance_list", "workflow", "id"),
        full_index_only(f"{prefix}ix_workflow_instance_status", "workflow", "status", "id"),
        # Instances to delete, in the order of their times.
        partial_index(
            f"{prefix}ix_workflow_instance_retention",
            "retention_until",
            where="retention_until IS NOT NULL",
        ),
        sqlite_autoincrement=True,
    )
    for tuning in _POSTGRESQL_TUNING:
        ddl = sa.DDL(tuning)  # type: ignore[no-untyped-call]  # SQLAlchemy's constructor has no types
        sa.event.listen(instance, "after_create", ddl.execute_if(dialect="postgresql"))
    run = table(
        "workflow_run",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("params", long_text(), nullable=False),
        sa.Column("output", long_text()),
        sa.Column("error_name", sa.String(255)),
        sa.Column("error_message", long_text()),
        sa.Column("reason", long_text()),
        sa.Column("definition_version", sa.Integer),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        # If it continues another run: that run, and the step at which it starts again. ``ancestry``: the earlier runs
        # whose time and random numbers its code sees in replay, as JSON (`ancestry.Ancestry`).
        sa.Column("forked_from_instance_id", sa.String(255)),
        sa.Column("forked_from_run_number", sa.Integer),
        sa.Column("forked_from_step_key", sa.String(280)),
        sa.Column("ancestry", long_text()),
        # The steps that caused its end.
        sa.Column("failed_steps", long_text()),
        # The random id of the transaction that wrote the row last. It tells whether a commit in doubt was applied.
        sa.Column("commit_id", sa.String(36), nullable=False),
        sa.Column("log_count", sa.Integer, nullable=False),
        sa.Column("dropped_log_count", sa.Integer, nullable=False),
        # When the run was asked to stop.
        sa.Column("cancel_requested_at", sa.BigInteger),
        # The newest requests for a run that came while it was the current one, as a JSON list of ids.
        sa.Column("request_ids", long_text()),
        # Ended runs in the order of their ends, to find the oldest ones.
        partial_index(
            f"{prefix}ix_workflow_run_completed",
            "completed_at",
            where="completed_at IS NOT NULL",
        ),
    )
    step = table(
        "workflow_step",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        *(column.build() for column in STEP_COLUMNS),
        # Open waits for events. Without partial indexes, as on MariaDB, an entry for each step would cost more than
        # the search gains.
        partial_index_only(
            f"{prefix}ix_workflow_step_waiting",
            "wait_event_type",
            "instance_pk",
            where=OPEN_EVENT_WAIT,
        ),
        partial_index_only(f"{prefix}ix_workflow_step_asking", "instance_pk", where=OPEN_ASK),
    )
    event = table(
        "workflow_event",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("event_id", sa.String(255), nullable=False),
        sa.Column("type", sa.String(255), nullable=False),
        sa.Column("payload", long_text(), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("delivered_at", sa.BigInteger),
        sa.Column("consumed_by_step_key", sa.String(280)),
        # The person whose answer to one wait it is: no other wait consumes it. NULL: it is no answer.
        sa.Column("actor", sa.String(255)),
        sa.UniqueConstraint("instance_pk", "run_number", "event_id", name=f"{prefix}uq_workflow_event_id"),
        sa.Index(f"{prefix}ix_workflow_event_waiting", "instance_pk", "run_number", "type", "delivered_at", "seq"),
    )
    heartbeat = table(
        "workflow_heartbeat",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("queues", long_text(), nullable=False),
        sa.Column("workflows", long_text(), nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.Column("swept_at", sa.BigInteger),
        sa.Column("next_sweep_at", sa.BigInteger),
        sa.Column("pool", sa.String(255)),
        # Of a worker: the references of the tasks that it holds, as a JSON list.
        sa.Column("held_tasks", long_text()),
        # The outages of the process as a JSON list, each with how long it has lasted.
        sa.Column("outages", long_text()),
        # Of a worker: its list contains all tasks that had reached it by this time. 0: its main loop is stuck.
        sa.Column("listed_at", sa.BigInteger),
        # When a dispatcher noticed that it was silent. It lives if it was seen later.
        sa.Column("silent_at", sa.BigInteger),
    )
    topic_wait = table(
        "workflow_topic_wait",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("topic", sa.String(100), nullable=False),
        sa.Column("opened_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_topic_wait_topic", "topic", "instance_pk"),
    )
    item = table(
        "workflow_item",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        # For a sent item: when it has timed out. For a pending item: its earliest time.
        sa.Column("due_at", sa.BigInteger),
        sa.Column("task", long_text(), nullable=False),
        sa.Column("answer", long_text()),
        # Of the current attempt: the token that its answer must name, and how often its message was lost.
        sa.Column("attempt_token", sa.String(32)),
        sa.Column("loss_count", sa.Integer, nullable=False),
        # When and where its message was last sent; NULL if the task's own route decides.
        sa.Column("sent_at", sa.BigInteger),
        sa.Column("queue", sa.String(255)),
        sa.Column("priority", sa.SmallInteger),
        sa.Column("on_lost", sa.String(8), nullable=False),
        # When a dispatcher noticed that its message has left the queue and no worker holds it.
        sa.Column("missing_at", sa.BigInteger),
        # Sent items, for the search for lost tasks.
        partial_index_only(f"{prefix}ix_workflow_item_out", "sent_at", where=SEARCHED_ITEM),
        full_index_only(f"{prefix}ix_workflow_item_sent", "status", "sent_at"),
        # Open items. An answer ends one without a new entry, where indexes can be partial.
        partial_index_only(
            f"{prefix}ix_workflow_item_open",
            *ITEM_INDEX,
            where=OPEN_ITEM,
        ),
        full_index_only(f"{prefix}ix_workflow_item_status", *ITEM_INDEX),
    )
    emission = table(
        "workflow_emission",
        sa.Column("id", sa.String(255), primary_key=True),
        sa.Column("topic", sa.String(100), nullable=False),
        sa.Column("payload", long_text(), nullable=False),
        # The instances it may reach, if its emitter may not reach all.
        sa.Column("scope", long_text()),
        sa.Column("cursor_pk", sa.BigInteger, nullable=False),
        sa.Column("end_pk", sa.BigInteger, nullable=False),
        sa.Column("delivered_count", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("next_check_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_emission_due", "next_check_at"),
    )
    outbox = table(
        "workflow_outbox",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("payload", long_text(), nullable=False),
        sa.Column("instance_pk", sa.BigInteger, nullable=False),
        sa.Column("run_number", sa.Integer, nullable=False),
        sa.Column("step_key", sa.String(280)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("claim_token", sa.String(36)),
        sa.Column("run_at", sa.BigInteger),
        sa.Column("next_check_at", sa.BigInteger),
        sa.Column("last_error", long_text()),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Index(f"{prefix}ix_workflow_outbox_due", "next_check_at"),
    )
    label = table(
        "workflow_label",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(255), nullable=False),
        # For lists, newest first.
        sa.Index(f"{prefix}ix_workflow_label_value", "name", "value", "instance_pk"),
    )
    published = table(
        "workflow_published",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", long_text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )
    database = table(
        "workflow_database",
        sa.Column("singleton", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("database_id", sa.String(32), nullable=False),
    )
    queue = table(
        "workflow_queue",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("claimed_sent_at", sa.BigInteger, nullable=False),
        sa.Column("previous_claimed_sent_at", sa.BigInteger),
        sa.Column("recorded_at", sa.BigInteger, nullable=False),
    )
    # What happened, for people. No pass reads these tables.
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
    limit = table(
        "workflow_limit",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        # The numbers of the code that asked last, and those that an operator has set instead.
        sa.Column("at_once", sa.Integer),
        sa.Column("rate", sa.String(64)),
        sa.Column("set_at_once", sa.Integer),
        sa.Column("set_rate", sa.String(64)),
        sa.Column("set_by", sa.String(255)),
        # The rate (GCRA): the earliest time of the next grant, and of the next start.
        sa.Column("next_grant_at", sa.BigInteger, nullable=False),
        sa.Column("next_start_at", sa.BigInteger, nullable=False),
        # The last number in its queue, and the turn that was granted last (`store.runs.limits`).
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )
    hold = table(
        "workflow_hold",
        sa.Column("instance_pk", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step_key", sa.String(280), primary_key=True),
        # The position of a map's item; -1 if the step itself holds.
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fair_key", sa.String(255), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        # Of a held one: the token of the claim or of the attempt that holds it.
        sa.Column("token", sa.String(36)),
        sa.Column("asked_at", sa.BigInteger, nullable=False),
        sa.Column("granted_at", sa.BigInteger),
        # Of a granted one: when it may start, and when a job checks it next.
        sa.Column("start_at", sa.BigInteger),
        sa.Column("check_at", sa.BigInteger),
        # How often it was parked because no pass had come for its grant.
        sa.Column("lapses", sa.Integer, nullable=False),
        partial_index_only(f"{prefix}ix_workflow_hold_waiting", "name", "key", "fair_key", "seq", where=WAITING_HOLD),
        partial_index_only(f"{prefix}ix_workflow_hold_active", "name", "key", where=ACTIVE_HOLD),
        full_index_only(f"{prefix}ix_workflow_hold_state", "state", "name", "key", "fair_key", "seq"),
        partial_index(f"{prefix}ix_workflow_hold_check", "check_at", where="check_at IS NOT NULL"),
    )
    return Tables(
        metadata, instance, run, step, event, log, heartbeat, topic_wait, emission, audit, outbox, label, published,
        item, database, queue, attempt, limit, hold,
    )  # fmt: skip
