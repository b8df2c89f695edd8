"""A worker with the real Sentry SDK, whose transport keeps the events: prints them as JSON. Run by `test_sentry`."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import sentry_sdk
from celery import Celery
from celery.contrib.testing.worker import start_worker
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from celery_durable import Completed, Durable, LinearStep, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.contrib.sentry import before_send
from celery_durable.definitions import define_linear
from celery_durable.runtime import Runtime
from tests.support.three_frames import charge

EVENTS: list[Any] = []


class Kept(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        EVENTS.extend(item.get_event() for item in envelope.items if item.get_event() is not None)


def main(path: str, *, fails_tasks: bool) -> None:
    sentry_sdk.init(
        dsn="http://key@localhost:1/1", transport=Kept, integrations=[CeleryIntegration()], before_send=before_send
    )
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(durable_database_url=f"sqlite:///{path}", durable_failed_runs_fail_tasks=fails_tasks)
    app.conf.update(durable_dispatcher="worker", worker_hijack_root_logger=False)
    durable = Durable(app)
    durable.migrate()

    @durable.workflow(name="function")
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge", StepConfig(retries=Retries(limit=1, delay=0.1)), charge, {})

    steps = [LinearStep("charge", max_attempts=1)]
    definition = define_linear("linear", module=__name__, version=1, steps=steps)
    definition.handlers["charge"] = lambda ctx: Completed(charge({}))
    durable.internals.registry.add(definition)
    states: list[str] = []
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel=logging.INFO, queues="celery,durable"):
        for kind in ("function", "linear"):
            durable.internals.operations.create.instance(kind, None, id=f"{kind}-1")
        for _ in range(600):
            found = [
                durable.internals.operations.queries.get(kind, f"{kind}-1").status.status
                for kind in ("function", "linear")
            ]
            if all(status.is_terminal for status in found):
                break
            Runtime().sleep(0.05)
        states = [str(status) for status in found]
    sentry_sdk.flush()
    print(json.dumps({"states": states, "events": EVENTS}, default=str))


if __name__ == "__main__":
    main(sys.argv[1], fails_tasks=sys.argv[2] == "failing")
