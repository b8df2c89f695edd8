"""`python -m tests.backlog`: what stands in queues and outboxes, and what it costs everybody else.

The bounds are those of docs/how-to/outages.md, "What a backlog costs".
It starts a PostgreSQL and a Redis on 127.0.0.1 and ends them.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.backlog.figures import Figure, table
from tests.backlog.scenarios import SCENARIOS
from tests.smoke.proc import RedisServer, postgresql_programs


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when every bound holds, 1 when one is broken, 2 when it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.backlog", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"by default all: {', '.join(SCENARIOS)}")
    given = parser.parse_args(argv)
    if unknown := sorted({*given.scenario} - {*SCENARIOS}):
        parser.error(f"no such scenario: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by the way that ends what was started
    if RedisServer.program is None or postgresql_programs() is None:
        print("Not installed here: redis-server, or PostgreSQL's programs", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="durable-backlog-"))
    rows: list[tuple[str, Figure]] = []
    for name in given.scenario or SCENARIOS:
        print(f"{name}: {SCENARIOS[name].__doc__}", flush=True)
        figures = [(name, each) for each in SCENARIOS[name](folder / name)]
        print(table(figures), flush=True)
        rows += figures
    broken = [row for row in rows if row[1].is_broken]
    print(f"\n{table(rows)}\n\n{len(broken)} bounds broken", flush=True)
    if not broken:
        shutil.rmtree(folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
