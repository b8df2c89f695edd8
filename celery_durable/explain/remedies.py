"""What to do where a broker, or one of its queues, takes no messages: by the broker's own words."""

from __future__ import annotations

import re

_REMEDIES = (
    (
        r"PRECONDITION_FAILED|\(406\)",
        "The queue exists with other arguments: delete it, or declare it in task_queues as it is.",
    ),
    (r"ACCESS_REFUSED|\(403\)", "Let the broker's user configure, write and read this queue and its exchange."),
    (
        r"RESOURCE_LOCKED|\(405\)",
        "Another connection has the queue for itself: end it, or declare the queue without exclusive.",
    ),
    (
        r"NO_ROUTE|\b312\b",
        "No queue is bound to its exchange for this routing key: bind one, or let workers declare it.",
    ),
    (r"no exchange", "Its exchange was deleted: declare it again, or start a worker of the queue."),
    (r"NOT_FOUND|\(404\)", "The queue, or its exchange, was deleted: start a worker of it, which declares it."),
    (
        r"QueueNotFound",
        "Name the queue in task_queues, or set task_create_missing_queues = True.",
    ),
    (r"basic\.nack", "The queue is full and rejects messages: start workers of it, or raise its x-max-length."),
    (r"NOPERM|NoPermission", "Let the Redis user write to the queue's key: ACL SETUSER <user> ~<queue>* +@all."),
    (r"WRONGTYPE", "The queue's key in Redis is no list: something else uses that name. Rename one of them."),
    (r"READONLY|ReadOnly", "This Redis is a replica: name the master in broker_url."),
    (r"[Cc]onnection refused", "Nothing listens there: start the broker, or correct broker_url."),
    (r"\bOOM\b|OutOfMemory", "Redis has reached maxmemory: give it more, or end what fills it."),
    (
        r"connection\.blocked|ConnectionBlocked",
        "RabbitMQ has raised a memory or disk alarm: give it room; it takes messages again by itself.",
    ),
)


def find_remedy(error: str) -> str:
    """One sentence; for words that are not known, where to look."""
    for words, sentence in _REMEDIES:
        if re.search(words, error):
            return sentence
    return "Look into the broker's log for what it says of this."
