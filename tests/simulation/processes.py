"""The processes of a simulation: they die, freeze and lose their connections where the schedule says so."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from celery_durable.all_kinds import KINDS
from celery_durable.all_operations import Operations
from celery_durable.model import OutboundEvent, OutboxMessage, RunRef
from celery_durable.operations.context import OperationContext
from celery_durable.runner import Runner
from celery_durable.store.instances.families import END_CHILDREN
from celery_durable.tasks.answers import AnswerCommitter
from celery_durable.tasks.outbox import Handler, OutboundDeliverer, Outbox
from celery_durable.tasks.publishing import PublishReport
from celery_durable.testing.cooperative import CooperativeThread, Crash
from celery_durable.testing.processes import Process, ends_the_process
from celery_durable.testing.runtime import HarnessRuntime
from celery_durable.values import Retries
from tests.simulation import limited
from tests.simulation.linear import LINEAR


class ColdShutdown(BaseException):
    """What a process raises, anywhere in a pass, that is told to quit."""


class Runtime(HarnessRuntime):
    """The runtime of one process; at each checkpoint the schedule has a say."""

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(world.clock, name=name)
        self.world, self.name = world, name
        self.begin(0)

    def begin(self, seed: int) -> None:
        """A new process takes the place of the last one."""
        self.is_dead, self.is_starved, self.has_session, self.may_die = False, False, False, False
        self.is_quitting = False
        self.incarnation = object()
        self.ref: RunRef | None = None
        self.passed.clear()
        self._stopped_at, self._aside = None, 0
        self._random = random.Random(f"{seed}/{self.name}")

    def checkpoint(self, name: str) -> None:
        if self._aside or not (self.ref or self.may_die):
            return
        if name == "after-commit":
            self.has_session = False
        self.world.schedule.reached(self, name)

    def start_periodic_job(self, seconds: float, work: Callable[[], bool], *, name: str) -> None:
        incarnation = self.incarnation

        def unless_starved() -> bool:
            return incarnation is self.incarnation and (self.is_starved or work())

        super().start_periodic_job(seconds, unless_starved, name=name)

    def run_attempt(self, body: Callable[[], Any], *, workflow: str, instance_id: str, step: str, number: int) -> Any:
        assert self.ref is not None
        schedule = self.world.schedule
        schedule.inside = self
        if workflow != LINEAR:  # whose handlers tell more
            schedule.begins((instance_id, self.ref.run_number, step), number)
            if workflow == "program":
                worker = next(each for each in self.world.workers if each.runtime is self)
                limited.check_body(schedule, worker, instance_id, self.ref.run_number, step)
        result = body()
        schedule.perhaps_leave(self, "body")
        return result


class Machine(Process):
    """A process that is used for one schedule after the other: connections are what costs."""

    runtime: Runtime

    def __init__(self, world: Any, name: str) -> None:
        super().__init__(name, world.url, Runtime(world, name), world.settings)
        self.world = world
        sa.event.listen(self.store.engine, "do_connect", world.connector.connect)
        sa.event.listen(self.store.engine, "connect", self._prepare)
        sa.event.listen(self.store.engine, "commit", self._perhaps_cut)

    def _prepare(self, connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.create_function("author_now", 0, self.runtime.clock)

    def _perhaps_cut(self, connection: sa.Connection) -> None:
        how = self.world.schedule.cut(self)
        if how is not None:
            driver: Any = connection.connection.driver_connection
            if how == "applied":
                driver.commit()
            driver.close()  # the commit that follows finds the connection lost

    def begin(self, seed: int) -> None:
        if self.runtime.is_dead:
            self.bury()
            self.connections.clear()
            self.store._connections.reconnect()
        self.runtime.begin(seed)

    def send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        """Hand these to the broker, with production's checkpoints around it."""
        self.runtime.checkpoint("before-publish")
        report: PublishReport = self.world.schedule.errands.send(messages)
        self.runtime.checkpoint("after-publish")
        return report

    def operations(self) -> Operations:
        """What this process does to instances from outside."""
        capture = functools.partial(self.world.capture, self.runtime)
        return Operations(OperationContext(self.store, self.world.settings, self.world.registry, self.runtime, capture))

    def until_dead(self, work: Callable[[], str]) -> str:
        """What ``work`` says, or "crashed" where the process died in it."""
        try:
            return work()
        except BaseException:
            if not self.runtime.is_dead:
                raise
            self.bury()
            return "crashed"


class Worker(Machine):
    """A runner process, and the message that it is at."""

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.thread: CooperativeThread | None = None
        self.should_stop = False
        self.task_id = ""
        self.runner = Runner(
            self.store,
            self.world.settings,
            self.world.registry,
            self.runtime,
            functools.partial(self.world.capture, self.runtime),
            send_messages=Outbox(self.store, self.world.settings, self.send).send_committed,
            should_stop=lambda: self.should_stop,
            kinds=KINDS,
            stops_process=lambda error: isinstance(error, ColdShutdown) or ends_the_process(error),
        )

    def take(self, ref: RunRef, number: int) -> CooperativeThread:
        self.task_id = f"task-{number}"
        self.runtime.ref = ref
        self.thread = CooperativeThread(self._advance, name=self.name, takes_turns=True)
        return self.thread

    def _advance(self) -> str:
        ref = self.runtime.ref
        assert ref is not None
        try:
            return self.until_dead(lambda: self.runner.advance(ref, task_id=self.task_id, node=self.name).summary)
        except ColdShutdown:
            return "left"


class Emitter(Machine):
    """A process of the application that emits; between two of its commits others get their turn, and it may die."""

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.thread: CooperativeThread | None = None
        self.runtime.may_die = True

    def emit(self, topic: str, payload: str, id_: str | None) -> CooperativeThread:
        """An emission that begins when its lane goes."""
        operations = self.operations()

        def emit() -> str:
            return f"{operations.topics.emit(topic, payload, id=id_)} resumed"

        self.thread = CooperativeThread(lambda: self.until_dead(emit), name=self.name)
        return self.thread


class Sender(Machine):
    """A dispatcher that sends what is in the outbox; between taking and forgetting it may wait for others, or die."""

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.thread: CooperativeThread | None = None
        self.runtime.may_die = True

    def sweep(self) -> CooperativeThread:
        """A sweep that begins when its lane goes."""
        outbox = Outbox(self.store, self.world.settings, self.send)
        self.thread = CooperativeThread(lambda: self.until_dead(lambda: f"{outbox.sweep()} sent"), name=self.name)
        return self.thread


class Answerer(Machine):
    """A worker that takes what tasks answer, from the messages of their callbacks."""

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.runtime.may_die = True

    def take(self, answer: dict[str, Any], asked: list[Any]) -> str:
        """Take one: it has an "output", or an "error" with name and message."""
        answers = AnswerCommitter(lambda: self.operations().answers, self.world.settings, self.runtime)
        if "error" in answer:
            return self.until_dead(lambda: answers.commit_error(answer["error"], asked))
        return self.until_dead(lambda: answers.commit_result(answer["output"], asked))


class Postman(Machine):
    """A worker that has the handler of outbound events."""

    def deliver(self, id_: str) -> str:
        """Deliver one; "crashed" where it died in the handler."""
        retries = Retries(limit=None, delay=5, backoff="constant")
        handlers = {"note": Handler.of(self._note, retries), END_CHILDREN: Handler.of(self._end_children, retries)}
        try:
            return OutboundDeliverer(self.store, self.world.settings, self.runtime, handlers, ends_the_process).deliver(
                id_
            )
        except BaseException:
            if not self.runtime.is_dead:
                raise
            return "crashed"

    def _end_children(self, event: OutboundEvent) -> None:
        """End the children of a run that was terminated; if this fails or dies afterwards, it is done again."""
        self.operations().lifecycle.end_children(event.payload)
        for _, instance_id in event.payload["children"]:
            self.world.schedule.story.terminated.add(instance_id)
            self.world.schedule.clients.note_end(instance_id)
        self._note(event)

    def _note(self, event: OutboundEvent) -> None:
        match self.world.schedule.errands.notes(event):
            case "fails":
                raise ValueError("as the schedule wants it")
            case "dies":
                self.runtime.is_dead = True
                raise Crash("note")
