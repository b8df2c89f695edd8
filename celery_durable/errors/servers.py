"""Errors of the database, and of the broker when messages are published."""

from __future__ import annotations

from collections.abc import Sequence

from celery_durable.errors.base import DurableError


class StoreMismatch(DurableError):
    """``session=`` is bound to a different database than the one that stores the workflows.

    One transaction cannot span both. Bind the session to the store's database, or leave out ``session=``.

    Attributes:
        session_url: The URL of the session's database.
        store_url: The URL of the store's database.
    """

    code = "STORE_MISMATCH"

    def __init__(self, session_url: str, store_url: str) -> None:
        self.session_url, self.store_url = session_url, store_url
        super().__init__(
            f"The session is bound to {session_url}, but workflows are stored in {store_url}. One transaction "
            "cannot span both: bind the session to the store's database, or leave out session=."
        )


class AliasMismatch(DurableError):
    """``using=`` names another database of Django than the one with the workflows.

    One transaction cannot span both. Put the call into ``transaction.atomic(using=...)`` of the workflows' database.

    Attributes:
        using: The alias that the call named.
        alias: The alias of the workflows' database.
    """

    code = "ALIAS_MISMATCH"

    def __init__(self, using: str, alias: str, *, is_known: bool) -> None:
        self.using, self.alias = using, alias
        remedy = f"put the call into transaction.atomic(using={alias!r}), and leave out using= or pass {alias!r}"
        super().__init__(
            f"using={using!r}, but workflows are in the database {alias!r} (CELERY_DURABLE_DATABASE). One transaction "
            f"cannot span both: {remedy}. To start a workflow with rows in {using!r}, create it in "
            f"transaction.on_commit(..., using={using!r})."
            if is_known
            else f"using={using!r} is not in DATABASES. Workflows are in {alias!r}: {remedy}."
        )


class StoreUnavailable(DurableError):
    """The database cannot be reached, does not answer in time or takes no writes, or other transactions block it.

    An operation raises it after some tries, or at once if the database takes no writes.

    The error of the database is the ``__cause__``. An operation inside a transaction of the application raises that
    error itself.

    Attributes:
        reason: The first line of the database's error; None if it did not answer.
        is_in_doubt: Whether the connection was lost during the commit, so that the change may have been applied.
    """

    code, http_status = "STORE_UNAVAILABLE", 503

    def __init__(self, reason: str | None = None, *, is_in_doubt: bool = False) -> None:
        self.reason, self.is_in_doubt = reason, is_in_doubt
        fault = "The database does not answer" if reason is None else f"The database could not do this now: {reason}"
        remedy = "The change may have been applied: look, then try again" if is_in_doubt else "Try again"
        super().__init__(f"{fault.rstrip('.')}. {remedy} in a few seconds.")


class SchemaOutdated(DurableError):
    """The tables are missing, or older than this version of the package needs.

    Run ``celery -A proj durable migrate``, or call `Durable.migrate`.

    Attributes:
        found: The revision of the tables; None if there are none.
        expected: The revision that this version needs.
    """

    code = "SCHEMA_OUTDATED"

    def __init__(self, found: str | None, expected: str) -> None:
        self.found, self.expected = found, expected
        state = "has no celery_durable tables" if found is None else f"is at revision {found!r}"
        super().__init__(
            f"The database {state}; this version needs revision {expected!r}. "
            "Bring it up to date: celery -A <your app> durable migrate"
        )


class SchemaIncomplete(DurableError):
    """Tables or columns are missing, although the database is at the revision that this version needs.

    They were removed, or a restore left them out. Restore them from a backup, or create them as
    ``celery -A proj durable migrate --sql`` shows.

    Attributes:
        missing: The missing tables, as ``table``, and columns, as ``table.column``.
    """

    code = "SCHEMA_INCOMPLETE"

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        super().__init__(
            f"The database lacks {', '.join(self.missing)}, although its revision is current. Restore what is "
            "missing from a backup, or create it as this shows: celery -A <your app> durable migrate --sql"
        )


class UnsupportedDatabase(DurableError):
    """The database is of a kind or version that celery_durable does not support.

    Use PostgreSQL, MariaDB or SQLite; the message names the oldest versions.

    Attributes:
        found: The database and its version.
    """

    code = "UNSUPPORTED_DATABASE"

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"{found} is not supported. Use PostgreSQL 15 or newer, MariaDB 10.6 or newer, or SQLite 3.35 or newer."
        )


class NotInOutbox(DurableError):
    """The outbox holds no message with these ids: they were sent, dropped or never existed.

    List what it holds: ``celery -A proj durable outbox``.

    Attributes:
        ids: The ids that were not found.
    """

    code, http_status = "NOT_IN_OUTBOX", 404

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        super().__init__(
            f"Nothing in the outbox has the id {', '.join(map(repr, self.ids))}. Sent messages are removed; list the "
            "others: celery -A <your app> durable outbox"
        )


class NotGivenUp(DurableError):
    """A message in the outbox cannot be retried by hand, because it is still retried automatically.

    Wait; ``celery -A proj durable outbox --given-up`` lists those that are not.

    Attributes:
        id: The message's id.
        kind: "task" or "event".
        name: The name of the task or of the outbound event.
    """

    code, http_status = "NOT_GIVEN_UP", 409

    def __init__(self, id_: str, kind: str, name: str) -> None:
        self.id, self.kind, self.name = id_, kind, name
        what = "Task" if kind == "task" else "Outbound event"
        super().__init__(
            f"{what} {name!r} ({id_}) was not given up. It is still retried automatically; list what was given up: "
            "celery -A <your app> durable outbox --given-up"
        )
