"""The processes of one harness: the test's own, and the runners that the test starts."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from celery_durable.all_kinds import KINDS
from celery_durable.config import Settings
from celery_durable.definitions import Registry
from celery_durable.model import DueRun, OutboxMessage, PassResult, RunRef
from celery_durable.runner import Runner
from celery_durable.runtime import is_ctrl_c
from celery_durable.store.engine import Store, Tx
from celery_durable.store.engine.statements import Rows, Statement
from celery_durable.tasks.outbox import Outbox, Send
from celery_durable.tasks.publishing import PublishReport
from celery_durable.testing import databases
from celery_durable.testing.clock import Clock
from celery_durable.testing.code import Deployed
from celery_durable.testing.cooperative import Crash
from celery_durable.testing.databases import MakeStore
from celery_durable.testing.errors import HeldOutside
from celery_durable.testing.mocks import Mocks
from celery_durable.testing.runtime import HarnessRuntime
from celery_durable.testing.tasks import Messages

# The processes of a harness, each with its own connections and runtime. A dead process reaches no database.


PublishRuns = Callable[[Sequence[DueRun]], None]


def ends_the_process(error: BaseException) -> bool:
    """Return False for failures of the code under test, True for a crash, `pytest.fail` in a mock, and Ctrl-C."""
    is_pytests = any(kind.__module__ == "_pytest.outcomes" for kind in type(error).__mro__)
    return is_pytests or isinstance(error, (Crash, HeldOutside)) or is_ctrl_c(error)


class ProcessTx(Tx):
    """The internal statements of a process. When it is dead, none reaches the database."""

    __slots__ = ()

    def run(self, statement: Statement, /, **params: Any) -> Rows:
        """Run a statement; raises Crash if the process is dead."""
        self._refuse_if_dead()
        return super().run(statement, **params)

    def run_many(self, statement: Statement, rows: Sequence[dict[str, Any]], /) -> None:
        """Run a statement for each row of parameters; raises Crash if the process is dead."""
        self._refuse_if_dead()
        super().run_many(statement, rows)

    def _refuse_if_dead(self) -> None:
        if getattr(self.store.runtime, "is_dead", False):
            raise Crash("died")


class SharedCache(dict[Any, Any]):
    """What SQLAlchemy has compiled for one driver, shared by the engines of all processes.

    SQLAlchemy's key begins with the engine's dialect object. Here the version of its server stands for it; what else
    decides the SQL, such as schema and prefix, is in the rest of the key.
    """

    _MOST = 1000

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what was compiled for a key of any engine."""
        return super().get(_without_engine(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        if len(self) >= self._MOST:
            self.clear()
        super().__setitem__(_without_engine(key), compiled)


def _without_engine(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.server_version_info if isinstance(each, sa.Dialect) else each for each in key)


_shared_caches: defaultdict[str, SharedCache] = defaultdict(SharedCache)


class Process:
    """A process with its own store. When it is dead, none of its statements and commits reaches the database."""

    def __init__(
        self,
        name: str,
        url: str | sa.URL | MakeStore,
        runtime: HarnessRuntime,
        settings: Settings,
    ) -> None:
        self.name, self.runtime = name, runtime
        if callable(url):
            self.store = url(settings, runtime)
        else:
            self.store = Store(
                url,
                schema=settings.database_schema,
                prefix=settings.table_prefix,
                prepared_statements=settings.prepared_statements,
                runtime=runtime,
            )
        engine = self.store.engine
        engine.update_execution_options(compiled_cache=_shared_caches[engine.dialect.driver])
        self.connections: list[Any] = []
        self.store.tx_type = ProcessTx
        # For the transactions and the statements of sessions. Before the store's own listener to "begin" locks SQLite.
        for what in ("begin", "before_execute", "commit"):
            event.listen(self.store.engine, what, self._refuse_if_dead, insert=True)
        event.listen(self.store.engine, "connect", lambda connection, _: self.connections.append(connection))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' (dead)' if self.runtime.is_dead else ''}>"

    @property
    def is_dead(self) -> bool:
        """Whether it has died."""
        return self.runtime.is_dead

    def _refuse_if_dead(self, *_: object) -> None:
        if self.runtime.is_dead:
            raise Crash(self.name)

    def bury(self) -> None:
        """Close its connections, as the kernel does for a process that died."""
        for connection in self.connections:
            with suppress(Exception):  # closed already
                connection.close()

    def close(self) -> None:
        """End it normally, or close the connections of a dead process."""
        if self.runtime.is_dead:
            self.bury()
        else:
            self.store.close()


class RunnerProcess(Process):
    """A worker process: a runner with the workflows that it knows."""

    def __init__(
        self,
        name: str,
        url: str | sa.URL | MakeStore,
        runtime: HarnessRuntime,
        settings: Settings,
        *,
        registry: Registry,
        publish_runs: PublishRuns,
        interruptions: tuple[type[BaseException], ...] = (),
        send: Send | None = None,
    ) -> None:
        super().__init__(name, url, runtime, settings)
        self.is_second = False
        """Whether it gets only what a test delivers to it."""
        self.should_stop = False
        """Set it to shut the process down: it releases its run at the next step boundary."""
        self.runner = Runner(
            self.store,
            settings,
            registry,
            runtime,
            publish_runs,
            send_messages=(lambda _: None)
            if send is None
            else Outbox(self.store, settings, self._passing(send)).send_committed,
            should_stop=lambda: self.should_stop,
            kinds=KINDS,
            stops_process=lambda error: ends_the_process(error) or isinstance(error, interruptions),
        )

    def _passing(self, send: Send) -> Send:
        """Return ``send`` with the checkpoints that production has around it."""

        def checked(messages: Sequence[OutboxMessage]) -> PublishReport:
            self.runtime.checkpoint("before-publish")
            report = send(messages)
            self.runtime.checkpoint("after-publish")
            return report

        return checked

    def die(self) -> None:
        """End the process here, as kill -9 does. For code that runs in it."""
        self.runtime.die()

    def kill(self) -> None:
        """End the process, from the test."""
        self.runtime.is_dead = True
        self.bury()

    def suspend(self) -> None:
        """Freeze the process, as SIGSTOP does. It renews no lease, and its own clock stops."""
        self.runtime.suspend()

    def wake_up(self) -> None:
        """Continue the process after `suspend`."""
        self.runtime.wake_up()

    def advance(
        self, ref: RunRef, *, task_id: str = "task", node: str | None = None, max_steps: int | None = None
    ) -> str:
        """Run a pass on this thread, as a worker does for a message. Returns "crashed" if the process died in it."""
        return self.run_pass(ref, task_id=task_id, node=node, max_steps=max_steps).summary

    def run_pass(
        self, ref: RunRef, *, task_id: str = "task", node: str | None = None, max_steps: int | None = None
    ) -> PassResult:
        """Run a pass as `advance` does, and return its result."""
        try:
            return self.runner.advance(ref, task_id=task_id, node=node or self.name, max_steps=max_steps)
        except BaseException:
            if not self.runtime.is_dead:
                raise
            self.bury()
            return PassResult("crashed")


AnyProcess = TypeVar("AnyProcess", bound=Process)


class Processes:
    """Starts processes over one database and one clock. ``web`` is the test's own, which calls the operations."""

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
