"""Time: a pass that asks a clock gets another answer than the pass before it."""

from __future__ import annotations

from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules.calls import CallTable
from celery_durable.lint.workflow_code import WorkflowCode

READS_CLOCK = Rule("CD101", "Use step.now(), or read the clock in a step.")
BLOCKS = Rule("CD102", "Use step.sleep(name, duration), which occupies no worker.")

RULES = (READS_CLOCK, BLOCKS)

CLOCKS = CallTable(
    READS_CLOCK,
    "returns another time on each pass",
    frozenset({
        "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter",
        "time.perf_counter_ns", "time.process_time", "time.process_time_ns", "time.thread_time",
        "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
        "django.utils.timezone.now", "arrow.now", "arrow.utcnow", "pendulum.now", "pendulum.today",
        "pendulum.tomorrow", "pendulum.yesterday",
    }),
    without_arguments={
        "time.localtime": 1, "time.gmtime": 1, "time.ctime": 1, "time.asctime": 1, "time.strftime": 2,
        "django.utils.timezone.localtime": 1, "django.utils.timezone.localdate": 1, "arrow.get": 1,
    },
)  # fmt: skip
_SLEEPS = CallTable(
    BLOCKS,
    "occupies the worker, and sleeps again on each pass",
    frozenset({"time.sleep", "asyncio.sleep", "gevent.sleep", "eventlet.sleep", "anyio.sleep", "trio.sleep"}),
)


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield calls that read a clock or sleep."""
    yield from CLOCKS.find(code)
    yield from _SLEEPS.find(code)
