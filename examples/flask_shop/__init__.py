"""A shop in Flask with Flask-SQLAlchemy: steps use `db.session` and `current_app` as views do.

Shown here: `FlaskDurable` in an application factory, an order and its workflow in one transaction, steps that commit
with their record, branches, and errors as responses.

From the folder above `examples`, once, and then in two terminals:

    flask --app examples.flask_shop durable migrate
    flask --app examples.flask_shop create-tables
    celery -A examples.flask_shop.run worker --beat
    flask --app examples.flask_shop run

In another:

    curl --json '{"item": "kettle"}' http://127.0.0.1:5000/orders
    curl -X POST http://127.0.0.1:5000/orders/1/payment
    curl http://127.0.0.1:5000/orders/1
    flask --app examples.flask_shop durable show shop-order order-1
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from flask import Flask, abort, current_app, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_durable import EventTimeout, Step, StepTx, WorkflowEvent, durable_workflow
from celery_durable.contrib.flask import FlaskDurable

FOLDER = Path(os.environ.get("DURABLE_EXAMPLES_DIR", ".")).resolve()


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
extension = FlaskDurable(db=db)


class Order(Base):
    __tablename__ = "flask_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(100))
    state: Mapped[str] = mapped_column(sa.String(20), default="placed")
    is_reserved: Mapped[bool] = mapped_column(default=False)


# --- the workflow -------------------------------------------------------------------------------


def reserve(tx: StepTx, order_id: int) -> None:  # noqa: ARG001  # with tx, db.session commits with the step
    db.session.get_one(Order, order_id).is_reserved = True


def write_invoice(order_id: int) -> str:
    item = db.session.get_one(Order, order_id).item
    return f"{current_app.config['SHOP_NAME']}: one {item}"


def set_state(tx: StepTx, order_id: int, state: str) -> None:  # noqa: ARG001
    db.session.get_one(Order, order_id).state = state


@durable_workflow(name="shop-order")
def shop_order(event: WorkflowEvent[int], step: Step) -> str:
    order_id = event.payload
    _, invoice = step.gather(
        step.submit("reserve", reserve, order_id), step.submit("write invoice", write_invoice, order_id)
    )
    try:
        step.wait_for_event("wait for payment", "payment", timeout="7 days")
    except EventTimeout:
        step.do("cancel", set_state, order_id, "cancelled")
        return "cancelled"
    step.do("ship", set_state, order_id, "shipped")
    return str(invoice)


# --- the application ----------------------------------------------------------------------------


def create_app(config: dict[str, Any] | None = None) -> Flask:
    app = Flask("flask-shop")
    app.config.from_mapping(
        {
            "SHOP_NAME": "The Kettle Shop",
            "SQLALCHEMY_DATABASE_URI": os.environ.get("DURABLE_DATABASE_URL", f"sqlite:///{FOLDER}/flask-shop.sqlite3"),
            "CELERY": {"broker_url": os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0")},
            **(config or {}),
        }
    )
    db.init_app(app)
    extension.init_app(app)

    @app.post("/orders")
    def place() -> tuple[dict[str, Any], int]:
        order = Order(item=request.get_json()["item"])
        db.session.add(order)
        db.session.flush()
        instance = shop_order.create(order.id, id=f"order-{order.id}", session=db.session())
        if order.item == "nothing":
            abort(400)  # nothing is committed: neither the order nor its workflow
        db.session.commit()
        return {"id": order.id, "instance": instance.id}, 201

    @app.post("/orders/<int:order_id>/payment")
    def pay(order_id: int) -> dict[str, bool]:
        instance = shop_order.get(f"order-{order_id}")
        return {"is_new": instance.send_event("payment", id=f"payment-{order_id}")}

    @app.get("/orders/<int:order_id>")
    def show(order_id: int) -> dict[str, Any]:
        status = shop_order.get(f"order-{order_id}").status()
        order = db.session.get_one(Order, order_id)
        return {"state": order.state, "is_reserved": order.is_reserved, "workflow": status.status}

    @app.cli.command("create-tables")
    def create_tables() -> None:
        """Create the shop's own table; in earnest this is a migration."""
        Base.metadata.create_all(db.engine)

    return app
