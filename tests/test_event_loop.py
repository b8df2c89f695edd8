"""The event loop of a process: what is called when it starts and ends, and what a fork does to it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest

from celery_durable import Durable
from celery_durable.errors import DefinitionInvalid, StepMisuse
from celery_durable.event_loop import event_loop


async def loop_id() -> int:
    return id(asyncio.get_running_loop())


def run_here() -> int:
    return event_loop.run(loop_id, name="a test")


def test_hooks_are_called_once_on_the_loop_and_again_after_it_has_ended() -> None:
    durable, called = Durable(), list[tuple[str, int]]()

    @durable.on_loop_start
    async def open_client() -> None:
        called.append(("start", await loop_id()))

    @durable.on_loop_stop
    async def close_client() -> None:
        called.append(("stop", await loop_id()))

    @durable.on_loop_stop
    async def close_first() -> None:
        called.append(("stop first", await loop_id()))
        raise OSError("is logged")

    first = {run_here(), run_here()}
    event_loop.stop()
    second = run_here()
    assert called == [*((what, *first) for what in ("start", "stop first", "stop")), ("start", second)]


def test_a_hook_that_fails_is_called_again_and_those_before_it_are_not() -> None:
    durable, called = Durable(), list[str]()

    @durable.on_loop_start
    async def works() -> None:
        called.append("works")

    @durable.on_loop_start
    async def fails() -> None:
        called.append("fails")
        if called.count("fails") < 3:
            raise OSError("not yet")

    @durable.on_loop_stop
    async def stop() -> None:
        called.append("stop")

    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            run_here()
    assert called == ["works", "fails", "fails"]
    event_loop.stop()  # calls no stop hook: they expect what the start hooks make
    run_here()
    event_loop.stop()
    assert called == ["works", "fails", "fails", "works", "fails", "stop"]


def test_only_an_async_function_can_be_a_hook() -> None:
    def plain() -> None: ...

    for register in (Durable().on_loop_start, Durable().on_loop_stop):
        for fn in (plain, 5):
            with pytest.raises(DefinitionInvalid) as refused:
                register(fn)  # type: ignore[type-var]
            assert str(refused.value) == (
                f"durable.{register.__name__}() needs an async function without parameters, and got {fn!r}."
            )


def test_a_forked_child_has_a_loop_of_its_own_and_calls_the_hooks_again() -> None:
    called: list[int] = []

    @Durable().on_loop_start
    async def start() -> None:
        called.append(os.getpid())

    run_here()
    child = os.fork()
    if child == 0:
        run_here()
        event_loop.stop()
        os._exit(0 if called == [os.getppid(), os.getpid()] else 1)
    assert os.waitpid(child, 0)[1] == 0
    run_here()  # the parent's loop still works
    assert called == [os.getpid()]


def test_the_loop_does_not_wait_for_itself() -> None:
    async def waits() -> None:
        event_loop.run(loop_id, name="Step 'ask' of order/o-1#1")

    with pytest.raises(StepMisuse) as refused:
        event_loop.run(waits, name="outer")
    assert str(refused.value) == (
        "Step 'ask' of order/o-1#1 is async, and was started by an async function that runs a workflow in its own "
        "process, as task_always_eager does: it would wait for itself. Call `await workflow.acreate(...)` there."
    )


def test_if_the_thread_that_waits_is_interrupted_the_function_is_cancelled() -> None:
    """By Ctrl-C or a soft time limit, for example."""
    interrupted, was_cancelled, waiting = threading.Event(), threading.Event(), threading.get_ident()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    async def hangs() -> None:
        try:
            while True:  # a signal that comes just before the thread waits does not wake it
                if sys._current_frames()[waiting].f_code is event_loop.run.__code__:
                    signal.pthread_kill(waiting, signal.SIGUSR1)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            was_cancelled.set()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(hangs, name="a test")
        assert was_cancelled.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_end_cancels_what_runs_and_leaves_no_thread() -> None:
    started, ended = threading.Event(), list[object]()

    async def hangs() -> str:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "cancelled"
        return "late"

    event_loop.start(hangs, ended.append, name="a test")
    assert started.wait(10)
    event_loop.stop()
    assert ended == ["cancelled"]
    assert "durable-event-loop" not in {thread.name for thread in threading.enumerate()}
