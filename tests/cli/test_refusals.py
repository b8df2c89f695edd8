"""What is refused: one line of error, one of advice, an exit code that a script can tell apart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.cli import durable as durable_command
from celery_durable.runtime import real_monotonic
from tests.cli.conftest import Said, Shop
from tests.runner.test_no_writes import read_only
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.support.lost_connections import cut_commit


def call(app: Celery, *words: str) -> Said:
    done = CliRunner().invoke(durable_command, words, obj=CLIContext(app=app, no_color=False, workdir=None))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.stdout, done.stderr, done.exit_code)


def test_an_app_without_durable_is_told_how_to_get_one() -> None:
    said = call(Celery("plain", set_as_current=False), "ls")
    assert said.err == (
        "error: The Celery app 'plain' has no Durable.\n"
        "hint: Create one where you create the app: from celery_durable import Durable; durable = Durable(app)\n"
    )
    assert said.code == 1


def test_no_database_is_told_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = Celery("shop", set_as_current=False)
    Durable(app)
    for words in (("ls",), ("migrate",)):
        said = call(app, *words)
        assert said.code == 1
        assert said.err == (
            "error: durable_database_url is not set.\n"
            "hint: Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db', "
            "or try SQLite in this directory: celery -A <your app> durable dev\n"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "error", "code"),
    [
        ("postgresql+psycopg://shop@127.0.0.1:1/none", "error: The database cannot be used: ", 4),
        ("mysql+pymysql://shop@127.0.0.1:1/none", "error: The database cannot be used: ", 4),
        (
            "sqlite:////no/such/folder/x.sqlite3",
            "error: The database cannot be used: unable to open database file\n",
            4,
        ),
        (
            "postgresql+nodriver://shop@127.0.0.1/none",
            "error: Setting durable_database_url='postgresql+nodriver' cannot be used: SQLAlchemy knows no such driver",
            1,
        ),
        (
            "postgresql+pg8000://shop@127.0.0.1/none",
            "error: The database driver is not installed: No module named 'pg8000'.\n"
            "hint: Begin durable_database_url with postgresql+psycopg:// and pip install",
            1,
        ),
        (
            "postgresql+asyncpg://shop@127.0.0.1/none",
            "error: Setting durable_database_url='postgresql+asyncpg' cannot be used: this driver is for async",
            1,
        ),
        ("oracle://shop@127.0.0.1/none", "error: oracle is not supported.\nhint: Use PostgreSQL 15", 1),
        ("nonsense", "error: Setting durable_database_url='***' cannot be used: it is no URL", 1),
    ],
)
def test_a_database_that_cannot_be_used_is_no_traceback(url: str, error: str, code: int) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.durable_database_url = url
    Durable(app)
    said = call(app, "ls")
    assert said.err.startswith(error)
    assert (said.out, said.code) == ("", code)
    app.durable.close()


def test_a_broker_that_is_away_delays_and_does_not_fail(order: Shop) -> None:
    order.app.conf.broker_url = "redis://127.0.0.1:1/0"
    said = order.pipe("send-event", "order", "o-1", "approval")
    assert (said.rows, said.code) == ([["Sent", "approval", "order/o-1"]], 0)


@pytest.fixture
def proxied(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Shop, FaultProxy]]:
    """A shop with an order o-1 that waits, whose database is behind a proxy."""
    url = sa.make_url(store_url)
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or {"postgresql": 5432}.get(url.get_backend_name(), 3306)))
    shop = Shop(url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False), monkeypatch)
    shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-1")
    yield shop, proxy
    proxy.set(Mode.PASS)
    shop.durable.close()
    shop.app.close()
    proxy.close()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("mode", [Mode.REFUSE, pytest.param(Mode.MUTE, marks=pytest.mark.slow)])
def test_a_database_that_goes_away_meanwhile_is_no_traceback(proxied: tuple[Shop, FaultProxy], mode: Mode) -> None:
    shop, proxy = proxied
    shop.clock.meanwhile = lambda: proxy.set(mode)
    began = real_monotonic()
    said = shop.pipe("logs", "order", "o-1", "-f")
    assert real_monotonic() - began < 20 + 20  # refused at once; silence is waited for 20 s at most
    assert said.err.startswith("error: The database cannot be used: ")
    assert said.err.endswith("hint: Is the server running, and is durable_database_url right?\n")
    assert said.code == 4


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_command_on_several_instances_ends_with_the_first_that_finds_no_database(
    proxied: tuple[Shop, FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, proxy = proxied
    checked = shop.durable.internals.operations.lifecycle.pause
    asked: list[str] = []

    def pause(workflow: str, instance_id: str, **options: Any) -> Any:
        asked.append(instance_id)
        proxy.set(Mode.REFUSE)
        return checked(workflow, instance_id, **options)

    monkeypatch.setattr(shop.durable.internals.operations.lifecycle, "pause", pause)
    said = shop.pipe("pause", "order", "o-1", "o-2")
    assert asked == ["o-1"]
    assert said.err.count("The database cannot be used: ") == 1
    assert said.code == 4


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_command_whose_commit_is_in_doubt_says_that_it_may_have_been_applied(
    proxied: tuple[Shop, FaultProxy],
) -> None:
    shop, proxy = proxied
    with cut_commit(shop.durable.internals.store, when="after", then=lambda: proxy.set(Mode.REFUSE)):
        said = shop.pipe("pause", "order", "o-1")
    assert "hint: The change may have been applied: look before you try again. Is the server running" in said.err
    assert said.code == 4


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_an_export_takes_as_long_as_it_takes(proxied: tuple[Shop, FaultProxy]) -> None:
    """Longer than one try of other commands may take, after which it would find nobody to connect to."""
    shop, proxy = proxied
    stalls: list[threading.Timer] = []

    def stall(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not stalls and "workflow_event" in statement:
            proxy.set(Mode.STALL)
            stalls.append(threading.Timer(14, proxy.set, [Mode.PASS]))
            stalls[0].start()

    sa.event.listen(shop.durable.internals.store.engine, "before_cursor_execute", stall)
    said = shop.pipe("export", "order", "o-1")
    assert (said.err, said.code, len(stalls)) == ("", 0, 1)
    assert json.loads(said.out)["params"] == {"order_id": "42", "cents": 500}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_missing_database_is_named_with_the_command_that_creates_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = sa.make_url(store_url).set(database="nowhere")
    shop = Shop(url.render_as_string(hide_password=False), monkeypatch)
    said = shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-1")
    command = "createdb nowhere" if url.get_backend_name() == "postgresql" else "CREATE DATABASE `nowhere`"
    assert f"hint: Create the database, {command}, or correct its name in durable_database_url." in said.err
    assert said.code == 4
    shop.durable.close()
    shop.app.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_read_only_database_is_named_by_start_and_explain(shop: Shop) -> None:
    shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-1")
    with read_only(shop.durable.internals.store.engine.url):
        shop.durable.internals.store._connections.reconnect()
        said = shop.pipe("start", "order", "-P", "order_id=42", "--id", "o-2")
        assert "hint: Name the server that takes writes in durable_database_url, or end the read-only mode." in said.err
        shop.clock.advance(seconds=60)
        assert "It has been due for 1 min, but the database is read-only" in shop.pipe("explain", "order", "o-1").out


def test_a_start_without_parameters_that_are_needed_says_how_to_give_them(store_url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    durable = Durable(app)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[dict[str, int]], step: Step) -> None: ...

    said = call(app, "start", "order")
    assert said.err == (
        "error: Parameters of workflow 'order' are not valid: $: Input should be a valid dictionary.\n"
        "hint: It was started without parameters. Give them with -P key=text -P key:=JSON, or --params JSON, or: "
        "celery -A <your app> durable start --help\n"
    )
    assert said.code == 1
