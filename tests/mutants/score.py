"""Plant each mutant in a process of its own, and say what catches it: ``make mutants``.

Caught is a mutant whose schedules break an invariant, or whose named test fails while it passes on the right code. One
that only makes schedules raise is broken, not caught: it would show without any simulation.

``seeds.json`` names the schedule that caught a mutant last; it is tried first, and the search begins at 0 if it
catches nothing any more. ``--record`` writes the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import plant

SCHEDULES = 2_000
SEEDS = Path(__file__).with_name("seeds.json")
# Those that named tests need; all that are installed would take longer to import than most of these tests run.
PLUGINS = ("-p", "celery_durable.testing.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
CONTROL = Mutant("none: the code as it is", ())


@dataclass(frozen=True)
class Score:
    """What became of a mutant: ``verdict`` is caught, SURVIVED or BROKEN."""

    mutant: str
    verdict: str
    by: str
    seconds: float
    seed: int | None = None

    def __str__(self) -> str:
        return f"{self.mutant:<66} {self.verdict:<9} {self.seconds:>5.1f} s  {self.by}"


def score(mutant: Mutant, schedules: int = SCHEDULES, is_controlled: bool = True) -> Score:
    """Plant a mutant in this process, and search for what it breaks.

    Args:
        mutant: The bug.
        schedules: How many schedules of the simulation to try.
        is_controlled: Run the named test on the right code, too. The suite does so anyway.
    """
    started = time.process_time()

    def scored(verdict: str, by: str, seed: int | None = None) -> Score:
        return Score(mutant.name, verdict, by, time.process_time() - started, seed)

    if mutant.caught_by is not None:
        return _by_test(mutant, mutant.caught_by, is_controlled=is_controlled)
    logging.disable(logging.CRITICAL)
    plant(mutant)
    from tests.simulation.simulation import UNEXPECTED, World

    world = World()
    try:
        for seed in chain(recorded_seeds().get(mutant.name, ()), range(schedules)):
            broken = world.run(seed).broken
            if broken and broken[0].startswith(UNEXPECTED):
                return scored("BROKEN", f"seed {seed}: {broken[0]}")
            if broken:
                return scored("caught", f"seed {seed}: {broken[0].partition(':')[0]}", seed)
        return scored("SURVIVED", f"{schedules} schedules")
    finally:
        world.close()


def recorded_seeds() -> dict[str, list[int]]:
    """The schedule that caught a mutant last, by its name."""
    return {name: [seed] for name, seed in json.loads(SEEDS.read_text()).items()}


def _by_test(mutant: Mutant, test: str, *, is_controlled: bool) -> Score:
    started = time.monotonic()
    codes = []
    for name in ("", mutant.name) if is_controlled else (mutant.name,):
        command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, "-p", "tests.mutants.planted", test]
        env = os.environ | {"DURABLE_MUTANT": name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        codes.append((done.returncode, " skipped" in done.stdout))
    spent = time.monotonic() - started
    match codes:
        case [(0, False), (1, _)] | [(1, _)]:
            return Score(mutant.name, "caught", test, spent)
        case [(0, True), *_]:
            return Score(mutant.name, "skipped", f"{test} needs its server", spent)
        case [*_, (0, _)]:
            return Score(mutant.name, "SURVIVED", test, spent)
        case _:
            return Score(mutant.name, "BROKEN", f"{test} ends with {codes}", spent)


def scores(wanted: list[Mutant], schedules: int, jobs: int, *, is_controlled: bool) -> Iterator[Score]:
    """The scores of these, in their order."""
    # Each in a new process: there is no way back from a mutant.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(score, wanted, repeat(schedules), repeat(is_controlled))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; without any, all and the control")
    parser.add_argument("--exactly", help="the whole name of one")
    parser.add_argument("-n", type=int, default=SCHEDULES, help="how many schedules at most for each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-control", action="store_true", help="do not run named tests on the right code as well")
    parser.add_argument("--record", action="store_true", help=f"write into {SEEDS.name} which schedule caught what")
    args = parser.parse_args()
    everything = (CONTROL, *MUTANTS)
    wanted = [mutant for mutant in everything if not args.names or any(name in mutant.name for name in args.names)]
    if args.exactly is not None:
        wanted = [mutant for mutant in everything if mutant.name == args.exactly]
    found = []
    for each in scores(wanted, args.n, args.jobs, is_controlled=not args.no_control):
        print(each, flush=True)
        found.append(each)
    if args.record:
        _record({each.mutant: each.seed for each in found if each.seed is not None})
    mutants = [each for each in found if each.mutant != CONTROL.name]
    caught = sum(each.verdict == "caught" for each in mutants)
    skipped = sum(each.verdict == "skipped" for each in mutants)
    is_control_clean = all(each.verdict == "SURVIVED" for each in found if each.mutant == CONTROL.name)
    is_controlled = len(found) > len(mutants)
    control = "clean" if is_control_clean else "NOT CLEAN"
    print(f"{caught} of {len(mutants)} mutants caught, {skipped} skipped", end="")
    print(f"; the code itself is {control}" if is_controlled else "")
    return 0 if caught + skipped == len(mutants) and is_control_clean else 1


def _record(seeds: dict[str, int]) -> None:
    names = [mutant.name for mutant in MUTANTS if mutant.caught_by is None]
    known = json.loads(SEEDS.read_text()) | seeds
    SEEDS.write_text(json.dumps({name: known[name] for name in names if name in known}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
