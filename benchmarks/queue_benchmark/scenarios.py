"""Runs a public benchmark of queues with its own harness: `python benchmarks/queue_benchmark/scenarios.py CHECKOUT`.

CHECKOUT is a clone of github.com/hardbyte/postgresql-job-queue-benchmarking. Its harness drives the adapter beside this
file. It would start PostgreSQL with Docker; here it gets one of its own, from local programs, with the settings of the
checkout's postgres.conf. Its charts are not drawn. The phases of each scenario are shortened in proportion. Each cell
is a JSON line. BENCH_BROKER names the Redis; PostgreSQL's programs are on the PATH, or where Debian puts them.

`--system NAME --command "..."` measures another system of the benchmark instead: its adapter, started by this command
and not with Docker.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).parent
os.environ.setdefault("BENCH_NAME", "celery_durable_bench")
sys.path.insert(0, str(HERE.parent))

from leftovers import count_unfinished, finish_jobs  # noqa: E402  # after the name that its keys and databases have
from local_postgresql import LocalPostgresql  # noqa: E402
from machine import OthersMeter  # noqa: E402
from servers import forget_keys  # noqa: E402


class Cell(NamedTuple):
    """A scenario, and its options of the harness. ``load``: times the rate; each replica gets an equal part."""

    scenario: str
    replicas: int = 1
    load: float = 1.0
    queues: int = 1
    options: tuple[str, ...] = ()


class System(NamedTuple):
    """What is measured. ``folder``: of its adapter.json; ``servers``: what works for it, and for others as well."""

    name: str
    folder: Path
    command: list[str]
    servers: tuple[str, ...] = ()


OURS = System("celery_durable", HERE, [sys.executable, str(HERE / "adapter.py")], ("redis-server",))


CELLS = {
    "throughput": Cell("soak", options=("--producer-mode=depth-target", "--target-depth=4000")),
    "chaos_postgres_restart": Cell("chaos_postgres_restart"),
    "chaos_pg_backend_kill": Cell("chaos_pg_backend_kill"),
    "chaos_pool_exhaustion": Cell("chaos_pool_exhaustion"),
    "crash_recovery": Cell("crash_recovery", 2),
    "chaos_crash_recovery": Cell("chaos_crash_recovery", 2),
    "chaos_repeated_kills": Cell("chaos_repeated_kills", 2),
    "crash_recovery_under_load": Cell("crash_recovery_under_load", 2),
    "idle_in_tx_saturation": Cell("idle_in_tx_saturation"),
    "sustained_high_load": Cell("sustained_high_load"),
    "active_readers": Cell("active_readers"),
    "event_delivery_burst": Cell("event_delivery_burst", load=1.5),
    "event_delivery_matrix": Cell("event_delivery_matrix"),
    "fleet_steady_state": Cell("fleet_steady_state", 2),
    "mixed_queue": Cell("mixed_queue", queues=4),
    "soak": Cell("soak"),
    "long_horizon": Cell("long_horizon"),
}
SHORTEST_SECONDS = 10
NOT_DRAWN = {"plots": "render_all", "report": "write_interactive_report"}
"""Modules of the harness that need more packages, and what it calls of each."""


class Harness:
    """The checkout's harness with one system's adapter and a local PostgreSQL."""

    def __init__(self, checkout: Path, results: Path, server: LocalPostgresql, system: System) -> None:
        sys.path.insert(0, str(checkout))
        for name, function in NOT_DRAWN.items():
            sys.modules[f"bench_harness.{name}"] = mock.Mock(**{function: lambda *_, **__: None})
        self._server, self._results, self._system = server, results, system
        self._adapters = self._import("adapters")
        self._orchestrator = self._import("orchestrator")
        self._phases = self._import("phases")
        self._replace()
        self.left: dict[str, int] = {}

    def run(self, cell: Cell, *, seconds: int, rate: float, more: list[str]) -> dict[str, Any]:
        """The summary that the harness writes. ``more``: its own options."""
        before = set(self._results.iterdir())
        os.environ["BENCH_QUEUE_COUNT"] = str(cell.queues)
        phases = [f"--phase={spec}" for spec in self.shorten(cell.scenario, seconds)]
        rate_each = f"--producer-rate={round(rate * cell.load / cell.replicas)}"
        options = [rate_each, f"--replicas={cell.replicas}", *cell.options, *more]
        self._orchestrator.main(["run", f"--systems={self._system.name}", "--sample-every=2", *phases, *options])
        (folder,) = set(self._results.iterdir()) - before
        return json.loads((folder / "summary.json").read_text())

    def shorten(self, scenario: str, seconds: int) -> list[str]:
        """The phases of a scenario that takes about so many seconds."""
        phases = [self._phases.parse_phase_spec(spec) for spec in self._phases.SCENARIOS[scenario]]
        factor = min(1.0, seconds / sum(phase.duration_s for phase in phases))
        lengths = [max(SHORTEST_SECONDS, round(phase.duration_s * factor)) for phase in phases]
        names = [spec.rpartition(":")[0] for spec in self._phases.SCENARIOS[scenario]]
        return [f"{name}:{length}s" for name, length in zip(names, lengths, strict=True)]

    def _import(self, name: str) -> ModuleType:
        return importlib.import_module(f"bench_harness.{name}")

    def _replace(self) -> None:
        """Put the local server where the harness calls Docker, and the adapter where it looks for systems."""
        server, orchestrator, adapters = self._server, self._orchestrator, self._adapters
        adapters.PG_PORT = server.port
        orchestrator.RESULTS_ROOT = self._results
        orchestrator.start_postgres = lambda _image: server.make()
        orchestrator.stop_postgres = lambda _image: server.remove()
        orchestrator._compose_stop_postgres = lambda _image: server.stop()
        orchestrator._compose_start_postgres = lambda _image: server.start()
        run_one_system = orchestrator.run_one_system

        def run_and_look(*args: Any, **options: Any) -> dict[str, Any]:
            forget_keys()
            try:
                return run_one_system(*args, **options)
            finally:
                self.left = self._finish()

        orchestrator.run_one_system = run_and_look
        adapters.ADAPTERS[self._system.name] = adapters.AdapterEntry(
            self._system.folder, lambda _skip: None, self._launch
        )

    def _launch(self, manifest: Any, overrides: dict[str, str]) -> Any:
        # The adapter keeps the rate by itself. So it follows the file that a phase of high load changes.
        os.environ["PRODUCER_PACING"] = "adapter"
        os.environ["PRODUCER_BATCH_MAX"] = "128"  # the default of most adapters
        environment = self._adapters._base_env(manifest, overrides)
        return self._adapters.LaunchSpec(self._system.command, environment)

    def _finish(self) -> dict[str, int]:
        """How many jobs were left at the end, and what became of all of them with a worker that gets no new ones."""
        if self._system is not OURS:
            return {}
        url = self._adapters.pg_url(self._adapters.AdapterManifest.load(HERE).db_name)
        return {"left": count_unfinished(url), **finish_jobs(url, HERE / "adapter.py")}


def describe(phases: dict[str, Any]) -> dict[str, Any]:
    """The figures of the summary that the benchmark's own tables have, by phase."""
    cell: dict[str, Any] = {"phases": {}}
    for label, phase in phases.items():
        metrics = phase["metrics"]
        cell["phases"][label] = {
            "type": phase["phase_type"],
            "completion_rate": read_median(metrics, "completion_rate"),
            "enqueue_rate": read_median(metrics, "enqueue_rate"),
            "claim_p50_ms": read_median(metrics, "claim_p50_ms"),
            "claim_p99_ms": read_median(metrics, "claim_p99_ms"),
            "queue_depth_peak": metrics.get("queue_depth", {}).get("peak"),
            "dead_tuples_peak": phase["peak_dead_tup"],
        }
        queues = {name: read_median(metrics, name) for name in metrics if name.startswith("claim_p99_ms@")}
        if len(queues) > 1:
            cell["phases"][label] |= queues
        cell |= {name: phase[name] for name in ("jobs_lost", "chaos_recovery_time_s") if name in phase}
    return cell


def read_median(metrics: dict[str, Any], name: str) -> float | None:
    value = metrics.get(name, {}).get("median")
    return None if value is None else round(value, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("cells", nargs="*", metavar="cell", help=f"all by default: {', '.join(CELLS)}")
    parser.add_argument("--seconds", type=int, default=120, help="how long a scenario takes; 100000 leaves it as it is")
    parser.add_argument("--rate", type=float, default=100, help="jobs per second, of all replicas together")
    parser.add_argument("--harness", default="", help="more options of the harness, as one word")
    parser.add_argument("--system", help="another system of the benchmark")
    parser.add_argument("--command", default="", help="the command that starts its adapter")
    args = parser.parse_intermixed_args()  # so that cells may follow options
    if unknown := set(args.cells) - set(CELLS):
        parser.error(f"no such cell: {', '.join(sorted(unknown))}")
    results = Path(tempfile.mkdtemp(prefix="queue-benchmark-"))
    server = LocalPostgresql((args.checkout / "postgres.conf").read_text())
    system = OURS
    if args.system is not None:
        system = System(args.system, args.checkout / f"{args.system}-bench", shlex.split(args.command))
    harness = Harness(args.checkout, results, server, system)
    failed = 0
    for name in args.cells or CELLS:
        others, began = OthersMeter(system.servers), time.monotonic()
        try:
            summary = harness.run(CELLS[name], seconds=args.seconds, rate=args.rate, more=args.harness.split())
            cell = describe(summary["systems"][system.name]["phases"])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a cell that fails is a result, too
            traceback.print_exc()
            failed, cell = failed + 1, {"failed": f"{type(error).__name__}: {error}"}
        finally:
            server.remove()
            forget_keys()
        more = {"others_cpu": round(others.share(), 2), "seconds": round(time.monotonic() - began)}
        known = {"system": system.name, "cell": name, "rate": args.rate * CELLS[name].load}
        print(json.dumps({**known, **cell, **harness.left, **more}), flush=True)
    print(f"the harness's files are in {results}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
