"""Every way in which a Celery task ends, in real workers: one answer of the right kind, and none of it a message.

One worker for each pool and kind takes all rows, so that the matrix is affordable.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.smoke import ends
from tests.smoke.proc import Proc, until
from tests.smoke.site import PAIRS, QUIET, REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(300)]

REVOKED = "is revoked"
TERMINATED = "is terminated"

RETURNS = dict.fromkeys(
    (
        "returns",
        "returns late",
        "is slow to start",
        "retries itself",
        "retries later",
        "replaces itself",
        "puts itself back late",
    ),
    42,
)
RAISES = {
    "raises": ["LookupError", "no 21"],
    "raises late": ["LookupError", "no 21"],
    "retries by itself": ["OSError", "no 21"],
}
ALSO = {
    "ignores": ["TaskIgnored", "The Celery task raised Ignore, so it has no result"],
    "rejects": ["TaskRejected", "The Celery task raised Reject: no"],
    "rejects late": ["TaskRejected", "The Celery task raised Reject: no"],
    "puts itself back": ["TaskRejected", "The Celery task raised Reject: later"],  # and its message is gone
    "needs another argument": ["TypeError", re.compile("missing 1 required positional argument")],
    "returns no json": ["EncodeError", re.compile("not JSON serializable")],
    "is pickled": ["ContentDisallowed", re.compile("Refusing to deserialize")],
    "expires": ["TaskRevoked", re.compile("was not run: it had expired")],
    REVOKED: ["TaskRevoked", re.compile("was revoked")],
}
PROCESSES = {  # what only processes can be told
    "exits softly": ["SoftTimeLimitExceeded", re.compile("")],
    "exits hard": ["TimeLimitExceeded", re.compile("1")],
    TERMINATED: ["TaskRevoked", re.compile("was terminated")],
}


class EndsSite(Site):
    project = "tests.smoke.ends"
    build = staticmethod(ends.build)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.nodes: dict[Proc, str] = {}

    def worker_of(self, kind: str, pool: str, *queues: str) -> Proc:
        """A worker of this application, of another one on the same broker, or of one without Durable."""
        url = self.config.bodies_url if kind != "another" else f"sqlite:///{self.folder}/another.sqlite3"
        config = dataclasses.replace(self.config, role=kind if kind != "ours" else "worker", database_url=url)
        names = [f"{queue}-{self.config.name}" for queue in queues]
        node = f"{kind}-{len(self.procs)}-{self.config.name}@smoke"
        argv = ("worker", "-P", pool, "-c", "4", "-n", node, *QUIET, "-Q", ",".join(names))
        proc = self._start(kind, *argv, **config.environment())
        self.nodes[proc] = node
        proc.wait_for_log(r"ready\.")
        return proc

    def remove_unreported_ends(self, wanted: dict[str, Any]) -> None:
        """Remove an end that RabbitMQ may not report: it drops an expired message that it cannot deliver at once."""
        if self.config.broker_url.startswith("amqp"):
            del wanted["expires"]


def same(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, list):
        return bool(got == wanted)
    name, text = wanted
    return bool(got[0] == name and (text.search(got[1]) if isinstance(text, re.Pattern) else got[1] == text))


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: got[name] for name in wanted if not same(got[name], wanted[name])}


def task_ids(instance: Any) -> dict[str, str]:
    return {step.name: step.task_id for step in instance.history().steps if step.task_id is not None}


def run_all(site: EndsSite, worker: Proc, names: list[str]) -> dict[str, Any]:
    """Have all of these end; two need a hand."""
    instance = site.create("ends", names)
    until("the tasks are out", lambda: len(task_ids(instance)) == len(names))
    ids, control = task_ids(instance), site.app.control
    if TERMINATED in names:
        until("its body runs", (site.folder / "terminates").exists)
        control.revoke(ids[TERMINATED], terminate=True)
    if REVOKED in names:
        control.revoke(ids[REVOKED])
        worker.wait_for_log(rf"Tasks flagged as revoked: .*{ids[REVOKED]}")
        control.add_consumer(f"later-{site.config.name}", destination=[site.nodes[worker]])
    try:
        until("the end of all tasks", lambda: instance.status().status.is_terminal, 60)
    except AssertionError:
        left = [step.name for step in instance.history().steps if step.is_waiting]
        pytest.fail(f"open: {left}\n{site.logs()}")
    got: dict[str, Any] = instance.result("1 second")
    assert all(step.attempts == 1 for step in instance.history().steps)
    return got


def answers_in(*procs: Proc) -> list[str]:
    """The answers that came as messages."""
    return [line for proc in procs for line in re.findall(r"celery_durable\.task_\w+\[\S+ received", proc.text())]


@pytest.fixture
def site(make_site: Callable[..., EndsSite], broker_url: str, store_url: str) -> EndsSite:
    return make_site(broker_url, store_url, kind=EndsSite, durable_dispatcher="worker")


def need(pool: str) -> None:
    if pool in ("gevent", "eventlet") and importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")


@pytest.mark.slow
@PAIRS
@pytest.mark.parametrize("pool", [pytest.param("prefork", marks=pytest.mark.gate), "threads", "solo"])
def test_every_end_is_committed_on_every_pool(site: EndsSite, pool: str) -> None:
    wanted = RETURNS | RAISES | ALSO | (PROCESSES if pool == "prefork" else {})
    site.remove_unreported_ends(wanted)
    worker = site.worker_of("ours", pool, "durable", "ends")
    got = run_all(site, worker, [*wanted])
    assert differences(got, wanted) == {}
    assert re.findall(r".* is sent as a message.*", worker.text()) == []
    assert answers_in(worker) == [], worker.text()
    assert worker.text().count("Errback") == 0
    site.finish()


@pytest.mark.slow
@PAIRS
@pytest.mark.parametrize("pool", [pytest.param("gevent", marks=pytest.mark.gate), "eventlet"])
def test_every_end_is_committed_on_pools_that_run_no_workflows(site: EndsSite, pool: str) -> None:
    need(pool)
    own = site.worker_of("ours", "threads", "durable")
    wanted = RETURNS | RAISES | ALSO
    site.remove_unreported_ends(wanted)
    theirs = site.worker_of("ours", pool, "ends")
    got = run_all(site, theirs, [*wanted])
    assert differences(got, wanted) == {}
    assert answers_in(own, theirs) == []
    site.finish()


@pytest.mark.slow
@REDIS_AND_POSTGRESQL
@pytest.mark.parametrize("kind", ["another", "none"])
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_workers_of_others_answer_by_message(site: EndsSite, pool: str, kind: str) -> None:
    need(pool)
    own = site.worker_of("ours", "threads", "durable")
    wanted: dict[str, Any] = dict(RETURNS)
    wanted |= RAISES | ALSO if kind == "another" else {name: ["TaskFailed", re.compile("failed")] for name in RAISES}
    if pool == "prefork" and kind == "another":
        wanted |= PROCESSES
    theirs = site.worker_of(kind, pool, "ends")
    got = run_all(site, theirs, [*wanted])
    assert differences(got, wanted) == {}
    assert len(answers_in(own)) >= len(wanted)
    assert answers_in(theirs) == []
    site.finish()
