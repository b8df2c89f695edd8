"""The storm: which fault comes next, and when, is decided by a seed; whom it hits also depends on who is at work."""

from __future__ import annotations

import functools
import heapq
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.chaos.arena import LEASE_SECONDS, Arena, end_group, send_group_signal, send_signal
from tests.chaos.galera import GALERA_FAULTS, GaleraCluster
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.smoke.proc import MariadbServer, Proc, RabbitmqServer, RedisServer, until

KILLED_CHILD = "pool processes killed in a pass"
KILLED_TASK = "pool processes killed in a task"
KILLED_IDLE = "pool processes killed between passes"
KILLED_WORKER = "workers killed with their processes"
KILLED_PARENT = "workers killed, processes orphaned"
KILLED_BEAT = "beats killed"
FROZEN_CHILD = "pool processes frozen beyond the lease"
FROZEN_WORKER = "workers frozen beyond the lease"
FORGOTTEN = "messages lost (FLUSHALL, purge)"
BROKER = "broker killed and started"
DATABASE = "database crashed and restarted"
PROMOTED = "database failed over to its standby or next node"
DEPLOYED = "workers replaced by a deploy (SIGTERM)"
OVERDUE = "workers killed 30 s after their SIGTERM"
CONNECTION = "connections ended by the server"
COMMIT_BEFORE = "COMMITs cut before the server got it"
COMMIT_AFTER = "COMMITs cut before its answer came"
REQUEST_BEFORE = "requests cut before the server got it"
REQUEST_AFTER = "requests cut before its answer came"
HUNG_BROKER = "broker silent for seconds"
HUNG_DATABASE = "database silent for seconds"
BROKER_FAILED_OVER = "connections to the broker silent for good"
DATABASE_FAILED_OVER = "connections to the database silent for good"

KILLS = (KILLED_CHILD, KILLED_TASK, KILLED_IDLE, KILLED_WORKER, KILLED_PARENT, KILLED_BEAT)
FAULTS = (
    *KILLS, FROZEN_CHILD, FROZEN_WORKER, DEPLOYED, OVERDUE, FORGOTTEN, BROKER, DATABASE, PROMOTED, CONNECTION,
    COMMIT_BEFORE, COMMIT_AFTER, REQUEST_BEFORE, REQUEST_AFTER, HUNG_BROKER, HUNG_DATABASE, BROKER_FAILED_OVER,
    DATABASE_FAILED_OVER, *GALERA_FAULTS,
)  # fmt: skip


_PAUSE_SECONDS = (0.2, 1.0)
"""Between two faults: so that work is struck, and not merely kept from beginning."""
_LONGEST_PAUSE_SECONDS = 2.0
_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 30.0
"""How long a worker has to stop, as with Kubernetes."""
_BETWEEN_DEPLOYED_SECONDS = 2.0


@dataclass
class Tally:
    """What has been done to the arena."""

    faults: Counter[str] = field(default_factory=Counter)
    fallen: list[str] = field(default_factory=list)
    longest_pause: float = 0.0
    """Seconds between two kills."""

    @property
    def killed(self) -> int:
        return sum(self.faults[kind] for kind in KILLS)


class Storm:
    """Blows over an arena."""

    def __init__(self, arena: Arena, dice: random.Random) -> None:
        self._arena, self._dice = arena, dice
        self.tally = Tally()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._frozen: set[int] = set()
        self._broker_rests_until = 0.0
        self._killed_at = time.monotonic()
        self._silent: set[FaultProxy] = set()
        self._leaving: dict[Proc, float] = {}
        """Workers that a deploy has replaced, and until when each may take to stop."""
        self._beside = ThreadPoolExecutor(1)  # not a thread for each fault: a server ends with the one that started it
        self._restarting: Future[None] | None = None
        slow_broker = isinstance(arena.broker, RabbitmqServer)
        self._winds: dict[Callable[[], bool], float] = {
            self._kill_child: 40,
            self._kill_task: 12,
            self._kill_worker: 1.5,
            self._kill_parent: 1.5,
            self._kill_beat: 1.5,
            self._freeze_child: 12,
            self._freeze_worker: 1,
            self._forget: 4,
            self._restart_broker: 0.4 if slow_broker else 0.8,
            self._restart_database: 0.7,
            self._fail_over_database: 0.7,
            self._deploy: 0.7,
            self._end_connection: 6,
            lambda: self._hang(HUNG_BROKER, arena.hanging_broker): 1.0,
            lambda: self._hang(HUNG_DATABASE, arena.hanging_database): 1.0,
            lambda: self._fail_over(BROKER_FAILED_OVER, arena.hanging_broker): 0.5,
            lambda: self._fail_over(DATABASE_FAILED_OVER, arena.hanging_database): 0.5,
            lambda: self._cut(COMMIT_BEFORE, "cut-before", arena.commit_message): 6,
            lambda: self._cut(COMMIT_AFTER, "cut-after", arena.commit_message): 6,
            lambda: self._cut(REQUEST_BEFORE, "cut-before", b""): 3,
            lambda: self._cut(REQUEST_AFTER, "cut-after", b""): 3,
        }
        if isinstance(arena.database, GaleraCluster):
            self._winds |= {
                functools.partial(self._hurt_node, name): weight for name, (weight, _) in arena.database.faults.items()
            }

    def blow(self, go_on: Callable[[], bool], wants_kills: Callable[[], bool] = lambda: False) -> None:
        """One fault after the other, as long as ``go_on``; one more kill while it ``wants_kills``.

        None goes without a kill for long.
        """
        self._killed_at = time.monotonic()
        winds, weights = list(self._winds), list(self._winds.values())
        while go_on():
            pause, wind = self._dice.uniform(*_PAUSE_SECONDS), self._dice.choices(winds, weights)[0]
            time.sleep(pause)
            self._do_what_is_due()
            self.tally.fallen += self._arena.fallen()
            wind()
            if wants_kills() or time.monotonic() - self._killed_at > _LONGEST_PAUSE_SECONDS:
                self._kill_child()

    def subside(self) -> None:
        """Thaw every frozen process, have the broker back, and everybody at work."""
        self._do_what_is_due(all_of_it=True)
        if self._restarting is not None:
            self._restarting.result()
        if isinstance(self._arena.broker, RabbitmqServer):
            until("RabbitMQ answers", self._arena.broker.answers, 60, pause=0.2)
        self._arena.proxy.disarm()
        self._count_cuts()
        self.tally.fallen += self._arena.fallen()

    def _in_future(self, seconds: float, what: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._later, (time.monotonic() + seconds, self._order, what))

    def _do_what_is_due(self, *, all_of_it: bool = False) -> None:
        while self._later and (all_of_it or self._later[0][0] <= time.monotonic()):
            heapq.heappop(self._later)[2]()

    # --- kill -9 --------------------------------------------------------------------------------

    def _kill_child(self) -> bool:
        working = self._working()
        if not working:
            return self._kill_idle()
        pid, _ = self._dice.choice(working)
        return self._signal_child(pid, signal.SIGKILL) and self._killed(KILLED_CHILD)

    def _kill_task(self) -> bool:
        """The task of a step is lost with it, unless its broker brings it back. They are short: it waits for one."""
        end = time.monotonic() + _WATCH_SECONDS
        while time.monotonic() < end:
            working = [pid for pid in self._arena.tasks() if pid not in self._frozen]
            if working and self._signal_child(self._dice.choice(working), signal.SIGKILL):
                return self._killed(KILLED_TASK)
            time.sleep(0.005)
        return False

    def _kill_idle(self) -> bool:
        children = [pid for worker in self._arena.ready_workers() for pid in worker.children()]
        children = [pid for pid in children if pid not in self._frozen]
        killed = bool(children) and self._signal_child(self._dice.choice(children), signal.SIGKILL)
        return killed and self._killed(KILLED_IDLE)

    def _working(self) -> list[tuple[int, str]]:
        """Whom it can strike in a pass. Those that are frozen are left to become zombies."""
        return [(pid, task_id) for pid, task_id in self._arena.passes() if pid not in self._frozen]

    def _signal_child(self, pid: int, number: int) -> bool:
        workers = [worker for worker in (*self._arena.workers, *self._leaving) if worker.is_running]
        return any(send_signal(pid, number, group=worker.pid) for worker in workers)

    @property
    def _are_all_ready(self) -> bool:
        """A fault that hits a worker waits until all are at work: else, on a slow machine, nobody ever is."""
        return len(self._arena.ready_workers()) == len(self._arena.workers)

    def _kill_worker(self) -> bool:
        if not self._are_all_ready:
            return False
        worker = self._dice.choice(self._arena.workers)
        end_group(worker)
        self._arena.replace(self._arena.workers, worker)
        return self._killed(KILLED_WORKER)

    def _kill_parent(self) -> bool:
        """Its children end their passes, and record them: nothing has to recover."""
        if not self._are_all_ready:
            return False
        worker = self._dice.choice(self._arena.workers)
        os.kill(worker.pid, signal.SIGKILL)
        worker.process.wait(30)
        self._in_future(3 * LEASE_SECONDS, worker.clean_up)
        self._arena.replace(self._arena.workers, worker)
        return self._killed(KILLED_PARENT)

    def _kill_beat(self) -> bool:
        beat = self._dice.choice(self._arena.beats)
        end_group(beat)
        self._arena.replace(self._arena.beats, beat)
        return self._killed(KILLED_BEAT)

    def _killed(self, fault: str) -> bool:
        self.tally.longest_pause = max(self.tally.longest_pause, time.monotonic() - self._killed_at)
        self._killed_at = time.monotonic()
        return self._count(fault)

    def _count(self, fault: str) -> bool:
        self.tally.faults[fault] += 1
        return True

    # --- SIGSTOP --------------------------------------------------------------------------------

    def _freeze_child(self) -> bool:
        working = self._working()
        if not working:
            return False
        pid, task_id = self._dice.choice(working)
        if not self._signal_child(pid, signal.SIGSTOP):
            return False
        if not self._arena.holds_claim(task_id):  # between two passes: it would be no zombie
            self._signal_child(pid, signal.SIGCONT)
            return False
        self._frozen.add(pid)
        self._in_future(self._longer_than_a_lease(), lambda: self._thaw_child(pid))
        return self._count(FROZEN_CHILD)

    def _thaw_child(self, pid: int) -> None:
        self._frozen.remove(pid)
        self._signal_child(pid, signal.SIGCONT)

    def _freeze_worker(self) -> bool:
        if not self._are_all_ready:
            return False
        worker = self._dice.choice(self._arena.workers)
        send_group_signal(worker, signal.SIGSTOP)
        self._in_future(self._longer_than_a_lease(), lambda: _thaw(worker))
        return self._count(FROZEN_WORKER)

    def _longer_than_a_lease(self) -> float:
        return self._dice.uniform(1.3, 2.5) * LEASE_SECONDS

    # --- deploys --------------------------------------------------------------------------------

    def _deploy(self) -> bool:
        """One worker after the other: its successor starts, and it is asked to stop."""
        if not self._are_all_ready or self._leaving:
            return False
        for index, worker in enumerate(self._arena.workers):
            self._in_future(index * _BETWEEN_DEPLOYED_SECONDS, functools.partial(self._replace, worker))
        return True

    def _replace(self, worker: Proc) -> None:
        if worker not in self._arena.workers or not worker.is_running:  # a fault has replaced it
            return
        self._arena.replace(self._arena.workers, worker)
        self._leaving[worker] = time.monotonic() + _GRACE_SECONDS
        os.kill(worker.pid, signal.SIGTERM)
        self._in_future(_GRACE_SECONDS, lambda: self._end_leaving(worker))
        self._count(DEPLOYED)

    def _end_leaving(self, worker: Proc) -> None:
        try:
            worker.process.wait(max(0.0, self._leaving.pop(worker) - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._count(OVERDUE)
        worker.clean_up()

    # --- servers --------------------------------------------------------------------------------

    def _forget(self) -> bool:
        return self._arena.forget_messages() and self._count(FORGOTTEN)

    def _restart_broker(self) -> bool:
        broker = self._arena.broker
        if time.monotonic() < self._broker_rests_until:
            return False
        broker.stop()
        away = self._dice.uniform(0.3, 2.0)
        self._in_future(away, broker.start if isinstance(broker, RedisServer) else lambda: broker.start(wait=False))
        self._broker_rests_until = time.monotonic() + away + (3 if isinstance(broker, RedisServer) else 25)
        return self._count(BROKER)

    def _restart_database(self) -> bool:
        return self._hurt_database(DATABASE, self._arena.database.restart)

    def _fail_over_database(self) -> bool:
        """A standby is built anew before the next fault."""
        database = self._arena.database
        return not isinstance(database, MariadbServer) and self._hurt_database(PROMOTED, database.fail_over)

    def _hurt_database(self, fault: str, hurt: Callable[[], None]) -> bool:
        """Beside the storm: it takes seconds, in which others are struck."""
        if self._restarting is not None:
            if not self._restarting.done():
                return False
            self._restarting.result()  # raises what the last fault has raised
        self._restarting = self._beside.submit(hurt)
        return self._count(fault)

    def _hurt_node(self, fault: str) -> bool:
        assert isinstance(self._arena.database, GaleraCluster)
        _, hurt = self._arena.database.faults[fault]
        return self._hurt_database(fault, functools.partial(hurt, self._dice.random()))

    def _end_connection(self) -> bool:
        return self._arena.cut_connection(self._dice.choice) and self._count(CONNECTION)

    # --- silence --------------------------------------------------------------------------------

    def _hang(self, fault: str, proxy: FaultProxy) -> bool:
        """Nobody's requests are answered, and no connection ends."""
        if proxy in self._silent:
            return False
        proxy.set(Mode.STALL)
        self._silent.add(proxy)
        self._in_future(self._dice.uniform(1.0, 3.0) * LEASE_SECONDS, lambda: self._wake(proxy))
        return self._count(fault)

    def _wake(self, proxy: FaultProxy) -> None:
        proxy.set(Mode.PASS)
        self._silent.discard(proxy)

    def _fail_over(self, fault: str, proxy: FaultProxy) -> bool:
        """The connections that there are get no answer ever again; new ones work."""
        if proxy in self._silent or not self._are_all_ready:
            return False
        proxy.set(Mode.STALL_OLD)
        if proxy is self._arena.hanging_database:  # which keeps the locks of those clients until then
            self._in_future(3 * LEASE_SECONDS, proxy.end_old)
        return self._count(fault)

    # --- cuts -----------------------------------------------------------------------------------

    def _cut(self, fault: str, how: str, inside: bytes) -> bool:
        """Counted by the proxy when it has happened; see `cuts`."""
        return self._arena.proxy.arm(how, inside=inside)

    def _count_cuts(self) -> None:
        """Add what the proxy did."""
        kinds = {
            ("cut-before", True): COMMIT_BEFORE,
            ("cut-after", True): COMMIT_AFTER,
            ("cut-before", False): REQUEST_BEFORE,
            ("cut-after", False): REQUEST_AFTER,
        }
        for cut in self._arena.proxy.made:
            self._count(kinds[cut])
        self._arena.proxy.made.clear()


def _thaw(worker: Proc) -> None:
    send_group_signal(worker, signal.SIGCONT)
