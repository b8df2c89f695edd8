CREATE TABLE workflow_schema_version (
    version_num VARCHAR(32) NOT NULL, 
    CONSTRAINT workflow_schema_version_pkc PRIMARY KEY (version_num)
);

-- Running upgrade  -> 0001

CREATE TABLE workflow_instance (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    workflow VARCHAR(255) NOT NULL, 
    instance_id VARCHAR(255) NOT NULL, 
    kind VARCHAR(16) NOT NULL, 
    run_number INTEGER NOT NULL, 
    status VARCHAR(16) NOT NULL, 
    claim_token VARCHAR(36), 
    claim_task_id VARCHAR(255), 
    claimed_by VARCHAR(255), 
    lease_until BIGINT, 
    running_step_key VARCHAR(280), 
    running_attempt INTEGER, 
    running_since BIGINT, 
    run_at BIGINT, 
    next_check_at BIGINT, 
    wake_reason VARCHAR(16) NOT NULL, 
    priority SMALLINT NOT NULL, 
    dispatch_count INTEGER NOT NULL, 
    crash_count INTEGER NOT NULL, 
    pause_requested BOOLEAN NOT NULL, 
    version BIGINT NOT NULL, 
    queue VARCHAR(255) NOT NULL, 
    sent_at BIGINT, 
    parent_pk BIGINT, 
    parent_run_number INTEGER, 
    parent_step_key VARCHAR(280), 
    created_at BIGINT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    retention_us BIGINT, 
    retention_until BIGINT, 
    CONSTRAINT uq_workflow_instance UNIQUE (workflow, instance_id)
);

CREATE INDEX ix_workflow_instance_due ON workflow_instance (priority, queue, next_check_at) WHERE next_check_at IS NOT NULL;

CREATE INDEX ix_workflow_instance_sent ON workflow_instance (queue, sent_at) WHERE sent_at IS NOT NULL AND claim_token IS NULL;

CREATE INDEX ix_workflow_instance_list ON workflow_instance (workflow, id);

CREATE INDEX ix_workflow_instance_status ON workflow_instance (workflow, status, id);

CREATE INDEX ix_workflow_instance_retention ON workflow_instance (retention_until) WHERE retention_until IS NOT NULL;

CREATE TABLE workflow_run (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    params TEXT NOT NULL, 
    output TEXT, 
    error_name VARCHAR(255), 
    error_message TEXT, 
    reason TEXT, 
    definition_version INTEGER, 
    created_at BIGINT NOT NULL, 
    started_at BIGINT, 
    completed_at BIGINT, 
    forked_from_instance_id VARCHAR(255), 
    forked_from_run_number INTEGER, 
    forked_from_step_key VARCHAR(280), 
    ancestry TEXT, 
    failed_steps TEXT, 
    commit_id VARCHAR(36) NOT NULL, 
    log_count INTEGER NOT NULL, 
    dropped_log_count INTEGER NOT NULL, 
    PRIMARY KEY (instance_pk, run_number)
);

CREATE TABLE workflow_step (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280) NOT NULL, 
    seq INTEGER NOT NULL, 
    name VARCHAR(256) NOT NULL, 
    type VARCHAR(16) NOT NULL, 
    status VARCHAR(16) NOT NULL, 
    attempts INTEGER NOT NULL, 
    max_attempts INTEGER, 
    timeout_ms BIGINT, 
    next_retry_at BIGINT, 
    wake_at BIGINT, 
    wait_event_type VARCHAR(255), 
    event_seq BIGINT, 
    result TEXT, 
    error_name VARCHAR(255), 
    error_message TEXT, 
    commit_id VARCHAR(36) NOT NULL, 
    created_at BIGINT NOT NULL, 
    started_at BIGINT, 
    finished_at BIGINT, 
    PRIMARY KEY (instance_pk, run_number, step_key)
);

CREATE TABLE workflow_event (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    seq BIGINT NOT NULL, 
    event_id VARCHAR(255) NOT NULL, 
    type VARCHAR(255) NOT NULL, 
    payload TEXT NOT NULL, 
    created_at BIGINT NOT NULL, 
    delivered_at BIGINT, 
    consumed_by_step_key VARCHAR(280), 
    PRIMARY KEY (instance_pk, run_number, seq), 
    CONSTRAINT uq_workflow_event_id UNIQUE (instance_pk, run_number, event_id)
);

CREATE INDEX ix_workflow_event_waiting ON workflow_event (instance_pk, run_number, type, delivered_at, seq);

CREATE TABLE workflow_log (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280), 
    attempt INTEGER, 
    level VARCHAR(8) NOT NULL, 
    category VARCHAR(255) NOT NULL, 
    message TEXT NOT NULL, 
    data TEXT, 
    is_replay BOOLEAN NOT NULL, 
    created_at BIGINT NOT NULL
);

CREATE INDEX ix_workflow_log_run ON workflow_log (instance_pk, run_number, id);

CREATE TABLE workflow_heartbeat (
    id VARCHAR(36) NOT NULL, 
    kind VARCHAR(16) NOT NULL, 
    node VARCHAR(255) NOT NULL, 
    pid BIGINT NOT NULL, 
    queues TEXT NOT NULL, 
    workflows TEXT NOT NULL, 
    started_at BIGINT NOT NULL, 
    seen_at BIGINT NOT NULL, 
    swept_at BIGINT, 
    next_sweep_at BIGINT, 
    pool VARCHAR(255), 
    inventory BIGINT, 
    answered_inventory BIGINT, 
    held_tasks TEXT, 
    received_markers TEXT, 
    outages TEXT, 
    PRIMARY KEY (id)
);

CREATE TABLE workflow_topic_wait (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280) NOT NULL, 
    topic VARCHAR(100) NOT NULL, 
    opened_at BIGINT NOT NULL, 
    PRIMARY KEY (instance_pk, run_number, step_key)
);

CREATE INDEX ix_workflow_topic_wait_topic ON workflow_topic_wait (topic, instance_pk);

CREATE TABLE workflow_item (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280) NOT NULL, 
    position INTEGER NOT NULL, 
    status VARCHAR(16) NOT NULL, 
    attempts INTEGER NOT NULL, 
    due_at BIGINT, 
    task TEXT NOT NULL, 
    answer TEXT, 
    attempt_token VARCHAR(32), 
    loss_count INTEGER NOT NULL, 
    sent_at BIGINT, 
    queue VARCHAR(255), 
    priority SMALLINT, 
    on_lost VARCHAR(8) NOT NULL, 
    PRIMARY KEY (instance_pk, run_number, step_key, position)
);

CREATE INDEX ix_workflow_item_sent ON workflow_item (status, sent_at) WHERE status = 'sent';

CREATE INDEX ix_workflow_item_status ON workflow_item (instance_pk, run_number, step_key, status, position);

CREATE TABLE workflow_emission (
    id VARCHAR(255) NOT NULL, 
    topic VARCHAR(100) NOT NULL, 
    payload TEXT NOT NULL, 
    scope TEXT, 
    cursor_pk BIGINT NOT NULL, 
    end_pk BIGINT NOT NULL, 
    delivered_count INTEGER NOT NULL, 
    created_at BIGINT NOT NULL, 
    next_check_at BIGINT NOT NULL, 
    PRIMARY KEY (id)
);

CREATE INDEX ix_workflow_emission_due ON workflow_emission (next_check_at);

CREATE TABLE workflow_audit (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280) NOT NULL, 
    action VARCHAR(16) NOT NULL, 
    actor VARCHAR(255) NOT NULL, 
    reason TEXT, 
    step_before TEXT NOT NULL, 
    commit_id VARCHAR(36) NOT NULL, 
    created_at BIGINT NOT NULL
);

CREATE INDEX ix_workflow_audit_run ON workflow_audit (instance_pk, run_number, id);

CREATE TABLE workflow_outbox (
    id VARCHAR(36) NOT NULL, 
    kind VARCHAR(16) NOT NULL, 
    name VARCHAR(255) NOT NULL, 
    payload TEXT NOT NULL, 
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    step_key VARCHAR(280), 
    attempts INTEGER NOT NULL, 
    claim_token VARCHAR(36), 
    run_at BIGINT, 
    next_check_at BIGINT, 
    last_error TEXT, 
    created_at BIGINT NOT NULL, 
    PRIMARY KEY (id)
);

CREATE INDEX ix_workflow_outbox_due ON workflow_outbox (next_check_at);

CREATE TABLE workflow_label (
    instance_pk BIGINT NOT NULL, 
    name VARCHAR(64) NOT NULL, 
    value VARCHAR(255) NOT NULL, 
    PRIMARY KEY (instance_pk, name)
);

CREATE INDEX ix_workflow_label_value ON workflow_label (name, value, instance_pk);

CREATE TABLE workflow_published (
    instance_pk BIGINT NOT NULL, 
    run_number INTEGER NOT NULL, 
    "key" VARCHAR(64) NOT NULL, 
    value TEXT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    PRIMARY KEY (instance_pk, run_number, "key")
);

CREATE TABLE workflow_queue (
    name VARCHAR(255) NOT NULL, 
    claimed_sent_at BIGINT NOT NULL, 
    previous_claimed_sent_at BIGINT, 
    recorded_at BIGINT NOT NULL, 
    PRIMARY KEY (name)
);

CREATE TABLE workflow_database (
    singleton SMALLINT NOT NULL, 
    database_id VARCHAR(32) NOT NULL, 
    PRIMARY KEY (singleton)
);

INSERT INTO workflow_database (singleton, database_id) SELECT 1, lower(hex(randomblob(16))) 
WHERE NOT (EXISTS (SELECT * 
FROM workflow_database 
WHERE workflow_database.singleton = 1));

INSERT INTO workflow_schema_version (version_num) VALUES ('0001') RETURNING version_num;

DELETE FROM workflow_audit;
INSERT INTO workflow_audit (id, instance_pk, run_number, step_key, action, actor, reason, step_before, commit_id, created_at) VALUES (1, 18, 2, 'fail', 'skip', 'eve', 'not needed', '{"status": "errored", "type": "do", "attempts": 1, "nextRetryAt": null, "wakeAt": null, "error": {"name": "NonRetryableError", "message": "for good"}}', '8638edee-7fab-7c42-6d40-2421b312577f', 1893456000000000);
DELETE FROM workflow_database;
INSERT INTO workflow_database (singleton, database_id) VALUES (1, '15a005d3c9725d0cde81714eeb46e0a0');
DELETE FROM workflow_emission;
INSERT INTO workflow_emission (id, topic, payload, scope, cursor_pk, end_pk, delivered_count, created_at, next_check_at) VALUES ('emission-1', 'prices', '{"eur":7}', NULL, 0, 3, 0, 1893456120000000, 1893456129000000);
DELETE FROM workflow_event;
INSERT INTO workflow_event (instance_pk, run_number, seq, event_id, type, payload, created_at, delivered_at, consumed_by_step_key) VALUES (1, 1, 6, 'event-1', 'unasked', '{"n":1}', 1893456000000000, NULL, NULL);
INSERT INTO workflow_event (instance_pk, run_number, seq, event_id, type, payload, created_at, delivered_at, consumed_by_step_key) VALUES (4, 1, 8, 'event-2', 'paid', '{"paid":6}', 1893456000000000, 1893456000000000, 'p');
INSERT INTO workflow_event (instance_pk, run_number, seq, event_id, type, payload, created_at, delivered_at, consumed_by_step_key) VALUES (20, 1, 7, 'event-3', 'paid', '5', 1893456120000000, 1893456120000000, '1');
DELETE FROM workflow_heartbeat;
INSERT INTO workflow_heartbeat (id, kind, node, pid, queues, workflows, started_at, seen_at, swept_at, next_sweep_at, pool, inventory, answered_inventory, held_tasks, received_markers, outages) VALUES ('dispatcher-1', 'dispatcher', 'shop', 1, '["durable"]', '[]', 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO workflow_heartbeat (id, kind, node, pid, queues, workflows, started_at, seen_at, swept_at, next_sweep_at, pool, inventory, answered_inventory, held_tasks, received_markers, outages) VALUES ('worker-1', 'worker', 'shop', 1, '["durable"]', '[]', 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
DELETE FROM workflow_instance;
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (1, 'shop', 'sleeping', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (2, 'shop', 'waiting', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1919376000000000, 1919376000000000, 'timer', 0, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (3, 'shop', 'listening', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1919376000000000, 1919376000000000, 'timer', 0, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (4, 'shop', 'gathering', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 12, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (5, 'shop', 'repeating', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (6, 'shop', 'delegating', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1919376000000000, 1919376000000000, 'timer', 0, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (7, 'shop', 'mapping', 'replay', 1, 'active', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893456120000000, 1893456122000000, 'event', 0, 0, 0, 0, 6, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456000000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (8, 'shop', 'losing', 'replay', 1, 'complete', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'event', 0, 0, 0, 0, 9, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (9, 'shop', 'parent', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1924992000000000, 1924992000000000, 'timer', 0, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (10, 'shop', 'paused', 'replay', 1, 'paused', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, NULL, 'timer', 0, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (11, 'shop', 'racing', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542520000000, 1893542520000000, 'timer', 0, 0, 0, 0, 10, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (12, 'shop', 'rewound', 'replay', 2, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 8, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (13, 'shop', 'complete', 'replay', 1, 'complete', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'start', 1, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (14, 'shop', 'errored', 'replay', 1, 'errored', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'start', 1, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (15, 'shop', 'terminated', 'replay', 1, 'terminated', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'timer', 0, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (16, 'child', 'child-of-parent', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 3, 'durable', NULL, 9, 1, 'child', 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (17, 'shop', 'forked', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542400000000, 1893542400000000, 'timer', 0, 0, 0, 0, 7, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (18, 'shop', 'corrected', 'replay', 2, 'complete', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'start', 1, 0, 0, 0, 10, 'durable', NULL, NULL, NULL, NULL, 1893456000000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (19, 'order', 'linear-waiting', 'linear', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1919376120000000, 1919376120000000, 'timer', 0, 0, 0, 0, 6, 'durable', NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (20, 'order', 'linear-done', 'linear', 1, 'complete', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'event', 0, 0, 0, 0, 15, 'durable', NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (21, 'order', 'linear-dead', 'linear', 1, 'errored', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'start', 1, 0, 0, 0, 7, 'durable', NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (22, 'order', 'linear-ready', 'linear', 1, 'active', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893456120000000, 1893456122000000, 'start', 1, 0, 0, 0, 1, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (23, 'shop', 'due', 'replay', 1, 'active', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893456120000000, 1893456122000000, 'start', 1, 0, 0, 0, 1, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (24, 'shop', 'crashed', 'replay', 1, 'active', '11adcb6f-f398-d8b1-9852-a92cc2d9a9e6', 'task', 'worker-2', 1893456150000000, NULL, NULL, NULL, 1893456120000000, 1893456150000000, 'start', 1, 0, 0, 0, 3, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (25, 'shop', 'branching', 'replay', 1, 'active', '61a8ca9e-26b0-5cb0-bb6b-048e510a0167', 'task', 'worker-3', 1893456150000000, NULL, NULL, NULL, 1893456120000000, 1893456150000000, 'resume', 0, 0, 0, 0, 7, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (26, 'order', 'linear-crashed', 'linear', 1, 'active', '80aee2c2-f7d1-3423-940a-cf21247afdef', 'task', 'worker-4', 1893456150000000, NULL, NULL, NULL, 1893456120000000, 1893456150000000, 'start', 1, 0, 0, 0, 3, 'durable', 1893456120000000, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
INSERT INTO workflow_instance (id, workflow, instance_id, kind, run_number, status, claim_token, claim_task_id, claimed_by, lease_until, running_step_key, running_attempt, running_since, run_at, next_check_at, wake_reason, priority, dispatch_count, crash_count, pause_requested, version, queue, sent_at, parent_pk, parent_run_number, parent_step_key, created_at, updated_at, retention_us, retention_until) VALUES (27, 'shop', 'labelled', 'replay', 1, 'waiting', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1893542520000000, 1893542520000000, 'timer', 0, 0, 0, 0, 5, 'durable', NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL);
DELETE FROM workflow_item;
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (6, 1, 'work', 0, 'sent', 1, 1919376000000000, '{"name":"frozen.work","args":[0],"kwargs":{},"options":{}}', NULL, '298de8d5f2b1fbd9e895b8a736c251f3', 0, 1893456000000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 0, 'done', 1, NULL, '{"name":"frozen.work","args":[0],"kwargs":{},"options":{}}', '{"output":20}', 'caefe32adcb75eadd4de4ef32ce1e4e8', 0, 1893456000000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 1, 'failed', 1, NULL, '{"name":"frozen.work","args":[1],"kwargs":{},"options":{}}', '{"error":{"name":"OSError","message":"once more"}}', 'ffe2e97f4f1101d04b6f4a95d221c587', 0, 1893456000000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 2, 'sent', 1, 1919376120000000, '{"name":"frozen.work","args":[2],"kwargs":{},"options":{}}', NULL, '56169930b14cec984dc433e20b5ed2b1', 0, 1893456120000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 3, 'sent', 1, 1919376120000000, '{"name":"frozen.work","args":[3],"kwargs":{},"options":{}}', NULL, '2b7778e99a98c1a6d3daef1a99260b64', 0, 1893456120000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 4, 'pending', 0, NULL, '{"name":"frozen.work","args":[4],"kwargs":{},"options":{}}', NULL, NULL, 0, NULL, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (7, 1, 'work', 5, 'pending', 0, NULL, '{"name":"frozen.work","args":[5],"kwargs":{},"options":{}}', NULL, NULL, 0, NULL, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (8, 1, 'work', 0, 'done', 1, NULL, '{"name":"frozen.work","args":[0],"kwargs":{},"options":{}}', '{"output":30}', '024fcc9f107b81b1c690b59d91f5d226', 0, 1893456000000000, NULL, NULL, 'resend');
INSERT INTO workflow_item (instance_pk, run_number, step_key, position, status, attempts, due_at, task, answer, attempt_token, loss_count, sent_at, queue, priority, on_lost) VALUES (8, 1, 'work', 1, 'dead', 1, NULL, '{"name":"frozen.work","args":[1],"kwargs":{},"options":{}}', '{"error":{"name":"ValueError","message":"no"}}', '909e084e5b2fe0c30196ec061f07923d', 0, 1893456000000000, NULL, NULL, 'resend');
DELETE FROM workflow_label;
INSERT INTO workflow_label (instance_pk, name, value) VALUES (1, 'way', 'sleeping');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (2, 'way', 'waiting');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (3, 'way', 'listening');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (4, 'way', 'gathering');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (5, 'way', 'repeating');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (6, 'way', 'delegating');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (7, 'way', 'mapping');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (8, 'way', 'losing');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (9, 'way', 'parent');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (10, 'way', 'paused');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (11, 'way', 'racing');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (12, 'way', 'rewound');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (13, 'way', 'complete');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (14, 'way', 'errored');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (15, 'way', 'terminated');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (17, 'way', 'sleeping');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (18, 'way', 'corrected');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (25, 'way', 'branching');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (27, 'of', 'shop');
INSERT INTO workflow_label (instance_pk, name, value) VALUES (27, 'way', 'labelled');
DELETE FROM workflow_log;
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (1, 1, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"sleeping"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (2, 2, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"waiting"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (3, 3, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"listening"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (4, 4, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"gathering"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (5, 5, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"repeating"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (6, 6, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"delegating"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (7, 7, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"mapping"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (8, 8, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"losing"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (9, 9, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"parent"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (10, 10, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"paused"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (11, 11, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"racing"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (12, 12, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"rewound"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (13, 13, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"complete"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (14, 14, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"errored"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (15, 15, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"terminated"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (16, 12, 2, NULL, NULL, 'info', 'workflow', 'started', '{"way":"rewound"}', 1, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (17, 17, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"sleeping"}', 1, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (18, 4, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"gathering"}', 1, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (19, 18, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"corrected"}', 0, 1893456000000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (20, 18, 2, NULL, NULL, 'info', 'workflow', 'started', '{"way":"corrected"}', 1, 1893456120000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (21, 11, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"racing"}', 1, 1893456120000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (22, 8, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"losing"}', 1, 1893456120000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (23, 25, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"branching"}', 0, 1893456120000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (24, 25, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"branching"}', 1, 1893456120000000);
INSERT INTO workflow_log (id, instance_pk, run_number, step_key, attempt, level, category, message, data, is_replay, created_at) VALUES (25, 27, 1, NULL, NULL, 'info', 'workflow', 'started', '{"way":"labelled"}', 0, 1893456120000000);
DELETE FROM workflow_outbox;
INSERT INTO workflow_outbox (id, kind, name, payload, instance_pk, run_number, step_key, attempts, claim_token, run_at, next_check_at, last_error, created_at) VALUES ('3aff124e-1f03-57c7-989c-61821e5710f0', 'event', 'Frozen', '{"way":"labelled"}', 27, 1, 'charge', 1, NULL, NULL, NULL, 'no handler', 1893456120000000);
INSERT INTO workflow_outbox (id, kind, name, payload, instance_pk, run_number, step_key, attempts, claim_token, run_at, next_check_at, last_error, created_at) VALUES ('783350fa-4d0a-5e3a-96c4-8e0011c80c3c', 'task', 'frozen.mail', '{"args":["labelled"],"kwargs":{},"options":{}}', 27, 1, 'charge', 0, NULL, 1893456120000000, 1893456122000000, NULL, 1893456120000000);
INSERT INTO workflow_outbox (id, kind, name, payload, instance_pk, run_number, step_key, attempts, claim_token, run_at, next_check_at, last_error, created_at) VALUES ('c9a6992d-7ef3-5e0d-a3c7-5764793c0e27', 'task', 'frozen.work', '{"args":[2],"kwargs":{},"options":{},"reference":["15a005d3c9725d0cde81714eeb46e0a0","shop","mapping",1,"item:7:2:1:work","56169930b14cec984dc433e20b5ed2b1",null,0]}', 7, 1, 'work', 0, NULL, 1893456120000000, 1893456122000000, NULL, 1893456120000000);
INSERT INTO workflow_outbox (id, kind, name, payload, instance_pk, run_number, step_key, attempts, claim_token, run_at, next_check_at, last_error, created_at) VALUES ('f5c66d0d-7064-57ee-80df-b82b66200c03', 'task', 'frozen.work', '{"args":[3],"kwargs":{},"options":{},"reference":["15a005d3c9725d0cde81714eeb46e0a0","shop","mapping",1,"item:7:3:1:work","2b7778e99a98c1a6d3daef1a99260b64",null,0]}', 7, 1, 'work', 0, NULL, 1893456120000000, 1893456122000000, NULL, 1893456120000000);
DELETE FROM workflow_published;
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (1, 1, 'way', '"sleeping"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (2, 1, 'way', '"waiting"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (3, 1, 'way', '"listening"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (4, 1, 'way', '"gathering"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (5, 1, 'way', '"repeating"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (6, 1, 'way', '"delegating"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (7, 1, 'way', '"mapping"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (8, 1, 'way', '"losing"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (9, 1, 'way', '"parent"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (10, 1, 'way', '"paused"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (11, 1, 'way', '"racing"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (12, 1, 'way', '"rewound"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (13, 1, 'way', '"complete"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (14, 1, 'way', '"errored"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (15, 1, 'way', '"terminated"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (18, 1, 'way', '"corrected"', 1893456000000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (24, 1, 'way', '"crashed"', 1893456120000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (25, 1, 'way', '"branching"', 1893456120000000);
INSERT INTO workflow_published (instance_pk, run_number, "key", value, updated_at) VALUES (27, 1, 'way', '"labelled"', 1893456120000000);
DELETE FROM workflow_queue;
INSERT INTO workflow_queue (name, claimed_sent_at, previous_claimed_sent_at, recorded_at) VALUES ('durable', 1893456000000000, NULL, 1893456000000000);
DELETE FROM workflow_run;
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (1, 1, '"sleeping"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'a8acc6bd-8008-e21d-fe18-97e22e38a486', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (2, 1, '"waiting"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, '8812be76-3779-16b3-5f65-ca3ec868ae11', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (3, 1, '"listening"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, '22135843-9388-b074-9d7b-90fef6b23655', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (4, 1, '"gathering"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'a197ff11-c09d-363b-bf1c-4abd915b3551', 2, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (5, 1, '"repeating"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, '0215d2ca-cc4e-f69c-f257-ef6be01ff9f8', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (6, 1, '"delegating"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, '9dd73097-c0a2-c55a-f329-574aceb7a807', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (7, 1, '"mapping"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'ab16e212-39ba-da89-df36-d903a647412f', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (8, 1, '"losing"', '[30,"ValueError: no"]', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, 'ead72fd6-5166-f03e-eb3d-cef5faf3af46', 2, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (9, 1, '"parent"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, '1d3fa176-ce3b-099a-7ea0-5532ec2a378a', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (10, 1, '"paused"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'ef336508-2e7f-0a2b-32b5-911c39e0c0b8', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (11, 1, '"racing"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'd2ad96a7-6ba3-989c-9c83-9221f93b4820', 2, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (12, 1, '"rewound"', NULL, NULL, NULL, 'again', NULL, 1893456000000000, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, '15a094c1-7943-7252-a811-631de401d8ba', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (12, 2, '"rewound"', NULL, NULL, NULL, 'again', NULL, 1893456000000000, 1893456000000000, NULL, 'rewound', 1, 'nap', '{"parts": [["shop/rewound/1", 1893456000000000, 1]], "carried": {}}', NULL, '14af484d-2fd2-5658-89d5-b248beb4a1ce', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (13, 1, '"complete"', '"done"', NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, '170decbf-864a-4dd7-ae32-9511f81496e0', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (14, 1, '"errored"', NULL, 'NonRetryableError', 'for good', NULL, NULL, 1893456000000000, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, '{"keys": ["fail"], "position": 2}', '5944fcc6-8ce4-fdac-0101-4592c6c7ca26', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (15, 1, '"terminated"', NULL, NULL, NULL, 'by the customer', NULL, 1893456000000000, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, '2f857d78-d482-5254-50d7-a0f5d2ce6432', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (16, 1, '"parent"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, NULL, NULL, 'adf5857a-d161-acb9-4e67-b4d4cf6e4a72', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (17, 1, '"sleeping"', NULL, NULL, NULL, NULL, NULL, 1893456000000000, 1893456000000000, NULL, 'sleeping', 1, 'nap', '{"parts": [["shop/sleeping/1", 1893456000000000, 1]], "carried": {}}', NULL, '95a11c81-6ab5-e0a4-5cf3-575e23c2ecbb', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (18, 1, '"corrected"', NULL, 'NonRetryableError', 'for good', NULL, NULL, 1893456000000000, 1893456000000000, 1893456000000000, NULL, NULL, NULL, NULL, '{"keys": ["fail"], "position": 2}', 'ebcb2ee3-e490-210a-8a1f-f05b8100e433', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (18, 2, '"corrected"', 'null', NULL, NULL, 'not needed', NULL, 1893456000000000, 1893456120000000, 1893456120000000, 'corrected', 1, 'fail', '{"parts": [["shop/corrected/1", 1893456000000000, 2]], "carried": {"fail": "shop/corrected/1"}}', NULL, '8638edee-7fab-7c42-6d40-2421b312577f', 1, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (19, 1, '{"way":"linear-waiting"}', NULL, NULL, NULL, NULL, 1, 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, '6d10c549-ccae-3363-4126-8e918e24a586', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (20, 1, '{"way":"linear-done"}', '"SHIP done"', NULL, NULL, NULL, 1, 1893456120000000, 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, '9da73fa1-50d2-8c70-f4fd-0cfaa6a3770e', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (21, 1, '{"way":"linear-dead"}', NULL, 'NonRetryableError', 'no', NULL, 1, 1893456120000000, 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, 'ff8ddf68-7699-d37a-f5d0-e38f8f3db98c', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (22, 1, '{"way":"linear-ready"}', NULL, NULL, NULL, NULL, 1, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '923dbd18-7526-86fa-7787-372241083c11', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (23, 1, '"due"', NULL, NULL, NULL, NULL, NULL, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'a1a62d21-a317-ef9a-1863-40be54e4ac5c', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (24, 1, '"crashed"', NULL, NULL, NULL, NULL, NULL, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '5248c384-53d3-efbc-ee63-af26c78961c1', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (25, 1, '"branching"', NULL, NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, 'b48d16ab-1b50-2df0-94a9-8ab87ea0b8ad', 2, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (26, 1, '{"way":"linear-crashed"}', NULL, NULL, NULL, NULL, 1, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '255bd248-fae2-0cff-a8cb-981080d5735f', 0, 0);
INSERT INTO workflow_run (instance_pk, run_number, params, output, error_name, error_message, reason, definition_version, created_at, started_at, completed_at, forked_from_instance_id, forked_from_run_number, forked_from_step_key, ancestry, failed_steps, commit_id, log_count, dropped_log_count) VALUES (27, 1, '"labelled"', NULL, NULL, NULL, NULL, NULL, 1893456120000000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, '33c1dd85-ab25-8fe1-1c2f-cbeb8593eb7c', 1, 0);
DELETE FROM workflow_step;
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (1, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"sleeping"}', NULL, NULL, 'e1a8c9a3-98f2-f51f-10b9-777f726436f3', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (1, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, 'd7fbd95c-739d-073c-6cdf-de9d1f4302de', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (2, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"waiting"}', NULL, NULL, '8d91e91d-9d1e-9bc7-2969-f81cd746121f', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (2, 1, 'payment', 2, 'payment', 'waitForEvent', 'waiting', 0, NULL, NULL, NULL, 1919376000000000, 'paid', NULL, NULL, NULL, NULL, 'de95291c-2d03-cb3f-0e91-0e5727200fb7', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (3, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"listening"}', NULL, NULL, 'd8767ff9-15f5-b0a2-e739-bf224340cd4b', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (3, 1, 'price', 2, 'price', 'waitForEvent', 'waiting', 0, NULL, NULL, NULL, 1919376000000000, 'topic:2:prices', NULL, NULL, NULL, NULL, 'a0ce639d-b029-9db5-edeb-4508a5b6cbdc', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (4, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"gathering"}', NULL, NULL, '64151157-996e-c6be-f3c3-275bb75e9319', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (4, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, '2b7ffd1e-0a41-d226-21b8-d47401b116d2', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (4, 1, 'p', 3, 'p', 'waitForEvent', 'completed', 0, NULL, NULL, NULL, 1894233600000000, 'paid', NULL, '{"type":"paid","at":1893456000000000,"payload":{"paid":6}}', NULL, NULL, 'c7416e46-1120-e4a3-52f2-722a10b3e022', 1893456000000000, NULL, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (5, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"repeating"}', NULL, NULL, '15ba612c-e0c2-a1eb-3d00-73bec6186efb', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (5, 1, 'flaky', 2, 'flaky', 'do', 'waiting', 1, 4, 600000, 1893542400000000, NULL, NULL, NULL, NULL, 'OSError', 'not yet', '78b9b3b1-29de-4f50-cde1-9aa790c2dd05', 1893456000000000, 1893456000000000, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (6, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"delegating"}', NULL, NULL, 'd0d769c2-f7ab-b36b-32d3-0abce0ec6749', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (6, 1, 'work', 2, 'work', 'task', 'waiting', 1, 1, 25920000000, NULL, 1919376000000000, 'task:6:2:1:frozen.work', NULL, NULL, NULL, NULL, 'f34b72f4-f1a6-e0fe-0392-d39f958811bf', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (7, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"mapping"}', NULL, NULL, '97037690-58b2-acb8-509c-7fe7f1576dba', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (7, 1, 'work', 2, 'work', 'map', 'waiting', 1, 3, 25920000000, NULL, 1919376000000000, 'task:7:2:0:frozen.work', NULL, NULL, NULL, NULL, '98e0cff1-4e39-a2b4-7d42-df61a916bbd1', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (8, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"losing"}', NULL, NULL, '25db6c40-b280-5498-e46b-d1539ac3f403', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (8, 1, 'work', 2, 'work', 'map', 'completed', 1, 1, 25920000000, NULL, NULL, 'task:8:2:0:frozen.work', NULL, NULL, NULL, NULL, '62d92afe-cb23-e4d1-0f0f-04594e95521d', 1893456000000000, NULL, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (9, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"parent"}', NULL, NULL, '44737086-5a56-5189-458c-280aba119a33', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (9, 1, 'child', 2, 'child', 'child', 'waiting', 1, NULL, NULL, NULL, 1924992000000000, 'child:2:child/child-of-parent', NULL, NULL, NULL, NULL, '8b8d45f1-bc07-6dd3-b56b-713410ebdf02', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (10, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"paused"}', NULL, NULL, 'cfaf58a4-6e76-ca45-267d-700406615722', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (10, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, 'f87f2383-4187-e746-472e-b9b2eef964c3', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (11, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"racing"}', NULL, NULL, '1b960769-a8d2-90e0-9e4d-28658c1d2ef0', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (11, 1, 'nap', 5, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542520000000, NULL, NULL, NULL, NULL, NULL, '3a81b326-976a-8bee-804a-6f2d67b9f0f4', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (11, 1, 'no', 3, 'no', 'waitForEvent', 'cancelled', 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'a51aeacc-ff25-bb23-6021-1e426bf57066', 1893456000000000, NULL, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (11, 1, 'race', 4, 'race', 'do', 'completed', 1, NULL, NULL, NULL, NULL, NULL, NULL, '"short"', NULL, NULL, 'a51aeacc-ff25-bb23-6021-1e426bf57066', 1893456120000000, NULL, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (11, 1, 'short', 2, 'short', 'sleep', 'completed', 0, NULL, NULL, NULL, 1893456060000000, NULL, NULL, NULL, NULL, NULL, 'a51aeacc-ff25-bb23-6021-1e426bf57066', 1893456000000000, NULL, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (12, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"rewound"}', NULL, NULL, '7365bbf9-c23f-832f-d0d1-dac06eb81845', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (12, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, '2134e0f0-511f-cb7e-039e-582e1f37e8df', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (12, 2, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"rewound"}', NULL, NULL, '7365bbf9-c23f-832f-d0d1-dac06eb81845', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (12, 2, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, 'c3904b08-3d6d-2c3a-2c48-099f22847cb9', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (13, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"complete"}', NULL, NULL, 'f40febe5-a575-b104-2a81-2257bf51b9da', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (14, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"errored"}', NULL, NULL, '6cf12f72-b348-7d23-3c07-66d652a23f68', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (14, 1, 'fail', 2, 'fail', 'do', 'errored', 1, 6, 600000, NULL, NULL, NULL, NULL, NULL, 'NonRetryableError', 'for good', 'e6da1e48-77f0-9f52-6031-e2cf3bb475e5', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (15, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"terminated"}', NULL, NULL, '5f226e8a-730d-7ff9-22ca-a4979839b762', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (15, 1, 'nap', 2, 'nap', 'sleep', 'cancelled', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, '27a07b9c-4f62-6b5c-0e9c-abe8f62cc275', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (16, 1, 'nap', 1, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, 'ae5624a7-e68d-bb63-6595-881ec71914dc', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (17, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"sleeping"}', NULL, NULL, 'e1a8c9a3-98f2-f51f-10b9-777f726436f3', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (17, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542400000000, NULL, NULL, NULL, NULL, NULL, '4992e8ee-2064-0617-1b75-9f7925c52075', 1893456000000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (18, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"corrected"}', NULL, NULL, '9ef18809-07b9-9f71-0dfb-2c4944d6b818', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (18, 1, 'fail', 2, 'fail', 'do', 'errored', 1, 6, 600000, NULL, NULL, NULL, NULL, NULL, 'NonRetryableError', 'for good', 'd054d1d1-0725-80d0-e642-0d070ed30614', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (18, 2, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"corrected"}', NULL, NULL, '9ef18809-07b9-9f71-0dfb-2c4944d6b818', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (18, 2, 'fail', 2, 'fail', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, 'null', NULL, NULL, '8638edee-7fab-7c42-6d40-2421b312577f', 1893456000000000, 1893456000000000, 1893456000000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (19, 1, '0', 0, 'VALIDATE', 'linear', 'DONE', 0, 6, 600000, NULL, NULL, NULL, NULL, '"VALIDATE done"', NULL, NULL, 'dc614a3c-68a6-389f-51a3-30d958783508', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (19, 1, '1', 1, 'PAY', 'linear', 'WAITING', 0, 6, 600000, NULL, 1919376120000000, 'paid', NULL, NULL, NULL, NULL, '9f2b7be5-e1ae-a9ce-66d3-63507b764405', 1893456120000000, 1893456120000000, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (19, 1, '2', 2, 'SHIP', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '6d10c549-ccae-3363-4126-8e918e24a586', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (20, 1, '0', 0, 'VALIDATE', 'linear', 'DONE', 0, 6, 600000, NULL, NULL, NULL, NULL, '"VALIDATE done"', NULL, NULL, 'c05431eb-73b6-61b6-db20-365335b7b841', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (20, 1, '1', 1, 'PAY', 'linear', 'DONE', 0, 6, 600000, NULL, NULL, NULL, 7, '5', NULL, NULL, '31eb4110-364b-2d40-5c26-59d8cbe55c25', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (20, 1, '2', 2, 'SHIP', 'linear', 'DONE', 0, 6, 600000, NULL, NULL, NULL, NULL, '"SHIP done"', NULL, NULL, '0c57a0e9-3831-e879-da97-5ff04b9ae5b5', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (21, 1, '0', 0, 'VALIDATE', 'linear', 'DONE', 0, 6, 600000, NULL, NULL, NULL, NULL, '"VALIDATE done"', NULL, NULL, '1404763e-af3e-9ce2-1446-3e016590f526', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (21, 1, '1', 1, 'PAY', 'linear', 'DEAD', 1, 6, 600000, NULL, NULL, NULL, NULL, NULL, 'NonRetryableError', 'no', 'e57c5454-8036-c0a2-c1ce-cfc211452de0', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (21, 1, '2', 2, 'SHIP', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'ff8ddf68-7699-d37a-f5d0-e38f8f3db98c', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (22, 1, '0', 0, 'VALIDATE', 'linear', 'READY', 0, 6, 600000, 1893456120000000, NULL, NULL, NULL, NULL, NULL, NULL, '923dbd18-7526-86fa-7787-372241083c11', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (22, 1, '1', 1, 'PAY', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '923dbd18-7526-86fa-7787-372241083c11', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (22, 1, '2', 2, 'SHIP', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '923dbd18-7526-86fa-7787-372241083c11', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (25, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"branching"}', NULL, NULL, '8f75741b-22b4-329f-4ef6-e2e134529532', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (25, 1, 'one', 2, 'one', 'do', 'pending', 1, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '002c98e7-c515-4adc-93ca-9a9ea91c4c35', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (25, 1, 'two', 3, 'two', 'do', 'pending', 1, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'fd992481-be3d-9f66-443d-fb16f45be3b2', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (26, 1, '0', 0, 'VALIDATE', 'linear', 'RUNNING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '5702eb37-df01-165d-72d3-9dd2557eafac', 1893456120000000, 1893456120000000, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (26, 1, '1', 1, 'PAY', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '255bd248-fae2-0cff-a8cb-981080d5735f', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (26, 1, '2', 2, 'SHIP', 'linear', 'PENDING', 0, 6, 600000, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '255bd248-fae2-0cff-a8cb-981080d5735f', 1893456120000000, NULL, NULL);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (27, 1, 'charge', 1, 'charge', 'do', 'completed', 1, 6, 600000, NULL, NULL, NULL, NULL, '{"way":"labelled"}', NULL, NULL, 'e56201d5-bdb7-d22e-1251-3afb5a6e7357', 1893456120000000, 1893456120000000, 1893456120000000);
INSERT INTO workflow_step (instance_pk, run_number, step_key, seq, name, type, status, attempts, max_attempts, timeout_ms, next_retry_at, wake_at, wait_event_type, event_seq, result, error_name, error_message, commit_id, created_at, started_at, finished_at) VALUES (27, 1, 'nap', 2, 'nap', 'sleep', 'waiting', 0, NULL, NULL, NULL, 1893542520000000, NULL, NULL, NULL, NULL, NULL, 'a04ccf38-df9e-33b0-f6ed-2576f8e65e93', 1893456120000000, NULL, NULL);
DELETE FROM workflow_topic_wait;
INSERT INTO workflow_topic_wait (instance_pk, run_number, step_key, topic, opened_at) VALUES (3, 1, 'price', 'prices', 1893456000000000);
