"""`make chaos`: real servers, real workers, and a storm over them; then the question whether anything was lost.

Everything it hurts it has started itself, on 127.0.0.1; everything it started it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from tests.chaos.arena import PAIRS, Arena, missing_programs
from tests.chaos.crowd import Crowd
from tests.chaos.report import LEGEND, Report, report, table
from tests.chaos.storm import Storm

_QUIET_SECONDS = 240.0
"""A task whose message was lost without a death is looked for when it is a minute old, each minute, and twice lost."""
_LONGER = 3.0
"""How much longer than asked a storm may go on for its kills."""
_NEWS_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 when nothing was lost or done twice, 1 when something was, 2 when it cannot run here."""
    given = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by the way that ends what was started
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    pairs = given.pair or list(PAIRS[:2])
    missing = sorted({name for pair in pairs for name in missing_programs(pair)})
    if missing:
        print(f"Not installed here: {', '.join(missing)}. Choose what is: --pair redis+postgresql", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="durable-chaos-"))
    folder.chmod(0o755)
    logging.basicConfig(filename=folder / "crowd.log")
    print(f"seed {seed}, logs in {folder}", flush=True)
    seconds = given.minutes * 60 / len(pairs)
    reports = [_run(pair, folder / pair, seed, seconds, given.kills, given.crowd) for pair in pairs]
    print(f"\n{table(reports)}\n\n{LEGEND}", flush=True)
    violations = [f"{each.pair}: {violation}" for each in reports for violation in each.violations]
    if violations:
        print(f"\n{len(violations)} VIOLATIONS, seed {seed}, logs kept in {folder}", *violations[:50], sep="\n  ")
        return 1
    if not given.keep:
        shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of storm, shared by the pairs")
    parser.add_argument(
        "--pair", action="append", choices=PAIRS, help="broker+database; again for more; two by default"
    )
    parser.add_argument("--seed", type=int, help="decides which faults come, and when; a random one by default")
    parser.add_argument(
        "--kills", type=int, default=0, help="go on (up to three times as long) until there were so many"
    )
    parser.add_argument("--crowd", type=int, default=160, help="how many instances live at a time")
    parser.add_argument("--keep", action="store_true", help="keep the logs also when nothing was found")
    return parser


def _run(pair: str, folder: Path, seed: int, seconds: float, kills: int, size: int) -> Report:
    """A storm over one pair, the quiet after it, and what is found then."""
    print(f"{pair}: starting its servers, workers and beats", flush=True)
    folder.mkdir()
    arena = Arena(pair, folder)
    try:
        storm = Storm(arena, random.Random(f"{seed} {pair} storm"))
        crowd = Crowd(arena.site, random.Random(f"{seed} {pair} crowd"), size=size)
        crowd.start()
        started = time.monotonic()
        news = _News(arena, storm, crowd)

        def go_on() -> bool:
            news.tell()
            passed = time.monotonic() - started
            return passed < seconds or (storm.tally.killed < kills and passed < seconds * _LONGER)

        def wants_kills() -> bool:
            return storm.tally.killed < min(kills, kills * (time.monotonic() - started) / seconds)

        storm.blow(go_on, wants_kills)
        passed = time.monotonic() - started
        storm.subside()
        crowd.stop()
        _await_quiet(arena, storm, news, crowd)
        return report(arena, crowd, storm.tally, seconds=passed)
    finally:
        arena.close()


def _await_quiet(arena: Arena, storm: Storm, news: _News, crowd: Crowd) -> None:
    end = time.monotonic() + _QUIET_SECONDS
    while arena.site.open_instances() and time.monotonic() < end:
        storm.tally.fallen += arena.fallen()
        news.tell()
        time.sleep(0.2)


class _News:
    """A line every ten seconds."""

    def __init__(self, arena: Arena, storm: Storm, crowd: Crowd) -> None:
        self._arena, self._storm, self._crowd = arena, storm, crowd
        self._started_at = time.monotonic()
        self._next = self._started_at + _NEWS_SECONDS

    def tell(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _NEWS_SECONDS
            tally = self._storm.tally
            done = f"{tally.faults.total()} faults, {tally.killed} kills"
            there = f"{len(self._crowd.plans)} instances, {self._open()} open"
            print(f"{self._arena.pair}: {now - self._started_at:4.0f} s, {done}, {there}", flush=True)

    def _open(self) -> str:
        with contextlib.suppress(sa.exc.DBAPIError):
            return str(self._arena.site.open_instances())
        return "?"


if __name__ == "__main__":
    sys.exit(main())
