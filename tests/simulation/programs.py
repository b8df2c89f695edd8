"""Random workflows: programs as data, and the one workflow function that runs any of them.

A step whose name begins with "book" writes one row into the ledger, in its own transaction; the ledger has no unique
key, so that a write that happens twice shows. Branches have a "~" in their names, races begin with "race", steps that
emit with "emit" and have the topic behind a dot, steps that send a task with "mail", steps that a task does begin with
"task", maps with "map" (see maps.py), and steps that another instance does with "child". A body returns the number of
its execution: no two bodies return the same, so that mixed records show.
"""

from __future__ import annotations

import random
import re
from typing import Any, Literal, Protocol

import sqlalchemy as sa

from celery_durable import Cancelled, EventTimeout, Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.definitions import WorkflowDefinition, define
from tests.simulation.limited import limits_of

Op = dict[str, Any]

authors = sa.MetaData()
ledger = sa.Table(
    "author_ledger",
    authors,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("instance", sa.String(100), nullable=False),
    sa.Column("run", sa.Integer, nullable=False),
    sa.Column("step", sa.String(256), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("execution", sa.Integer, nullable=False),
)

EVENTS = ("go", "stop")
TOPICS = ("news", "alarm")
TASK = "work"
RETRY_SECONDS = 5
CLEANUP = "cleanup"
_ONCE = re.compile(r"(book|plain)\d*[13579](~|$)")
FAILS = "fail"
"""The key of an operation that ends its program; only children have it."""


class Host(Protocol):
    """What the bodies tell the simulation, and ask of it."""

    def execution(self) -> int:
        """The number of the body that begins to run."""

    def opens_session(self) -> None:
        """The body holds the write lock of the database from here on."""

    def fails(self, step: str) -> None:
        """The body raises, as the program wants it to."""

    def workflow_of(self, instance: str) -> Any:
        """The workflow of an instance, as its handle."""

    def linear_params(self, seed: int) -> dict[str, Any]:
        """Parameters of a linear child."""


def make_program(dice: random.Random, instances: list[str]) -> list[Op]:
    """A few steps of all kinds, and mostly a cleanup."""
    ops = [_make_op(dice, str(number), instances) for number in range(dice.randint(2, 5))]
    if dice.random() < 0.7:
        ops.append(_make_cleanup(dice, instances))
    return ops


def _make_cleanup(dice: random.Random, instances: list[str]) -> Op:
    """Operations that the program does if it is cancelled."""
    numbers = range(90, 90 + dice.randint(1, 3))
    return {"op": CLEANUP, "key": CLEANUP, "ops": [_make_op(dice, str(n), instances, is_branch=True) for n in numbers]}


def find_cleanup(ops: list[Op]) -> list[Op]:
    """The operations of a program's cleanup."""
    return [each for op in ops if op["op"] == CLEANUP for each in op["ops"]]


def _make_op(dice: random.Random, name: str, instances: list[str], *, is_branch: bool = False) -> Op:
    leaves = {"do": 8, "sleep": 2, "wait": 4, "topic": 4, "task": 3, "map": 3, "child": 2}
    kinds = leaves if is_branch else leaves | {"emit": 1, "mail": 1, "send": 1, "create": 1, "gather": 2, "first": 2}
    kind = dice.choices(list(kinds), list(kinds.values()))[0]
    match kind:
        case "do":
            writes = dice.choice(["session", "mutate", None])
            fails = dice.choice([0, 0, 0, 1, 2])
            prefix = "plain" if writes is None else "book"
            return {"op": kind, "key": prefix + name, "writes": writes, "fails": fails, "limit": dice.choice([1, 2, 5])}
        case "sleep":
            return {"op": kind, "key": f"sleep{name}", "seconds": dice.choice([0, 1, 20, 3600])}
        case "wait":
            seconds = dice.choice([5, 60, 600, None])
            return {"op": kind, "key": f"wait{name}", "type": dice.choice(EVENTS), "seconds": seconds}
        case "topic":
            seconds = dice.choice([60, 600, 3600, None])
            return {"op": kind, "key": f"topic{name}", "topic": dice.choice(TOPICS), "seconds": seconds}
        case "task":
            seconds = dice.choice([5, 60, 600, 3600])
            return {"op": kind, "key": f"task{name}", "seconds": seconds, "limit": dice.choice([0, 1, 2])}
        case "map":
            seconds, at_once = dice.choice([5, 60, 600, 3600]), dice.choice([0, 1, 2])
            key = f"map{name}x{at_once}" + dice.choice(["", "w"])
            count = dice.choice([0, 1, 2, 3, 5])
            return {"op": kind, "key": key, "items": count, "seconds": seconds, "limit": dice.choice([0, 1, 2])}
        case "child":
            return _make_child(dice, name, instances)
        case "emit":
            return {"op": kind, "key": f"emit{name}.{dice.choice(TOPICS)}"}
        case "mail":
            return {"op": kind, "key": f"mail{name}"}
        case "send":
            return {"op": kind, "key": f"send{name}", "to": dice.choice(instances), "type": dice.choice(EVENTS)}
        case "create":
            child = [_make_op(dice, "0", instances, is_branch=True)]
            return {"op": kind, "key": f"create{name}", "ops": child}
        case _:
            branches = [
                _make_op(dice, f"{name}~{message}", instances, is_branch=True)
                for message in "abc"[: dice.randint(2, 3)]
            ]
            return {"op": kind, "key": f"{'race' if kind == 'first' else 'all'}{name}", "of": branches}


def _make_child(dice: random.Random, name: str, instances: list[str]) -> Op:
    """``id``: one that may be taken, or None; ``linear``: the seed of the parameters, None for a program."""
    ops = [_make_op(dice, "0", instances, is_branch=True)]
    if dice.random() < 0.25:
        ops.append({"op": "fail", "key": FAILS})
    if dice.random() < 0.3:
        ops.append(_make_cleanup(dice, instances))
    child = {"op": "child", "key": f"child{name}", "ops": ops, "seconds": dice.choice([60, 3600, None, None])}
    linear = dice.randrange(1000) if dice.random() < 0.25 else None
    return child | {"linear": linear, "id": dice.choice([None, "c0", "c1"])}


def make_definition(host: Host) -> WorkflowDefinition:
    """The workflow that runs a program: its parameters."""

    class Defined:
        definition: WorkflowDefinition

    defined = Defined()

    def work(tx: StepTx, op: Op, instance: str, run: int) -> int:
        number = host.execution()
        row = {"instance": instance, "run": run, "step": op["key"], "attempt": tx.attempt, "execution": number}
        if op["writes"] == "session":
            host.opens_session()
            tx.session.execute(sa.insert(ledger).values(row))
        elif op["writes"] == "mutate":
            tx.mutate(lambda session: session.execute(sa.insert(ledger).values(row)))
        if tx.attempt <= op["fails"]:
            host.fails(op["key"])
            raise ValueError("as the program wants it")
        return number

    def send(tx: StepTx, op: Op, instance: str, run: int) -> int:
        tx.send_event(host.workflow_of(op["to"]), op["to"], op["type"], f"{instance} {run} {op['key']}")
        return host.execution()

    def create(tx: StepTx, op: Op, instance: str, run: int) -> int:
        tx.create(defined, op["ops"], id=f"{instance}-{run}-{op['key']}")
        return host.execution()

    def emit(tx: StepTx, op: Op, instance: str, run: int) -> int:
        tx.emit(op["key"].partition(".")[2], f"{instance} {run} {op['key']}")
        return host.execution()

    def mail(tx: StepTx, op: Op) -> int:
        tx.send_task("mail", op["key"])
        return host.execution()

    def child(op: Op, instance: str, run: int) -> dict[str, Any]:
        asked = {"name": op["key"], **_timeout(op)}
        if op["linear"] is None:
            return asked | {"workflow": defined, "params": op["ops"], "id": op["id"]}
        id_ = f"l{instance}-{run}-{op['key']}".replace("~", "-")
        return asked | {"workflow": host.workflow_of(id_), "params": host.linear_params(op["linear"]), "id": id_}

    def program(event: WorkflowEvent, step: Step) -> dict[str, Any]:
        where = event.instance_id, event.run_number

        def do(op: Op) -> Any:
            match op["op"]:
                case "do":
                    return step.do(op["key"], _config(op), work, op, *where)
                case "send":
                    return step.do(op["key"], send, op, *where)
                case "create":
                    return step.do(op["key"], create, op, *where)
                case "emit":
                    return step.do(op["key"], emit, op, *where)
                case "mail":
                    return step.do(op["key"], mail, op)
                case "sleep":
                    return step.sleep(op["key"], op["seconds"])
                case "wait":
                    return step.wait_for_event(op["key"], op["type"], **_timeout(op)).payload
                case "topic":
                    return step.wait_for_topic(op["key"], op["topic"], **_timeout(op)).payload
                case "task":
                    return step.task(op["key"], TASK, **_task_options(op))
                case "map":
                    return step.map(op["key"], TASK, range(op["items"]), **_map_options(op))
                case "child":
                    return step.child(**child(op, *where))
                case "fail":
                    raise ValueError("as the program wants it")
                case "first":
                    return step.first(op["key"], *(submit(branch) for branch in op["of"]))

        def submit(op: Op) -> Any:
            match op["op"]:
                case "do":
                    return step.submit(op["key"], _config(op), work, op, *where)
                case "sleep":
                    return step.submit_sleep(op["key"], op["seconds"])
                case "wait":
                    return step.submit_wait_for_event(op["key"], op["type"], **_timeout(op))
                case "topic":
                    return step.submit_wait_for_topic(op["key"], op["topic"], **_timeout(op))
                case "task":
                    return step.submit_task(op["key"], TASK, **_task_options(op))
                case "map":
                    return step.submit_map(op["key"], TASK, range(op["items"]), **_map_options(op))
                case "child":
                    return step.submit_child(**child(op, *where))

        def do_all(ops: list[Op]) -> dict[str, Any]:
            told: dict[str, Any] = {}
            for op in ops:
                if op["op"] == "gather":
                    futures = [submit(branch) for branch in op["of"]]
                    results = step.gather(*futures, return_exceptions=True)
                    for branch, result in zip(op["of"], results, strict=True):
                        told[branch["key"]] = _plain(result)
                elif op["op"] != CLEANUP:
                    try:
                        told[op["key"]] = _plain(do(op))
                    except StepFailed as error:
                        told[op["key"]] = _plain(error)
            return told

        try:
            return do_all(event.payload)
        except Cancelled:
            do_all(find_cleanup(event.payload))
            raise

    defined.definition = define(program)
    return defined.definition


def is_once(step: str) -> bool:
    """Whether a step may not be called again once the end of an attempt is unknown: those of an odd number."""
    return _ONCE.match(step) is not None


def on_lost(step: str) -> Literal["resend", "fail"]:
    return "fail" if is_once(step) else "resend"


def _config(op: Op) -> StepConfig:
    return StepConfig(retries=_retries(op), on_lost=on_lost(op["key"]), limits=limits_of(op["key"]))


def _retries(op: Op) -> Retries:
    return Retries(limit=op["limit"], delay=RETRY_SECONDS, backoff="constant")


def _task_options(op: Op) -> dict[str, Any]:
    return {"timeout": op["seconds"], "retries": _retries(op), "limits": limits_of(op["key"])}


def _map_options(op: Op) -> dict[str, Any]:
    at_once, is_wanted = int(op["key"].partition("x")[2].rstrip("w")), op["key"].endswith("w")
    return _task_options(op) | {"max_concurrency": at_once or None, "return_exceptions": is_wanted}


def _timeout(op: Op) -> dict[str, Any]:
    return {} if op["seconds"] is None else {"timeout": op["seconds"]}


def _plain(result: Any) -> Any:
    if isinstance(result, list):
        return [_plain(each) for each in result]
    if isinstance(result, (StepFailed, EventTimeout)):
        return f"failed: {result.error_name}"
    return getattr(result, "payload", result)


def expected(ops: list[Op], steps: dict[str, Any]) -> dict[str, Any]:
    """What a program must have returned, from the rows of its steps: ``steps`` gives (status, result, error) by key."""
    told = {}
    for op in ops:
        if op["op"] == "gather":
            told |= {branch["key"]: _recorded(steps, branch["key"]) for branch in op["of"]}
        elif op["op"] == CLEANUP:
            continue
        elif op["op"] == "first":
            told[op["key"]] = _recorded(steps, steps[op["key"]][1] if op["key"] in steps else None)
        else:
            told[op["key"]] = _recorded(steps, op["key"])
    return told


def _recorded(steps: dict[str, Any], key: Any) -> Any:
    if key not in steps:
        return "NO ROW"
    status, result, error = steps[key]
    if status not in ("completed", "errored"):
        return f"STILL {status}"
    if error is not None:
        return f"failed: {error}"
    return result.get("payload", result) if isinstance(result, dict) else result
