"""A pair of operations: the first is stopped while it has a lock, the second starts, then both end.

Whatever their outcome: the invariants hold, no accepted event, answer or pause is lost, no transaction had to be
repeated, and the instance can still run to its end.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, field
from typing import Any

from celery_durable.errors import DurableError, InstanceTerminal
from celery_durable.model import Claim, OutboxMessage, RunRef, Status, TaskReference
from celery_durable.store.runs import outbox
from tests.pairs.environment import Environment, PairProcess
from tests.pairs.operations import OPERATIONS, Operation
from tests.pairs.pausable_job import HoldAt, PausableJob, RolledBack
from tests.support import invariants
from tests.support.instances import note_accepted_events
from tests.support.world import Instance

_SECONDS = 30.0
_ROUNDS = 12


@dataclass(frozen=True)
class Pair:
    """Two operations. ``at`` is where the first one is stopped. If ``rolls_back``, it then rolls back."""

    first: Operation
    second: Operation
    at: HoldAt
    rolls_back: bool

    def __str__(self) -> str:
        end = "rolls back" if self.rolls_back else "commits"
        return f"{self.first.name}, held at its {self.at}, {end} before {self.second.name}"


def _is_possible(first: Operation, second: Operation) -> bool:
    both = (first, second)
    flows = {operation.flow for operation in both} - {None}
    if "family" in flows and any(operation.needs_claim or operation.name == "queue" for operation in both):
        return False
    needs_messages = any(operation.needs_messages for operation in both)
    return len(flows) < 2 and not (needs_messages and flows & {"nap", "family"})


_COMBINATIONS = [(first, second) for first in OPERATIONS for second in OPERATIONS if _is_possible(first, second)]
_HOLDS = ((HoldAt.LOCK, False), (HoldAt.COMMIT, False), (HoldAt.COMMIT, True))
DATABASES = ("postgresql", "mariadb")
PAIRS = tuple(Pair(first, second, *way) for first, second in _COMBINATIONS for way in _HOLDS)
_ONCE = [
    (DATABASES[nth % len(DATABASES)], Pair(first, second, *_HOLDS[nth % len(_HOLDS)]))
    for nth, (first, second) in enumerate(_COMBINATIONS)
]
IN_GATE = frozenset(_ONCE)
"""Each combination once, on one of the databases and with one of the holds."""
SMOKE = frozenset(pair for nth, pair in enumerate(_ONCE) if nth % 8 in (0, 5))
"""A quarter of them, as many on each database, with all holds."""


@dataclass
class Participant:
    """One process with its operation in a pair."""

    pair_run: PairRun
    operation: Operation
    process: PairProcess
    message: OutboxMessage | None = None
    job: PausableJob | None = None
    outcome: Any = None
    error: BaseException | None = None

    @property
    def ref(self) -> RunRef:
        return self.pair_run.ref

    @property
    def kid(self) -> RunRef:
        """The child of the instance's map, which runs again."""
        return self.pair_run.environment.kids()[-1]

    @property
    def is_done(self) -> bool:
        """Whether the operation returned without an error."""
        return self.error is None

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call an operation by its path, such as "lifecycle.pause", on the instance."""
        call = operator.attrgetter(method)(self.process.operations)
        return call(self.ref.workflow, self.ref.instance_id, *args, **options)

    def answer(self, task: str) -> bool:
        message = self.message or next(each for each in self.pair_run.messages if each.name == task)
        return self.pair_run.environment.answer(self.process, message)

    def lose(self, task: str) -> int:
        message = next(each for each in self.pair_run.messages if each.name == task)
        reference = TaskReference.read(message.content["reference"])
        assert reference is not None
        return self.process.operations.answers.report_lost([(reference, None)], why="its worker has died")

    def send_event(self) -> bool:
        """Send an event without an id, which one statement does on PostgreSQL, if nothing changes meanwhile."""
        with note_accepted_events(self.pair_run.environment.world):
            is_new: bool = self.call("events.send", "ok", "sent")
        return is_new

    def restart(self) -> int:
        """Restart the instance and return the new run's number."""
        number: int = self.call("rewind.restart")
        return number

    def queue(self) -> str:
        """Ask for another run after the current one."""
        ref = self.ref
        made: str = self.process.operations.create.instance(ref.workflow, id=ref.instance_id, if_running="queue")
        return made

    def end(self) -> None:
        """Wait for the job and keep its result or its error."""
        assert self.job is not None
        try:
            self.outcome = self.job.future.result(_SECONDS)
        except BaseException as error:
            self.error = error


@dataclass
class PairRun:
    """One run of a pair: the instance, the participants, and the checks afterwards."""

    environment: Environment
    pair: Pair
    instance: Instance = field(init=False)
    participants: tuple[Participant, Participant] = field(init=False)
    owner: PairProcess = field(init=False)
    claim: Claim | None = None
    messages: list[OutboxMessage] = field(default_factory=list)
    bystander: PausableJob | None = None
    has_waited: bool = False
    """Whether the second operation waited for a lock of the first one."""

    def __post_init__(self) -> None:
        self.participants = (
            Participant(self, self.pair.first, self.environment.first),
            Participant(self, self.pair.second, self.environment.second),
        )
        self.owner = self.environment.first
        self._prepare()

    @property
    def ref(self) -> RunRef:
        return RunRef(self.instance.workflow, self.instance.id, 1)

    @property
    def operations(self) -> list[Operation]:
        return [participant.operation for participant in self.participants]

    @property
    def names(self) -> set[str]:
        return {operation.name for operation in self.operations}

    # --- before ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        environment, world = self.environment, self.environment.world
        flow = next((operation.flow for operation in self.operations if operation.flow), "gather")
        world.operations.create.instance(flow, id="i-1")
        world.accepted.append((flow, "i-1"))
        self.instance = Instance(world, flow, "i-1")
        self._advance_to_start()
        self.messages = environment.messages()
        self._assign_answers()
        if any(operation.needs_sent for operation in self.operations):
            left = [message.id for message in environment.messages()]
            world.store.transact(lambda tx: outbox.delete(tx, left))
        if "resume" in self.names and flow != "family":
            self.instance.pause()
        for participant in self.participants:
            if participant.operation.gate is not None and not participant.operation.is_pass:
                participant.job = self._begin(participant)

    def _advance_to_start(self) -> None:
        """Advance the instance to a state in which both operations have something to do."""
        environment = self.environment
        if self.instance.workflow == "family":
            environment.fail_family()
        passes = [participant for participant in reversed(self.participants) if participant.operation.is_pass]
        if not passes and any(operation.needs_claim for operation in self.operations):
            ref = self.ref
            self.bystander = environment.start(lambda: environment.first.advance(ref), gate="book")
        for participant in passes:  # if both are passes, the first one takes over the claim of the second one
            participant.process.groups_commits(participant.operation.is_grouped)
            participant.job, self.owner = self._begin(participant), participant.process
            environment.advance(31)
            if participant.operation.is_grouped and len(passes) == 1:  # a commit that renews its lease is in no group
                participant.process.renew()
        if not passes and self.bystander is None and self.instance.workflow != "family":
            environment.second.advance(self.ref)
            is_due = any(operation.needs_due for operation in self.operations)
            environment.advance(101 if is_due else 5)
        elif self.bystander is not None:
            environment.advance(31)
        self.claim = environment.claim_of(self.instance)
        for process in environment.processes:
            process.published.clear()

    def _begin(self, participant: Participant) -> PausableJob:
        assert participant.operation.gate is not None
        return self.environment.start(lambda: participant.operation.work(participant), gate=participant.operation.gate)

    def _assign_answers(self) -> None:
        """Assign a message to each operation that answers one, and answer the others before."""
        environment, world = self.environment, self.environment.world
        answering = [participant for participant in self.participants if participant.operation.answers]
        pages = [message for message in self.messages if message.name == "pairs.page"]
        if any(participant.operation.answers == "last" for participant in answering):
            environment.answer(world, pages[0])
            pages = [message for message in environment.messages() if message.name == "pairs.page"][1:]
            if len(answering) == 1:
                environment.answer(world, pages.pop())
        for participant, message in zip(answering, pages, strict=False):
            participant.message = message

    # --- the pair -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run both operations and check what must hold afterwards."""
        first, second = self.participants
        first_job, second_job = self._ready(first), self._ready(second)
        first_job.hold(self.pair.at, rolls_back=self.pair.rolls_back)
        first_job.proceed()
        first_job.wait()
        second_job.proceed()
        self.has_waited = self.environment.wait_until_blocked(second_job)
        first_job.proceed()
        first.end()
        second.end()
        if self.bystander is not None:
            self.bystander.proceed()
            self.bystander.future.result(_SECONDS)
        self._check()
        self._finish()

    def _ready(self, participant: Participant) -> PausableJob:
        if participant.job is None:
            participant.job = self.environment.start(lambda: participant.operation.work(participant))
        return participant.job

    # --- after ----------------------------------------------------------------------------------

    def _check(self) -> None:
        first, second = self.participants
        if not (self.pair.rolls_back and _is_by(first.error, RolledBack)):
            assert first.error is None or isinstance(first.error, DurableError), repr(first.error)
        assert second.error is None or isinstance(second.error, DurableError), repr(second.error)
        assert self.environment.repeats() == 0, "a deadlock: a transaction was repeated"
        invariants.check(self.environment.world)
        self._check_pause()
        self._check_answers()
        sent = [message.id for process in self.environment.processes for message in process.sent]
        assert len(set(sent)) == len(sent), "a message was sent twice"

    def _check_pause(self) -> None:
        if self._has_done("pause") and not self.names & {"resume", "restart", "cancel"}:
            row = self.instance.row
            is_kept = row.status == "paused" or row.pause_requested or Status(row.status).is_terminal
            assert is_kept, f"the pause is lost: {row.status}"

    def _check_answers(self) -> None:
        answered = [
            participant
            for participant in self.participants
            if participant.operation.answers and participant.error is None
        ]
        if len(answered) < len([participant for participant in self.participants if participant.operation.answers]):
            return
        if not self.names & {"terminate", "cancel", "restart", "race", "settle"}:
            assert all(participant.outcome is True for participant in answered), "an answer was not taken"
        if self.names == {"last answer"}:
            published = [due for process in self.environment.processes for due in process.published]
            assert len(published) == 1, f"there was not one last answer: {published}"

    def _has_done(self, name: str) -> bool:
        return any(
            participant.operation.name == name and participant.error is None for participant in self.participants
        )

    # --- the end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Deliver everything that the instance waits for, and check its end."""
        environment, world, instance = self.environment, self.environment.world, self.instance
        for _ in range(_ROUNDS):
            if instance.status.is_terminal:
                break
            instance.resume()
            with contextlib.suppress(InstanceTerminal):
                world.operations.events.send(instance.workflow, instance.id, "ok", "at the end", id="at the end")
            for message in self._all_messages():
                environment.answer(world, message)
            environment.advance(61)
            world.run_until_idle()
        self._check_end()
        invariants.check(world)

    def _all_messages(self) -> list[OutboxMessage]:
        found = [*self.messages, *self.environment.messages(), *self.environment.world.sent]
        return found + [message for process in self.environment.processes for message in process.sent]

    def _check_end(self) -> None:
        instance = self.instance
        if self._has_done("queue"):
            self._check_runs()
        may_run_again = self.names & {"restart", "queue"}
        if self._has_done("terminate") and (instance.status is Status.TERMINATED or not may_run_again):
            assert instance.status is Status.TERMINATED
            return
        if self._has_done("cancel") and instance.status is Status.TERMINATED:
            self._check_cleanup()
            return
        is_gone = self.names & {"restart", "settle", "race", "queue"}
        assert not self._has_done("cancel") or is_gone, "the cancel is lost"
        if instance.workflow == "family":
            others = self.names - {"family retry", "end of a child", "send_event", "sweep", "claim"}
            if self._has_done("family retry") and not others:
                assert instance.output == ["kid", ["kid"]]
            return
        output = instance.output
        if instance.workflow in ("race", "nap"):
            return
        pages, shipped, ok, nap, charged, booked = output
        assert pages == [f"pairs.page [{number}]" for number in range(3)], output
        assert (shipped, nap, charged, booked) == ("pairs.ship []", None, "charged", "booked book"), output
        if self._has_done("send_event") and not self.names & {"set_result", "restart", "queue"}:
            assert ok["payload"] == "sent", f"the event is lost: {output}"

    def _check_runs(self) -> None:
        """Check that one more run followed, however often it was asked for.

        A stop discards it. The run of a restart takes the parameters itself if it has not begun.
        """
        possible = {2}
        if self.names & {"terminate", "cancel"}:
            possible = {1, 2}
        elif "restart" in self.names:
            possible = {2, 3}
        assert self.instance.row.run_number in possible

    def _check_cleanup(self) -> None:
        """Check that the workflow has cleaned up, unless the run was ended at once."""
        was_ended_at_once = self.names <= {"cancel", "terminate"} or self.names == {"cancel", "restart"}
        if self.instance.workflow in ("gather", "grouped") and not was_ended_at_once:
            assert self.instance.statuses()["refund"] == "completed", "there was no cleanup"


def _is_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether an error, or one of its causes, is of this kind."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def run(environment: Environment, pair: Pair) -> PairRun:
    """Run a pair in a cleared environment; raises AssertionError for the first check that fails."""
    environment.clear()
    pair_run = PairRun(environment, pair)
    pair_run.run()
    return pair_run
