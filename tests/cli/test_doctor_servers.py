"""doctor: brokers and databases that cannot be used, or lack a setting."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from kombu import Connection

from celery_durable import Durable, doctor
from celery_durable.doctor.database import check_galera
from celery_durable.store.engine import Store, server_info
from celery_durable.store.heartbeats import HeartbeatUpdate
from celery_durable.store.schema.tables import REVISION
from tests.cli.installations import Make, findings, live, make, one
from tests.support.services import BROKERS, missing, require_broker

__all__ = ["make"]
REDIS, RABBITMQ = BROKERS["redis"], BROKERS["rabbitmq"]


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://guest:secret@127.0.0.1:1//"])
def test_a_broker_that_does_not_answer_is_a_failure(make: Make, url: str) -> None:
    level, sentence, remedy = one(make(url), "broker")
    assert (level, remedy) == ("FAIL", "Is the server running, and is broker_url right?")
    assert sentence.startswith("The broker ")
    assert "secret" not in sentence


@pytest.mark.parametrize(
    ("kind", "change", "said", "remedy"),
    [
        (
            "rabbitmq",
            {"virtual_host": "nope"},
            "Connection.open: (530) NOT_ALLOWED - vhost nope not found.",
            "Create the virtual host that broker_url names, and allow the user to use it.",
        ),
        (
            "rabbitmq",
            {"password": "wrong"},
            "(0, 0): (403) ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
            "the broker logfile.",
            "Correct the user name and the password in broker_url.",
        ),
        (
            "redis",
            {"userid": "stranger", "password": "wrong"},
            "invalid username-password pair or user is disabled.",
            "Correct the user name and the password in broker_url.",
        ),
    ],
)
def test_a_broker_that_refuses_the_connection_is_a_failure_with_its_reason(
    make: Make, kind: str, change: dict[str, str], said: str, remedy: str
) -> None:
    parts = Connection(require_broker(kind))
    url = Connection(**{**parts.info(), **change}).as_uri(include_password=True)
    level, sentence, fix = one(make(url), "broker")
    assert (level, fix) == ("FAIL", remedy)
    assert sentence.endswith(f" refuses the connection: {said}")
    assert "wrong" not in sentence


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_broker_that_accepts_connections_and_says_nothing_is_a_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor, doctor.findings):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        port = silent.getsockname()[1]
        level, sentence, remedy = one(make(f"redis://127.0.0.1:{port}/0"), "broker")
    assert (level, remedy) == ("FAIL", "Check the broker's load and whether it is stopped; a restart may be needed.")
    assert sentence == f"The broker redis://127.0.0.1:{port}/0 takes connections, but has not answered for 0.5 seconds."


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("redis://127.0.0.1:1/0", "packaging.version", "redis"),
        ("rediss://127.0.0.1:1/0", "packaging.version", "redis"),
        ("mongodb://127.0.0.1:1/", "pymongo", "mongodb"),
    ],
)
def test_a_broker_whose_client_is_not_installed_is_a_failure_with_the_command_that_installs_it(
    make: Make, url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kombu imports the library when it is first used. Without the extra, packaging is missing too."""
    transport = f"kombu.transport.{extra}"
    monkeypatch.delitem(sys.modules, transport, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("kombu.transport._transport_cache", {})
    level, sentence, remedy = one(make(url), "broker")
    assert (level, remedy) == ("FAIL", f'Install the library: pip install "celery[{extra}]"')
    assert sentence.startswith(f"The client library of the broker {url} cannot be imported: ")
    assert module in sentence


@pytest.mark.parametrize(
    ("kind", "url", "option"), [("redis", REDIS, "socket_timeout"), ("rabbitmq", RABBITMQ, "read_timeout")]
)
@pytest.mark.parametrize("is_set", [False, True])
def test_a_broker_whose_silence_is_not_bounded_is_told(
    make: Make, kind: str, url: str, option: str, is_set: bool
) -> None:
    found = findings(make(url, broker_transport_options={option: 5} if is_set else {}))
    if found["broker"][0][0] == "FAIL":
        missing(kind, found["broker"][0][1])
    ((level, sentence, remedy),) = found[option]
    assert level == ("OK" if is_set else "WARN"), sentence
    assert (option in remedy) is not is_set


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql+psycopg://nobody@127.0.0.1:1/none", "The database cannot be used: "),
        ("mysql+pymysql://nobody@127.0.0.1:1/none", "The database cannot be used: "),
        ("oracle://nobody@127.0.0.1/none", "oracle is not supported."),
        (None, "durable_database_url is not set."),
    ],
)
def test_a_database_that_cannot_be_used_is_a_failure(
    make: Make, url: str | None, sentence: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = findings(make(durable_database_url=url))
    ((level, said, _),) = found["database"]
    assert (level, said.startswith(sentence)) == ("FAIL", True), said
    assert "tables" not in found
    assert "workers" not in found


def test_missing_tables_are_a_failure(make: Make, tmp_path: Any) -> None:
    found = findings(make(durable_database_url=f"sqlite:///{tmp_path}/empty.sqlite3"))
    assert found["tables"] == [
        ("FAIL", f"The tables do not exist; this version needs {REVISION}.", "celery -A <your app> durable migrate")
    ]
    assert "dispatcher" not in found


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_database_that_takes_no_writes_is_a_failure(store_url: str) -> None:
    engine = sa.create_engine(store_url, connect_args={"options": "-c default_transaction_read_only=on"})
    app = Celery("shop", broker="memory://", set_as_current=False)
    durable = Durable(app, engine=engine)
    level, sentence, remedy = one(app, "database")
    assert (level, sentence.endswith(" is read-only: a standby?")) == ("FAIL", True)
    assert remedy == "Name the server that takes writes in durable_database_url."
    durable.close()
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_engine_that_sets_another_isolation_is_a_failure(store_url: str) -> None:
    engine = sa.create_engine(store_url)
    app = Celery("shop", broker="memory://", set_as_current=False)
    durable = Durable(app, engine=engine)

    @sa.event.listens_for(engine, "begin")
    def set_isolation(connection: sa.Connection) -> None:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    assert one(app, "isolation") == (
        "FAIL",
        "Transactions run as REPEATABLE READ: wake-ups can be lost.",
        "Remove what sets it from engine=, such as a listener. Durable asks for READ COMMITTED.",
    )
    durable.close()
    engine.dispose()


def test_a_galera_node_is_told_how_much_it_waits_before_it_reads() -> None:
    for sync_wait in (0, 2, 6):
        (found,) = check_galera(sync_wait)
        assert (found.level, found.about, found.sentence, found.remedy) == (
            "WARN",
            "galera",
            f"MariaDB is a Galera node with wsrep_sync_wait = {sync_wait}: after a switch to another node, a process "
            "may not see what was committed a moment before.",
            "Set wsrep_sync_wait = 7 on all nodes, and let a proxy connect all processes to one node at a time.",
        )
    for sync_wait in (1, 7):
        (found,) = check_galera(sync_wait)
        assert (found.level, found.sentence, found.remedy) == (
            "OK",
            f"MariaDB is a Galera node with wsrep_sync_wait = {sync_wait}. All processes must use one node at a time.",
            "",
        )


def test_a_server_is_a_galera_node_if_its_variables_say_so() -> None:
    for variables, sync_wait in (
        ({"wsrep_on": "ON", "wsrep_sync_wait": "7"}, 7),
        ({"wsrep_on": "ON", "wsrep_sync_wait": "0"}, 0),
        ({"wsrep_on": "OFF", "wsrep_sync_wait": "0"}, None),
        ({}, None),  # a MariaDB that was built without Galera
    ):
        assert server_info.find_sync_wait(variables) == sync_wait


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_server_that_is_no_galera_node_has_no_finding_about_it(make: Make) -> None:
    assert "galera" not in findings(make())


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_galera_is_read_from_the_variables_of_the_server(store: Store) -> None:
    assert server_info.read_server_info(store).sync_wait is None  # wsrep_on is OFF
    assert list(check_galera(None)) == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_statements_without_a_lock_timeout_are_told(make: Make, store_url: str) -> None:
    """As behind a pooler that ignores the options of a connection, or keeps no settings of a session."""
    assert "lock_timeout" not in findings(make())
    sentence = "Statements outside a transaction, such as a claim, wait for locks forever: lock_timeout is 0."
    remedy = "Run: ALTER ROLE CURRENT_USER SET lock_timeout = '5s'"
    assert findings(make(durable_prepared_statements=False))["lock_timeout"] == [("WARN", sentence, remedy)]
    engine = sa.create_engine(store_url)
    app = Celery("shop", broker="memory://", set_as_current=False)
    durable = Durable(app, engine=engine)
    level, _, more = one(app, "lock_timeout")
    assert (level, more) == (
        "WARN",
        f"{remedy}. Behind PgBouncer in transaction mode, also set durable_prepared_statements = False.",
    )
    durable.close()
    engine.dispose()


def test_workers_that_do_not_reply_over_the_broker_are_told(make: Make) -> None:
    app = make(require_broker("redis"))
    live(app, HeartbeatUpdate("w", "worker", "w@here", os.getpid(), queues=["durable"], workflows=["order"]))
    assert one(app, "workers") == (
        "WARN",
        "w@here write heartbeats to this database, but do not reply over this broker.",
        "Do they use the same broker_url? Busy solo workers do not reply either.",
    )
