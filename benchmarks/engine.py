"""What this engine costs: its steps, its messages, its creation and its maps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import sqlalchemy as sa
from measuring import PREFORK, PREFORK8, SOLO, THREADS, Answer, Question, measure, wait_for, worker
from servers import SERVER, query_one
from wire import CountingProxy


class EngineQuestions:
    """The questions about this engine. Makes its tables."""

    def __init__(self) -> None:
        from project import awaited, durable, logged, many, spread

        self.durable, self._many, self._logged, self._spread = durable, many, logged, spread
        self._awaited = awaited
        self._store = durable.internals.store
        with self._store.engine.begin() as conn:
            self._store.tables.metadata.create_all(conn)

    def questions(self, instances: int) -> dict[str, Question]:
        few = max(10, instances // 8)

        def steps(
            number: int, count: int, kind: str, options: Sequence[str] = PREFORK, workers: int = 1
        ) -> tuple[str, Callable[[], Answer]]:
            title = f"steps, {number} in a workflow, {kind}" if number > 1 else f"workflows of 1 step, {kind}"
            return title, lambda: self.run(number, count, workers=workers, options=options)

        def ask(title: str, question: Callable[[], Answer], reference: str | None) -> Question:
            return Question(title, reference, question)

        return {
            "steps1": ask(*steps(1, instances, "prefork 2"), "noop"),
            "steps1_8": ask(*steps(1, instances, "prefork 8", PREFORK8), "noop8"),
            "steps10": ask(*steps(10, instances, "prefork 2"), "limit2"),
            "steps100": ask(*steps(100, few, "prefork 2"), "limit2"),
            "threads10": ask(*steps(10, instances, "2 workers with 16 threads", THREADS, 2), "limit2"),
            "threads100": ask(*steps(100, few, "2 workers with 16 threads", THREADS, 2), "limit2"),
            "solo10": ask(*steps(10, instances, "2 solo workers", SOLO, 2), "limit2"),
            "byhand": ask("Celery tasks that count, sent by hand, prefork 2", lambda: tasks_by_hand(instances), None),
            "map": ask("such tasks by step.map, results recorded", lambda: self.tasks_by_map(instances), "byhand"),
            "create": ask("create(), each committed and published", self.creation, "limit1"),
            "superfluous": ask("superfluous messages, in this process", self.superfluous, None),
            "logged10": ask(
                "steps, 10 in a workflow, each with a line in the durable log, prefork 2",
                lambda: self.run(10, instances, workflow=self._logged),
                "steps10",
            ),
            "async10": ask(
                "async steps, 10 in a workflow, prefork 2",
                lambda: self.run(10, instances, workflow=self._awaited),
                "steps10",
            ),
            "statements": ask("statements per step, 10 in a workflow", lambda: self.statements(10), None),
            "counts": ask(
                "what this engine sends to PostgreSQL per step, 10 in a workflow",
                lambda: self.count_messages(min(200, instances)),
                None,
            ),
        }

    def run(
        self,
        steps: int,
        count: int,
        *,
        workers: int = 1,
        options: Sequence[str] = PREFORK,
        proxy: CountingProxy | None = None,
        workflow: Any = None,
    ) -> Answer:
        """Instances of ``workflow``, by default `many`, that wait when the workers start."""
        self._forget()
        for _ in range(count):
            (workflow or self._many).create(steps)
        url = {"BENCH_POSTGRESQL_URL": proxy.url.render_as_string(hide_password=False)} if proxy else {}
        with ExitStack() as stack:
            sessions = [
                stack.enter_context(worker(*options, "-n", f"bench{n}@localhost", **url)) for n in range(workers)
            ]
            answer = measure(done, count * steps, sessions=sessions, proxy=proxy)
        self._forget()
        return answer

    def count_messages(self, count: int) -> Answer:
        with CountingProxy(SERVER) as proxy:
            answer = self.run(10, count, proxy=proxy)
        return {name: answer[name] for name in ("statements", "round_trips", "transactions")}

    def statements(self, steps: int) -> Answer:
        """Client statements per step: one pass in this process, counted at the driver."""
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        ref = self._create(steps)
        sa.event.listen(self._store.engine, "before_cursor_execute", note)
        self._advance(ref)
        sa.event.remove(self._store.engine, "before_cursor_execute", note)
        return {"per_step": count / steps}

    def superfluous(self) -> Answer:
        """The cost of a duplicate delivery of a finished run."""
        ref = self._create(1)
        self._advance(ref)
        times = []
        for _ in range(500):
            began = time.perf_counter()
            self._advance(ref)
            times.append((time.perf_counter() - began) * 1000)
        median = statistics.median(times)
        return {"per_second": 1000 / median, "p50_ms": median, "p99_ms": statistics.quantiles(times, n=100)[98]}

    def tasks_by_map(self, count: int) -> Answer:
        """The tasks of `tasks_by_hand` as one step."""
        from project import COUNTED, counter

        with worker(*PREFORK):
            self._spread.create(1).result(timeout=60)  # it is up
            began = time.perf_counter()
            self._spread.create(count).result(timeout=120)
            took = time.perf_counter() - began
        counter.delete(COUNTED)
        return {"per_second": count / took}

    def creation(self) -> Answer:
        from project import QUEUE_KEY, counter

        began = time.perf_counter()
        for _ in range(500):
            self._many.create(1)
        answer = {"per_second": 500 / (time.perf_counter() - began)}
        counter.delete(QUEUE_KEY)
        return answer

    def _forget(self) -> None:
        with self._store.engine.begin() as conn:
            for table in reversed(self._store.tables.metadata.sorted_tables):
                conn.execute(sa.text(f"TRUNCATE {table.name}"))

    def _create(self, steps: int):
        handle = self._many.create(steps)
        return self.durable.internals.operations.queries.get("many", handle.id).instance.ref

    def _advance(self, ref) -> None:
        self.durable.internals.runner.advance(ref, task_id="bench", node="bench")


def tasks_by_hand(count: int) -> Answer:
    """So many tasks that do next to nothing, sent to a worker that is up."""
    from project import COUNTED, counter
    from project import count as task

    with worker(*PREFORK):
        counter.set(COUNTED, 0)
        task.delay(0)
        wait_for(lambda: int(counter.get(COUNTED)) == 1)
        began = time.perf_counter()
        for number in range(count):
            task.delay(number)
        wait_for(lambda: int(counter.get(COUNTED)) == count + 1)
        took = time.perf_counter() - began
    counter.delete(COUNTED)
    return {"per_second": count / took}


def done() -> int:
    return query_one("SELECT count(*) FROM workflow_step")
