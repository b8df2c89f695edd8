"""Clients that follow instances: how many there may be, what they share, and what they may cost the database."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from celery_durable.errors import InstanceNotFound
from celery_durable.http import asgi
from celery_durable.http.followers import Followers
from celery_durable.model import Scope, VersionedInstance
from tests.http.asgi import ask, scope
from tests.http.conftest import Shop
from tests.http.test_routes import refused

PATH = "/workflows/order/instances/o-1"


@asynccontextmanager
async def stream(app: Any) -> AsyncIterator[asyncio.Queue[Any]]:
    """A client's open stream: what it is sent. At the end the client breaks off."""
    sent: asyncio.Queue[Any] = asyncio.Queue()
    is_gone = asyncio.Event()
    asked = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if asked:
            return asked.pop()
        await is_gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(app(scope("GET", f"{PATH}/stream"), receive, sent.put))
    try:
        yield sent
    finally:
        is_gone.set()
        await task


async def started(sent: asyncio.Queue[Any]) -> int:
    """Its status, once the stream has told where the instance stands."""
    first = await sent.get()
    while first["status"] == 200 and b"event: status" not in (await sent.get())["body"]:
        pass
    return int(first["status"])


def test_streams_beyond_the_limit_are_refused_until_one_has_gone(shop: Shop, order: str) -> None:
    app = asgi(shop.durable, allow_anonymous=True, max_streams=2)

    async def work() -> None:
        for _ in range(2):
            async with stream(app) as first, stream(app) as second:
                assert [await started(first), await started(second)] == [200, 200]
                async with stream(app) as third:
                    assert (await third.get())["status"] == 429
                    assert json.loads((await third.get())["body"])["code"] == "TOO_MANY_STREAMS"
                assert (await ask(app, "GET", PATH))[0] == 200  # what does not follow is served

    asyncio.run(work())


def test_long_polls_count_as_streams_do(shop: Shop, order: str) -> None:
    api = shop.client(allow_anonymous=True, max_streams=0)
    answer = api.get(order, params={"wait": 1})
    assert refused(answer, 429, "TOO_MANY_STREAMS").startswith("This server follows instances for 0 clients at a time")
    assert answer.headers["retry-after"] == "10"
    assert api.get(order).status_code == 200


def test_followers_of_one_instance_share_a_look(shop: Shop, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operations, looks, may_look = shop.durable.internals.operations, list[str](), threading.Event()
    real = operations.queries.read_with_tag

    def read_with_tag(workflow: str, instance_id: str) -> VersionedInstance:
        looks.append(instance_id)
        assert may_look.wait(30)
        return real(workflow, instance_id)

    counted = operations.restrict_to(None)
    monkeypatch.setattr(counted.queries, "read_with_tag", read_with_tag)

    async def work() -> None:
        followers = Followers(1000)
        many = [asyncio.create_task(followers.read_shared(counted, "order", "o-1", within=60)) for _ in range(500)]
        many[0].cancel()  # who has asked first breaks off: the others have their look all the same
        await asyncio.sleep(0)
        may_look.set()
        found = await asyncio.gather(*many, return_exceptions=True)
        assert {each.tag for each in found if isinstance(each, VersionedInstance)} == {
            operations.queries.read_with_tag("order", "o-1").tag
        }
        assert sum(isinstance(each, VersionedInstance) for each in found) == 499
        with pytest.raises(InstanceNotFound):  # one look for each scope
            await followers.read_shared(operations.restrict_to(Scope(id_prefix="x-")), "order", "o-1", within=60)
        await followers.read_shared(counted, "order", "o-1", within=-1)
        with pytest.raises(InstanceNotFound):
            await followers.read_shared(counted, "order", "o-2", within=60)

    asyncio.run(work())
    assert looks == ["o-1", "o-1", "o-2"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_database_sees_no_more_connections_than_the_docs_name(shop: Shop, order: str) -> None:
    """Every thread that uses the database is held in it, by a lock on a table that they all read."""
    app = asgi(shop.durable, allow_anonymous=True)
    store = shop.durable.internals.store
    is_postgresql = store.engine.dialect.name == "postgresql"
    name = store.tables.instance.name
    admin = sa.create_engine(store.engine.url, poolclass=sa.NullPool)
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        if is_postgresql
        else "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND state LIKE '%%lock%%'"
    )

    async def work() -> None:
        with admin.connect() as holder, admin.connect() as counter:
            lock = f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE" if is_postgresql else f"LOCK TABLES {name} WRITE"
            holder.exec_driver_sql(lock)
            asked = [asyncio.create_task(ask(app, "GET", PATH)) for _ in range(60)]
            most, looks = 0, 0
            while looks < 10:  # until no more come
                await asyncio.sleep(0.1)
                found = counter.exec_driver_sql(count).scalar_one()
                counter.rollback()
                most, looks = max(most, found), looks + 1 if 0 < found <= most else 0
            holder.rollback()
            if not is_postgresql:
                holder.exec_driver_sql("UNLOCK TABLES")
            assert 1 < most <= 10
            assert {status for status, *_ in await asyncio.gather(*asked)} == {200}

    asyncio.run(work())
    admin.dispose()


def test_reads_of_loops_that_have_ended_are_forgotten(shop: Shop, order: str) -> None:
    """A WSGI server runs each request in a loop of its own."""
    followers, operations = Followers(1000), shop.durable.internals.operations
    for _ in range(20):
        asyncio.run(followers.read_shared(operations, "order", "o-1", within=60))
    assert len(followers._shared_reads) == 1
