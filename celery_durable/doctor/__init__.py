"""The checks of an installation: settings, servers and processes. What they look for they yield, and do not raise."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import datetime, timedelta
from typing import Any

from kombu.utils.url import maybe_sanitize_url

from celery_durable import tasks
from celery_durable.app import Durable
from celery_durable.doctor.database import check_database
from celery_durable.doctor.findings import (
    ANSWER_SECONDS,
    APP,
    CONNECT_SECONDS,
    Finding,
    Level,
    Servers,
    ask_in_time,
)
from celery_durable.doctor.workers import check_workers, find_replies
from celery_durable.errors import DurableError
from celery_durable.insight.explain.due import find_remedy, is_refused_connection
from celery_durable.insight.explain.phrases import show_limit_command
from celery_durable.insight.stats import Health
from celery_durable.model import SWEEP_TASK, Outage, format_duration, iso

__all__ = [
    "Finding",
    "Level",
    "Servers",
    "check_all",
    "check_database",
    "check_health",
    "check_servers",
    "check_workers",
]

_MIN_TIME_LIMIT = timedelta(hours=1)
"""A step may take this long. A shorter time limit of Celery would end passes that work correctly."""
_MAX_LATENESS = timedelta(minutes=1)
_MAX_LIMIT_WAIT, _SHOWN_LIMITS = timedelta(hours=1), 3
_DATABASE_REMEDY = "Bring the database back. The dispatcher then continues by itself."
_PICKLE = {"pickle", "application/x-python-serialize"}
_VISIBILITY_SECONDS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}


def check_all(durable: Durable) -> Iterator[Finding]:
    """Run all checks. Findings come in the order in which problems should be fixed."""
    servers = Servers()
    yield from check_servers(durable, servers)
    if servers.can_read:
        health = durable.internals.operations.stats.health()
        yield from check_health(durable, health)
        yield from check_workers(durable, health, servers)


def check_servers(durable: Durable, servers: Servers) -> Iterator[Finding]:
    """Check the settings, the broker and the database, and ask the workers for replies."""
    try:
        _ = durable.internals.settings
    except DurableError as exc:
        yield Finding(Level.FAIL, "configuration", str(exc), "Set it as the message says.")
        return
    yield from _check_settings(durable)
    has_broker = yield from _check_broker(durable)
    yield from check_database(durable, servers)
    if has_broker and servers.can_read:
        servers.replies, servers.must_reply = find_replies(durable), _transport(durable.app.conf) != "memory"


def check_health(durable: Durable, health: Health) -> Iterator[Finding]:
    """Check what the database says of dispatchers and of the work that is due."""
    yield _check_dispatcher(durable, health)
    yield from _check_outages(health)
    yield _check_backlog(health)
    yield _check_outbox(health)
    yield from _check_limits(durable, health)


# --- settings -----------------------------------------------------------------------------------


def _check_settings(durable: Durable) -> Iterator[Finding]:
    conf: Any = durable.app.conf
    about, settings = "configuration", durable.internals.settings
    count = len(durable.workflows)
    known = "1 workflow is" if count == 1 else f"{count} workflows are"
    yield Finding(Level.OK, about, f"The durable_* settings are valid; {known} known.")
    if not settings.is_create_enabled:
        yield Finding(
            Level.WARN, "switches", "durable_create_enabled is off: new instances are refused.", "Turn it on."
        )
    if not settings.is_execution_enabled:
        sentence = "durable_execution_enabled is off: workers take no runs, and dispatchers send nothing."
        yield Finding(Level.FAIL, "switches", sentence, "Turn it on.")
    if conf.task_always_eager:
        sentence = "task_always_eager is on: workflows run in the process that creates them, and not on workers."
        yield Finding(Level.WARN, about, sentence, "Remove it from the production settings.")
    if conf.worker_pool in ("gevent", "eventlet"):
        sentence = f"worker_pool is {conf.worker_pool!r}: such a worker runs no workflows."
        remedy = f"celery -A {APP} worker -P prefork -Q {settings.queue}"
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
_REDIS_TRANSPORTS = ("redis", "rediss", "sentinel")
_READ_TIMEOUT_OPTIONS = dict.fromkeys(_REDIS_TRANSPORTS, _REDIS) | dict.fromkeys(("amqp", "amqps", "pyamqp"), _AMQP)
"""For each transport: the option that limits the time of a read, and the value to set."""


def _check_broker(durable: Durable) -> Generator[Finding, None, bool]:
    conf: Any = durable.app.conf
    url, transport = maybe_sanitize_url(_broker_url(conf)), _transport(conf)

    def connect() -> None:
        with durable.app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
            connection.ensure_connection(max_retries=0, timeout=CONNECT_SECONDS)

    try:
        ask_in_time(connect)
    except TimeoutError:
        sentence = f"The broker {url} takes connections, but has not answered for {ANSWER_SECONDS} seconds."
        remedy = "Check the broker's load and whether it is stopped; a restart may be needed."
        yield Finding(Level.FAIL, "broker", sentence, remedy)
        return False
    except ImportError as exc:
        extra = "redis" if transport in _REDIS_TRANSPORTS else transport
        sentence = f"The client library of the broker {url} cannot be imported: {exc}."
        yield Finding(Level.FAIL, "broker", sentence, f'Install the library: pip install "celery[{extra}]"')
        return False
    except Exception as exc:  # noqa: BLE001  # each transport has its own errors
        yield _describe_broker_error(url, str(exc))
        return False
    if transport == "memory":
        sentence = "The broker is the memory of this process: workers in other processes get no messages."
        yield Finding(Level.WARN, "broker", sentence, "Set broker_url to a server, for example redis:// or amqp://.")
        return True
    yield Finding(Level.OK, "broker", f"{url} answers.")
    if transport in _READ_TIMEOUT_OPTIONS:
        yield _check_read_timeout(transport, conf.broker_transport_options or {})
    return True


def _describe_broker_error(url: str, error: str) -> Finding:
    error = error.removesuffix(".")
    if is_refused_connection(error):
        sentence = f"The broker {url} refuses the connection: {error}."
        return Finding(Level.FAIL, "broker", sentence, find_remedy(error))
    sentence = f"The broker {url} does not answer: {error}."
    return Finding(Level.FAIL, "broker", sentence, "Is the server running, and is broker_url right?")


def _check_read_timeout(transport: str, options: dict[str, Any]) -> Finding:
    """Check that reads from the broker have a timeout: else Celery's main loop may wait forever for it, too."""
    about, wanted = _READ_TIMEOUT_OPTIONS[transport]
    if seconds := options.get(about):
        return Finding(Level.OK, about, f"Celery gives up on a broker that stops responding after {seconds:g} s.")
    sentence = (
        f"{about} is not set: a broker that stops responding, without closing the connection, blocks a worker forever."
    )
    return Finding(Level.WARN, about, sentence, f"Set broker_transport_options = {wanted}")


# --- processes ----------------------------------------------------------------------------------


def _check_dispatcher(durable: Durable, health: Health) -> Finding:
    about, setting = "dispatcher", durable.internals.settings.dispatcher
    sweeping = [beat for beat in health.heartbeats if beat.sweeps(health.now)]
    if sweeping and all(beat.id == SWEEP_TASK for beat in sweeping):
        sentence = (
            f"Only the task {SWEEP_TASK} looks for due work, last on {sweeping[0].node}: timers are up to five seconds "
            "late, and outages are not reported."
        )
        return Finding(
            Level.WARN, about, sentence, "Set durable_dispatcher to worker or both, or see why beat has none."
        )
    if sweeping:
        nodes = ", ".join(sorted({beat.node for beat in sweeping})[:5])
        return Finding(Level.OK, about, f"Due work is looked for by {nodes}.")
    last = max((beat.swept_at for beat in health.heartbeats if beat.swept_at is not None), default=None)
    seen = "No dispatcher has been seen" if last is None else f"No dispatcher has looked for due work since {iso(last)}"
    host = {"worker": "worker", "none": ""}.get(setting, "beat")
    remedy = f"celery -A {APP} {host}" if host else "Set durable_dispatcher to beat, worker or both in one process."
    sentence = f"{seen}: sleeps, timeouts and retries do not end (durable_dispatcher is {setting!r})."
    return Finding(Level.FAIL, about, sentence, remedy)


def _check_outages(health: Health) -> Iterator[Finding]:
    """Report the outages that dispatchers recorded. Of one outage, only the earliest record is shown."""
    first_seen: dict[tuple[str, str], Outage] = {}
    now, beats = health.now, [beat for beat in health.heartbeats if not beat.is_silent(health.now)]
    for outage in sorted((each for beat in beats for each in beat.outages), key=_since):
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


def _check_backlog(health: Health) -> Finding:
    # The agenda does not count a run whose message was sent: its row is next read when the message may be lost.
    now, times = health.now, (health.agenda.next_at, health.due.oldest)
    oldest = min((at for at in times if at is not None), default=None)
    if oldest is None or now - oldest <= _MAX_LATENESS:
        return Finding(Level.OK, "backlog", f"No due work has waited longer than {format_duration(_MAX_LATENESS)}.")
    sentence = f"The oldest due work has been waiting for {format_duration(now - oldest, units=1)}."
    remedy = "Check dispatcher, broker and workers. If the queue is long, add workers."
    return Finding(Level.WARN, "backlog", sentence, remedy)


def _check_outbox(health: Health) -> Finding:
    count = health.given_up
    if not count:
        return Finding(Level.OK, "outbox", "No task or outbound event was given up.")
    what = "1 task or outbound event was" if count == 1 else f"{count} tasks or outbound events were"
    remedy = f"celery -A {APP} durable outbox --given-up shows why; then outbox --retry ID... or --drop ID..."
    return Finding(Level.WARN, "outbox", f"{what} given up.", remedy)


def _check_limits(durable: Durable, health: Health) -> Iterator[Finding]:
    """Name the limits with the longest waits. A forgotten holder is found so, such as a run that sleeps for weeks."""
    awaited = [(each.longest_wait or timedelta(0), each) for each in health.limits]
    late = sorted((each for each in awaited if each[0] > _MAX_LIMIT_WAIT), key=lambda each: each[0], reverse=True)
    for wait, found in late[:_SHOWN_LIMITS]:
        limit = durable.internals.redaction("", "").redact_limit(found)
        of_key = f" with the key {limit.key!r}" if limit.key else ""
        held = f"{limit.held} held" if limit.at_once is None else f"{limit.held} of {limit.at_once} held"
        sentence = (
            f"The first of {limit.waiting} that wait for limit {limit.name!r}{of_key} has waited for "
            f"{format_duration(wait, units=1)}; {held}."
        )
        yield Finding(Level.WARN, "limits", sentence, show_limit_command(limit.name, limit.key))
