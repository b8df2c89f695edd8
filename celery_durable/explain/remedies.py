"""Remedies for a broker, a queue or a database that cannot be used, found by the text of its error."""

from __future__ import annotations

import re
from typing import Literal

_UNKNOWN_BROKER_ERROR = "Check the broker's log for this error."
_UNKNOWN_DATABASE_ERROR = "Is the server running, and is durable_database_url right?"
_REFUSED_HOST = r"vhost \S+ not found|access to vhost"
_REFUSED_LOGIN = r"Login was refused|username-password pair|Authentication required|called without any password"
_POOLER = "unsupported startup parameter"
_BROKER_REMEDIES = (
    (
        r"PRECONDITION_FAILED|\(406\)",
        "The queue exists with other arguments: delete it, or declare it in task_queues with these arguments.",
    ),
    (_REFUSED_HOST, "Create the virtual host that broker_url names, and allow the user to use it."),
    (_REFUSED_LOGIN, "Correct the user name and the password in broker_url."),
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
    (
        r"^QueueFull",
        "Start more workers of this queue, or raise durable_queue_high_water. Until then, work waits in the database.",
    ),
    (r"basic\.nack", "The queue is full and rejects messages: start workers of this queue, or raise its x-max-length."),
    (r"NOPERM|NoPermission", "Allow the Redis user to write to the queue's key: ACL SETUSER <user> ~<queue>* +@all."),
    (r"WRONGTYPE", "The queue's key in Redis is not a list: other data uses that name. Rename one of them."),
    (r"READONLY|ReadOnly", "This Redis is a replica: set broker_url to the primary server."),
    (r"[Cc]onnection refused", "Nothing listens there: start the broker, or correct broker_url."),
    (
        r"TimeoutError|Timeout (reading|writing|connecting)|timed out",
        "It does not answer: check its load, its disk, and the network between.",
    ),
    (r"\bOOM\b|OutOfMemory", "Redis has reached maxmemory: raise the limit, or delete data."),
    (
        r"connection\.blocked|ConnectionBlocked",
        "RabbitMQ has raised a memory or disk alarm: free some. It then accepts messages again by itself.",
    ),
)
_URL = "durable_database_url"
READ_ONLY_REMEDY = f"Name the server that takes writes in {_URL}, or end the read-only mode."
_DATABASE_REMEDIES = (
    (_POOLER, "Behind PgBouncer in transaction mode, set durable_prepared_statements = False."),
    (r'database "([^"]+)" does not exist', rf"Create the database, createdb \1, or correct its name in {_URL}."),
    (r"Unknown database '([^']+)'", rf"Create the database, CREATE DATABASE `\1`, or correct its name in {_URL}."),
    (r"read-?only", READ_ONLY_REMEDY),
    (r"No space left|\bis full\b", "The disk of the database is full: free some space."),
    (
        r"authentication failed|no password supplied|no pg_hba\.conf entry|role \S+ does not exist|Access denied",
        f"Correct the user name and the password in {_URL}, or allow the user to connect.",
    ),
    (
        r"[Tt]oo many (clients|connections)|connection slots",
        "Raise max_connections of the server, or run fewer processes.",
    ),
    (
        r"Name or service not known|Temporary failure in name resolution|failed to resolve host|could not translate",
        f"Correct the host in {_URL}.",
    ),
    (r"unable to open database file", f"Create the folder that {_URL} names, and let this user write to it."),
)


def is_full_queue(error: str) -> bool:
    """Whether the broker rejected a message because the queue has reached its limit."""
    return "basic.nack" in error


def is_refused_connection(error: str) -> bool:
    """Whether the broker answers, and refuses the virtual host or the login of its URL."""
    return re.search(f"{_REFUSED_HOST}|{_REFUSED_LOGIN}", error) is not None


def is_pooler_rejection(error: str) -> bool:
    """Whether a pooler in transaction mode, such as PgBouncer, refuses a setting of the session."""
    return _POOLER in error


def find_remedy(error: str, *, of: Literal["broker", "database"] = "broker") -> str:
    """Return one sentence that says how to fix this error, or where to look if the error is unknown.

    ``of``: what raised it, the database or the broker with its queues.
    """
    remedies, unknown = (
        (_DATABASE_REMEDIES, _UNKNOWN_DATABASE_ERROR) if of == "database" else (_BROKER_REMEDIES, _UNKNOWN_BROKER_ERROR)
    )
    matches = ((re.search(pattern, error), sentence) for pattern, sentence in remedies)
    return next((match.expand(sentence) for match, sentence in matches if match is not None), unknown)
