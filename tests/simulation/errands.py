"""Errands of a schedule: emissions that take several turns, messages of the outbox, and who delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_durable.model import OutboundEvent, OutboxKind, OutboxMessage
from celery_durable.tasks.publishing import PublishReport, SendState
from tests.simulation import witnesses
from tests.simulation.processes import Emitter, Sender


class Errands:
    """What is under way beside the runners."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._world = schedule, schedule.world
        self._dice, self._story = schedule.dice, schedule.story
        self._emitting: list[Emitter] = []
        self._sending: list[Sender] = []
        self._messages: list[str] = []

    def calm_down(self) -> None:
        """Who emits comes to an end, or dies."""
        for emitter in list(self._emitting):
            emitter.runtime.is_dead = self._dice.random() < 0.5
            self._go_on(emitter)
        for sender in list(self._sending):
            sender.runtime.is_dead = self._dice.random() < 0.5
            self._send_on(sender)

    def end(self) -> None:
        """Let no lane outlive its schedule."""
        for process in (*self._emitting, *self._sending):
            process.runtime.is_dead = True
            assert process.thread is not None
            process.thread.kill()
        self._emitting.clear()
        self._sending.clear()

    # --- messages --------------------------------------------------------------------------------

    def send(self, messages: Sequence[OutboxMessage]) -> PublishReport:
        """A broker for what was in the outbox: at times away, at times it refuses some."""
        committed = {id_ for (id_,) in self._world.raw.execute("SELECT id FROM author_message")}
        early = [each for each in messages if each.id not in committed]
        self._story.wrongs += [f"O2 {each} is sent, and was not committed" for each in early]
        is_calm = self._schedule.is_calm
        if not is_calm and self._dice.random() < 0.2:
            self._story.stats["messages lost"] += len(messages)
            return PublishReport.of(len(messages), SendState.UNSENT)
        refused = [each for each in messages if not is_calm and self._dice.random() < 0.1]
        for each in messages:
            if each not in refused:
                self._story.sent[each.id] += 1
                self._schedule.foreign.sent(each)
                if each.kind is OutboxKind.EVENT and (is_calm or self._dice.random() >= self._schedule.losses):
                    self._messages.append(each.id)
        self._story.stats["messages sent"] += len(messages) - len(refused)
        return PublishReport([SendState.REFUSED if each in refused else SendState.SENT for each in messages])

    def sweep_outbox(self) -> None:
        """Dispatchers send what is due; two of them at once, and each gets its turns."""
        free = [sender for sender in self._world.senders if sender not in self._sending]
        if free and (not self._sending or self._dice.random() < 0.3):
            sender = self._dice.choice(free)
            sender.sweep()
            self._sending.append(sender)
        else:
            sender = self._dice.choice(self._sending)
        self._send_on(sender)

    def _send_on(self, sender: Sender) -> None:
        assert sender.thread is not None
        sender.thread.go()
        if sender.thread.result is None:
            self._schedule.tell(f"{sender.name} at {sender.thread.parked_at}")
            self._story.stats["senders at once"] += len(self._sending) > 1
            return
        self._schedule.tell(f"{sender.name}: {sender.thread.result}")
        self._sending.remove(sender)
        if sender.runtime.is_dead:
            self._story.stats["sender crashed"] += 1
            sender.begin(self._schedule.next_seed())

    def hand_all_over(self) -> None:
        while self._messages:
            self.hand_over()

    def hand_over(self) -> None:
        """An outbound event comes to a worker that has its handler."""
        if not self._messages:
            return
        index = self._dice.randrange(len(self._messages))
        id_ = self._messages[index]
        if self._schedule.is_calm or self._dice.random() >= 0.1:  # else the message comes again
            del self._messages[index]
        postman = self._world.postman
        said = postman.deliver(id_)
        self._schedule.tell(f"message {id_}: {said}")
        self._story.stats[f"message {said.partition(':')[0]}"] += 1
        if postman.runtime.is_dead:
            postman.begin(self._schedule.next_seed())

    def notes(self, event: OutboundEvent) -> str:
        """What becomes of the handler's call."""
        hows = ["returns"] * 9 + ["fails"] if self._schedule.is_calm else ["returns", "fails", "dies"]
        how = self._dice.choice(hows)
        self._story.noted[event.id] += how == "returns"
        return how

    # --- emissions ------------------------------------------------------------------------------

    def emit(self, topic: str, payload: str, id_: str | None) -> str:
        """Have a process emit; it gets its turns as runners do."""
        free = [emitter for emitter in self._world.emitters if emitter not in self._emitting]
        if not free:
            return "nobody is free"
        started = "SELECT count(*) FROM author_emission"
        (waiting,) = self._world.raw.execute(witnesses.WAITING, (topic,)).fetchone()
        (before,) = self._world.raw.execute(started).fetchone()
        (under_way,) = self._world.raw.execute("SELECT count(*) FROM workflow_emission WHERE id = ?", (id_,)).fetchone()
        lost = self._story.stats["cut, lost"]
        emitter = self._dice.choice(free)
        emitter.emit(topic, payload, id_)
        self._emitting.append(emitter)
        has_died = self._go_on(emitter)
        (after,) = self._world.raw.execute(started).fetchone()
        is_put_off = self._story.stats["cut, lost"] > lost  # it looks what became of its commit, and begins later
        if waiting and not (has_died or under_way or is_put_off) and after == before:
            self._story.wrongs.append(
                f"T1 {payload} is emitted to {topic}, where {waiting} wait, and nothing comes of it"
            )
        return f"by {emitter.name}"

    def continue_abandoned_emission(self) -> None:
        if self._emitting:
            self._go_on(self._dice.choice(self._emitting))

    def _go_on(self, emitter: Emitter) -> bool:
        """Its turn; answers whether it died in it."""
        assert emitter.thread is not None
        emitter.thread.go()
        if emitter.thread.result is None:
            self._schedule.tell(f"{emitter.name} at {emitter.thread.parked_at}")
            return False
        said = emitter.thread.result
        self._schedule.tell(f"{emitter.name}: {said}")
        self._story.stats[f"emission {said.partition(' ')[2] or said}"] += 1
        self._emitting.remove(emitter)
        if not emitter.runtime.is_dead:
            return False
        emitter.begin(self._schedule.next_seed())
        return True
