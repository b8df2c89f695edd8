"""The steps of this engine on MariaDB and SQLite, beside plain inserts on the same database.

BENCH_MARIADB_URL names the server of MariaDB. The file of SQLite is in a temporary folder of /var/tmp: /tmp may be in
memory. SQLite has one writer at a time, so its reference is one connection.

`python databases.py STEPS COUNT` runs so many workflows in the database that BENCH_DATABASE_URL names, and prints the
answer as a JSON line: the module `project` knows one database in each process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pymysql
import sqlalchemy as sa
from limits import SECONDS
from measuring import HERE, PREFORK, Answer, Question, measure, worker
from servers import NAME

MARIADB = sa.make_url(os.environ.get("BENCH_MARIADB_URL", "mysql+pymysql://root@127.0.0.1:3306/mysql"))
_TABLE = "CREATE TABLE bench_row (id {key}, a bigint, b varchar(20), c varchar(20))"
_KEYS = {"mysql": "bigint AUTO_INCREMENT PRIMARY KEY", "sqlite": "integer PRIMARY KEY"}


def questions(instances: int) -> dict[str, Question]:
    seconds = min(SECONDS, instances / 100)
    server = [(MARIADB.host or "127.0.0.1", MARIADB.port or 3306)]

    def loop(make: Callable[[], AbstractContextManager[str]], connections: int) -> Answer:
        with make() as url:
            return insert_loop(url, connections, seconds)

    def steps(make: Callable[[], AbstractContextManager[str]]) -> Answer:
        with make() as url:
            return run(url, 10, instances)

    inserts, title = "INSERT in autocommit", "steps, 10 in a workflow, prefork 2"
    return {
        "mariadb_limit2": Question(
            f"{inserts}, PyMySQL, 2 processes, MariaDB", None, lambda: loop(mariadb, 2), servers=server
        ),
        "mariadb10": Question(f"{title}, MariaDB", "mariadb_limit2", lambda: steps(mariadb), servers=server),
        "sqlite_limit1": Question(f"{inserts}, 1 process, SQLite", None, lambda: loop(sqlite, 1)),
        "sqlite10": Question(f"{title}, SQLite", "sqlite_limit1", lambda: steps(sqlite)),
    }


@contextmanager
def mariadb() -> Iterator[str]:
    """A database of its own; its URL."""
    admin = sa.create_engine(MARIADB, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {NAME}")
        connection.exec_driver_sql(f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4")
        try:
            yield MARIADB.set(database=NAME).render_as_string(hide_password=False)
        finally:
            connection.exec_driver_sql(f"DROP DATABASE {NAME}")


@contextmanager
def sqlite() -> Iterator[str]:
    """A file of its own; its URL."""
    with TemporaryDirectory(prefix=f"{NAME}_sqlite_", dir="/var/tmp") as folder:
        yield f"sqlite:///{folder}/bench.sqlite3"


def run(url: str, steps: int, count: int) -> Answer:
    command = [sys.executable, "databases.py", str(steps), str(count)]
    environment = os.environ | {"BENCH_DATABASE_URL": url}
    ran = subprocess.run(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: Answer = json.loads(ran.stdout)
    return answer


def insert_loop(url: str, connections: int, seconds: float) -> Answer:
    """Commits per second of plain inserts, one process for each connection."""
    with closing(connect(url)) as connection:
        connection.cursor().execute(_TABLE.format(key=_KEYS[sa.make_url(url).get_backend_name()]))
    with multiprocessing.get_context("spawn").Pool(connections) as pool:
        return {"per_second": sum(pool.starmap(insert_rows, [(url, seconds)] * connections))}


def insert_rows(url: str, seconds: float) -> float:
    with closing(connect(url)) as connection:
        cursor = connection.cursor()
        mark = "?" if isinstance(connection, sqlite3.Connection) else "%s"
        statement = f"INSERT INTO bench_row (a, b, c) VALUES ({mark}, {mark}, {mark})"
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            cursor.execute(statement, (count, "name", '{"x":1}'))
            count += 1
        return count / (time.perf_counter() - began)


def connect(url: str) -> Any:
    """A connection in autocommit. SQLite gets the settings of the engine: a commit waits for the disk."""
    parts = sa.make_url(url)
    if parts.get_backend_name() == "sqlite":
        connection = sqlite3.connect(str(parts.database), isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection
    return pymysql.connect(**parts.translate_connect_args(username="user"), autocommit=True)


def main() -> None:
    from project import durable, many

    steps, count = map(int, sys.argv[1:])
    durable.migrate()
    for _ in range(count):
        many.create(steps)
    store = durable.internals.store
    query = sa.select(sa.func.count()).select_from(store.tables.step)

    def done() -> int:
        return store.read(lambda tx: tx.execute(query).scalar_one())

    with worker(*PREFORK) as pid:
        answer = measure(done, steps * count, sessions=[pid])
    print(json.dumps({name: answer[name] for name in ("per_second", "worker_cpu_ms")}))
    durable.close()


if __name__ == "__main__":
    main()
