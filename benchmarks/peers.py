"""The questions that `make bench` asks of another system: steps in workflows of two lengths, and what they send."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from measuring import Answer, Question
from servers import SERVER
from wire import CountingProxy


class Run(Protocol):
    """Runs so many workflows of so many steps."""

    def __call__(self, steps: int, count: int) -> Answer: ...


class CountedRun(Run, Protocol):
    """``proxy``: counts what they send to PostgreSQL."""

    def __call__(self, steps: int, count: int, *, proxy: CountingProxy | None = None) -> Answer: ...


class Peer(NamedTuple):
    """Another system. ``workflow``: its word for one; ``packages``, ``programs``: what has to be installed."""

    name: str
    workflow: str
    packages: tuple[str, ...]
    run: Run
    programs: tuple[str, ...] = ()

    def speeds(self, short: int, long: int) -> dict[str, Question]:
        """Ask about so many workflows of 10 steps and of 100."""

        def speed(steps: int, count: int) -> Question:
            text = f"steps in {self.name}, {steps} in a {self.workflow}, 2 processes"
            return Question(text, "limit2", lambda: self.run(steps, count), self.packages, self.programs)

        key = self.name.lower()
        return {f"{key}10": speed(10, short), f"{key}100": speed(100, long)}

    def counts(self, run: CountedRun, count: int) -> dict[str, Question]:
        """Count what so many workflows of 10 steps send to PostgreSQL."""

        def ask() -> Answer:
            with CountingProxy(SERVER) as proxy:
                answer = run(10, count, proxy=proxy)
            return {name: answer[name] for name in ("statements", "round_trips", "transactions")}

        text = f"what {self.name} sends to PostgreSQL per step, 10 in a {self.workflow}"
        return {f"{self.name.lower()}_counts": Question(text, None, ask, self.packages, self.programs)}
