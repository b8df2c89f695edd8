"""Tools to test workflows: a harness with its own clock and no broker, mocks of steps, scenarios, pytest fixtures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable.model import OutboxMessage, RunRef
    from celery_durable.testing.clock import START, Clock
    from celery_durable.testing.cooperative import Barrier, Crash
    from celery_durable.testing.crash_runs import CrashSchedule
    from celery_durable.testing.crash_safety import CrashReport, assert_crash_safe
    from celery_durable.testing.errors import (
        GoldenHistoryMissing,
        HarnessBusy,
        HarnessError,
        HarnessMisuse,
        HeldOutside,
        NotCrashSafe,
        NotEnded,
        NothingDue,
        NotReplayed,
        OpenStepChanged,
        PendingHooks,
        SampledSchedules,
        ScenarioFailed,
        StoreNotEmpty,
        UncheckedTables,
    )
    from celery_durable.testing.faults import Faults
    from celery_durable.testing.golden import GoldenHistories, assert_replays
    from celery_durable.testing.harness import DurableHarness
    from celery_durable.testing.instance import HarnessInstance
    from celery_durable.testing.mocks import Attempt, Mock, Mocks
    from celery_durable.testing.processes import Process, RunnerProcess
    from celery_durable.testing.runtime import CHECKPOINTS, HarnessRuntime
    from celery_durable.testing.tasks import Messages

__all__ = [
    "CHECKPOINTS",
    "START",
    "Attempt",
    "Barrier",
    "Clock",
    "Crash",
    "CrashReport",
    "CrashSchedule",
    "DurableHarness",
    "Faults",
    "GoldenHistories",
    "GoldenHistoryMissing",
    "HarnessBusy",
    "HarnessError",
    "HarnessInstance",
    "HarnessMisuse",
    "HarnessRuntime",
    "HeldOutside",
    "Messages",
    "Mock",
    "Mocks",
    "NotCrashSafe",
    "NotEnded",
    "NotReplayed",
    "NothingDue",
    "OpenStepChanged",
    "OutboxMessage",
    "PendingHooks",
    "Process",
    "RunRef",
    "RunnerProcess",
    "SampledSchedules",
    "ScenarioFailed",
    "StoreNotEmpty",
    "UncheckedTables",
    "assert_crash_safe",
    "assert_replays",
]

_ROOMS = (
    "errors",
    "cooperative",
    "clock",
    "tasks",
    "mocks",
    "runtime",
    "processes",
    "faults",
    "instance",
    "harness",
    "crash_runs",
    "crash_safety",
    "golden",
)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: pytest imports this package for its plugin in every project."""
    if name in __all__:
        for room in _ROOMS:
            home = vars(import_module(f"{__name__}.{room}"))
            if name in home:
                return globals().setdefault(name, home[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
