"""A shop in FastAPI: the order's row and its workflow are written in one transaction of an AsyncSession.

Shown here: `acreate` and `asend_event` with `session=`, `Depends(durable.client)`, the lifespan, errors as responses,
and a stream that any process of the server can serve.

From the folder above this one, once, and then in two terminals:

    python -m examples.fastapi_shop
    celery -A examples.fastapi_shop worker --beat
    uvicorn --workers 2 examples.fastapi_shop:site

In another:

    curl --json '{"item": "kettle"}' http://127.0.0.1:8000/orders
    curl -N http://127.0.0.1:8000/api/workflows/shipping/instances/order-1/stream &
    curl --json '{"cents": 1999}' http://127.0.0.1:8000/orders/1/payment
    curl http://127.0.0.1:8000/orders/1
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from celery import Celery
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_durable import Durable, EventTimeout, Step, StepTx, WorkflowEvent, durable_workflow
from celery_durable.contrib.fastapi import add_exception_handlers, lifespan
from celery_durable.http import router

FOLDER = Path(os.environ.get("DURABLE_EXAMPLES_DIR", "."))
DATABASE_URL = os.environ.get("DURABLE_DATABASE_URL", f"sqlite:///{FOLDER}/fastapi-shop.sqlite3")
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}

app = Celery("fastapi-shop", broker=os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0"))
app.conf.durable_database_url = DATABASE_URL
durable = Durable(app)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(100))
    state: Mapped[str] = mapped_column(sa.String(20), default="placed")


# --- the workflow -------------------------------------------------------------------------------


class Payment(BaseModel):
    cents: int


def set_state(tx: StepTx, order_id: int, state: str) -> None:
    tx.session.get_one(Order, order_id).state = state


@durable_workflow
def shipping(event: WorkflowEvent[int], step: Step) -> str:
    try:
        step.wait_for_event("wait for payment", "payment", timeout="7 days", schema=Payment)
    except EventTimeout:
        step.do("cancel", set_state, event.payload, "cancelled")
        return "cancelled"
    step.do("ship", set_state, event.payload, "shipped")
    return "shipped"


# --- the application ----------------------------------------------------------------------------

url = sa.make_url(DATABASE_URL)
engine = create_async_engine(url.set(drivername=ASYNC_DRIVERS[url.get_backend_name()]))
open_session = async_sessionmaker(engine, expire_on_commit=False)


async def session() -> AsyncIterator[AsyncSession]:
    async with open_session() as opened:
        yield opened


@asynccontextmanager
async def run(site: FastAPI) -> AsyncIterator[None]:
    async with lifespan(durable)(site):
        yield
    await engine.dispose()


site = FastAPI(title="Shop", lifespan=run)
site.include_router(router(durable, allow_anonymous=True), prefix="/api")  # in earnest: authorize=
add_exception_handlers(site)

Client = Annotated[Durable, Depends(durable.client)]
InSession = Annotated[AsyncSession, Depends(session)]


class NewOrder(BaseModel):
    item: str


@site.post("/orders", status_code=201)
async def place_order(new: NewOrder, client: Client, session: InSession) -> dict[str, Any]:
    order = Order(item=new.item)
    session.add(order)
    await session.flush()
    instance = await client.workflows["shipping"].acreate(order.id, id=f"order-{order.id}", session=session)
    if new.item == "nothing":
        raise HTTPException(400, "Order something.")  # nothing is committed: neither the order nor its workflow
    await session.commit()
    return {"id": order.id, "instance": instance.id}


@site.post("/orders/{order_id}/payment")
async def pay(order_id: int, payment: Payment, client: Client, session: InSession) -> dict[str, bool]:
    instance = await client.workflows["shipping"].aget(f"order-{order_id}")
    is_new = await instance.asend_event("payment", payment.model_dump(), id=f"payment-{order_id}", session=session)
    await session.execute(sa.update(Order).where(Order.id == order_id, Order.state == "placed").values(state="paid"))
    await session.commit()
    return {"is_new": is_new}


@site.get("/orders/{order_id}")
async def show(order_id: int, client: Client, session: InSession) -> dict[str, Any]:
    instance = await client.workflows["shipping"].aget(f"order-{order_id}")
    status = await instance.astatus()
    return {"state": (await session.get_one(Order, order_id)).state, "workflow": status.status}


if __name__ == "__main__":
    durable.migrate()
    Base.metadata.create_all(durable.engine)
