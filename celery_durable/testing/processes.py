"""The processes of one harness: the test's own, and the runners that the test starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from celery_durable.config import Settings
from celery_durable.model import DueRun
from celery_durable.tasks.outbox import Send
from celery_durable.testing import databases
from celery_durable.testing.clock import Clock
from celery_durable.testing.code import Deployed
from celery_durable.testing.databases import MakeStore
from celery_durable.testing.messages import Messages
from celery_durable.testing.mocks import Mocks
from celery_durable.testing.process import Process, RunnerProcess
from celery_durable.testing.runtime import HarnessRuntime

AnyProcess = TypeVar("AnyProcess", bound=Process)


class Processes:
    """Starts processes over one database and one clock. ``web`` is the test's own process, which calls the operations.

    They share what they compile.
    """

    def __init__(
        self,
        store_url: str | MakeStore | None,
        settings: Settings,
        clock: Clock,
        *,
        seed: int,
        mocks: Mocks,
        code: Deployed,
        messages: Messages,
        send: Send,
        wait: Callable[[float, float], None],
    ) -> None:
        self._settings, self._clock, self._seed, self._mocks = settings, clock, seed, mocks
        self._code, self._messages, self._send = code, messages, send
        self._runners: list[RunnerProcess] = []
        self.database = databases.Database(store_url, schema=settings.database_schema, prefix=settings.table_prefix)
        runtime = _WebRuntime(clock, seed=seed, wait=wait)
        self.web = self._started(Process("web", self.database.url, runtime, settings))

    def __iter__(self) -> Iterator[Process]:
        return iter((*self._runners, self.web))

    @property
    def runner(self) -> RunnerProcess:
        """The runner that gets the messages. If the last one has died, a new one."""
        living = self._living
        return living[-1] if living else self.start_runner()

    @property
    def _living(self) -> list[RunnerProcess]:
        return [runner for runner in self._runners if not runner.is_dead and not runner.is_second]

    def restart_runner(self) -> RunnerProcess:
        """Kill the runner that gets the messages, and start another."""
        for runner in self._living:
            runner.kill()
        return self.start_runner()

    def start_runner(self, code: Deployed | None = None) -> RunnerProcess:
        """Start a runner. ``code`` None: it always knows what is deployed."""
        name = f"runner-{len(self._runners) + 1}"
        runtime = HarnessRuntime(self._clock, name=name, seed=self._seed, mocks=self._mocks)
        runner = RunnerProcess(
            name,
            self.database.url,
            runtime,
            self._settings,
            registry=code or self._code,
            publish_runs=functools.partial(self._capture, runtime),
            send=self._send,
        )
        self._runners.append(self._started(runner))
        return runner

    def close(self) -> None:
        """End all processes and remove the database, unless the test gave it."""
        for runner in self._runners:
            runner.runtime.is_dead = True  # a held runner must not write when it continues to its end
        for barrier in self._mocks.barriers:
            barrier.abandon()
        for process in self:
            process.close()
        self._runners.clear()
        self.database.remove()

    def _started(self, process: AnyProcess) -> AnyProcess:
        if self.database.is_own:
            sa.event.listen(process.store.engine, "connect", _never_sync)
        return process

    def _capture(self, runtime: HarnessRuntime, due_runs: Sequence[DueRun]) -> None:
        """Capture the messages of a runner, with the checkpoints that production has around their publishing."""
        runtime.checkpoint("before-publish")
        self._messages.extend(due_runs)
        runtime.checkpoint("after-publish")


class _WebRuntime(HarnessRuntime):
    """The runtime of the test's own process. Code that waits for a result moves the clock to the next work."""

    def __init__(self, clock: Clock, *, seed: int, wait: Callable[[float, float], None]) -> None:
        super().__init__(clock, name="web", seed=seed)
        self._wait = wait

    def wait_for_progress(self, pause: float, left: float) -> None:
        self._wait(pause, left)

    def sleep(self, seconds: float) -> None:
        self._wait(seconds, seconds)


def _never_sync(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous=OFF")
