"""Async code joins the atomic() block that is open on the thread of Django's connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.db import connections, transaction

from celery_durable import CreateOptions, Durable
from celery_durable.contrib.django import wiring
from celery_durable.errors import InstanceNotFound
from celery_durable.testing import DurableHarness
from celery_durable.testing.databases import MakeStore
from tests.contrib.django.site import site, users
from tests.contrib.django.workflows import booked, wait

__all__ = ["site", "users"]


class Undo(Exception):
    pass


@asynccontextmanager
async def atomic(alias: str) -> AsyncIterator[None]:
    """An atomic() block for async code: it is entered and left on the thread of the ORM's async methods."""
    block = transaction.atomic(using=alias)
    await sync_to_async(block.__enter__)()
    try:
        yield
    except BaseException as error:
        await sync_to_async(block.__exit__)(type(error), error, error.__traceback__)
        raise
    await sync_to_async(block.__exit__)(None, None, None)


def run(alias: str, use: Callable[[], Awaitable[Any]]) -> Any:
    """Run async code as a server does: the thread of Django's connection is not the event loop's."""

    async def main() -> Any:
        try:
            return await use()
        finally:
            await sync_to_async(lambda: connections[alias].close())()

    return asyncio.run(main())


def exists(id: str) -> bool:
    try:
        wait.get(id)
    except InstanceNotFound:
        return False
    return True


def test_every_async_call_is_part_of_the_block(alias: str, harness: DurableHarness) -> None:
    harness.create(wait, alias, id="w-1")
    harness.run_until_idle()

    async def change() -> None:
        handle = await wait.aget("w-1")
        assert await handle.aset_result("answer", 1, by="ada") == 1
        assert await handle.asend_event("answer", 1, id="e-1")
        await handle.apause()
        await handle.aresume()
        assert await handle.arestart() == 2
        await handle.aterminate("no longer wanted")
        assert (await handle.astatus()).status == "terminated"
        assert (await wait.acreate(alias, id="w-2")).id == "w-2"
        assert len(await wait.acreate_batch([CreateOptions("w-3", alias)])) == 1
        assert (await wait.arestart_or_create(alias, id="w-4")).outcome == "created"
        assert len((await wait.alist()).items) == 4
        await harness.durable.aemit("news", 1)

    async def roll_back() -> None:
        with pytest.raises(Undo):
            async with atomic(alias):
                await change()
                raise Undo

    run(alias, roll_back)
    assert [(each.id, each.status, each.run_number) for each in wait.list().items] == [("w-1", "waiting", 1)]
    assert len(harness.messages) == 0

    async def commit() -> None:
        async with atomic(alias):
            await change()
            assert len(harness.messages) == 0

    run(alias, commit)
    assert {(each.id, each.status) for each in wait.list().items} == {
        ("w-1", "terminated"), ("w-2", "active"), ("w-3", "active"), ("w-4", "active"),
    }  # fmt: skip
    assert {due.ref.instance_id for due in harness.messages} >= {"w-2", "w-3", "w-4"}


def test_without_a_block_the_event_loop_goes_on(alias: str, harness: DurableHarness) -> None:
    async def use() -> set[int]:
        await wait.acreate(alias, id="w-1")
        threads = {await harness.durable.internals.call_async(threading.get_ident)}
        return threads | {await sync_to_async(threading.get_ident)()}

    threads = run(alias, use)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert exists("w-1")


def test_outside_of_a_request_all_calls_share_one_thread(alias: str, harness: DurableHarness) -> None:
    """Unless a task has a context of its own, as each request of a server has."""

    async def find_thread() -> int:
        return await harness.durable.internals.call_async(threading.get_ident)

    async def find_own_thread(both: asyncio.Barrier) -> int:
        async with ThreadSensitiveContext():
            found = await find_thread()
            await both.wait()  # the thread ends with its context
            return found

    async def use() -> tuple[set[int], set[int]]:
        shared, both = await asyncio.gather(find_thread(), find_thread()), asyncio.Barrier(2)
        return set(shared), set(await asyncio.gather(find_own_thread(both), find_own_thread(both)))

    shared, own = run(alias, use)
    assert len(shared) == 1
    assert len(own | shared) == 3


def test_waiting_for_a_result_moves_the_clock_of_a_harness(alias: str, harness: DurableHarness) -> None:
    async def use() -> Any:
        handle = await wait.acreate(alias)
        await handle.asend_event("answer", "yes")
        return await handle.aresult()

    assert run(alias, use) == "yes"


def test_waiting_for_a_result_leaves_the_thread_to_other_calls(
    alias: str, make_store: MakeStore, make_app: Any
) -> None:
    durable = Durable(make_app(durable_database_url=None))
    durable.internals.make_store, durable.internals.call_async = make_store, wiring.call_async
    durable.internals.registry.add(wait.definition)

    async def use() -> Any:
        handle = await durable.workflows["wait"].acreate(alias)
        await sync_to_async(durable.tick)()
        result = asyncio.create_task(handle.aresult("20 seconds"))
        while (await handle.astatus()).status != "waiting":
            pass
        await handle.asend_event("answer", "yes")
        await sync_to_async(durable.tick)()
        return await result

    assert run(alias, use) == "yes"
    durable.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_writes_the_rows_and_the_workflow_of_a_request_together(
    alias: str, harness: DurableHarness, site: DurableHarness, fails: bool
) -> None:
    """Each request has a thread of its own for its connections, as under every ASGI server."""
    body = f"alias={alias}&id=w-1&fails={int(fails)}".encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/orders/",
        "query_string": b"",
        "headers": [(b"host", b"testserver"), (b"content-type", b"application/x-www-form-urlencoded")],
    }

    async def use() -> int:
        server = ApplicationCommunicator(get_asgi_application(), scope)
        await server.send_input({"type": "http.request", "body": body})
        start = await server.receive_output(20)
        await server.receive_output(20)
        await server.wait()
        return start["status"]

    assert asyncio.run(use()) == (500 if fails else 200)
    assert booked(alias) == ([] if fails else ["placed"])
    assert exists("w-1") is not fails
