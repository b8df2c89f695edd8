"""A pair: the first operation is held open while it has a lock, the second begins, the first ends, then the second.

Whatever became of it: what holds of every database holds, nothing that was promised is lost, nobody had to begin again,
and the instance can be brought to its end.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from celery_durable.errors import DurableError, InstanceTerminal
from celery_durable.model import Claim, OutboxMessage, RunRef, Status, TaskReference
from celery_durable.store import outbox
from tests.engine import invariants
from tests.engine.world import Instance
from tests.pairs.acts import Act, HoldAt, RolledBack
from tests.pairs.operations import OPERATIONS, Operation
from tests.pairs.stage import Party, Stage

_SECONDS = 30.0
_ROUNDS = 12


@dataclass(frozen=True)
class Pair:
    """``at``: where the first one is held. ``rolls_back``: it then comes to nothing."""

    first: Operation
    second: Operation
    at: HoldAt
    rolls_back: bool

    def __str__(self) -> str:
        end = "rolls back" if self.rolls_back else "commits"
        return f"{self.first.name}, held at its {self.at}, {end} before {self.second.name}"


def _makes_sense(first: Operation, second: Operation) -> bool:
    flows = {operation.flow for operation in (first, second)} - {None}
    return len(flows) < 2


_MEETINGS = [(first, second) for first in OPERATIONS for second in OPERATIONS if _makes_sense(first, second)]
_WAYS = ((HoldAt.LOCK, False), (HoldAt.COMMIT, False), (HoldAt.COMMIT, True))
DATABASES = ("postgresql", "mariadb")
PAIRS = tuple(Pair(first, second, *way) for first, second in _MEETINGS for way in _WAYS)
SMOKE = frozenset(
    (DATABASES[nth % len(DATABASES)], Pair(first, second, *_WAYS[nth % len(_WAYS)]))
    for nth, (first, second) in enumerate(_MEETINGS)
)
"""Each meeting once, on one of the databases, in one of the ways."""


@dataclass
class Role:
    """An operation in the hands of a process, on the instance of a scene."""

    scene: Scene
    operation: Operation
    party: Party
    message: OutboxMessage | None = None
    act: Act | None = None
    outcome: Any = None
    error: BaseException | None = None

    @property
    def ref(self) -> RunRef:
        return self.scene.ref

    @property
    def is_done(self) -> bool:
        """Whether it came to an end of its own, and nothing was in its way."""
        return self.error is None

    def verb(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.party.operations, name)(self.ref.workflow, self.ref.instance_id, *args, **options)

    def answer(self, task: str) -> bool:
        message = self.message or next(each for each in self.scene.messages if each.name == task)
        return self.scene.stage.answer(self.party, message)

    def lose(self, task: str) -> int:
        message = next(each for each in self.scene.messages if each.name == task)
        reference = TaskReference.read(message.content["answers"])
        assert reference is not None
        return self.party.operations.report_lost([(reference, None)], why="its worker has died")

    def send_event(self) -> bool:
        id_ = f"event of the {self.party.name}"
        is_new: bool = self.verb("send_event", "ok", "sent", id=id_)
        self.scene.stage.world.accepted_events.append(id_)
        return is_new

    def restart(self) -> int:
        """The run that it ended is not to change any more."""
        number: int = self.verb("restart")
        return number

    def end(self) -> None:
        """Wait for the act, and keep what came of it."""
        assert self.act is not None
        try:
            self.outcome = self.act.future.result(_SECONDS)
        except BaseException as error:
            self.error = error


@dataclass
class Scene:
    """An instance, prepared for a pair."""

    stage: Stage
    pair: Pair
    instance: Instance = field(init=False)
    roles: tuple[Role, Role] = field(init=False)
    owner: Party = field(init=False)
    claim: Claim | None = None
    messages: list[OutboxMessage] = field(default_factory=list)
    bystander: Act | None = None
    has_waited: bool = False
    """Whether the second one waited for a lock of the first one."""

    def __post_init__(self) -> None:
        self.roles = (
            Role(self, self.pair.first, self.stage.first),
            Role(self, self.pair.second, self.stage.second),
        )
        self.owner = self.stage.first
        self._prepare()

    @property
    def ref(self) -> RunRef:
        return RunRef(self.instance.workflow, self.instance.id, 1)

    @property
    def operations(self) -> list[Operation]:
        return [role.operation for role in self.roles]

    @property
    def names(self) -> set[str]:
        return {operation.name for operation in self.operations}

    # --- before ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        stage, world = self.stage, self.stage.world
        flow = next((operation.flow for operation in self.operations if operation.flow), "gather")
        world.operations.create(flow, id="i-1")
        world.accepted.append((flow, "i-1"))
        self.instance = Instance(world, flow, "i-1")
        self._set_off()
        self.messages = stage.messages()
        self._deal_answers()
        if any(operation.needs_sent for operation in self.operations):
            left = [message.id for message in stage.messages()]
            world.store.transact(lambda tx: outbox.delete_unsent(tx, left))
        if "resume" in self.names:
            self.instance.pause()
        for role in self.roles:
            if role.operation.gate is not None and not role.operation.is_pass:
                role.act = self._begin(role)

    def _set_off(self) -> None:
        """Bring the instance to where both operations find something to do."""
        stage = self.stage
        passes = [role for role in reversed(self.roles) if role.operation.is_pass]
        if not passes and any(operation.needs_claim for operation in self.operations):
            ref = self.ref
            self.bystander = stage.start(lambda: stage.first.advance(ref), gate="book")
        for role in passes:  # of two, the first one's has taken over from the second one's
            role.act, self.owner = self._begin(role), role.party
            stage.advance(31)
        if not passes and self.bystander is None:
            stage.second.advance(self.ref)
            is_due = any(operation.needs_due for operation in self.operations)
            stage.advance(101 if is_due else 5)
        elif self.bystander is not None:
            stage.advance(31)
        self.claim = stage.claim_of(self.instance)
        for party in stage.parties:
            party.wakes.clear()

    def _begin(self, role: Role) -> Act:
        assert role.operation.gate is not None
        return self.stage.start(lambda: role.operation.work(role), gate=role.operation.gate)

    def _deal_answers(self) -> None:
        """Which item each of them answers, and which are answered before."""
        stage, world = self.stage, self.stage.world
        answering = [role for role in self.roles if role.operation.answers]
        pages = [message for message in self.messages if message.name == "pairs.page"]
        if any(role.operation.answers == "last" for role in answering):
            stage.answer(world, pages[0])
            pages = [message for message in stage.messages() if message.name == "pairs.page"][1:]
            if len(answering) == 1:
                stage.answer(world, pages.pop())
        for role, message in zip(answering, pages, strict=False):
            role.message = message

    # --- the pair -------------------------------------------------------------------------------

    def play(self) -> None:
        """Both, and what must hold after them."""
        first, second = self.roles
        first_act, second_act = self._ready(first), self._ready(second)
        first_act.hold(self.pair.at, rolls_back=self.pair.rolls_back)
        first_act.go()
        first_act.wait()
        second_act.go()
        self.has_waited = self.stage.let_meet(second_act)
        first_act.go()
        first.end()
        second.end()
        if self.bystander is not None:
            self.bystander.go()
            self.bystander.future.result(_SECONDS)
        self._judge()
        self._finish()

    def _ready(self, role: Role) -> Act:
        if role.act is None:
            role.act = self.stage.start(lambda: role.operation.work(role))
        return role.act

    # --- after ----------------------------------------------------------------------------------

    def _judge(self) -> None:
        first, second = self.roles
        if not (self.pair.rolls_back and _is_by(first.error, RolledBack)):
            assert first.error is None or isinstance(first.error, DurableError), repr(first.error)
        assert second.error is None or isinstance(second.error, DurableError), repr(second.error)
        assert self.stage.repeats() == 0, "a deadlock: a transaction had to begin again"
        invariants.check(self.stage.world)
        self._judge_pause()
        self._judge_answers()
        sent = [message.id for party in self.stage.parties for message in party.sent]
        assert len(set(sent)) == len(sent), "a message was sent twice"

    def _judge_pause(self) -> None:
        if self._has_done("pause") and not self.names & {"resume", "restart"}:
            row = self.instance.row
            is_kept = row.status == "paused" or row.pause_requested or Status(row.status).is_terminal
            assert is_kept, f"the pause is lost: {row.status}"

    def _judge_answers(self) -> None:
        answered = [role for role in self.roles if role.operation.answers and role.error is None]
        if len(answered) < len([role for role in self.roles if role.operation.answers]):
            return
        if not self.names & {"terminate", "restart", "race", "settle"}:
            assert all(role.outcome is True for role in answered), "an answer was not taken"
        if self.names == {"last answer"}:
            wakes = [due for party in self.stage.parties for due in party.wakes]
            assert len(wakes) == 1, f"there was not one last answer: {wakes}"

    def _has_done(self, name: str) -> bool:
        return any(role.operation.name == name and role.error is None for role in self.roles)

    # --- the end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Do all that the instance waits for; it ends as its code says."""
        stage, world, instance = self.stage, self.stage.world, self.instance
        for _ in range(_ROUNDS):
            if instance.status.is_terminal:
                break
            instance.resume()
            with contextlib.suppress(InstanceTerminal):
                world.operations.send_event(instance.workflow, instance.id, "ok", "at the end", id="at the end")
            for message in self._all_letters():
                stage.answer(world, message)
            stage.advance(61)
            world.run_until_idle()
        self._judge_end()
        invariants.check(world)

    def _all_letters(self) -> list[OutboxMessage]:
        found = [*self.messages, *self.stage.messages(), *self.stage.world.sent]
        return found + [message for party in self.stage.parties for message in party.sent]

    def _judge_end(self) -> None:
        instance = self.instance
        if self._has_done("terminate") and (instance.status is Status.TERMINATED or "restart" not in self.names):
            assert instance.status is Status.TERMINATED
            return
        output = instance.output
        if instance.workflow == "race":
            return
        pages, shipped, ok, nap, charged, booked = output
        assert pages == [f"pairs.page [{number}]" for number in range(3)], output
        assert (shipped, nap, charged, booked) == ("pairs.ship []", None, "charged", "booked book"), output
        if self._has_done("send_event") and not self.names & {"set_result", "restart"}:
            assert ok["payload"] == "sent", f"the event is lost: {output}"


def _is_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an error is of a kind, or was raised because of one."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def play(stage: Stage, pair: Pair) -> Scene:
    """Play a pair on a cleared stage; raises AssertionError with what is broken."""
    stage.clear()
    scene = Scene(stage, pair)
    scene.play()
    return scene
