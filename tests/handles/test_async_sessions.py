"""Async callers: what they create and send commits with their AsyncSession, on every async driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_durable import CreateOptions, Durable, Step, Workflow, WorkflowEvent
from celery_durable.errors import InstanceNotFound, InstanceTerminal, StoreMismatch, ValueRefused
from tests.support.embedded import messages

DRIVERS = [
    ("postgresql", "postgresql+asyncpg"),
    ("postgresql", "postgresql+psycopg"),
    ("sqlite", "sqlite+aiosqlite"),
    ("mariadb", "mysql+asyncmy"),
]
on_every_driver = pytest.mark.parametrize(("database", "driver"), DRIVERS, indirect=["database"])
"""For what the driver writes. What the handle refuses is the same on one."""
on_one_driver = pytest.mark.parametrize(("database", "driver"), DRIVERS[:1], indirect=["database"])


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "app_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(sa.String(20))


@pytest.fixture
def flow(durable: Durable) -> Workflow[Any, Any]:
    @durable.workflow
    def flow(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.wait_for_event("answer", "answer").payload

    return flow


@pytest.fixture
def sessions(driver: str, store_url: str) -> Callable[[], Any]:
    """Sessions of the application, on the database of the store, with a table of its own."""
    url = sa.make_url(store_url).set(drivername=driver)

    @asynccontextmanager
    async def open_session() -> AsyncIterator[AsyncSession]:
        engine = create_async_engine(url)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.drop_all)
                await connection.run_sync(Base.metadata.create_all)
            async with AsyncSession(engine) as session:
                yield session
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.drop_all)
        finally:
            await engine.dispose()

    return open_session


def run(sessions: Callable[[], Any], use: Callable[[AsyncSession], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with sessions() as session:
            return await use(session)

    return asyncio.run(main())


def has(flow: Workflow[Any, Any], id: str) -> bool:
    try:
        flow.get(id)
    except InstanceNotFound:
        return False
    return True


@on_every_driver
def test_an_instance_is_created_with_the_callers_row(
    app: Celery, flow: Workflow[Any, Any], sessions: Callable[[], Any]
) -> None:
    async def use(session: AsyncSession) -> None:
        session.add(Order(id=1, state="new"))
        instance = await flow.acreate({"order": 1}, id="o-1", labels={"tenant": "acme"}, session=session)
        assert instance.id == "o-1"
        assert not await asyncio.to_thread(has, flow, "o-1")
        assert messages(app) == []
        await session.commit()
        assert (await session.get_one(Order, 1)).state == "new"

    run(sessions, use)
    assert has(flow, "o-1")
    assert len(messages(app)) == 1


@on_every_driver
def test_an_event_is_sent_with_the_callers_row(
    app: Celery, flow: Workflow[Any, Any], sessions: Callable[[], Any]
) -> None:
    flow.create(1, id="o-1")
    messages(app)

    async def use(session: AsyncSession) -> None:
        instance = await flow.aget("o-1")
        assert await instance.asend_event("answer", {"yes": True}, id="e-1", session=session)
        assert not await instance.asend_event("answer", {"yes": True}, id="e-1", session=session)
        await session.rollback()
        assert await instance.asend_event("answer", {"yes": False}, id="e-1", session=session)
        await session.commit()

    run(sessions, use)
    assert [event.payload for event in flow.get("o-1").history().events] == [{"yes": False}]


@on_every_driver
def test_a_batch_is_created_with_the_callers_row(
    app: Celery, flow: Workflow[Any, Any], sessions: Callable[[], Any]
) -> None:
    batch = [CreateOptions(f"o-{number}", number) for number in range(3)]

    async def use(session: AsyncSession) -> None:
        session.add(Order(id=1, state="new"))
        assert len(await flow.acreate_batch(batch, session=session)) == 3
        await session.rollback()
        assert not await asyncio.to_thread(has, flow, "o-1")
        session.add(Order(id=1, state="new"))
        made = await flow.acreate_batch([*batch, batch[0]], session=session)
        assert [each.id for each in made] == ["o-0", "o-1", "o-2"]
        assert messages(app) == []
        await session.commit()

    run(sessions, use)
    assert len(flow.list().items) == 3
    assert len(messages(app)) == 3


@on_one_driver
def test_an_event_for_an_instance_that_has_ended_is_refused_in_the_callers_transaction(
    flow: Workflow[Any, Any], sessions: Callable[[], Any]
) -> None:
    flow.create(1, id="o-1").terminate()

    async def use(session: AsyncSession) -> None:
        with pytest.raises(InstanceTerminal):
            await (await flow.aget("o-1")).asend_event("answer", session=session)
        await flow.acreate(2, id="o-2", session=session)
        await session.commit()

    run(sessions, use)
    assert has(flow, "o-2")


@on_one_driver
def test_the_event_loop_goes_on_while_the_broker_is_slow_after_a_commit(
    durable: Durable, flow: Workflow[Any, Any], sessions: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ticked = threading.Event()
    sent: list[Any] = []

    def publish(due_runs: Any) -> None:
        assert has_ticked.wait(20), "the event loop waits for the broker"
        sent.extend(due_runs)

    monkeypatch.setattr(durable.internals.dispatch_publisher, "publish", publish)

    async def use(session: AsyncSession) -> None:
        await flow.acreate(1, id="o-1", session=session)
        commit = asyncio.ensure_future(session.commit())
        while not has(flow, "o-1"):  # noqa: ASYNC110  # it shows in the database alone
            await asyncio.sleep(0)  # the commit of another connection
        has_ticked.set()
        await commit

    run(sessions, use)
    assert [due.ref.instance_id for due in sent] == ["o-1"]


@on_one_driver
def test_a_session_of_another_database_is_refused(
    flow: Workflow[Any, Any], sessions: Callable[[], Any], driver: str
) -> None:
    async def use(session: AsyncSession) -> None:
        other = create_async_engine("sqlite+aiosqlite:///elsewhere.sqlite3")
        async with AsyncSession(other) as elsewhere:
            with pytest.raises(StoreMismatch):
                await flow.acreate(1, session=elsewhere)
        await other.dispose()

    run(sessions, use)


@on_one_driver
def test_the_kinds_of_session_are_not_confused(
    flow: Workflow[Any, Any], sessions: Callable[[], Any], store_url: str
) -> None:
    async def use(session: AsyncSession) -> None:
        with pytest.raises(ValueRefused) as refused:
            flow.create(1, session=session)  # type: ignore[arg-type]
        assert str(refused.value) == (
            "session= is an AsyncSession: pass it to the async method, such as `await acreate()`."
        )
        with Session(sa.create_engine(store_url)) as plain, pytest.raises(ValueRefused) as refused:
            await flow.acreate(1, session=plain)  # type: ignore[arg-type]
        assert str(refused.value) == (
            "session= is not an AsyncSession: pass it to the method that is not async, such as `create()`."
        )

    run(sessions, use)
