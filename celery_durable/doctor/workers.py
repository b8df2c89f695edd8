"""The checks of the workers: by their heartbeats in the database, and by their replies over the broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celery_durable.app import Durable
from celery_durable.doctor.findings import APP, CONNECT_SECONDS, Finding, Level, Replies, Servers, ask_in_time
from celery_durable.insight.stats import Health
from celery_durable.model import SILENT_AFTER, Heartbeat, format_duration

_PING_SECONDS = 1.0


def find_replies(durable: Durable) -> Replies:
    """Ask workers over the broker which queues they consume. Workers that do not reply in time are left out."""

    def ask() -> dict[str, Any]:
        # A connection of its own: a pooled connection that still waits for replies would be inherited by forks.
        with durable.app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
            found: Any = durable.app.control.inspect(timeout=_PING_SECONDS, connection=connection).active_queues()
        return found or {}

    try:
        replies = ask_in_time(ask)
    except Exception:  # noqa: BLE001  # transports without broadcast
        return {}
    return {node: {queue["name"] for queue in queues or ()} for node, queues in replies.items()}


def check_workers(durable: Durable, health: Health, servers: Servers) -> Iterator[Finding]:
    """Check that workers run, consume the queues, know the workflows and, if they must, reply over the broker."""
    working = [beat for beat in health.heartbeats if beat.kind == "worker" and not beat.is_silent(health.now)]
    current, replying = leave_out_replaced(working), servers.replies
    yield _check_replies(durable, current, set(replying), must_reply=servers.must_reply)
    yield from check_node_names(current)
    needed: dict[str, list[str]] = {durable.internals.settings.queue: []}
    for name, handle in durable.workflows.items():
        needed.setdefault(handle.definition.queue or durable.internals.settings.queue, []).append(name)
    configured = set(needed)
    for queue in health.agenda.queues:  # instances keep the queue that they began with
        needed.setdefault(queue, [])
    for queue, names in needed.items():
        consumers_of_any_pool = [beat for beat in working if queue in beat.queues]
        consumers = [beat for beat in consumers_of_any_pool if beat.runs_workflows]
        if consumers_of_any_pool and not consumers:
            pools = ", ".join(sorted({f"{beat.node}: {beat.pool}" for beat in consumers_of_any_pool})[:5])
            sentence = f"{queue!r} is consumed only by workers on pools that run no workflows ({pools})."
            yield Finding(Level.FAIL, "queue", sentence, f"celery -A {APP} worker -P prefork -Q {queue}")
            continue
        if not consumers:
            why = "" if queue in configured else ", and unfinished instances belong to it"
            sentence = f"No worker consumes queue {queue!r}{why}.{_describe_other_consumers(replying, queue)}"
            yield Finding(Level.FAIL, "queue", sentence, f"celery -A {APP} worker -Q {queue}")
            continue
        nodes = ", ".join(sorted({beat.node for beat in consumers})[:5])
        if all(queue not in replying.get(beat.node, {queue}) for beat in consumers):
            sentence = (
                f"The last heartbeats say that {nodes} consume {queue!r}, but the workers reply that they no longer do."
            )
            remedy = f"celery -A {APP} control add_consumer {queue}"
            yield Finding(Level.FAIL, "queue", sentence, remedy)
            continue
        yield Finding(Level.OK, "queue", f"{queue!r} is consumed by {nodes}.")
        unknown = [name for name in names if not any(name in beat.workflows for beat in consumers)]
        if unknown:
            sentence = f"No worker of queue {queue!r} knows {', '.join(map(repr, unknown[:5]))}."
            remedy = "Import the modules that define them in the workers, or finish the deploy."
            yield Finding(Level.FAIL, "workflows", sentence, remedy)
    yield from _check_task_queues(health, set(needed), set().union(*replying.values()))


def _check_task_queues(health: Health, checked: set[str], replied: set[str]) -> Iterator[Finding]:
    """Report queues in which tasks of steps wait and that no worker consumes, by its heartbeat or by its reply."""
    for name, queue in health.task_queues.items():
        if queue.is_consumed or name in checked | replied:
            continue
        waits = "1 task of a step waits" if queue.count == 1 else f"{queue.count} tasks of steps wait"
        age = format_duration(queue.age, units=1)
        sentence = f"{waits} in queue {name!r}, which no known worker consumes; the oldest was sent {age} ago."
        yield Finding(Level.WARN, "task queue", sentence, f"celery -A {APP} worker -Q {name}")


def _describe_other_consumers(replying: Replies, queue: str) -> str:
    """Name the workers that consume the queue without a heartbeat in this database; "" if there are none."""
    nodes = ", ".join(sorted(node for node, queues in replying.items() if queue in queues)[:5])
    return f" But {nodes} consumes it and writes no heartbeat to this database." if nodes else ""


def check_node_names(working: Sequence[Heartbeat]) -> Iterator[Finding]:
    """Report workers that use the same node name."""
    pids: dict[str, list[int]] = {}
    for beat in working:
        pids.setdefault(beat.node, []).append(beat.pid)
    for node, same in sorted(pids.items()):
        if len(same) > 1:
            listed = ", ".join(map(str, sorted(same)[:5]))
            sentence = (
                f"{len(same)} workers use the node name {node} (pids {listed}): remote control and monitors take them "
                "for one."
            )
            remedy = f"Give each worker a name of its own: celery -A {APP} worker -n NAME@%h"
            yield Finding(Level.WARN, "node name", sentence, remedy)


def leave_out_replaced(working: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Return the workers without those that were killed and started again, which have two recent heartbeats.

    The last heartbeat of the old one came before the new worker started.
    """
    return [
        beat
        for beat in working
        if not any(other.node == beat.node and other.started_at > beat.seen_at for other in working)
    ]


def _check_replies(durable: Durable, working: Sequence[Heartbeat], replying: set[str], *, must_reply: bool) -> Finding:
    about, names = "workers", {beat.node for beat in working}
    seen = f"in the last {format_duration(SILENT_AFTER)}"
    if not working and not replying:
        return Finding(Level.FAIL, about, f"No worker has been seen {seen}.", f"celery -A {APP} worker")
    if not working:
        nodes = ", ".join(sorted(replying)[:5])
        sentence = f"{nodes} reply over the broker, but have written no heartbeat {seen}."
        remedy = "Do they load this app with its Durable, and use the same durable_database_url?"
        return Finding(Level.FAIL, about, sentence, remedy)
    nodes = ", ".join(sorted(names)[:5])
    if must_reply and not names & replying and durable.app.conf.worker_enable_remote_control:
        sentence = f"{nodes} write heartbeats to this database, but do not reply over this broker."
        remedy = "Do they use the same broker_url? Busy solo workers do not reply either."
        return Finding(Level.WARN, about, sentence, remedy)
    return Finding(Level.OK, about, f"{len(working)} running: {nodes}.")
