"""The schedules of faults under which `assert_crash_safe` runs a workflow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Deliveries = Literal["once", "twice", "at once", "lost"]
"""What happens to each message: delivered once; twice, and every older one again, mixed; to two runners; never."""
_PAIRS = 8
_HOLDS_NO_LOCK = ("claimed", "before-body", "after-commit")


@dataclass(frozen=True, slots=True)
class CrashSchedule:
    """The faults in one run of the workflow.

    ``crashes``: the first runner dies at its checkpoint of the first number, the next runner at its checkpoint of the
    second number, and so on. ``freeze``: the first runner is frozen beyond its lease at this checkpoint, and continues
    when another runner has finished the work.
    """

    crashes: tuple[int, ...] = ()
    freeze: int | None = None
    deliveries: Deliveries = "once"
    seed: int = 0

    @property
    def faults(self) -> int:
        """The number of step functions that may run without their result being stored."""
        return len(self.crashes) + (self.freeze is not None)


def choose_schedules(schedules: list[CrashSchedule], most: int, seed: int) -> list[CrashSchedule]:
    """Return at most ``most`` of the schedules, which the seed chooses."""
    if len(schedules) <= most:
        return schedules
    chosen = random.Random(f"{seed}/choice").sample(range(len(schedules)), most)  # noqa: S311  # reproducible on purpose
    return [schedules[number] for number in sorted(chosen)]


def generate_schedules(passed: Sequence[str], seed: int) -> Iterator[CrashSchedule]:
    """Order schedules from simple to complex, so that the first failure is nearly the shortest."""
    rng = random.Random(f"{seed}/schedules")  # noqa: S311  # reproducible on purpose
    kinds: tuple[Deliveries, ...] = get_args(Deliveries)
    for deliveries in kinds[1:]:
        yield CrashSchedule(deliveries=deliveries, seed=seed)
    for number in range(len(passed)):
        yield CrashSchedule((number,), deliveries=kinds[number % 2], seed=seed)
    for number, name in enumerate(passed):
        if name in _HOLDS_NO_LOCK:
            yield CrashSchedule(freeze=number, seed=seed)
    for _ in range(_PAIRS):
        pair = rng.randrange(len(passed)), rng.randrange(len(passed))
        yield CrashSchedule(pair, deliveries=rng.choice(kinds), seed=rng.getrandbits(16))


def simplify(schedule: CrashSchedule) -> Iterator[CrashSchedule]:
    """Yield schedules with fewer faults, which may show the same failure."""
    if schedule.faults and schedule.deliveries != "once":
        yield replace(schedule, crashes=(), freeze=None)
    for number in schedule.crashes if len(schedule.crashes) > 1 else ():
        yield replace(schedule, crashes=(number,), deliveries="once")
        yield replace(schedule, crashes=(number,))
    if schedule.deliveries != "once":
        yield replace(schedule, deliveries="once")
