"""The checks of an installation: settings, servers and processes.

Each check yields findings. It does not raise for the problems that it looks for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from kombu.utils.url import maybe_sanitize_url

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.errors import DurableError, UnsupportedDatabase
from celery_durable.explain.remedies import find_remedy
from celery_durable.model import HEARTBEAT_INTERVAL, SWEEP_TASK, Heartbeat, Outage, format_duration, iso
from celery_durable.store import heartbeats, migrate, outbox, schedule, server_info
from celery_durable.store.schema import REVISION
from celery_durable.testing import local_servers

_APP = "<your app>"
_MIN_TIME_LIMIT = timedelta(hours=1)
"""A step may take this long. A shorter time limit of Celery would end passes that work correctly."""
_MAX_LATENESS = timedelta(minutes=1)
_CONNECT_SECONDS = 3
_PING_SECONDS = 1.0
_DATABASE_REMEDY = "Bring the database back. The dispatcher then continues by itself."
_PICKLE = {"pickle", "application/x-python-serialize"}
_VISIBILITY_SECONDS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


class Level(StrEnum):
    """FAIL: work does not get done now. WARN: it works, but is likely to fail later."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``remedy`` is empty if the level is OK."""

    level: Level
    about: str
    sentence: str
    remedy: str = ""


def check_all(durable: Durable) -> Iterator[Finding]:
    """Run all checks. Findings come in the order in which problems should be fixed."""
    try:
        _ = durable.internals.settings
    except DurableError as exc:
        yield Finding(Level.FAIL, "configuration", str(exc), "Set it as the message says.")
        return
    yield from _check_settings(durable)
    has_broker = yield from _check_broker(durable)
    processes = yield from _check_database(durable)
    if processes is not None:
        now, beats = processes
        yield _check_dispatcher(durable, now, beats)
        yield from _check_outages(now, beats)
        yield _check_backlog(durable)
        yield _check_outbox(durable)
        yield from _check_workers(durable, now, beats, has_broker=has_broker)


# --- settings -----------------------------------------------------------------------------------


def _check_settings(durable: Durable) -> Iterator[Finding]:
    conf: Any = durable.app.conf
    about, settings = "configuration", durable.internals.settings
    count = len(durable.workflows)
    known = "1 workflow is" if count == 1 else f"{count} workflows are"
    yield Finding(Level.OK, about, f"The durable_* settings are valid; {known} known.")
    if conf.task_always_eager:
        sentence = "task_always_eager is on: workflows run in the process that creates them, and not on workers."
        yield Finding(Level.WARN, about, sentence, "Remove it from the production settings.")
    if conf.worker_pool in ("gevent", "eventlet"):
        sentence = f"worker_pool is {conf.worker_pool!r}: such a worker runs no workflows."
        remedy = f"celery -A {_APP} worker -P prefork -Q {settings.queue}"
        yield Finding(Level.WARN, about, sentence, remedy)
    yield from _check_accept_content(conf)
    yield _check_time_limits(durable)
    transport = _transport(conf)
    if transport in _VISIBILITY_SECONDS:
        seconds = float((conf.broker_transport_options or {}).get("visibility_timeout", _VISIBILITY_SECONDS[transport]))
        if seconds < settings.lease_seconds:
            sentence = (
                f"visibility_timeout is {seconds:g} s, and a lease lasts {settings.lease_seconds:g} s: {transport} "
                "redelivers messages while their runs are in progress."
            )
            remedy = "Remove visibility_timeout from broker_transport_options, or set it to an hour."
            yield Finding(Level.WARN, "visibility_timeout", sentence, remedy)
        else:
            sentence = f"visibility_timeout ({seconds:g} s) is longer than a lease ({settings.lease_seconds:g} s)."
            yield Finding(Level.OK, "visibility_timeout", sentence)


def _check_accept_content(conf: Any) -> Iterator[Finding]:
    accepted = {str(each) for each in conf.accept_content or ()}
    if accepted & _PICKLE:
        sentence = "accept_content allows pickle: any client that can write to the broker can run code in your workers."
        yield Finding(Level.WARN, "accept_content", sentence, "Remove pickle: accept_content = ['json'].")
    else:
        yield Finding(Level.OK, "accept_content", "Workers accept JSON and no pickle.")


def _check_time_limits(durable: Durable) -> Finding:
    task: Any = durable.app.tasks[tasks.ADVANCE]
    limits = [seconds for seconds in (task.time_limit, task.soft_time_limit) if seconds]
    if not limits or min(limits) >= _MIN_TIME_LIMIT.total_seconds():
        sentence = "task_time_limit and task_soft_time_limit do not apply to passes, which have limits of their own"
        own = "" if not limits else f": {format_duration(timedelta(seconds=min(limits)))}"
        return Finding(Level.OK, "time limits", f"{sentence}{own}.")
    sentence = f"A time limit of {min(limits):g} s kills {tasks.ADVANCE} and the step that it runs, on every attempt."
    remedy = f"Do not change the limits of {tasks.ADVANCE}; give steps a timeout instead."
    return Finding(Level.FAIL, "time limits", sentence, remedy)


# --- servers ------------------------------------------------------------------------------------


def _transport(conf: Any) -> str:
    return _broker_url(conf).partition("://")[0].partition("+")[0]


def _broker_url(conf: Any) -> str:
    url = conf.broker_write_url or ""
    return url if isinstance(url, str) else ";".join(url)


_REDIS = ("socket_timeout", '{"socket_timeout": 5, "socket_connect_timeout": 5, "health_check_interval": 5}')
_AMQP = ("read_timeout", '{"read_timeout": 5, "write_timeout": 5}, and broker_heartbeat = 10')
_READ_TIMEOUT_OPTIONS = dict.fromkeys(("redis", "rediss", "sentinel"), _REDIS) | dict.fromkeys(
    ("amqp", "amqps", "pyamqp"), _AMQP
)
"""For each transport: the option that limits the time of a read, and the value to set."""


def _check_broker(durable: Durable) -> Generator[Finding, None, bool]:
    conf: Any = durable.app.conf
    url, transport = maybe_sanitize_url(_broker_url(conf)), _transport(conf)
    try:
        with durable.app.connection_for_write(connect_timeout=_CONNECT_SECONDS) as connection:
            connection.ensure_connection(max_retries=0, timeout=_CONNECT_SECONDS)
    except Exception as exc:  # noqa: BLE001  # each transport has its own errors
        sentence = f"The broker {url} does not answer: {exc}."
        yield Finding(Level.FAIL, "broker", sentence, "Is the server running, and is broker_url right?")
        return False
    if transport == "memory":
        sentence = "The broker is the memory of this process: workers in other processes get no messages."
        yield Finding(Level.WARN, "broker", sentence, "Set broker_url to a server, for example redis:// or amqp://.")
        return True
    yield Finding(Level.OK, "broker", f"{url} answers.")
    if transport in _READ_TIMEOUT_OPTIONS:
        yield _check_read_timeout(transport, conf.broker_transport_options or {})
    return True


def _check_read_timeout(transport: str, options: dict[str, Any]) -> Finding:
    """Check that reads from the broker have a timeout.

    Without one, Celery waits forever for a broker that stops responding, also in the main loop of a worker.
    """
    about, wanted = _READ_TIMEOUT_OPTIONS[transport]
    if seconds := options.get(about):
        return Finding(Level.OK, about, f"Celery gives up on a broker that stops responding after {seconds:g} s.")
    sentence = (
        f"{about} is not set: a broker that stops responding, without closing the connection, blocks a worker forever."
    )
    return Finding(Level.WARN, about, sentence, f"Set broker_transport_options = {wanted}")


Processes = tuple[datetime, tuple[Heartbeat, ...]]


def _check_database(durable: Durable) -> Generator[Finding, None, Processes | None]:
    """Check the database. Returns its time and the stored heartbeats; None if the tables cannot be read."""
    about = "database"
    try:
        if local_servers.is_without_store(durable):
            remedy = "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db'"
            yield Finding(Level.FAIL, about, "durable_database_url is not set.", remedy)
            return None
        started_at = durable.internals.runtime.wall_clock()
        found = server_info.read_server_info(durable.internals.store)
        offset = started_at + (durable.internals.runtime.wall_clock() - started_at) / 2 - found.now
    except UnsupportedDatabase as exc:
        yield Finding(Level.FAIL, about, str(exc), "Use a supported database.")
        return None
    except Exception as exc:  # noqa: BLE001  # many drivers, many errors, one meaning
        answer = getattr(exc, "orig", None) or exc
        yield Finding(Level.FAIL, about, f"The database cannot be used: {answer}", find_remedy(str(exc), of="database"))
        return None
    url = durable.internals.store.engine.url.render_as_string()
    if found.is_read_only:
        sentence = f"{found.name} {found.version} at {url} is read-only: a standby?"
        yield Finding(Level.FAIL, about, sentence, "Name the server that takes writes in durable_database_url.")
    else:
        yield Finding(Level.OK, about, f"{found.name} {found.version} at {url}, {found.isolation}.")
    if found.isolation not in ("READ COMMITTED", "SERIALIZABLE" if found.name == "sqlite" else ""):
        remedy = "Let engine= use isolation_level='READ COMMITTED'."
        yield Finding(Level.FAIL, "isolation", f"Transactions run as {found.isolation}: wake-ups can be lost.", remedy)
    yield from _check_lock_timeout(durable)
    is_current = yield from _check_tables(durable)
    direction = "ahead of" if offset > timedelta(0) else "behind"
    ahead = f"{format_duration(abs(offset))} {direction} the database's"
    sentence = f"This machine's clock is {ahead}. Workflows use only the database's clock."
    yield Finding(Level.OK, "clock", sentence)
    return durable.internals.store.read(heartbeats.read) if is_current else None


def _check_lock_timeout(durable: Durable) -> Iterator[Finding]:
    if not server_info.has_lock_timeout(durable.internals.store):
        sentence = "Statements outside a transaction, such as a claim, wait for locks forever: lock_timeout is 0."
        remedy = "Run: ALTER ROLE CURRENT_USER SET lock_timeout = '5s'"
        if durable.internals.settings.prepared_statements:
            remedy += ". Behind PgBouncer in transaction mode, also set durable_prepared_statements = False."
        yield Finding(Level.WARN, "lock_timeout", sentence, remedy)


def _check_tables(durable: Durable) -> Generator[Finding, None, bool]:
    revision = migrate.read_revision(durable.internals.store)
    if revision is not None and revision >= REVISION:
        yield Finding(Level.OK, "tables", f"The tables are at revision {revision}; this version needs {REVISION}.")
        return True
    at = "The tables do not exist" if revision is None else f"The tables are at revision {revision}"
    sentence = f"{at}; this version needs {REVISION}."
    yield Finding(Level.FAIL, "tables", sentence, f"celery -A {_APP} durable migrate")
    return False


# --- processes ----------------------------------------------------------------------------------


def _check_dispatcher(durable: Durable, now: datetime, beats: tuple[Heartbeat, ...]) -> Finding:
    about, setting = "dispatcher", durable.internals.settings.dispatcher
    sweeping = [beat for beat in beats if beat.sweeps(now)]
    if sweeping and all(beat.id == SWEEP_TASK for beat in sweeping):
        sentence = (
            f"Only the task {SWEEP_TASK} looks for due work, last on {sweeping[0].node}: timers are up to five seconds "
            "late, Celery tasks of steps that are lost wait for their timeout, and outages are not reported."
        )
        return Finding(
            Level.WARN, about, sentence, "Set durable_dispatcher to worker or both, or see why beat has none."
        )
    if sweeping:
        nodes = ", ".join(sorted({beat.node for beat in sweeping})[:5])
        return Finding(Level.OK, about, f"Due work is looked for by {nodes}.")
    last = max((beat.swept_at for beat in beats if beat.swept_at is not None), default=None)
    seen = "No dispatcher has been seen" if last is None else f"No dispatcher has looked for due work since {iso(last)}"
    host = {"worker": "worker", "none": ""}.get(setting, "beat")
    remedy = f"celery -A {_APP} {host}" if host else "Set durable_dispatcher to beat, worker or both in one process."
    sentence = f"{seen}: sleeps, timeouts and retries do not end (durable_dispatcher is {setting!r})."
    return Finding(Level.FAIL, about, sentence, remedy)


def _check_outages(now: datetime, beats: tuple[Heartbeat, ...]) -> Iterator[Finding]:
    """Report the outages that dispatchers recorded. Of one outage, only the earliest record is shown."""
    first_seen: dict[tuple[str, str], Outage] = {}
    for outage in sorted((each for beat in beats if beat.is_live(now) for each in beat.outages), key=_since):
        first_seen.setdefault((outage.what, outage.where), outage)
    for outage in first_seen.values():
        who = {
            "queue": f"Queue {outage.where!r} has refused messages",
            "full": f"Queue {outage.where!r} has been full",
            "broker": f"The broker {outage.where} has taken no messages",
        }
        what = who.get(outage.what, "The dispatcher has not reached the database")
        sentence = (
            f"{what} since {iso(outage.since)}, {format_duration(now - outage.since, units=1)} ago: {outage.error}"
        )
        fix = _DATABASE_REMEDY if outage.what == "database" else find_remedy(outage.error)
        yield Finding(Level.FAIL, outage.what, sentence, fix)


def _since(outage: Outage) -> datetime:
    return outage.since


def _check_backlog(durable: Durable) -> Finding:
    first, now = durable.internals.store.read(schedule.read_next_due)
    if first is None or now - first <= _MAX_LATENESS:
        return Finding(Level.OK, "backlog", "Nothing is late.")
    sentence = f"The oldest due work has been waiting for {format_duration(now - first, units=1)}."
    remedy = "Check dispatcher, broker and workers. If the queue is long, add workers."
    return Finding(Level.WARN, "backlog", sentence, remedy)


def _check_outbox(durable: Durable) -> Finding:
    count = durable.internals.store.read(outbox.count_given_up)
    if not count:
        return Finding(Level.OK, "outbox", "No outbound event was given up.")
    what = (
        "1 outbound event was given up: its handler"
        if count == 1
        else f"{count} outbound events were given up: a handler"
    )
    remedy = f"celery -A {_APP} durable outbox --given-up shows why; then outbox --retry ID... or --drop ID..."
    return Finding(Level.WARN, "outbox", f"{what} failed in every attempt.", remedy)


def _check_workers(
    durable: Durable, now: datetime, beats: tuple[Heartbeat, ...], *, has_broker: bool
) -> Iterator[Finding]:
    working = [beat for beat in beats if beat.kind == "worker" and beat.is_live(now)]
    replying = _find_replying_workers(durable) if has_broker else {}
    yield _check_replies(durable, {beat.node for beat in working}, set(replying), has_broker=has_broker)
    needed: dict[str, list[str]] = {durable.internals.settings.queue: []}
    for name, handle in durable.workflows.items():
        needed.setdefault(handle.definition.queue or durable.internals.settings.queue, []).append(name)
    for queue, names in needed.items():
        consumers_of_any_pool = [beat for beat in working if queue in beat.queues]
        consumers = [beat for beat in consumers_of_any_pool if beat.runs_workflows]
        if consumers_of_any_pool and not consumers:
            pools = ", ".join(sorted({f"{beat.node}: {beat.pool}" for beat in consumers_of_any_pool})[:5])
            sentence = f"{queue!r} is consumed only by workers on pools that run no workflows ({pools})."
            yield Finding(Level.FAIL, "queue", sentence, f"celery -A {_APP} worker -P prefork -Q {queue}")
            continue
        if not consumers:
            remedy = f"celery -A {_APP} worker -Q {queue}"
            yield Finding(
                Level.FAIL,
                "queue",
                f"No worker consumes queue {queue!r}.{_describe_other_consumers(replying, queue)}",
                remedy,
            )
            continue
        nodes = ", ".join(sorted({beat.node for beat in consumers})[:5])
        if all(queue not in replying.get(beat.node, {queue}) for beat in consumers):
            sentence = (
                f"The last heartbeats say that {nodes} consume {queue!r}, but the workers reply that they no longer do."
            )
            remedy = f"celery -A {_APP} control add_consumer {queue}"
            yield Finding(Level.FAIL, "queue", sentence, remedy)
            continue
        yield Finding(Level.OK, "queue", f"{queue!r} is consumed by {nodes}.")
        unknown = [name for name in names if not any(name in beat.workflows for beat in consumers)]
        if unknown:
            sentence = f"No worker of queue {queue!r} knows {', '.join(map(repr, unknown[:5]))}."
            remedy = "Import the modules that define them in the workers, or finish the deploy."
            yield Finding(Level.FAIL, "workflows", sentence, remedy)


def _describe_other_consumers(replying: dict[str, set[str]], queue: str) -> str:
    """Name the workers that consume the queue without a heartbeat in this database; "" if there are none."""
    nodes = ", ".join(sorted(node for node, queues in replying.items() if queue in queues)[:5])
    return f" But {nodes} consumes it and writes no heartbeat to this database." if nodes else ""


def _check_replies(durable: Durable, working: set[str], replying: set[str], *, has_broker: bool) -> Finding:
    about = "workers"
    seen = f"in the last {format_duration(3 * HEARTBEAT_INTERVAL)}"
    if not working and not replying:
        return Finding(Level.FAIL, about, f"No worker has been seen {seen}.", f"celery -A {_APP} worker")
    if not working:
        nodes = ", ".join(sorted(replying)[:5])
        sentence = f"{nodes} reply over the broker, but have written no heartbeat {seen}."
        remedy = "Do they load this app with its Durable, and use the same durable_database_url?"
        return Finding(Level.FAIL, about, sentence, remedy)
    nodes = ", ".join(sorted(working)[:5])
    if has_broker and not working & replying and durable.app.conf.worker_enable_remote_control:
        sentence = f"{nodes} write heartbeats to this database, but do not reply over this broker."
        remedy = "Do they use the same broker_url? Busy solo workers do not reply either."
        return Finding(Level.WARN, about, sentence, remedy)
    return Finding(Level.OK, about, f"{len(working)} running: {nodes}.")


def _find_replying_workers(durable: Durable) -> dict[str, set[str]]:
    """Ask workers over the broker which queues they consume. Workers that do not reply in time are left out."""
    try:
        # A connection of its own: a pooled connection that still waits for replies would be inherited by forks.
        with durable.app.connection_for_write(connect_timeout=_CONNECT_SECONDS) as connection:
            replies = durable.app.control.inspect(timeout=_PING_SECONDS, connection=connection).active_queues() or {}
    except Exception:  # noqa: BLE001  # transports without broadcast
        return {}
    return {node: {queue["name"] for queue in queues or ()} for node, queues in replies.items()}
