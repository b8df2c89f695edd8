"""Workers of other applications: they do the tasks that steps wait for, and what they answer takes its way.

A task is done once or twice, late, or never; it returns or fails. Its answer is a message of its own, which comes once
or twice, and comes again where the worker that took it has died.
"""

from __future__ import annotations

from typing import Any

from celery_durable.model import OutboxMessage
from tests.simulation import maps
from tests.simulation.story import Story


class Foreign:
    """What is under way there. An answer is JSON: its "output", or its "error"."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._world, self._dice = schedule, schedule.world, schedule.dice
        self._story: Story = schedule.story
        self._tasks: list[OutboxMessage] = []
        self._answers: list[tuple[dict[str, Any], list[Any]]] = []
        self._references: dict[tuple[str, int, str], list[Any]] = {}
        self._numbers = 0

    def sent(self, message: OutboxMessage) -> None:
        """The broker has a message."""
        if "reference" in message.content:
            self._tasks.append(message)

    def act(self) -> None:
        """Some of them go on."""
        for _ in range(self._dice.choice([1, 2, 4])):
            self._go_on()

    def _go_on(self) -> None:
        if self._tasks and (not self._answers or self._dice.random() < 0.5):
            self._work()
        elif self._answers:
            self._answer()

    def answer_all(self) -> None:
        """Nothing stays undone, nothing unsaid."""
        while self._tasks or self._answers:
            self._go_on()

    def answer_again(self) -> None:
        """Answers from long ago, to whatever has asked."""
        for key, given in list(self._story.given.items())[-5:]:
            self._world.answerer.take(given[-1], self._references[key])

    def _work(self) -> None:
        message = self._some(self._tasks)
        hows = ["returns", "fails", "gives up"] if self._schedule.is_calm else ["returns", "fails", "gives up", "lost"]
        how = self._dice.choices(hows, [12, 5, 1, 4][: len(hows)])[0]
        self._story.stats[f"task {how}"] += 1
        asked = message.content["reference"]
        _, _, instance, run, type_, *_ = asked
        self._schedule.tell(f"task {type_} of {instance}#{run} {how}")
        if how == "lost":
            return
        self._numbers += 1
        answer: dict[str, Any]
        match how:
            case "returns":
                answer = {"output": None if self._dice.random() < 0.1 else f"answer {self._numbers}"}
            case "fails":
                answer = {"error": {"name": "ValueError", "message": f"failure {self._numbers}"}}
            case _:
                answer = {"error": {"name": "NonRetryableError", "message": f"failure {self._numbers}"}}
        self._story.given.setdefault((instance, run, type_), []).append(answer)
        self._references[instance, run, type_] = asked
        self._answers.append((answer, asked))

    def _answer(self) -> None:
        answer, asked = self._some(self._answers)
        _, _, instance, run, type_, *_ = asked
        is_awaited = self._is_awaited(instance, run, type_)
        answerer = self._world.answerer
        said = answerer.take(answer, asked)
        self._schedule.tell(f"answer {answer} to {instance}#{run} {type_}: {said}")
        self._story.stats[f"answer {said.partition(':')[0]}"] += 1
        if said == "crashed":  # its message was not acknowledged
            self._answers.append((answer, asked))
            answerer.begin(self._schedule.next_seed())
        elif is_awaited and self._is_awaited(instance, run, type_):
            self._story.wrongs.append(f"D1 {instance}#{run} waited for {answer}, which came, and it waits still")

    def _some(self, messages: list[Any]) -> Any:
        """Any of them, which at times comes again."""
        index = self._dice.randrange(len(messages))
        if not self._schedule.is_calm and self._dice.random() < 0.1:
            return messages[index]
        return messages.pop(index)

    def _is_awaited(self, instance: str, run: int, type_: str) -> bool:
        """Whether a step of a live run waits for an answer of this type, and has none."""
        if type_.startswith("item:"):
            return maps.is_awaited(self._world.raw, instance, run, type_)
        query = """
            SELECT 1 FROM workflow_step s
            JOIN workflow_instance i ON i.id = s.instance_pk AND i.run_number = s.run_number
            WHERE i.instance_id = ? AND s.run_number = ? AND s.wait_event_type = ? AND s.status = 'waiting'
              AND i.status NOT IN ('complete', 'errored', 'terminated') AND NOT EXISTS (
                SELECT 1 FROM workflow_event e WHERE e.instance_pk = i.id AND e.run_number = s.run_number
                  AND e.type = s.wait_event_type)"""
        return self._world.raw.execute(query, (instance, run, type_)).fetchone() is not None
