"""What must hold of the second act: of what is kept how long, of batches, of what people settle, of labels and hooks.

Triggers write it down, as in witnesses.py:

author_over     each end of a run
author_deleted  each instance that was deleted; ``age``: of the end of its last run, NULL where it has none
author_pruning  the age from which somebody prunes at this moment
author_audit    each intervention that was recorded; instances are deleted with theirs
author_label    each label that a step changed, in the order of the commits
author_hook     each message that reports the end of a run
"""

from __future__ import annotations

import json
from typing import Any

from tests.simulation.kept import KEPT, ORIGIN
from tests.simulation.witnesses import IS_COPY

_OVER = "('complete', 'errored', 'terminated')"


def _labelled(name: str, when: str) -> str:
    return f"""
        CREATE TRIGGER {name} AFTER {when}
          AND NEW.status = 'completed' AND NEW.name LIKE 'label%.%' AND NOT {IS_COPY.format("NEW")}
          AND json_type(NEW.result) = 'integer'  -- else it was settled by hand
        BEGIN
            INSERT INTO author_label VALUES (
                NULL, NEW.instance_pk, substr(NEW.name, instr(NEW.name, '.') + 1),
                CASE WHEN CAST(NEW.result AS INTEGER) % 3 THEN NEW.result END);
        END;"""


SCRIPT = f"""
    CREATE TABLE author_over (pk, instance, run, status, at);
    CREATE TRIGGER author_ending AFTER UPDATE OF status ON workflow_instance
      WHEN NEW.workflow = '{KEPT}' AND OLD.status NOT IN {_OVER} AND NEW.status IN {_OVER}
    BEGIN
        INSERT INTO author_over VALUES (NEW.id, NEW.instance_id, NEW.run_number, NEW.status, author_now());
    END;

    CREATE TABLE author_pruning (age);
    CREATE TABLE author_deleted (pk, instance, run, status, retention, pruned, age);
    CREATE TRIGGER author_deletes AFTER DELETE ON workflow_instance WHEN OLD.workflow = '{KEPT}'
    BEGIN
        DELETE FROM author_ledger WHERE instance = OLD.instance_id;
        INSERT INTO author_deleted VALUES (
            OLD.id, OLD.instance_id, OLD.run_number, OLD.status, OLD.retention_us,
            (SELECT age FROM author_pruning),
            (SELECT author_now() - max(at) FROM author_over WHERE pk = OLD.id AND run = OLD.run_number));
    END;

    CREATE TABLE author_audit (person, pk, run, step_key);
    CREATE TRIGGER author_audits AFTER INSERT ON workflow_audit
    BEGIN
        INSERT INTO author_audit VALUES (NEW.actor, NEW.instance_pk, NEW.run_number, NEW.step_key);
    END;

    CREATE TABLE author_label (nr INTEGER PRIMARY KEY, pk, name, value);
    {_labelled("author_labels", "INSERT ON workflow_step WHEN NEW.status IS NOT NULL")}
    {_labelled("author_labels_later", "UPDATE ON workflow_step WHEN OLD.status <> NEW.status")}

    CREATE TABLE author_hook (id, pk, run, name);
    CREATE TRIGGER author_hooks AFTER INSERT ON workflow_outbox WHEN NEW.name LIKE 'tell.%'
    BEGIN
        INSERT INTO author_hook VALUES (NEW.id, NEW.instance_pk, NEW.run_number, NEW.name);
    END;
"""

_TABLES = ("run", "step", "event", "log", "audit", "label", "topic_wait", "item", "published")
_ORPHANS = " UNION ALL ".join(
    f"SELECT '{table}', instance_pk FROM workflow_{table} WHERE instance_pk NOT IN (SELECT id FROM workflow_instance)"
    for table in _TABLES
)

QUERIES = {
    "R1 what is deleted has ended as long ago as its retention says, or who prunes": """
        SELECT instance, run, status, retention, pruned, age FROM author_deleted
        WHERE status NOT IN ('complete', 'errored', 'terminated')
          OR age IS NULL OR age < coalesce(pruned, retention)""",
    "R2 nothing is left of what is deleted": _ORPHANS,
    "G1 the labels are those that the steps committed last": f"""
        SELECT i.instance_id, a.name, a.value, l.value FROM author_label a JOIN workflow_instance i ON i.id = a.pk
        LEFT JOIN workflow_label l ON l.instance_pk = a.pk AND l.name = a.name
        WHERE a.nr = (SELECT max(nr) FROM author_label b WHERE b.pk = a.pk AND b.name = a.name)
          AND a.value IS NOT l.value
        UNION ALL
        SELECT l.instance_pk, l.name, NULL, l.value FROM workflow_label l
        WHERE l.name <> '{ORIGIN}' AND NOT EXISTS (
          SELECT 1 FROM author_label a WHERE a.pk = l.instance_pk AND a.name = l.name)""",
    "H1 the end of a run is reported once, as it was, and nothing else is": """
        SELECT o.pk, o.run, o.status, 'is not reported once' FROM author_over o
        WHERE o.status <> 'terminated' AND 1 <> (
          SELECT count(*) FROM author_hook h WHERE h.pk = o.pk AND h.run = o.run AND h.name = 'tell.' || o.status)
        UNION ALL
        SELECT h.pk, h.run, h.name, 'is reported' FROM author_hook h WHERE NOT EXISTS (
          SELECT 1 FROM author_over o WHERE o.pk = h.pk AND o.run = h.run
            -- A cancelled run that has cleaned up is reported as well, one that was terminated is not.
            AND h.name IN ('tell.' || o.status, CASE o.status WHEN 'terminated' THEN 'tell.errored' END))
        UNION ALL
        SELECT h.pk, h.run, h.name, 'is reported twice' FROM author_hook h
        GROUP BY h.pk, h.run, h.name HAVING count(*) > 1""",
}


def wrong(act: Any) -> list[str]:
    """What does not follow from what the operators were told."""
    return _wrong_audit(act) + _wrong_params(act) + _wrong_search(act)


def _wrong_audit(act: Any) -> list[str]:
    database, settled = act.world.raw, act.operators.settled
    recorded = database.execute("SELECT person, pk, run, step_key FROM author_audit ORDER BY rowid").fetchall()
    wanted = [(by, *where[:3]) for by, where in settled.items()]
    found = []
    if sorted(recorded) != sorted(wanted):
        found.append(f"A1 accepted were {sorted(wanted)}, recorded are {sorted(recorded)}")
    there = {pk for (pk,) in database.execute("SELECT id FROM workflow_instance")}
    for by, (pk, run, key, row) in settled.items():
        if pk in there and act.operators.row(pk, run, key) != row:
            found.append(f"A3 step {key} of {pk}#{run} was settled by {by}, and has changed: {row}")
    return found


def _wrong_params(act: Any) -> list[str]:
    query = "SELECT instance_pk, run_number, params FROM workflow_run ORDER BY 1, 2"
    return [
        f"B3 run {run} of {pk} has not the parameters that it was created with: {params}"
        for pk, run, params in act.world.raw.execute(query)
        if json.loads(params) != act.operators.params.get(pk)
    ]


def _wrong_search(act: Any) -> list[str]:
    """A search for a label finds the instances that have it, and no others."""
    rows = act.world.raw.execute("SELECT id, instance_id FROM workflow_instance").fetchall()
    should: dict[tuple[str, str], set[str]] = {}
    for pk, instance in rows:
        should.setdefault((ORIGIN, act.operators.origins.get(pk, "none")), set()).add(instance)
    last = "SELECT pk, name, value FROM author_label WHERE nr IN (SELECT max(nr) FROM author_label GROUP BY pk, name)"
    names = dict(rows)
    for pk, name, value in act.world.raw.execute(last):
        if pk in names and value is not None:
            should.setdefault((name, value), set()).add(names[pk])
    found = []
    for (name, value), instances in should.items():
        there = {each.id for each in act.world.operations.queries.list(KEPT, labels={name: value}).items}
        if there != instances:
            found.append(f"G2 a search for {name}={value} finds {sorted(there)}, not {sorted(instances)}")
    return found
