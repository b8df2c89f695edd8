"""What the database itself writes down while a schedule runs, in triggers: no process can forget, or die in between.

author_arrow     each change of a linear step's row
author_lost      each step that failed because the end of an attempt is unknown
author_emission  each emission that was started; ``over``: when its row was removed
author_meant     the waits that were open when it began, and had got nothing yet
author_missed    those of them that were open still when it was over, and had got nothing
author_emitted   each step that emits, when it was recorded, and how many waited then
author_message    each message that was put into the outbox; ``asks``: the event type of the answer that it asks for
author_attempt   each change of a step that others do; ``payload``: of the answer that it consumed, ``in_time``: how
                 many answers had come by its deadline that nobody had consumed
author_answer    each answer; ``asking``: how many steps waited for it
author_end       each end of a child for which a step waited that had no answer
"""

from __future__ import annotations

_OPEN = """
    workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
    WHERE s.type = 'waitForEvent' AND s.status = 'waiting' AND i.status NOT IN ('complete', 'errored', 'terminated')
      AND s.wake_at >= author_now() AND NOT EXISTS (
        SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk AND e.run_number = s.run_number
          AND e.type = s.wait_event_type)"""

IS_COPY = """EXISTS (
    SELECT 1 FROM workflow_step c WHERE c.step_key = {0}.step_key AND c.commit_id = {0}.commit_id
      AND (c.instance_pk < {0}.instance_pk OR c.instance_pk = {0}.instance_pk AND c.run_number < {0}.run_number))"""


def _emitted(name: str, when: str) -> str:
    return f"""
        CREATE TRIGGER {name} AFTER {when}
          AND NEW.status IN ('completed', 'DONE') AND NEW.name LIKE 'emit%.%' AND NOT {IS_COPY.format("NEW")}
        BEGIN
            INSERT INTO author_emitted
            SELECT '"' || o.instance_id || ' ' || NEW.run_number || ' ' || NEW.name || '"', (
              SELECT count(*) FROM {_OPEN}
                AND s.wait_event_type LIKE 'topic:%:' || substr(NEW.name, instr(NEW.name, '.') + 1))
            FROM workflow_instance o WHERE o.id = NEW.instance_pk;
        END;"""


def _lost(name: str, when: str) -> str:
    return f"""
        CREATE TRIGGER {name} AFTER {when} AND NEW.error_name = 'OutcomeUnknown' AND NOT {IS_COPY.format("NEW")}
        BEGIN
            INSERT INTO author_lost VALUES (NEW.instance_pk, NEW.run_number, NEW.step_key);
        END;"""


SCRIPT = f"""
    CREATE TABLE author_arrow (
        pk, run, step_key, old, new, attempts, error, old_event, new_event, wait_type, deadline, at);
    CREATE TRIGGER author_arrows AFTER UPDATE ON workflow_step WHEN OLD.type = 'linear'
    BEGIN
        INSERT INTO author_arrow VALUES (
            NEW.instance_pk, NEW.run_number, NEW.step_key, OLD.status, NEW.status, NEW.attempts - OLD.attempts,
            NEW.error_name, OLD.event_seq, NEW.event_seq, OLD.wait_event_type, OLD.wake_at, NEW.started_at);
    END;

    CREATE TABLE author_lost (pk, run, step_key);
    {_lost("author_loses", "INSERT ON workflow_step WHEN TRUE")}
    {_lost("author_loses_later", "UPDATE ON workflow_step WHEN OLD.commit_id <> NEW.commit_id")}

    CREATE TABLE author_emission (nr INTEGER PRIMARY KEY, id, topic, payload, at, over);
    CREATE TABLE author_meant (nr, pk, run, step_key, wait_type);
    CREATE TABLE author_missed (nr, pk, run, step_key, wait_type);
    CREATE TRIGGER author_begins AFTER INSERT ON workflow_emission
    BEGIN
        INSERT INTO author_emission VALUES (NULL, NEW.id, NEW.topic, NEW.payload, NEW.created_at, NULL);
        INSERT INTO author_meant
        SELECT (SELECT max(nr) FROM author_emission), s.instance_pk, s.run_number, s.step_key, s.wait_event_type
        FROM {_OPEN} AND s.wait_event_type LIKE 'topic:%:' || NEW.topic;
    END;
    CREATE TRIGGER author_ends AFTER DELETE ON workflow_emission
    BEGIN
        INSERT INTO author_missed
        SELECT m.* FROM author_meant m JOIN author_emission a ON a.nr = m.nr AND a.id = OLD.id AND a.over IS NULL
        WHERE (m.pk, m.run, m.step_key, m.wait_type) IN (
          SELECT s.instance_pk, s.run_number, s.step_key, s.wait_event_type FROM {_OPEN})
          AND NOT EXISTS (  -- a run that got it before gets it no second time
            SELECT 1 FROM workflow_event e WHERE e.instance_pk = m.pk AND e.run_number = m.run
              AND (e.event_id = OLD.id OR e.event_id LIKE OLD.id || char(31) || '%'));
        UPDATE author_emission SET over = author_now() WHERE id = OLD.id AND over IS NULL;
    END;

    CREATE TABLE author_emitted (payload, waiting);
    {_emitted("author_emits", "INSERT ON workflow_step WHEN NEW.status IS NOT NULL")}
    {_emitted("author_emits_later", "UPDATE ON workflow_step WHEN OLD.status <> NEW.status")}

    CREATE TABLE author_message (id, kind, pk, run, step_key, asks);
    CREATE TRIGGER author_writes AFTER INSERT ON workflow_outbox
    BEGIN
        INSERT INTO author_message VALUES (
            NEW.id, NEW.kind, NEW.instance_pk, NEW.run_number, NEW.step_key,
            json_extract(NEW.payload, '$.reference[4]'));
    END;

    CREATE TABLE author_attempt (
        pk, run, step_key, type, seq, old, new, old_asks, asks, attempts, more, most, deadline, next_deadline, due,
        timeout, error, result, payload, in_time, at);
    CREATE TRIGGER author_asks AFTER INSERT ON workflow_step
      WHEN NEW.type IN ('task', 'child') AND NEW.status = 'waiting'
    BEGIN
        INSERT INTO author_attempt VALUES (
            NEW.instance_pk, NEW.run_number, NEW.step_key, NEW.type, NEW.seq, 'new', NEW.status, NULL,
            NEW.wait_event_type, NEW.attempts, NEW.attempts, NEW.max_attempts, NULL, NEW.wake_at, NULL,
            NEW.timeout_ms * 1000, NULL, NULL, NULL, 0, author_now());
    END;
    CREATE TRIGGER author_asks_again AFTER UPDATE ON workflow_step WHEN OLD.type IN ('task', 'child')
    BEGIN
        INSERT INTO author_attempt VALUES (
            NEW.instance_pk, NEW.run_number, NEW.step_key, NEW.type, NEW.seq, OLD.status, NEW.status,
            OLD.wait_event_type, NEW.wait_event_type, NEW.attempts, NEW.attempts - OLD.attempts, NEW.max_attempts,
            OLD.wake_at, NEW.wake_at, OLD.next_retry_at, NEW.timeout_ms * 1000, NEW.error_name, NEW.result,
            (SELECT e.payload FROM workflow_event e WHERE e.instance_pk = OLD.instance_pk
               AND e.run_number = OLD.run_number AND e.type = OLD.wait_event_type
               AND e.consumed_by_step_key = OLD.step_key),
            (SELECT count(*) FROM workflow_event e WHERE e.instance_pk = OLD.instance_pk
               AND e.run_number = OLD.run_number AND e.type = OLD.wait_event_type
               AND e.consumed_by_step_key IS NULL AND e.created_at <= OLD.wake_at),
            author_now());
    END;

    CREATE TABLE author_answer (pk, run, type, payload, asking);
    CREATE TRIGGER author_answers AFTER INSERT ON workflow_event
      WHEN (NEW.type LIKE 'task:%' OR NEW.type LIKE 'child:%') AND NEW.consumed_by_step_key IS NULL
    BEGIN
        INSERT INTO author_answer
        SELECT NEW.instance_pk, NEW.run_number, NEW.type, NEW.payload, count(*) FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
        WHERE i.id = NEW.instance_pk AND i.run_number = NEW.run_number AND s.wait_event_type = NEW.type
          AND s.status = 'waiting' AND i.status NOT IN ('complete', 'errored', 'terminated');
    END;

    CREATE TABLE author_end (pk, run, status, parent_pk, parent_run, type);
    CREATE TRIGGER author_children AFTER UPDATE ON workflow_instance
      WHEN NEW.parent_pk IS NOT NULL AND OLD.status NOT IN ('complete', 'errored', 'terminated')
        AND NEW.status IN ('complete', 'errored', 'terminated')
    BEGIN
        INSERT INTO author_end
        SELECT NEW.id, NEW.run_number, NEW.status, s.instance_pk, s.run_number, s.wait_event_type FROM workflow_step s
        JOIN workflow_instance p ON p.id = s.instance_pk AND p.run_number = s.run_number
        WHERE s.instance_pk = NEW.parent_pk AND s.run_number = NEW.parent_run_number
          AND s.step_key = NEW.parent_step_key AND s.type = 'child' AND s.status = 'waiting'
          AND p.status NOT IN ('complete', 'errored', 'terminated') AND NOT EXISTS (
            SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk AND e.run_number = s.run_number
              AND e.type = s.wait_event_type);
    END;
"""

WAITING = f"SELECT count(*) FROM {_OPEN} AND s.wait_event_type LIKE 'topic:%:' || ?"
"""How many wait on a topic."""

COUNTS = """
    SELECT old || ' to ' || new, count(*) FROM author_arrow GROUP BY 1
    UNION ALL SELECT error, count(*) FROM author_arrow WHERE attempts = 1 GROUP BY 1
    UNION ALL SELECT type || ' ' || old || ' to ' || new, count(*) FROM author_attempt GROUP BY 1
    UNION ALL SELECT type || ' errored: ' || error_name, count(*) FROM workflow_step
      WHERE type IN ('task', 'child') AND status = 'errored' GROUP BY 1
    UNION ALL SELECT 'Cancelled raised', count(*) FROM (SELECT DISTINCT instance_pk, run_number FROM workflow_step
      WHERE status = 'cancelled' AND error_name = 'Cancelled')
    UNION ALL SELECT 'unknown end', count(*) FROM author_lost
    UNION ALL SELECT 'received from a topic', count(*) FROM workflow_event WHERE type LIKE 'topic:%'"""
"""What happened, for the check that every kind of event occurs often enough."""
