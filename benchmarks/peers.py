"""The questions that `make bench` asks of another system: steps in workflows of two lengths, and what they send."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from measuring import Answer, Question
from servers import SERVER
from wire import CountingProxy


class Run(Protocol):
    """Runs so many workflows of so many steps; ``proxy``: counts what they send to PostgreSQL."""

    def __call__(self, steps: int, count: int, *, proxy: CountingProxy | None = None) -> Answer: ...


class Peer(NamedTuple):
    """Another system. ``workflow``: its word for one; ``packages``: what has to be installed."""

    name: str
    workflow: str
    packages: tuple[str, ...]
    run: Run

    def questions(self, short: int, long: int, counted: int) -> dict[str, Question]:
        """Ask about so many workflows of 10 steps and of 100, and count what ``counted`` of 10 steps send."""
        key = self.name.lower()

        def speed(steps: int, count: int) -> Question:
            text = f"steps in {self.name}, {steps} in a {self.workflow}, 2 processes"
            return Question(text, "limit2", lambda: self.run(steps, count), self.packages)

        text = f"what {self.name} sends to PostgreSQL per step, 10 in a {self.workflow}"
        return {
            f"{key}10": speed(10, short),
            f"{key}100": speed(100, long),
            f"{key}_counts": Question(text, None, lambda: self._count(counted), self.packages),
        }

    def _count(self, count: int) -> Answer:
        with CountingProxy(SERVER) as proxy:
            answer = self.run(10, count, proxy=proxy)
        return {name: answer[name] for name in ("statements", "round_trips", "transactions")}
