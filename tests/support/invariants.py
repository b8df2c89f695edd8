"""What must hold of any database that the engine leaves behind, as SQL that answers with the rows that break it.

The names are those of docs/design.md: lost or doubled steps, mixed owners, wrong order, events and steps that
disagree, work that no process will find, wake-ups that got lost, prior runs that changed.
"""

from __future__ import annotations

import functools
from typing import Any

import sqlalchemy as sa

_STEP_OF_RUN = "s.instance_pk = i.id AND s.run_number = i.run_number"
_BOOKING = "l.instance = i.instance_id AND l.run = s.run_number AND l.step = s.name"
_IS_NO_COPY = """NOT EXISTS (
    SELECT 1 FROM workflow_step c WHERE c.step_key = s.step_key AND c.commit_id = s.commit_id
      AND (c.instance_pk < s.instance_pk OR c.instance_pk = s.instance_pk AND c.run_number < s.run_number))"""
"""A step that a run took over from another; what it wrote is on record there."""
_LIVE = "i.status IN ('active', 'waiting')"
_TERMINAL = "i.status IN ('complete', 'errored', 'terminated')"

COUNTS = """(h.state = 'granted' OR h.state = 'held' AND EXISTS (
    SELECT 1 FROM workflow_instance o WHERE o.id = h.instance_pk AND o.run_number = h.run_number
      AND (o.claim_token = h.token OR h.token IS NULL AND o.status NOT IN ('complete', 'errored', 'terminated')))
  OR EXISTS (SELECT 1 FROM workflow_item m WHERE m.instance_pk = h.instance_pk AND m.run_number = h.run_number
      AND m.step_key = h.step_key AND m.position = h.position AND m.attempt_token = h.token AND m.status = 'sent')
  OR h.token = 'child' AND EXISTS (SELECT 1 FROM workflow_step c WHERE c.instance_pk = h.instance_pk
      AND c.run_number = h.run_number AND c.step_key = h.step_key AND c.status = 'waiting' AND NOT EXISTS (
        SELECT 1 FROM workflow_event e WHERE e.instance_pk = c.instance_pk AND e.run_number = c.run_number
          AND e.type = c.wait_event_type)))"""
"""A hold that counts: its owner still has it."""

QUERIES = {
    "I1 a completed booking step has written exactly one row": f"""
        SELECT i.instance_id, s.step_key, (SELECT count(*) FROM author_ledger l WHERE {_BOOKING}) AS written
        FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk
        WHERE s.name LIKE 'book%' AND s.status IN ('completed', 'DONE') AND {_IS_NO_COPY}
          AND (SELECT count(*) FROM author_ledger l WHERE {_BOOKING}) <> 1""",
    "I2 a row in the ledger belongs to a completed step": f"""
        SELECT l.instance, l.run, l.step FROM author_ledger l
        WHERE NOT EXISTS (SELECT 1 FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk
                          WHERE {_BOOKING} AND s.status IN ('completed', 'DONE'))""",
    "I3 step and ledger come from the same attempt": f"""
        SELECT i.instance_id, s.step_key, s.attempts, l.attempt
        FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk JOIN author_ledger l ON {_BOOKING}
        WHERE s.attempts + CASE WHEN s.type = 'linear' THEN 1 ELSE 0 END <> l.attempt""",
    "I4 no step ended before an earlier one that is still open": """
        SELECT s.instance_pk, s.step_key, o.step_key FROM workflow_step s JOIN workflow_step o
          ON o.instance_pk = s.instance_pk AND o.run_number = s.run_number AND o.seq < s.seq
        WHERE s.status IN ('completed', 'errored') AND o.status IN ('pending', 'waiting')""",
    "I4b call order is a total order": """
        SELECT instance_pk, run_number, seq FROM workflow_step
        GROUP BY instance_pk, run_number, seq HAVING count(*) > 1""",
    "I5 a consumed event belongs to a wait that ended": """
        SELECT e.instance_pk, e.seq, e.consumed_by_step_key FROM workflow_event e LEFT JOIN workflow_step s
          ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number AND s.step_key = e.consumed_by_step_key
        WHERE e.consumed_by_step_key IS NOT NULL
          AND (s.step_key IS NULL OR s.type NOT IN ('waitForEvent', 'linear', 'task', 'child'))
           OR s.type IN ('task', 'child') AND e.created_at > s.wake_at
           OR s.type = 'waitForEvent' AND (e.created_at > s.wake_at
               OR NOT (s.status = 'completed' OR s.status = 'errored' AND s.error_name = 'EventPayloadInvalid'))""",
    "I5b delivered and consumed are one thing": """
        SELECT instance_pk, seq FROM workflow_event
        WHERE (delivered_at IS NULL) <> (consumed_by_step_key IS NULL)""",
    "I5c a wait that ended with an event consumed exactly one": """
        SELECT s.instance_pk, s.step_key FROM workflow_step s LEFT JOIN workflow_event e
          ON e.instance_pk = s.instance_pk AND e.run_number = s.run_number AND e.consumed_by_step_key = s.step_key
        WHERE s.type = 'waitForEvent'
        GROUP BY s.instance_pk, s.run_number, s.step_key, s.status, s.error_name
        HAVING count(e.seq) <> CASE WHEN s.status = 'completed' OR s.status = 'errored'
                                         AND s.error_name = 'EventPayloadInvalid' THEN 1 ELSE 0 END""",
    "I5h what others did was answered, once": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s LEFT JOIN workflow_event e
          ON e.instance_pk = s.instance_pk AND e.run_number = s.run_number AND e.consumed_by_step_key = s.step_key
            AND e.type = s.wait_event_type
        WHERE s.type IN ('task', 'child') AND s.status = 'completed'
        GROUP BY s.instance_pk, s.run_number, s.step_key HAVING count(e.seq) <> 1""",
    "M1 a map that has completed has an answer to every item, and nothing under way": """
        SELECT s.instance_pk, s.run_number, s.step_key, m.position, m.status
        FROM workflow_step s JOIN workflow_item m
          ON m.instance_pk = s.instance_pk AND m.run_number = s.run_number AND m.step_key = s.step_key
        WHERE s.type = 'map' AND s.status = 'completed' AND s.result IS NULL
          AND (m.status NOT IN ('done', 'dead') OR m.answer IS NULL)""",
    "M2 what is out has a deadline, what has ended has none, and every item has a place": """
        SELECT m.instance_pk, m.run_number, m.step_key, m.position, m.status FROM workflow_item m
        WHERE (m.status = 'sent') AND (m.due_at IS NULL OR m.attempts = 0)
           OR m.status IN ('done', 'dead', 'failed') AND (m.due_at IS NOT NULL OR m.answer IS NULL)
           OR m.position > 0 AND NOT EXISTS (SELECT 1 FROM workflow_item b WHERE b.instance_pk = m.instance_pk
                AND b.run_number = m.run_number AND b.step_key = m.step_key AND b.position = m.position - 1)""",
    "M4 a task step that waits for its attempt has a token of its own, and what does not has none": """
        SELECT s.instance_pk, s.run_number, s.step_key, s.status, s.attempts, m.attempts, m.status
        FROM workflow_step s JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
        LEFT JOIN workflow_item m
          ON m.instance_pk = s.instance_pk AND m.run_number = s.run_number AND m.step_key = s.step_key
        WHERE s.type = 'task' AND i.status NOT IN ('complete', 'errored', 'terminated')
          AND (m.position IS NOT NULL) <> (s.status = 'waiting' AND s.wait_event_type IS NOT NULL AND NOT EXISTS (
                SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk AND e.run_number = s.run_number
                  AND e.type = s.wait_event_type))
           OR s.type = 'task' AND m.position IS NOT NULL AND (m.attempt_token IS NULL OR m.status <> 'sent'
                OR s.status = 'waiting' AND (m.attempts <> s.attempts OR m.due_at <> s.wake_at))""",
    "M5 what is out has a token of its own": """
        SELECT count(*), attempt_token FROM workflow_item WHERE status = 'sent' GROUP BY attempt_token
        HAVING count(*) > 1 OR attempt_token IS NULL""",
    "M3 a map that waits is looked at when the first of its items may be lost": """
        SELECT s.instance_pk, s.run_number, s.step_key, m.position FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
        JOIN workflow_item m
          ON m.instance_pk = s.instance_pk AND m.run_number = s.run_number AND m.step_key = s.step_key
        WHERE s.type = 'map' AND s.status = 'waiting' AND i.status = 'waiting' AND i.claim_token IS NULL
          AND (m.status = 'failed' OR m.status = 'sent' AND m.due_at < i.run_at)""",
    "M6 only the items of a map that waits are open, and only of another one are they cancelled": """
        SELECT m.instance_pk, m.run_number, m.step_key, m.position, m.status FROM workflow_item m
        JOIN workflow_step s
          ON s.instance_pk = m.instance_pk AND s.run_number = m.run_number AND s.step_key = m.step_key
        JOIN workflow_instance i ON i.id = m.instance_pk
        WHERE s.type = 'map' AND (m.status = 'cancelled') = (s.status = 'waiting' AND i.run_number = m.run_number
          AND i.status NOT IN ('complete', 'errored', 'terminated')) AND m.status NOT IN ('done', 'dead')""",
    "I5i an answer is for the step that waits for it": """
        SELECT e.instance_pk, e.run_number, e.type FROM workflow_event e LEFT JOIN workflow_step s
          ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number AND s.step_key = e.consumed_by_step_key
        WHERE e.type LIKE 'child:%' AND s.wait_event_type <> e.type
           OR e.type LIKE 'task:%' AND s.type <> 'task'""",
    "F1 a step whose attempt failed has a record of that attempt, written by the same commit": f"""
        SELECT s.instance_pk, s.run_number, s.step_key, s.attempts, s.error_name FROM workflow_step s
        WHERE s.type IN ('do', 'linear') AND s.status IN ('errored', 'waiting', 'DEAD', 'READY')
          AND s.error_name NOT IN ('LEASE_EXPIRED', 'OutcomeUnknown', 'StepMaxAttemptsExceeded', 'WorkerCrashLoop')
          AND {_IS_NO_COPY} AND NOT EXISTS (
            SELECT 1 FROM workflow_attempt a WHERE a.instance_pk = s.instance_pk AND a.run_number = s.run_number
              AND a.step_key = s.step_key AND a.attempt = s.attempts AND a.error_name = s.error_name)""",
    "F2 a recorded attempt is one that its step has counted": """
        SELECT a.instance_pk, a.run_number, a.step_key, a.attempt, s.attempts FROM workflow_attempt a
        LEFT JOIN workflow_step s
          ON s.instance_pk = a.instance_pk AND s.run_number = a.run_number AND s.step_key = a.step_key
        WHERE a.step_key IS NOT NULL AND a.item IS NULL AND (s.step_key IS NULL OR s.attempts < a.attempt
          AND s.status <> 'cancelled')""",
    "F3 an attempt is recorded once": """
        SELECT instance_pk, run_number, step_key, item, attempt FROM workflow_attempt WHERE step_key IS NOT NULL
        GROUP BY instance_pk, run_number, step_key, item, attempt HAVING count(*) > 1""",
    "F4 each death of a worker is recorded": """
        SELECT i.instance_id, i.crash_count FROM workflow_instance i
        WHERE i.crash_count > (SELECT count(*) FROM workflow_attempt a WHERE a.instance_pk = i.id
          AND a.run_number = i.run_number AND a.outcome = 'crashed')""",
    "F5 an item that failed has a record of its last attempt": f"""
        SELECT m.instance_pk, m.run_number, m.step_key, m.position, m.attempts FROM workflow_item m
        JOIN workflow_step s
          ON s.instance_pk = m.instance_pk AND s.run_number = m.run_number AND s.step_key = m.step_key
        WHERE s.type = 'map' AND m.status IN ('failed', 'dead') AND {_IS_NO_COPY} AND NOT EXISTS (
          SELECT 1 FROM workflow_item c WHERE c.instance_pk = m.instance_pk AND c.run_number < m.run_number
            AND c.step_key = m.step_key AND c.position = m.position AND c.attempts = m.attempts) AND NOT EXISTS (
          SELECT 1 FROM workflow_attempt a WHERE a.instance_pk = m.instance_pk AND a.run_number = m.run_number
            AND a.step_key = m.step_key AND a.item = m.position AND a.attempt = m.attempts)""",
    "I6 due work is found by a sweep": f"""
        SELECT i.instance_id, i.status, i.run_at, i.next_check_at FROM workflow_instance i
        WHERE {_LIVE} AND (i.run_at IS NULL OR i.next_check_at IS NULL)
           OR NOT ({_LIVE}) AND i.next_check_at IS NOT NULL""",
    "I6b what sleeps is looked at when its time comes": """
        SELECT i.instance_id, i.run_at, i.next_check_at FROM workflow_instance i
        WHERE i.status = 'waiting' AND i.claim_token IS NULL AND i.next_check_at < i.run_at""",
    "I7 a claim is whole, and only active instances have one": """
        SELECT i.instance_id, i.status FROM workflow_instance i
        WHERE (i.claim_token IS NULL) <> (i.lease_until IS NULL) OR (i.claim_token IS NULL) <> (i.claimed_by IS NULL)
           OR (i.claimed_by IS NULL) <> (i.claim_task_id IS NULL)
           OR i.claim_token IS NOT NULL AND i.status <> 'active'
           OR i.claim_token IS NULL AND i.pause_requested""",
    "I7b no wake-up is lost": f"""
        SELECT i.instance_id, s.step_key, e.seq FROM workflow_instance i
        JOIN workflow_step s ON {_STEP_OF_RUN} AND s.wait_event_type IS NOT NULL AND s.status IN ('waiting', 'WAITING')
        JOIN workflow_event e ON e.instance_pk = i.id AND e.run_number = i.run_number AND e.type = s.wait_event_type
          AND e.delivered_at IS NULL AND e.created_at <= s.wake_at
        WHERE i.status = 'waiting' AND i.claim_token IS NULL AND i.run_at > :now""",
    "I7c an instance sleeps no longer than its earliest step": f"""
        SELECT i.instance_id, s.step_key FROM workflow_instance i
        JOIN workflow_step s ON {_STEP_OF_RUN} AND s.status IN ('waiting', 'WAITING')
        WHERE i.status = 'waiting' AND i.run_at > coalesce(s.next_retry_at, s.wake_at)""",
    "I8 an ended run says how, and only that": f"""
        SELECT i.instance_id, i.status, r.output, r.error_name FROM workflow_instance i
        JOIN workflow_run r ON r.instance_pk = i.id AND r.run_number = i.run_number
        WHERE (r.output IS NOT NULL) <> (i.status = 'complete') OR (r.error_name IS NOT NULL) <> (i.status = 'errored')
           OR (r.error_message IS NOT NULL) <> (i.status = 'errored') OR (r.completed_at IS NOT NULL) <> ({_TERMINAL})
           OR {_TERMINAL} AND (i.run_at IS NOT NULL OR i.claim_token IS NOT NULL)""",
    "I17 a terminated run has nothing open": f"""
        SELECT i.instance_id, s.step_key, s.status FROM workflow_instance i JOIN workflow_step s ON {_STEP_OF_RUN}
        WHERE i.status = 'terminated' AND s.status IN ('pending', 'waiting')
        UNION ALL
        SELECT i.instance_id, m.step_key, m.status FROM workflow_instance i JOIN workflow_item m
          ON m.instance_pk = i.id AND m.run_number = i.run_number
        WHERE i.status = 'terminated' AND m.status IN ('pending', 'sent', 'failed')
        UNION ALL
        SELECT i.instance_id, w.step_key, w.topic FROM workflow_instance i JOIN workflow_topic_wait w
          ON w.instance_pk = i.id AND w.run_number = i.run_number
        WHERE i.status = 'terminated'""",
    "I8b a step that ended has its time, result or error, and only then": """
        SELECT s.instance_pk, s.step_key, s.status FROM workflow_step s
        WHERE (s.finished_at IS NOT NULL) <> (s.status IN ('completed', 'errored', 'cancelled', 'DONE', 'DEAD'))
              AND NOT (s.status = 'cancelled' AND s.finished_at IS NULL)
           OR s.status IN ('errored', 'DEAD') AND s.error_name IS NULL
           OR s.status = 'DONE' AND (s.error_name IS NOT NULL OR s.result IS NULL)
           OR s.status = 'completed' AND (s.error_name IS NOT NULL
               OR (s.result IS NULL) <> (s.type = 'sleep') AND s.type <> 'map')
           OR s.status = 'waiting' AND s.type NOT IN ('do', 'task') AND s.next_retry_at IS NOT NULL
           OR s.status = 'waiting' AND s.type <> 'do' AND (s.next_retry_at IS NULL) <> (s.wake_at IS NOT NULL)
              AND NOT (s.type IN ('task', 'child') AND s.wake_at IS NULL)
           OR s.status = 'waiting' AND s.type = 'do' AND s.wake_at IS NOT NULL
           OR s.status = 'waiting' AND s.type IN ('task', 'child')
              AND (s.wake_at IS NOT NULL) <> (s.wait_event_type IS NOT NULL)
           OR s.status = 'pending' AND s.type <> 'do'""",
    "L1 a linear run stands at one step: before it all is done, after it all is to come": """
        SELECT a.instance_pk, a.step_key, b.step_key FROM workflow_step a JOIN workflow_step b
          ON b.instance_pk = a.instance_pk AND b.run_number = a.run_number AND b.seq > a.seq
        WHERE a.type = 'linear' AND a.status <> 'DONE' AND b.status <> 'PENDING'""",
    "L2 a linear instance ends as its steps do": f"""
        SELECT i.instance_id, i.status, s.step_key, s.status FROM workflow_instance i
        JOIN workflow_step s ON {_STEP_OF_RUN} AND s.type = 'linear'
        WHERE i.status = 'complete' AND s.status <> 'DONE' OR s.status = 'DEAD' AND i.status <> 'errored'
           OR i.status = 'errored' AND NOT EXISTS (
              SELECT 1 FROM workflow_step d WHERE d.instance_pk = i.id AND d.run_number = i.run_number
              AND d.status = 'DEAD')""",
    "L3 a linear step carries what its status needs": """
        SELECT s.instance_pk, s.step_key, s.status FROM workflow_step s
        WHERE s.type = 'linear' AND (
              (s.next_retry_at IS NOT NULL) <> (s.status = 'READY')
           OR s.status = 'WAITING' AND (s.wake_at IS NULL OR s.wait_event_type IS NULL OR s.event_seq IS NOT NULL)
           OR s.event_seq IS NOT NULL AND s.wait_event_type IS NOT NULL
           OR s.status = 'PENDING' AND s.attempts > 0)""",
    "I10 no step has more attempts than it may": """
        SELECT s.instance_pk, s.step_key, s.attempts, s.max_attempts FROM workflow_step s
        WHERE s.attempts > s.max_attempts""",
    "I16 a run begins with copies of steps that had ended, as they are in the run that it continues": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk
        JOIN workflow_run r ON r.instance_pk = s.instance_pk AND r.run_number = s.run_number
        JOIN workflow_instance j ON j.workflow = i.workflow AND j.instance_id = r.forked_from_instance_id
        JOIN workflow_step o
          ON o.instance_pk = j.id AND o.run_number = r.forked_from_run_number AND o.step_key = s.step_key
          AND o.commit_id = s.commit_id
        WHERE o.status NOT IN ('completed', 'errored', 'cancelled', 'DONE') OR o.status <> s.status OR o.seq <> s.seq
           OR o.result <> s.result""",
    "C1 a run that raised Cancelled did not complete": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s JOIN workflow_run r
          ON r.instance_pk = s.instance_pk AND r.run_number = s.run_number
        WHERE s.status = 'cancelled' AND s.error_name = 'Cancelled' AND r.output IS NOT NULL""",
    "C2 a run raises Cancelled at one call": """
        SELECT instance_pk, run_number FROM workflow_step WHERE status = 'cancelled' AND error_name = 'Cancelled'
        GROUP BY instance_pk, run_number HAVING count(DISTINCT commit_id) > 1""",
    "C3 only a run that was asked to stop raises Cancelled": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s JOIN workflow_run r
          ON r.instance_pk = s.instance_pk AND r.run_number = s.run_number
        WHERE s.status = 'cancelled' AND s.error_name = 'Cancelled' AND r.cancel_requested_at IS NULL""",
    "C4 a run that was asked to stop is not paused": """
        SELECT i.instance_id FROM workflow_instance i JOIN workflow_run r
          ON r.instance_pk = i.id AND r.run_number = i.run_number
        WHERE i.status = 'paused' AND r.cancel_requested_at IS NOT NULL""",
    "C5 nothing of a terminated run is open": f"""
        SELECT i.instance_id, s.step_key FROM workflow_instance i JOIN workflow_step s ON {_STEP_OF_RUN}
        WHERE i.status = 'terminated' AND s.status IN ('pending', 'waiting')
        UNION ALL SELECT i.instance_id, m.step_key FROM workflow_instance i JOIN workflow_item m
          ON m.instance_pk = i.id AND m.run_number = i.run_number
        WHERE i.status = 'terminated' AND m.status IN ('pending', 'sent', 'failed')
        UNION ALL SELECT i.instance_id, w.step_key FROM workflow_instance i JOIN workflow_topic_wait w
          ON w.instance_pk = i.id WHERE i.status = 'terminated'""",
    "Q1 no more hold a limit than it allows": f"""
        SELECT l.name, l.key FROM workflow_limit l WHERE coalesce(l.set_at_once, l.at_once) < (
            SELECT count(*) FROM workflow_hold h WHERE h.name = l.name AND h.key = l.key AND {COUNTS})""",
    "Q2 what waits for limits has a place in one queue": f"""
        SELECT i.instance_id, s.step_key FROM workflow_instance i JOIN workflow_step s ON {_STEP_OF_RUN}
        WHERE i.status = 'waiting' AND i.claim_token IS NULL AND s.status = 'waiting'
          AND s.type IN ('do', 'task', 'child') AND s.next_retry_at IS NULL AND s.wake_at IS NULL AND NOT EXISTS (
            SELECT 1 FROM workflow_hold h WHERE h.instance_pk = i.id AND h.run_number = i.run_number
              AND h.step_key = s.step_key AND h.state <> 'held')
        UNION ALL
        SELECT i.instance_id, h.step_key FROM workflow_hold h JOIN workflow_instance i ON i.id = h.instance_pk
        GROUP BY i.instance_id, h.instance_pk, h.run_number, h.step_key, h.position
        HAVING sum(CASE WHEN h.state = 'waiting' THEN 1 ELSE 0 END)
               <> CASE WHEN max(CASE WHEN h.state IN ('waiting', 'blocked') THEN 1 ELSE 0 END) = 1 THEN 1 ELSE 0 END
            OR min(CASE WHEN h.state = 'blocked' THEN 'waiting' ELSE h.state END)
               <> max(CASE WHEN h.state = 'blocked' THEN 'waiting' ELSE h.state END)""",
    "Q3 an ended run holds nothing": f"""
        SELECT i.instance_id, h.name FROM workflow_hold h LEFT JOIN workflow_instance i ON i.id = h.instance_pk
        WHERE i.id IS NULL OR {_TERMINAL} OR i.run_number <> h.run_number""",
    "I13 the counters of a run's log are right": """
        SELECT r.instance_pk, r.run_number, r.log_count FROM workflow_run r
        WHERE r.log_count <> (SELECT count(*) FROM workflow_log l
                         WHERE l.instance_pk = r.instance_pk AND l.run_number = r.run_number)""",
}


def open_rows(store: Any) -> list[Any]:
    """Return what is open, of all instances. If all have ended, also by an error, there is nothing."""
    t = store.tables
    queries = (
        sa.select(t.step).where(t.step.c.status.in_(("pending", "waiting")), t.step.c.type != "linear"),
        sa.select(t.item).where(t.item.c.status.in_(("pending", "sent", "failed"))),
        sa.select(t.instance).where(sa.or_(t.instance.c.claim_token.is_not(None), t.instance.c.run_at.is_not(None))),
        sa.select(t.topic_wait),
        sa.select(t.outbox),
        sa.select(t.hold),
    )
    return [row for query in queries for row in store.read(lambda tx, query=query: list(tx.execute(query)))]


def check(world: Any) -> None:
    """Fail with every invariant that is broken, but for those that the test has exempted, with its reason."""
    with (world.inspector or world.store.engine).connect() as connection:
        broken = _broken_rows(connection, world.now_us, frozenset(world.exempt))
    broken += _attempts_run_twice(world) + _changed_runs(world) + _lost_calls(world)
    assert not broken, "\n".join(broken)


def _broken_rows(connection: sa.Connection, now_us: int, exempt: frozenset[str]) -> list[str]:
    """Ask all queries in one statement, as nearly always none has rows; then those that have some, for their rows."""
    names, query = _all_in_one(exempt)
    found = [names[position] for (position,) in connection.execute(query, {"now": now_us})]
    return [
        f"{name}: {tuple(row)}"
        for name in found
        for row in connection.execute(sa.text(QUERIES[name].replace(":now", str(now_us))))
    ]


@functools.cache
def _all_in_one(exempt: frozenset[str]) -> tuple[list[str], sa.TextClause]:
    """Return the names of the queries that are not exempt, and a statement for the positions of those with rows.

    The time is a parameter, so the text is always the same: it is compiled once, and PostgreSQL plans it once for each
    connection. That takes 20 ms.
    """
    names = [name for name in QUERIES if name.split()[0] not in exempt]
    query = " UNION ALL ".join(
        f"SELECT {position} FROM (SELECT 1 AS one) o WHERE EXISTS ({QUERIES[name]})"
        for position, name in enumerate(names)
    )
    return names, sa.text(query).bindparams(sa.bindparam("now", type_=sa.BigInteger))


def _attempts_run_twice(world: Any) -> list[str]:
    if "I9" in world.exempt:
        return []
    bodies = world.bodies
    return [f"I9 an attempt ran twice: {body}" for body in dict.fromkeys(bodies) if bodies.count(body) > 1]


def _changed_runs(world: Any) -> list[str]:
    return [
        f"I11 run {run} of {instance_id} has changed after its restart"
        for (workflow, instance_id, run), rows in world.prior_runs.items()
        if world.recorded(world.instance(workflow, instance_id), run) != rows
    ]


def _lost_calls(world: Any) -> list[str]:
    if not (world.accepted or world.accepted_events):
        return []
    i, e = world.store.tables.instance.c, world.store.tables.event.c
    instances = {(row.workflow, row.instance_id) for row in world.rows(sa.select(i.workflow, i.instance_id))}
    events = {row.event_id for row in world.rows(sa.select(e.event_id))}
    return [f"I12 create was answered, and is gone: {each}" for each in world.accepted if each not in instances] + [
        f"I12 send_event was answered, and is gone: {each}" for each in world.accepted_events if each not in events
    ]
