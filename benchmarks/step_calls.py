"""How much code one step opens, in counts that do not depend on the machine: `python benchmarks/step_calls.py`.

Runs a pass of a workflow with trivial steps in this process, on PostgreSQL (BENCH_POSTGRESQL_URL names another server)
or with ``--sqlite`` on a file. Prints a JSON line for one `step.do` in the middle of the pass: the files of the package
in which a function is called, the lines of these files, and the calls.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import sqlalchemy as sa
from celery import Celery

import celery_durable
from celery_durable import Durable, Step, WorkflowEvent

PACKAGE = str(Path(celery_durable.__file__).parent) + os.sep
WARM_UP, MEASURED = 20, 10


class CallCounter:
    """A profile function that counts calls of the package's functions while it is on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(PACKAGE):
            self.calls[f"{name.removeprefix(PACKAGE)}:{frame.f_code.co_qualname}"] += 1
            self.files.add(name)


def measure(url: str) -> tuple[dict[str, Any], Counter[str]]:
    """Return the counts of one step, and the calls by function over all measured steps."""
    app = Celery("step_calls", broker="memory://", set_as_current=False)
    app.conf.update(durable_database_url=url, durable_max_steps=1000)
    durable = Durable(app)
    counter = CallCounter()

    @durable.workflow(name="step_calls")
    def step_calls(event: WorkflowEvent[None], step: Step) -> None:
        for number in range(WARM_UP):
            step.do(f"warm up {number}", int)
        counter.is_on = True
        for number in range(MEASURED):
            step.do(f"step {number}", int)
        counter.is_on = False

    durable.migrate()
    instance = step_calls.create()
    ref = durable.internals.operations.queries.get("step_calls", instance.id).instance.ref
    sys.setprofile(counter)
    try:
        outcome = durable.internals.runner.advance(ref, task_id="bench", node="bench")
    finally:
        sys.setprofile(None)
    assert outcome.summary == "complete", outcome
    durable.close()
    counts = {
        "database": sa.make_url(url).get_backend_name(),
        "files": len(counter.files),
        "lines": sum(len(Path(name).read_text(encoding="utf-8").splitlines()) for name in counter.files),
        "calls per step": sum(counter.calls.values()) / MEASURED,
    }
    return counts, counter.calls


def main() -> None:
    if "--sqlite" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            counts, calls = measure(f"sqlite:///{folder}/step_calls.sqlite3")
    else:
        server = sa.make_url(os.environ.get("BENCH_POSTGRESQL_URL", "postgresql+psycopg://postgres@127.0.0.1/postgres"))
        admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(sa.text("DROP DATABASE IF EXISTS durable_step_calls WITH (FORCE)"))
            connection.execute(sa.text("CREATE DATABASE durable_step_calls"))
        try:
            url = server.set(database="durable_step_calls").render_as_string(hide_password=False)
            counts, calls = measure(url)
        finally:
            with admin.connect() as connection:
                connection.execute(sa.text("DROP DATABASE durable_step_calls WITH (FORCE)"))
            admin.dispose()
    print(json.dumps(counts))
    if "--calls" in sys.argv:
        for name, count in calls.most_common():
            print(f"{count / MEASURED:6.1f}  {name}")


if __name__ == "__main__":
    main()
