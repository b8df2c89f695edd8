"""The event loop of this process, on which async functions run: those of steps, and handlers.

It runs on a thread of its own, from the first async function to the end of the process, so clients that belong to a
loop stay usable from one pass to the next. A forked child starts without it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVar

from celery_durable.errors import StepMisuse
from celery_durable.housekeeping import Job, reset_in_child

T = TypeVar("T")
Hook = Callable[[], Awaitable[object]]

logger = logging.getLogger("celery_durable")

STOP_SECONDS = 5.0
"""How long the end of the process waits for async functions and hooks."""
_BLOCKED_SECONDS = 1.0
_WATCH_SECONDS = 0.25


class LoopTask:
    """A call of an async function, as a task of the loop. ``call`` never raises; ``report`` gets what it returns."""

    def __init__(
        self, running: _Running, call: Callable[[], Awaitable[T]], report: Callable[[T], None], name: str
    ) -> None:
        self.name = name
        self.was_cancelled = False
        """Whether the task was cancelled before it had ended. The loop's thread sets it."""
        self._running, self._call, self._report = running, call, report
        self._task: asyncio.Task[None] | None = None
        running.loop.call_soon_threadsafe(self._start)  # with a copy of the caller's context variables

    def cancel(self) -> None:
        """Cancel the task, as `asyncio.Task.cancel` does. Any thread may call it."""
        # The second call_soon comes after the first step of the task: a task that is cancelled before it has started
        # would not report.
        loop = self._running.loop
        loop.call_soon_threadsafe(lambda: loop.call_soon(self._cancel))

    def _cancel(self) -> None:
        self.was_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = self._running.loop.create_task(self._run(), name=self.name)
        self._running.tasks[self._task] = self.name

    async def _run(self) -> None:
        result = await self._call()
        if self._task is not None:
            del self._running.tasks[self._task]
        self._report(result)


class _Running:
    """A loop that runs, and its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[asyncio.Task[Any], str] = {}
        """The running tasks and their names. The loop itself refers to them only weakly."""
        self.is_stopping = False
        self.start_hooks: asyncio.Task[None] | None = None
        self._probed_at: float | None = None
        """When the watch asked the loop for a turn that it has not made yet; infinite once that is reported."""
        self.thread = threading.Thread(target=self._run, name="durable-event-loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.is_stopping:
            try:
                self.loop.run_forever()
            except BaseException:  # asyncio raises the SystemExit of any task here, and must not stop for it
                logger.exception("A task on the event loop raised an error that asyncio passes on; the loop continues")
        self.loop.close()

    async def stop(self, hooks: list[Hook]) -> None:
        """Cancel the tasks, call the hooks and end the loop."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks), timeout=STOP_SECONDS / 2)
        for hook in hooks:
            try:
                await hook()
            except Exception:
                logger.exception("on_loop_stop: %r failed", hook)
        await self.loop.shutdown_asyncgens()
        self.is_stopping = True
        self.loop.stop()

    def watch(self) -> float:
        """Warn if the loop makes no turn for a second; returns when to look again."""
        if not self.tasks or self.is_stopping:
            return math.inf
        now = time.monotonic()
        if self._probed_at is None:
            self._probed_at = now
            self.loop.call_soon_threadsafe(self._note_turn)
        elif now - self._probed_at >= _BLOCKED_SECONDS:
            self._probed_at = math.inf
            self._warn_blocked()
        return _WATCH_SECONDS

    def _note_turn(self) -> None:
        self._probed_at = None

    def _warn_blocked(self) -> None:
        task = asyncio.current_task(self.loop)
        names = [self.tasks[task]] if task in self.tasks else list(self.tasks.values())
        frame = sys._current_frames().get(self.thread.ident or 0)  # noqa: SLF001  # documented, for debuggers
        logger.warning(
            "%s has blocked the event loop of this process for %g second(s). Other async functions and their timeouts "
            "wait meanwhile: use an async client, or `await asyncio.to_thread(...)`. It is here:\n%s",
            " or ".join(names[:3]),
            _BLOCKED_SECONDS,
            "".join(traceback.format_stack(frame)[-4:]),
        )


class EventLoop:
    """The event loop of this process, if one runs, and what is called when it starts and stops."""

    def __init__(self) -> None:
        self.start_hooks: list[Hook] = []
        self.stop_hooks: list[Hook] = []
        self._inherited: list[_Running] = []
        """The loops of the processes before this one's fork. To close one would change the parent's selector."""
        self._running: _Running | None = None
        self.reset_in_child()
        self._watch = Job("durable-event-loop", self._check, is_quick=True, delays_forks=False)
        reset_in_child(self)

    def reset_in_child(self) -> None:
        """Forget the parent's loop: its thread is not in this process."""
        if self._running is not None:
            self._inherited.append(self._running)
        self._running, self._lock = None, threading.Lock()
        self._pending_hooks = list(self.start_hooks)

    # --- hooks ----------------------------------------------------------------------------------

    def add_start_hook(self, hook: Hook) -> None:
        """Call ``hook`` before the next async function, once in each process."""
        self.start_hooks.append(hook)
        self._pending_hooks.append(hook)

    async def _call_start_hooks(self) -> None:
        while self._pending_hooks:
            await self._pending_hooks[0]()
            del self._pending_hooks[0]

    # --- calls ----------------------------------------------------------------------------------

    def start(self, call: Callable[[], Awaitable[T]], report: Callable[[T], None], *, name: str) -> LoopTask:
        """Start ``call``, which never raises, as a task; its result goes to ``report`` on the loop's thread.

        Raises StepMisuse on the loop's own thread, whose caller would wait for itself.
        """
        with self._lock:
            if self._running is None:
                self._running = _Running()
                atexit.register(self.stop)
            running = self._running
        if running.thread is threading.current_thread():
            raise StepMisuse(
                f"{name} is async, and was started by an async function that runs a workflow in its own process, as "
                "task_always_eager does: it would wait for itself. Call `await workflow.acreate(...)` there."
            )
        self._watch.start(after=_WATCH_SECONDS)
        return LoopTask(running, call, report, name)

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call an async function on the loop. The start hooks come first; the next call repeats one that failed."""
        running = self._running
        if self._pending_hooks and running is not None:
            if running.start_hooks is None or running.start_hooks.done():
                # Without the context of the first step, which clients would keep.
                running.start_hooks = Context().run(running.loop.create_task, self._call_start_hooks())
            await asyncio.shield(running.start_hooks)
        return await call()

    def run(self, call: Callable[[], Awaitable[T]], *, name: str) -> T:
        """Call an async function and wait for it on this thread. If that is interrupted, the task is cancelled."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        async def guarded() -> tuple[Any, BaseException | None]:
            try:
                return await self.call(call), None
            except BaseException as exc:  # noqa: BLE001  # raised on the thread that waits
                return None, exc

        task = self.start(guarded, done.put, name=name)
        try:
            value, error = done.get()
        except BaseException:
            task.cancel()
            raise
        if error is not None:
            raise error
        result: T = value
        return result

    # --- the loop's end, and its watch ----------------------------------------------------------

    def stop(self) -> None:
        """Cancel what runs, call the stop hooks if all start hooks have run, and end the loop; waits `STOP_SECONDS`."""
        with self._lock:
            running, self._running = self._running, None
            hooks = [] if self._pending_hooks else self.stop_hooks[::-1]
            self._pending_hooks = list(self.start_hooks)
        atexit.unregister(self.stop)
        if running is not None:
            running.loop.call_soon_threadsafe(lambda: running.loop.create_task(running.stop(hooks)))
            running.thread.join(STOP_SECONDS)

    def _check(self) -> float:
        running = self._running
        return math.inf if running is None else running.watch()


event_loop = EventLoop()
