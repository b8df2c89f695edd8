"""What is in the storm: workflows that go by a plan, so that each has another mix and all outputs are known before."""

from __future__ import annotations

import os
import random
import time
import zlib
from typing import Any

from celery import Celery, signature

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from tests.smoke import flows

KINDS = ("book", "plain", "flaky", "sleep", "event", "branches", "task", "map")
_WEIGHTS = (5, 5, 2, 2, 2, 2, 2, 1.5)
WORK = "chaos.work"

# Without end: how often a step is cut down is the storm's business, and no reason to give it up.
_AGAIN = StepConfig(retries=Retries(limit=None, delay=0.1, backoff="constant"))


def plan(dice: random.Random) -> list[str]:
    """What one instance is to do."""
    return dice.choices(KINDS, _WEIGHTS, k=dice.randint(3, 9))


def expected(steps: list[str]) -> list[Any]:
    """The output of an instance with this plan."""

    def output(number: int, kind: str) -> Any:
        others = {"flaky": "at last", "sleep": None, "event": {"for": number}, "branches": [number, number, None]}
        others |= {"task": worked(number), "map": [worked(item) for item in items(number)]}
        return others.get(kind, number)

    return [output(number, kind) for number, kind in enumerate(steps)]


def items(number: int) -> range:
    """The items of a map that is the step of this number."""
    return range(number, 2 * number + 4)


def worked(number: int) -> str:
    """What the task makes of a number."""
    return f"{number} worked"


def events(steps: list[str]) -> list[tuple[str, Any]]:
    """Type and payload of the events that an instance with this plan waits for."""
    return [(f"answer-{number}", {"for": number}) for number, kind in enumerate(steps) if kind == "event"]


def build(config: flows.Config) -> Celery:
    """The application of the smoke tests, `planned`, and the task that does some of its steps."""
    app = flows.build(config)

    @app.task(name=WORK, shared=False)
    def work(number: int) -> str:
        take_time(f"{os.getpid()} {number}")
        return worked(number)

    traces = PacedTraces(config)
    durable = vars(app)["durable"]

    @durable.workflow(name="planned")
    def planned(event: WorkflowEvent[Any], step: Step) -> Any:
        return _planned(event, step, traces)

    return app


def _planned(event: WorkflowEvent[Any], step: Step, traces: flows.Traces) -> list[Any]:
    here = (event.instance_id, event.run_number)
    done: list[Any] = []
    for number, kind in enumerate(event.payload):
        match kind:
            case "book":
                done.append(step.do(f"book {number}", _AGAIN, traces.book, *here, number))
            case "plain":
                done.append(step.do(f"plain {number}", _AGAIN, traces.plain, *here, number))
            case "flaky":
                done.append(step.do(f"book flaky {number}", _AGAIN, traces.flaky, *here))
            case "sleep":
                done.append(step.sleep(f"sleep {number}", 0.3))
            case "event":
                done.append(step.wait_for_event(f"wait {number}", f"answer-{number}", timeout="1 hour").payload)
            case "task":
                done.append(step.task(f"task {number}", signature(WORK, (number,)), timeout="1 hour"))
            case "map":
                most = (None, 2, 3)[number % 3]
                given = {"max_concurrency": most, "timeout": "1 hour"}
                done.append(step.map(f"map {number}", WORK, items(number), **given))
            case "branches":
                book = step.submit(f"book {number}", _AGAIN, traces.book, *here, number)
                plain = step.submit(f"plain {number}", _AGAIN, traces.plain, *here, number)
                done.append(list(step.gather(book, plain, step.submit_sleep(f"sleep {number}", 0.2))))
    return done


class PacedTraces(flows.Traces):
    """Bodies that take their time, most 5 to 40 milliseconds, some half a second: processes die in them, too."""

    def _begin(self, tx: StepTx, instance: str, run: int, *, is_held: bool) -> None:
        super()._begin(tx, instance, run, is_held=is_held)
        take_time(f"{instance}/{tx.name}")


def take_time(what: str) -> None:
    """The time that a body or a task takes."""
    chance = zlib.crc32(what.encode())
    time.sleep(0.5 if chance % 25 == 0 else 0.005 + chance % 36 / 1000)
