"""Group commit: passes of one process that commit at the same time share a statement."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from celery_durable import Step, WorkflowEvent
from celery_durable.errors import Superseded
from celery_durable.model import Claim, from_us
from celery_durable.runner import Runner
from celery_durable.runner.group_commit import GroupCommit
from celery_durable.store.engine import Store
from celery_durable.store.instances import instances
from celery_durable.store.lanes.groups import GroupedStep
from celery_durable.store.lanes.steps import WrittenStep
from tests.conftest import MovableRuntime
from tests.store.world import LEASE, World, step
from tests.support import world as engine_world
from tests.support.embedded import until
from tests.support.groups import AlwaysInGroups
from tests.support.instances import Instance
from tests.support.lost_connections import cut_commit, cut_statement

everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


class Stopped(BaseException):
    """Ends the thread of a pass, as SystemExit does."""


class GatedRuntime(MovableRuntime):
    """Counts commits, and holds each at ``gate``, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = 0
        self.gate: Callable[[], object] | None = None

    def checkpoint(self, name: str) -> None:
        if name == "before-commit":
            self.commits += 1
            gate, self.gate = self.gate, None
            if gate is not None:
                gate()


class Passes:
    """The passes of one process, each on its own thread, with a step to commit."""

    def __init__(self, store: Store, runtime: GatedRuntime) -> None:
        self.world, self.runtime, self.group_commit = World(store), runtime, GroupCommit(store)
        self.claims = [self.world.claim(self.world.create(f"o-{index}")) for index in range(4)]
        self.alone: list[int] = []
        """The passes that committed alone, by their number."""

    def commit(self, number: int, claim: Claim | None = None) -> WrittenStep:
        def commit_alone() -> WrittenStep:
            self.alone.append(number)
            return self.world.commit(grouped.claim, grouped.write, changes_instance=False)

        grouped = GroupedStep(claim or self.claims[number], step(result=str(number)))
        return self.group_commit.commit(grouped, commit_alone)

    def hold_next(self) -> tuple[threading.Event, threading.Event]:
        """Hold the next commit just before the database gets it: returns when it is held, and what lets it go on."""
        is_held, may_go = threading.Event(), threading.Event()

        def gate() -> None:
            is_held.set()
            assert may_go.wait(30)

        self.runtime.gate = gate
        return is_held, may_go

    def start_held(self, number: int) -> tuple[Future[WrittenStep], threading.Event]:
        """Start a commit, and return when it is under way, with what lets it go on."""
        is_held, may_go = self.hold_next()
        future = self.world.start(self.commit, number)
        assert is_held.wait(30)
        return future, may_go

    def start_waiting(self, *numbers: int) -> list[Future[WrittenStep]]:
        """Start commits that wait for those under way."""
        before = len(self.group_commit._waiting)
        futures = [self.world.start(self.commit, number) for number in numbers]
        until(lambda: len(self.group_commit._waiting) == before + len(numbers))
        return futures

    def results(self) -> list[list[str | None]]:
        return [[row.result for row in self.world.steps(claim)] for claim in self.claims]


@pytest.fixture
def passes(store_url: str) -> Iterator[Passes]:
    runtime = GatedRuntime()
    store = Store(store_url, runtime=runtime)
    passes = Passes(store, runtime)
    yield passes
    passes.world.close()
    store.close()


@everywhere
def test_a_commit_that_meets_no_other_goes_alone_at_once(passes: Passes) -> None:
    assert [passes.commit(number).row.result for number in (0, 1)] == ["0", "1"]
    assert passes.alone == [0, 1]


@on_servers
def test_commits_that_wait_for_one_under_way_share_a_statement(passes: Passes) -> None:
    first, first_may_go = passes.start_held(0)
    leading, leader_may_go = passes.start_held(1)  # nothing waits yet: a group of one
    waiting = passes.start_waiting(2, 3)
    before = passes.runtime.commits
    leader_may_go.set()
    assert [each.result(30).row.result for each in (leading, *waiting)] == ["1", "2", "3"]
    assert passes.runtime.commits == before + 1
    first_may_go.set()
    first.result(30)
    assert (passes.results(), passes.alone) == ([["0"], ["1"], ["2"], ["3"]], [0])


def hold_group_of_three(passes: Passes) -> tuple[list[Future[WrittenStep]], threading.Event, threading.Event]:
    """Have pass 0 commit alone, and the others in a group: returns them, and what lets each of the two go on."""
    _, first_may_go = passes.start_held(0)
    leading, leader_may_go = passes.start_held(1)
    return [leading, *passes.start_waiting(2, 3)], leader_may_go, first_may_go


@on_servers
def test_a_locked_instance_delays_no_other_run(passes: Passes) -> None:
    group, leader_may_go, first_may_go = hold_group_of_three(passes)
    with passes.world.hold_transaction() as tx:
        instances.lock(tx, "order", "o-3")
        leader_may_go.set()
        assert [each.result(30).row.result for each in group[:2]] == ["1", "2"]
        assert not {1, 2} & set(passes.alone)  # a group that waits fails in the end, and leaves all alone
        assert not group[2].done()
        first_may_go.set()
    assert group[2].result(30).row.result == "3"
    assert 3 in passes.alone


@on_servers
def test_a_lost_claim_supersedes_only_its_own_pass(passes: Passes) -> None:
    lost = passes.claims[2]
    group, leader_may_go, first_may_go = hold_group_of_three(passes)
    passes.world.advance(LEASE.total_seconds() + 1)
    passes.claims[2] = passes.world.claim(lost.ref)
    leader_may_go.set()
    assert [each.result(30).row.result for each in (group[0], group[2])] == ["1", "3"]
    with pytest.raises(Superseded):
        group[1].result(30)
    first_may_go.set()
    assert passes.results()[1:] == [["1"], [], ["3"]]


@on_servers
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_group_in_doubt_is_committed_once(passes: Passes, when: str) -> None:
    """Each pass goes on alone. If the group was applied, its row exists, which `DatabaseCommitter` finds by its id."""
    group, leader_may_go, first_may_go = hold_group_of_three(passes)
    is_held, group_may_go = passes.hold_next()
    leader_may_go.set()
    assert is_held.wait(30)
    group[0].result(30)
    store = passes.world.store
    cut = cut_statement if store.combines_writes else cut_commit
    with cut(store, when=when) as cuts:
        group_may_go.set()
        ends = [each.exception(30) for each in group[1:]]
    assert cuts == [when]
    assert [type(end) for end in ends] == ([Superseded] * 2 if when == "after" else [type(None)] * 2)
    first_may_go.set()
    assert passes.results()[1:] == [["1"], ["2"], ["3"]]


@on_servers
def test_if_the_leader_is_stopped_the_others_commit_alone(passes: Passes) -> None:
    def stop() -> None:
        raise Stopped

    first, first_may_go = passes.start_held(0)
    leading, leader_may_go = passes.start_held(1)
    waiting = passes.start_waiting(2, 3)
    passes.runtime.gate = stop
    leader_may_go.set()
    leading.result(30)
    ends = [each.exception(30) for each in waiting]
    assert sorted(str(type(end)) for end in ends) == sorted(map(str, (Stopped, type(None))))
    first_may_go.set()
    first.result(30)
    assert len([each for each in passes.results() if each]) == 3


@on_servers
def test_steps_with_other_columns_form_the_next_group(passes: Passes) -> None:
    first, first_may_go = passes.start_held(0)
    leading, leader_may_go = passes.start_held(1)
    futures = passes.start_waiting(2)
    failed = GroupedStep(passes.claims[3], step(result="3", attempts=2, max_attempts=3))
    futures.append(passes.world.start(passes.group_commit.commit, failed, lambda: pytest.fail("it was left alone")))
    until(lambda: len(passes.group_commit._waiting) == 2)
    before = passes.runtime.commits
    leader_may_go.set()
    assert [each.result(30).row.attempts for each in futures] == [0, 2]
    assert passes.runtime.commits == before + 2
    leading.result(30)
    first_may_go.set()
    first.result(30)


# --- whole passes ---------------------------------------------------------------------------------


def make_runner(world: engine_world.World, *, group_commit: GroupCommit | None = None) -> Runner:
    runtime = world.store.runtime
    runner = Runner(world.store, world.settings, world.registry, runtime, world.messages.extend, groups_commits=True)
    if group_commit is not None:
        runner.env = dataclasses.replace(runner.env, group_commit=group_commit)
    return runner


def advance(runner: Runner, instance: Instance) -> str:
    return runner.advance(instance.ref, task_id="task", node="node").summary


@everywhere
def test_a_pass_whose_commits_are_in_groups_records_what_it_would_record_alone(world: engine_world.World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[None], step: Step) -> list[object]:
        return [step.do(f"step {number}", lambda: {"number": 7}) for number in range(4)]

    rows = []
    for group_commit in (AlwaysInGroups(world.store), None):
        instance = order.create(id=f"o-{len(rows)}")
        assert advance(make_runner(world, group_commit=group_commit), instance) == "complete"
        rows.append(instance.steps())
    assert rows[0] == rows[1]


@everywhere
def test_passes_that_commit_together_renew_their_leases(world: engine_world.World) -> None:
    left: list[timedelta] = []

    @world.workflow
    def order(event: WorkflowEvent[None], step: Step) -> None:
        for number in range(12):
            step.do(f"step {number}", world.clock.advance, 4)
            left.append(from_us(instance.row.lease_until) - world.now)

    instance = order.create()
    assert advance(make_runner(world, group_commit=AlwaysInGroups(world.store)), instance) == "complete"
    assert min(left) > LEASE / 2


@everywhere
def test_passes_on_many_threads_record_each_step_once(world: engine_world.World) -> None:
    @world.workflow
    def order(event: WorkflowEvent[int], step: Step) -> int:
        return sum(step.do(f"step {number}", lambda number=number: event.payload * number) for number in range(20))

    runner = make_runner(world)
    instances_ = [order.create(number, id=f"o-{number}") for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda instance: advance(runner, instance), instances_)) == {"complete"}
    assert [instance.output for instance in instances_] == [190 * number for number in range(16)]
    assert [len(instance.steps()) for instance in instances_] == [20] * 16
