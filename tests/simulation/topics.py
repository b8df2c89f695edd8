"""What must hold of topics: who waits when something is emitted gets it exactly once, and nobody else does."""

from __future__ import annotations

from tests.simulation.witnesses import IS_COPY

QUERIES = {
    "T1b a step's emission is started once if an instance waits": """
        SELECT o.payload, o.waiting FROM author_emitted o
        WHERE o.waiting > 0 AND NOT EXISTS (SELECT 1 FROM author_emission a WHERE a.payload = o.payload)
        UNION ALL
        SELECT a.payload, count(*) FROM author_emission a WHERE a.payload NOT LIKE '"outside%'
        GROUP BY a.payload HAVING count(*) > 1""",
    "T2 an emission is for those who waited when it began": f"""
        SELECT e.instance_pk, e.type, e.payload FROM workflow_event e JOIN workflow_step s
          ON s.instance_pk = e.instance_pk AND s.run_number = e.run_number AND s.wait_event_type = e.type
        WHERE e.type LIKE 'topic:%' AND NOT EXISTS (
            SELECT 1 FROM author_meant m JOIN author_emission a ON a.nr = m.nr
            WHERE m.pk = e.instance_pk AND m.run = e.run_number AND m.wait_type = e.type AND a.payload = e.payload)
          -- A wait that began in the same microsecond: neither was first.
          AND NOT EXISTS (SELECT 1 FROM author_emission a WHERE a.payload = e.payload AND a.at = s.created_at)
          AND NOT {IS_COPY.format("s")}""",
    "T3 a wait gets one emission": """
        SELECT instance_pk, run_number, type FROM workflow_event WHERE type LIKE 'topic:%'
        GROUP BY instance_pk, run_number, type HAVING count(*) > 1""",
    "T4 when an emission is over, nobody that it was meant for waits for it": """
        SELECT m.nr, m.pk, m.run, m.step_key FROM author_missed m""",
    "T5 who waits on a topic is found there": """
        SELECT s.instance_pk, s.run_number, s.step_key FROM workflow_step s
        JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
        WHERE s.status = 'waiting' AND s.wait_event_type LIKE 'topic:%' AND s.wake_at >= :now
          AND i.status NOT IN ('complete', 'errored', 'terminated')
          AND NOT EXISTS (SELECT 1 FROM workflow_event e WHERE e.instance_pk = s.instance_pk
            AND e.run_number = s.run_number AND e.type = s.wait_event_type)
          AND NOT EXISTS (SELECT 1 FROM workflow_topic_wait w WHERE w.instance_pk = s.instance_pk
            AND w.run_number = s.run_number AND w.step_key = s.step_key
            AND s.wait_event_type LIKE 'topic:%:' || w.topic)""",
    "T6 a run gets an emission at one moment, also where it is repeated under its id": """
        SELECT instance_pk, run_number, event_id FROM workflow_event WHERE type LIKE 'topic:%'
        GROUP BY instance_pk, run_number, substr(event_id, 1, instr(event_id || char(31), char(31)) - 1)
        HAVING count(DISTINCT created_at) > 1""",
}
