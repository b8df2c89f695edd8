"""Kills its own workers, and drops and repeats messages, to test on your staging that no instance is lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from celery_durable.app import Durable
from celery_durable.model import DueRun
from celery_durable.store.instances import chaos_checks, instances
from celery_durable.tasks.dispatcher import Dispatcher, Sweeper
from celery_durable.tasks.publishing import Publisher, PublishReport, SendState
from celery_durable.testing.errors import WorkersNotStarted

# The faults of a chaos run: it kills only workers that it started, and drops only messages of its own dispatcher.


_DROP_BELOW, _REPEAT_BELOW = 0.2, 0.4
_EXIT_SECONDS = 10.0


class OwnWorker:
    """A worker with one pool process, in its own process group, so that Ctrl-C does not reach it."""

    def __init__(self, app: str | None, node: str, queues: Sequence[str], log: Path) -> None:
        self.node, self.log = node, log
        app_option = [] if app is None else ["-A", app]
        options = ["-Q", ",".join(queues), "-n", node, "--pool", "prefork", "--concurrency", "1", "--loglevel", "INFO"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  # this very program, for the app that we were given
                [sys.executable, "-m", "celery", *app_option, "worker", *options, *quiet],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether its process has not exited."""
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it takes messages."""
        return self.is_running and "ready." in self.read_log()

    def read_log(self) -> str:
        """Return the log of the worker up to now."""
        return self.log.read_text(errors="replace")

    def pool_process_id(self) -> int | None:
        """Return the id of the pool process; None if there is none."""
        return next(iter(_find_children(self._process.pid)), None)

    def signal_pool_process(self, pid: int, number: int) -> bool:
        """Signal the pool process if it is still a child of this worker. Returns whether it was signalled."""
        if pid not in _find_children(self._process.pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def signal_group(self, number: int) -> None:
        """Signal the worker and its pool process."""
        if self.is_running:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the worker and its pool process."""
        self.signal_group(signal.SIGKILL)
        self._process.wait(_EXIT_SECONDS)

    def terminate(self) -> None:
        """Send SIGTERM. The worker finishes its current step and releases its run."""
        if self.is_running:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the worker to exit, and kill it after 10 s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # its pool process may have outlived it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_EXIT_SECONDS)


def _find_children(parent: int) -> list[int]:
    """Return the ids of the direct child processes that are alive, from /proc, or else from ps."""
    proc = Path("/proc")
    if (proc / str(os.getpid()) / "stat").exists():
        return [pid for pid, parent_id in _proc_parents(proc) if parent_id == parent]
    output = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout  # noqa: S607
    pairs = (line.split() for line in output.splitlines())
    return [int(pid) for pid, parent_id in pairs if int(parent_id) == parent]


def _proc_parents(proc: Path) -> list[tuple[int, int]]:
    found = []
    for entry in proc.iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent_id = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found.append((int(entry.name), int(parent_id)))
    return found


class Messenger:
    """The publisher of the dispatcher of a chaos run. It drops some messages and sends others twice."""

    def __init__(self, publisher: Publisher, rng: random.Random) -> None:
        self._publisher, self._rng = publisher, rng
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter(dropped=0, repeated=0)

    def publish(self, due_runs: Sequence[DueRun]) -> PublishReport:
        """Publish like `Publisher`, but unreliably. A dropped message is reported as sent; a sweep sends it again."""
        sent: list[int] = []
        for index in range(len(due_runs)):
            chance = self._rng.random()
            times = 0 if chance < _DROP_BELOW else 1 if chance > _REPEAT_BELOW else 2
            sent += [index] * times
            with self._lock:
                self.done["dropped"] += times == 0
                self.done["repeated"] += times == 2
        report = self._publisher.publish([due_runs[index] for index in sent]) if sent else PublishReport([])
        states = [SendState.SENT] * len(due_runs)
        for index, state in zip(sent, report.states, strict=True):
            states[index] = state
        return PublishReport(states)

    def repeat(self, due: DueRun) -> None:
        """Publish a superfluous message."""
        self._publisher.publish([due])
        with self._lock:
            self.done["repeated"] += 1


_SUPERSEDED = "superseded: the instance was taken over, restarted or ended meanwhile"
_UNKNOWN = "The outcome of a commit is unknown, looking it up"
_MAX_OBSERVED = 10_000
_REPORT_SECONDS = 10.0
_PAUSE_SECONDS = (0.3, 1.2)
_GRACE_SECONDS = 30.0
_CHILDREN_KILLED, _WORKERS_KILLED = "pool processes killed", "workers killed"


class ChaosRun:
    """One chaos run: its workers, its dispatcher, the injected faults, and the runs that they interrupted."""

    def __init__(self, durable: Durable, rng: random.Random, app: str | None, log: Callable[[str], None]) -> None:
        self._durable, self._rng, self._app, self._log = durable, rng, app, log
        self._folder = Path(tempfile.mkdtemp(prefix="durable-chaos-"))
        self._messenger = Messenger(durable.internals.publisher, rng)
        # Loops poll it between sleeps: a signal handler sets it, which could deadlock with wait() on the main thread.
        self._stop = threading.Event()
        self._workers: list[OwnWorker] = []
        self._logs: list[Path] = []
        self._counts: Counter[str] = Counter({_CHILDREN_KILLED: 0, _WORKERS_KILLED: 0})
        self._killed_claims: list[chaos_checks.HeldClaim] = []
        self._recovered: dict[chaos_checks.HeldClaim, float] = {}
        self._seen: dict[int, DueRun] = {}
        self._since: datetime = durable.internals.store.read(instances.read_clock)
        queues = {durable.internals.registry.get(name).queue for name in durable.workflows}
        self._queues = sorted({durable.internals.settings.queue} | {queue for queue in queues if queue})

    def run(self, *, workers: int, length: timedelta) -> bool:
        """Inject faults, wait for recovery, and stop the workers. Returns True if the user interrupted it."""
        sweeper = Sweeper(
            self._durable.internals.store,
            self._durable.internals.settings,
            self._durable.internals.runtime,
            self._messenger.publish,
            self._durable.internals.publisher.queue_length,
        )
        dispatcher = Dispatcher(sweeper, self._durable.internals.settings)
        with self._signals():
            try:
                self._observe()
                for _ in range(workers):
                    self._workers.append(self._new_worker())
                self._await_ready()
                dispatcher.start()
                self._inject_faults(length)
                self._await_recovery()
            except WorkersNotStarted:
                self.forget_logs(keep=False)
                raise
            finally:
                dispatcher.stop()
                self._end_workers()
        return self._stop.is_set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM by a flag, so that a worker that is just being started is stopped too."""

        def handle_signal(*_: object) -> None:
            if self._stop.is_set():
                for worker in self._workers:
                    worker.signal_group(signal.SIGKILL)
                os._exit(128 + signal.SIGINT)
            self._stop.set()
            self._log("Stopping the started workers. Press Ctrl-C again to kill them.")

        before = {number: signal.signal(number, handle_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _new_worker(self) -> OwnWorker:
        number = len(self._logs)
        node = f"chaos-{number}-{os.getpid()}@chaos"
        self._logs.append(self._folder / f"worker-{number}.log")
        return OwnWorker(self._app, node, self._queues, self._logs[-1])

    def _await_ready(self) -> None:
        runtime, end = self._durable.internals.runtime, self._durable.internals.runtime.monotonic() + 60
        while not (self._stop.is_set() or all(worker.is_ready for worker in self._workers)):
            failed = next((worker for worker in self._workers if not worker.is_running), None)
            if failed is not None or runtime.monotonic() > end:
                last_line = (failed or self._workers[0]).read_log().strip().splitlines()[-1:]
                raise WorkersNotStarted(" ".join(last_line))
            self._stop.wait(0.1)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.signal_group(signal.SIGCONT)  # it may have been stopped in order to be killed
            worker.terminate()
        for worker in self._workers:
            worker.end()

    # --- the faults -------------------------------------------------------------------------------

    def _inject_faults(self, length: timedelta) -> None:
        runtime = self._durable.internals.runtime
        started = runtime.monotonic()
        report_at = started + _REPORT_SECONDS
        actions = {self._kill_child: 6, self._kill_worker: 1, self._repeat_messages: 3}
        while (now := runtime.monotonic()) < started + length.total_seconds():
            if self._stop.wait(self._rng.uniform(*_PAUSE_SECONDS)):
                break
            action = self._rng.choices(list(actions), list(actions.values()))[0]
            with self._tolerating_outages():
                self._observe()
                action()
            if now >= report_at:
                report_at = now + _REPORT_SECONDS
                summary = "; ".join(f"{what}: {n}" for what, n in self._actions())
                self._log(f"{now - started:4.0f} s; {summary}; instances seen: {len(self._seen)}")

    @contextlib.contextmanager
    def _tolerating_outages(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if not self._durable.internals.store.is_transient(exc):
                raise
            self._counts["times the database was away"] += 1

    def _observe(self) -> None:
        """Record the instances that are in progress, and replace workers that have exited."""
        if len(self._seen) < _MAX_OBSERVED:
            within, limit = timedelta(minutes=1), _MAX_OBSERVED - len(self._seen)
            self._seen |= self._durable.internals.store.read(
                lambda tx: chaos_checks.find_due_soon(tx, within=within, limit=limit)
            )
        for worker in [worker for worker in self._workers if not worker.is_running]:
            self._replace(worker)

    def _replace(self, worker: OwnWorker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _kill_child(self) -> None:
        """Kill a pool process. It is stopped first, so that its claim cannot change while it is read."""
        worker = self._rng.choice(self._workers)
        pid = worker.pool_process_id() if worker.is_ready else None
        if pid is None or not worker.signal_pool_process(pid, signal.SIGSTOP):
            return
        held, end = None, signal.SIGCONT
        try:
            held = self._claims_to_kill(worker)
            end = signal.SIGCONT if held is None else signal.SIGKILL
        finally:
            worker.signal_pool_process(pid, end)
        if held is not None:
            self._killed_claims += held
            self._counts[_CHILDREN_KILLED] += 1

    def _kill_worker(self) -> None:
        worker = self._rng.choice(self._workers)
        if not worker.is_ready:
            return
        worker.signal_group(signal.SIGSTOP)
        try:
            held = self._claims_to_kill(worker)
        except BaseException:
            worker.signal_group(signal.SIGCONT)
            raise
        if held is None:
            worker.signal_group(signal.SIGCONT)
            return
        worker.kill()
        self._replace(worker)
        self._killed_claims += held
        self._counts[_WORKERS_KILLED] += 1

    def _claims_to_kill(self, worker: OwnWorker) -> list[chaos_checks.HeldClaim] | None:
        """What the worker holds; None where one more death could make an instance end as WorkerCrashLoop."""
        held = self._durable.internals.store.read(
            lambda tx: chaos_checks.find_held_claims(tx, worker.node, lease=self._durable.internals.settings.lease)
        )
        max_crash_count = max(1, self._durable.internals.settings.max_crashes - 2)
        return None if any(each.crash_count >= max_crash_count for each in held) else held

    def _repeat_messages(self) -> None:
        for pk in self._rng.sample(sorted(self._seen), min(3, len(self._seen))):
            self._messenger.repeat(self._seen[pk])

    def _await_recovery(self) -> None:
        """Give the struck runs the time that they may need: a lease, and a message or two that got lost."""
        settings, runtime = self._durable.internals.settings, self._durable.internals.runtime
        end = runtime.monotonic() + settings.lease_seconds + 2 * settings.redispatch_seconds + _GRACE_SECONDS
        unrecovered = self._unrecovered()
        if unrecovered and not self._stop.is_set():
            self._log(f"Waiting for {len(unrecovered)} interrupted runs to continue")
        while unrecovered and runtime.monotonic() < end and not self._stop.is_set():
            self._stop.wait(0.5)
            unrecovered = self._unrecovered()

    def _unrecovered(self) -> list[chaos_checks.HeldClaim]:
        for held in self._killed_claims:
            if held not in self._recovered:
                with self._tolerating_outages():
                    at = self._durable.internals.store.read(partial(chaos_checks.find_progress_after, held=held))
                    if at is not None:
                        self._recovered[held] = (at - held.at).total_seconds()
        return [held for held in self._killed_claims if held not in self._recovered]

    # --- the report -----------------------------------------------------------------------------

    def _actions(self) -> list[tuple[str, int]]:
        messages = {f"messages {how}": n for how, n in self._messenger.done.items()}
        return sorted((dict(self._counts) | messages).items())

    def report(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the rows of the report, and the contradictions in the tables."""
        pks = sorted(self._seen.keys() | {held.pk for held in self._killed_claims})
        read = self._durable.internals.store.read
        statuses, steps = read(lambda tx: chaos_checks.count_progress(tx, pks, since=self._since))
        violations = read(lambda tx: chaos_checks.find_contradictions(tx, pks))
        unrecovered = self._unrecovered()
        logs = "".join(log.read_text(errors="replace") for log in self._logs)
        rows = [
            *((what, str(n)) for what, n in self._actions()),
            ("instances seen", str(len(pks))),
            *((f"of them {status} now", str(n)) for status, n in sorted(statuses.items())),
            ("steps recorded meanwhile", str(steps)),
            ("zombie writes refused", str(logs.count(_SUPERSEDED))),
            ("unknown commits looked up", str(logs.count(_UNKNOWN))),
            ("runs interrupted by a kill", str(len(self._killed_claims))),
            ("seconds until they continued, p50 / p99", _quantiles(list(self._recovered.values()))),
            ("not continued yet", ", ".join(str(held.ref) for held in unrecovered[:5]) or "0"),
            ("violations", str(len(violations))),
        ]
        return rows, violations

    def forget_logs(self, *, keep: bool) -> None:
        """Remove the logs of the workers, or print where they are."""
        if keep:
            self._log(f"The logs of the workers are in {self._folder}")
        else:
            shutil.rmtree(self._folder)


def _quantiles(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    return f"{p50:.2f} / {p99:.2f}"
