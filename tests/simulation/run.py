"""Run many schedules, on all cores, and say how fast and what is broken: ``make simulate N=20000 SEED=0``.

``python -m tests.simulation.run --replay 123`` tells one schedule's story.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tests.simulation.simulation import Outcome, World

_CHUNK = 50
_MOST_SHOWN = 10

_worlds: list[World] = []


def world() -> World:
    """The world of this process."""
    if not _worlds:
        logging.getLogger("celery_durable").setLevel(logging.CRITICAL)  # a storm of warnings is what we make
        _worlds.append(World())
    return _worlds[0]


def _prepare() -> None:
    """Let the collector of garbage leave out what stays: SQLAlchemy and the world."""
    world()
    gc.freeze()


def outcomes(seeds: Iterable[int]) -> list[Outcome]:
    """What comes of the schedules of these seeds, in this process."""
    return [world().run(seed) for seed in seeds]


def told(outcome: Outcome) -> str:
    """A broken schedule, and how to look at it."""
    lines = "".join(f"\n  {each}" for each in outcome.broken)
    return f"Seed {outcome.seed}:{lines}\n  python -m tests.simulation.run --replay {outcome.seed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20_000, help="how many schedules")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, nargs="+", help="run these seeds and print their journals")
    args = parser.parse_args()
    if args.replay is not None:
        return max(map(_replay, args.replay))
    started, done, broken = time.monotonic(), 0, 0
    stats: Counter[str] = Counter()
    chunks = [range(at, min(at + _CHUNK, args.seed + args.n)) for at in range(args.seed, args.seed + args.n, _CHUNK)]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        for future in as_completed([pool.submit(outcomes, chunk) for chunk in chunks]):
            for outcome in future.result():
                stats.update(outcome.stats)
                if outcome.broken:
                    broken += 1
                    if broken <= _MOST_SHOWN:
                        print(f"\r{told(outcome)}", flush=True)
                done += 1
            spent = time.monotonic() - started
            print(f"\r{done}/{args.n} schedules, {done / spent:.0f}/s, {broken} broken", end="", flush=True)
    print()
    for name, count in stats.most_common():
        print(f"{count:>12,}  {name}")
    return 1 if broken else 0


def _replay(seed: int) -> int:
    outcome = world().run(seed)
    print("\n".join(outcome.journal))
    print(f"rows {outcome.digest}")
    if outcome.broken:
        print(told(outcome))
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
