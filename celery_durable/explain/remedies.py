"""Remedies for a broker or a queue that accepts no messages, found by the text of its error."""

from __future__ import annotations

import re

_REMEDIES = (
    (
        r"PRECONDITION_FAILED|\(406\)",
        "The queue exists with other arguments: delete it, or declare it in task_queues with these arguments.",
    ),
    (r"ACCESS_REFUSED|\(403\)", "Allow the broker's user to configure, write and read this queue and its exchange."),
    (
        r"RESOURCE_LOCKED|\(405\)",
        "Another connection has exclusive use of the queue: close it, or declare the queue without exclusive.",
    ),
    (
        r"NO_ROUTE|\b312\b",
        "No queue is bound to its exchange for this routing key: bind one, or start a worker that declares it.",
    ),
    (r"no exchange", "Its exchange was deleted: declare it again, or start a worker of this queue."),
    (
        r"NOT_FOUND|\(404\)",
        "The queue, or its exchange, was deleted: start a worker of this queue, which declares both.",
    ),
    (
        r"QueueNotFound",
        "Name the queue in task_queues, or set task_create_missing_queues = True.",
    ),
    (r"basic\.nack", "The queue is full and rejects messages: start workers of this queue, or raise its x-max-length."),
    (r"NOPERM|NoPermission", "Allow the Redis user to write to the queue's key: ACL SETUSER <user> ~<queue>* +@all."),
    (r"WRONGTYPE", "The queue's key in Redis is not a list: other data uses that name. Rename one of them."),
    (r"READONLY|ReadOnly", "This Redis is a replica: set broker_url to the primary server."),
    (r"[Cc]onnection refused", "Nothing listens there: start the broker, or correct broker_url."),
    (r"\bOOM\b|OutOfMemory", "Redis has reached maxmemory: raise the limit, or delete data."),
    (
        r"connection\.blocked|ConnectionBlocked",
        "RabbitMQ has raised a memory or disk alarm: free some. It then accepts messages again by itself.",
    ),
)


def find_remedy(error: str) -> str:
    """Return one sentence that says how to fix this error, or to check the broker's log if the error is unknown."""
    for pattern, sentence in _REMEDIES:
        if re.search(pattern, error):
            return sentence
    return "Check the broker's log for this error."
