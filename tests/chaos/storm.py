"""The storm: which fault comes next, and when, is decided by a seed; whom it hits also depends on who is at work."""

from __future__ import annotations

import heapq
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.arena import LEASE_SECONDS, Arena, end_group, now_us, send_group_signal, send_signal
from tests.smoke.proc import Proc, RabbitmqServer, RedisServer, until

KILLED_CHILD = "pool processes killed in a pass"
KILLED_IDLE = "pool processes killed between passes"
KILLED_WORKER = "workers killed with their processes"
KILLED_PARENT = "workers killed, processes orphaned"
KILLED_BEAT = "beats killed"
FROZEN_CHILD = "pool processes frozen beyond the lease"
FROZEN_WORKER = "workers frozen beyond the lease"
FORGOTTEN = "messages lost (FLUSHALL, purge)"
BROKER = "broker killed and started"
DATABASE = "database crashed and restarted"
CONNECTION = "connections ended by the server"
COMMIT_BEFORE = "COMMITs cut before the server got it"
COMMIT_AFTER = "COMMITs cut before its answer came"
REQUEST_BEFORE = "requests cut before the server got it"
REQUEST_AFTER = "requests cut before its answer came"

KILLS = (KILLED_CHILD, KILLED_IDLE, KILLED_WORKER, KILLED_PARENT, KILLED_BEAT)
FAULTS = (
    *KILLS, FROZEN_CHILD, FROZEN_WORKER, FORGOTTEN, BROKER, DATABASE, CONNECTION, COMMIT_BEFORE, COMMIT_AFTER,
    REQUEST_BEFORE, REQUEST_AFTER,
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """A process died at this time (microseconds) while it held the claim of this run."""

    fault: str
    instance_pk: int
    run_number: int
    at_us: int


@dataclass
class Tally:
    """What has been done to the arena."""

    faults: Counter[str] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    fallen: list[str] = field(default_factory=list)

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
        slow_broker = isinstance(arena.broker, RabbitmqServer)
        self._winds: dict[Callable[[], bool], float] = {
            self._kill_child: 40,
            self._kill_worker: 1.5,
            self._kill_parent: 1.5,
            self._kill_beat: 1.5,
            self._freeze_child: 12,
            self._freeze_worker: 1,
            self._forget: 4,
            self._restart_broker: 0.5 if slow_broker else 1.5,
            self._restart_database: 1.2,
            self._end_connection: 6,
            lambda: self._cut(COMMIT_BEFORE, "cut-before", arena.commit_message): 6,
            lambda: self._cut(COMMIT_AFTER, "cut-after", arena.commit_message): 6,
            lambda: self._cut(REQUEST_BEFORE, "cut-before", b""): 3,
            lambda: self._cut(REQUEST_AFTER, "cut-after", b""): 3,
        }

    def blow(self, go_on: Callable[[], bool], wants_kills: Callable[[], bool] = lambda: False) -> None:
        """One fault after the other, several a second, as long as ``go_on``; one more kill while it ``wants_kills``."""
        winds, weights = list(self._winds), list(self._winds.values())
        while go_on():
            pause, wind = self._dice.uniform(0.05, 0.35), self._dice.choices(winds, weights)[0]
            time.sleep(pause)
            self._do_what_is_due()
            self.tally.fallen += self._arena.fallen()
            wind()
            if wants_kills():
                self._kill_child()

    def subside(self) -> None:
        """Thaw whoever is frozen, have the broker back, and everybody at work."""
        self._do_what_is_due(all_of_it=True)
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
        """Frozen first: so its claim is read while nothing can change it, and the time is that of its death."""
        working = self._working()
        if not working:
            return self._kill_idle()
        pid, task_id = self._dice.choice(working)
        if not self._signal_child(pid, signal.SIGSTOP):
            return False
        held = self._arena.claims(task_id)
        self._signal_child(pid, signal.SIGKILL)
        return self._killed(KILLED_CHILD, held)

    def _kill_idle(self) -> bool:
        children = [pid for worker in self._arena.ready_workers() for pid in worker.children()]
        children = [pid for pid in children if pid not in self._frozen]
        if not children or not self._signal_child(self._dice.choice(children), signal.SIGKILL):
            return False
        return self._killed(KILLED_IDLE, [])

    def _working(self) -> list[tuple[int, str]]:
        """Whom it can strike in a pass. Those that are frozen are left to become zombies."""
        return [(pid, task_id) for pid, task_id in self._arena.passes() if pid not in self._frozen]

    def _signal_child(self, pid: int, number: int) -> bool:
        return any(send_signal(pid, number, group=worker.pid) for worker in self._arena.workers if worker.is_running)

    def _kill_worker(self) -> bool:
        worker = self._dice.choice(self._arena.workers)
        send_group_signal(worker, signal.SIGSTOP)
        held = self._arena.claims(self._arena.node(worker))
        end_group(worker)
        self._arena.replace(self._arena.workers, worker)
        return self._killed(KILLED_WORKER, held)

    def _kill_parent(self) -> bool:
        """Its children end their passes, and record them: nothing has to recover."""
        worker = self._dice.choice(self._arena.workers)
        os.kill(worker.pid, signal.SIGKILL)
        worker.process.wait(30)
        self._in_future(3 * LEASE_SECONDS, worker.clean_up)
        self._arena.replace(self._arena.workers, worker)
        return self._killed(KILLED_PARENT, [])

    def _kill_beat(self) -> bool:
        beat = self._dice.choice(self._arena.beats)
        end_group(beat)
        self._arena.replace(self._arena.beats, beat)
        return self._killed(KILLED_BEAT, [])

    def _killed(self, fault: str, held: list[tuple[int, int]]) -> bool:
        at = now_us()
        self.tally.kills += [Kill(fault, pk, run, at) for pk, run in held]
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
        if not self._arena.claims(task_id):  # between two passes: it would be no zombie
            self._signal_child(pid, signal.SIGCONT)
            return False
        self._frozen.add(pid)
        self._in_future(self._longer_than_a_lease(), lambda: self._thaw_child(pid))
        return self._count(FROZEN_CHILD)

    def _thaw_child(self, pid: int) -> None:
        self._frozen.remove(pid)
        self._signal_child(pid, signal.SIGCONT)

    def _freeze_worker(self) -> bool:
        worker = self._dice.choice(self._arena.workers)
        send_group_signal(worker, signal.SIGSTOP)
        self._in_future(self._longer_than_a_lease(), lambda: _thaw(worker))
        return self._count(FROZEN_WORKER)

    def _longer_than_a_lease(self) -> float:
        return self._dice.uniform(1.3, 2.5) * LEASE_SECONDS

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
        self._arena.database.restart()
        return self._count(DATABASE)

    def _end_connection(self) -> bool:
        return self._arena.cut_connection(self._dice.choice) and self._count(CONNECTION)

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
