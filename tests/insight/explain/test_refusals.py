"""What to do about a refusal, by what brokers really say."""

from __future__ import annotations

from celery_durable.insight.explain.due import find_remedy

_UNKNOWN = "Check the broker's log for this error."


REMEDIES = [
    (
        "PreconditionFailed: Queue.declare: (406) PRECONDITION_FAILED - inequivalent arg 'x-max-priority' for "
        "queue 'snacks' in vhost '/': received none but current is the value '9' of type 'signedint'",
        "The queue exists with other arguments: delete it",
    ),
    (
        "AccessRefused: Queue.declare: (403) ACCESS_REFUSED - access to queue 'snacks' in vhost '/' refused for "
        "user 'shop'",
        "Allow the broker's user to configure, write and read this queue",
    ),
    (
        "NotAllowed: Connection.open: (530) NOT_ALLOWED - vhost snacks not found",
        "Create the virtual host that broker_url names",
    ),
    (
        "AccessRefused: (0, 0): (403) ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For "
        "details see the broker logfile.",
        "Correct the user name and the password",
    ),
    ("AuthenticationError: Authentication required.", "Correct the user name and the password"),
    (
        "AuthenticationError: invalid username-password pair or user is disabled.",
        "Correct the user name and the password",
    ),
    (
        "ResourceLocked: Queue.declare: (405) RESOURCE_LOCKED - cannot obtain exclusive access to locked queue "
        "'snacks' in vhost '/'",
        "Another connection has exclusive use of the queue",
    ),
    ("NotFound: Basic.publish: (404) NOT_FOUND - no exchange 'snacks' in vhost '/'", "Its exchange was deleted"),
    (
        "NotFound: Queue.declare: (404) NOT_FOUND - no queue 'snacks' in vhost '/'",
        "The queue, or its exchange, was",
    ),
    ("ChannelError: (50, 60): (312) NO_ROUTE", "No queue is bound to its exchange"),
    ("basic.nack: the queue is full or not available", "The queue is full and rejects messages"),
    ("QueueNotFound: Queue 'snacks' missing from task_queues", "Name the queue in task_queues"),
    ("NoPermissionError: No permissions to access a key", "Allow the Redis user to write to the queue's key"),
    (
        "ResponseError: WRONGTYPE Operation against a key holding the wrong kind of value",
        "The queue's key in Redis is not a list",
    ),
    ("ReadOnlyError: You can't write against a read only replica.", "This Redis is a replica"),
    (
        "OutOfMemoryError: command not allowed when used memory > 'maxmemory'.",
        "Redis has reached maxmemory",
    ),
    ("ConnectionBlocked: low on memory", "RabbitMQ has raised a memory or disk alarm"),
    ("ConnectionRefusedError: [Errno 111] Connection refused", "Nothing listens there: start the broker"),
    ("gaierror: [Errno -2] snacks-broker.shop: Name or service not known", _UNKNOWN),
    ("", _UNKNOWN),
]


def test_each_refusal_has_its_own_remedy() -> None:
    for error, begins in REMEDIES:
        assert find_remedy(error).startswith(begins)
        assert find_remedy(error).endswith(".")


def test_an_error_of_the_database_has_a_remedy_of_its_own() -> None:
    pooler = "unsupported startup parameter: options"
    assert find_remedy(pooler, of="database") == (
        "Behind PgBouncer in transaction mode, set durable_prepared_statements = False."
    )
    assert find_remedy("Connection refused", of="database") == (
        "Is the server running, and is durable_database_url right?"
    )


DATABASE_REMEDIES = [
    ('connection failed: FATAL:  database "shop" does not exist', "Create the database, createdb shop, or"),
    ("(1049, \"Unknown database 'shop'\")", "Create the database, CREATE DATABASE `shop`, or"),
    ("cannot execute INSERT in a read-only transaction", "Name the server that takes writes"),
    ("(1290, 'The MariaDB server is running with the --read-only option')", "Name the server that takes writes"),
    ("attempt to write a readonly database", "Name the server that takes writes"),
    ("could not extend file: No space left on device", "The disk of the database is full"),
    ('FATAL:  password authentication failed for user "shop"', "Correct the user name and the password"),
    ('FATAL:  role "shop" does not exist', "Correct the user name and the password"),
    ("(1045, \"Access denied for user 'shop'@'localhost'\")", "Correct the user name and the password"),
    ("FATAL:  sorry, too many clients already", "Raise max_connections"),
    ("failed to resolve host 'db': [Errno -2] Name or service not known", "Correct the host"),
    ("unable to open database file", "Create the folder"),
]


def test_each_error_of_a_database_has_its_own_remedy() -> None:
    for error, begins in DATABASE_REMEDIES:
        assert find_remedy(error, of="database").startswith(begins)
