"""``celery -A tests.smoke.ends``: tasks that end in every way that Celery knows, and a workflow whose steps they do.

The role says in whose worker they run: of this application, of another one that has a Durable and a database of its
own, or of one that has never heard of workflows.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_durable import Durable, Step, StepFailed, WorkflowEvent
from celery_durable.store.migrations import migrate
from tests.smoke import dying, flows
from tests.smoke.config import Config

KINDS = ("ours", "another", "none")


def build(config: Config) -> Celery:
    """The application, for its own worker, the test, or with the same tasks for a worker of somebody else."""
    if config.role == "none":
        app = Celery("nobody", broker=config.broker_url, set_as_current=False)
        app.conf.broker_transport_options = {"global_keyprefix": f"{config.name}:"} if _is_redis(config) else {}
    else:
        name = config.name if config.role != "another" else f"another-{config.name}"
        app = flows.build(dataclasses.replace(config, name=name))
        app.conf.broker_transport_options = {"global_keyprefix": f"{config.name}:"} if _is_redis(config) else {}
    app.conf.update(
        task_default_queue=f"ends-{config.name}",
        worker_enable_remote_control=True,
        control_exchange=f"control-{config.name}",
        broker_connection_retry_on_startup=True,
    )
    _tasks(app, config)
    if config.role not in ("none", "another"):
        _workflow(vars(app)["durable"], config)
    return app


def _is_redis(config: Config) -> bool:
    return config.broker_url.startswith("redis")


def _tasks(app: Celery, config: Config) -> None:
    def task(name: str, **options: Any) -> Any:
        return app.task(name=f"ends.{name}", shared=False, **options)

    task("returns")(_double)
    task("returns late", acks_late=True)(_double)
    task("is slow to start", rate_limit="20/s")(_double)
    task("expires")(_same)
    task("is revoked")(_same)
    task("is pickled", serializer="pickle")(_same)  # which its worker does not accept
    task("raises")(_raise)
    task("raises late", acks_late=True)(_raise)
    task("raises from another")(_raise_from_another)
    task("returns no json")(_give_no_json)
    task("needs another argument", typing=False)(_need_more)
    task("ignores")(_ignore)
    task("rejects")(_reject)
    task("rejects late", acks_late=True)(_reject)
    task("puts itself back", bind=True)(_put_back)
    task("puts itself back late", bind=True, acks_late=True)(_put_back)
    task("exits softly", soft_time_limit=1)(_sleep)
    task("exits hard", time_limit=1)(_sleep)

    @task("is terminated")
    def is_terminated(number: int) -> None:
        config.path("terminates").touch()
        _sleep(number)

    @task("is held")
    def is_held(number: int) -> int:
        _write(config.path("body"), str(os.getpid()))
        flows.wait_for(config.path("go"))
        return number * 2

    @task("is held and raises")
    def is_held_and_raises(number: int) -> None:
        _raise(is_held(number) // 2)

    task("retries itself", bind=True, max_retries=3, default_retry_delay=0)(_retry)
    task("retries later", bind=True, max_retries=1)(_retry_later)
    task("retries by itself", autoretry_for=(OSError,), max_retries=1, default_retry_delay=0)(_fail)
    task("replaces itself", bind=True)(_replace)


def _write(path: Path, text: str) -> None:
    """A reader finds all of it, or nothing."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _double(number: int) -> int:
    return number * 2


def _same(number: int) -> int:
    return number


def _give_no_json(number: int) -> object:
    return object()


def _need_more(number: int, more: int) -> int:
    return number + more


def _replace(self: Any, number: int) -> None:
    self.replace(self.app.signature("ends.returns", (number,)))


def _raise(number: int) -> None:
    raise LookupError(f"no {number}")


def _raise_from_another(number: int) -> None:
    try:
        _fail(number)
    except OSError:
        _raise(number)


def _fail(number: int) -> None:
    raise OSError(f"no {number}")


def _ignore(number: int) -> None:
    raise Ignore


def _reject(number: int) -> None:
    raise Reject("no", requeue=False)


def _put_back(self: Any, number: int) -> int:
    if not self.request.delivery_info.get("redelivered"):
        raise Reject("later", requeue=True)
    return number * 2


def _sleep(number: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)


def _retry(self: Any, number: int) -> int:
    if self.request.retries < 2:
        raise self.retry()
    return number * 2


def _retry_later(self: Any, number: int) -> int:
    if not self.request.retries:
        raise self.retry(countdown=1)  # an ETA, which its worker keeps
    return number * 2


def _workflow(durable: Durable, config: Config) -> None:
    @durable.workflow(name="ends")
    def ends(event: WorkflowEvent[list[str]], step: Step) -> Any:
        """What comes of each task: what it returned, or the name and the text of its error."""
        futures = []
        for name in event.payload:
            options = {"expires": -1} if name == "expires" else {}
            queue = f"{'later' if name == 'is revoked' else 'ends'}-{config.name}"
            task = durable.app.signature(f"ends.{name}", (21,)).set(queue=queue, **options)
            futures.append(step.submit_task(name, task, timeout="10 minutes"))
        got = step.gather(*futures, return_exceptions=True)
        return {
            name: [each.error_name, each.error_message] if isinstance(each, StepFailed) else each
            for name, each in zip(event.payload, got, strict=True)
        }


if "DURABLE_SMOKE" in os.environ:
    app = dying.make_app(build)
    if Config.read(os.environ).role != "none":
        migrate.upgrade(vars(app)["durable"].internals.store)
