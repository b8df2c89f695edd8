"""The backend of `celery -A proj durable`: the Durable of the app given by -A, and its database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.backend import POLL_SECONDS, Connection, InstanceSnapshot, ListQuery, WorkflowInfo
from celery_durable.cli.errors import UNREACHABLE, CliError
from celery_durable.cli.inputs import Given
from celery_durable.errors import DurableError
from celery_durable.explain import Diagnosis, explain
from celery_durable.model import History, InstanceSummary, LogLevel, LogRecord, Page, Published
from celery_durable.operations import Operations
from celery_durable.operations.history import HistoryOperations
from celery_durable.redaction import Redaction
from celery_durable.runtime import Runtime
from celery_durable.store import migrate, schedule
from celery_durable.store.engine import Store
from celery_durable.testing import local_servers
from celery_durable.wire.permissions import Permission

if TYPE_CHECKING:
    from celery_durable.commands import A, Command, Q, Target

LOGS_PER_PAGE = 1000
_LEVELS = list(LogLevel)  # from the least to the most important


def attached_durable(ctx: click.Context) -> Durable:
    """Return the Durable of the app given by -A; raises CliError."""
    app = ctx.obj.app
    found = getattr(app, "durable", None)
    if found is None:
        app.loader.import_default_modules()  # it may be attached in a module that only workers import
        found = getattr(app, "durable", None)
    if isinstance(found, Durable):
        return found
    if ctx.find_root().params.get("app") is None and app.main == "default":
        raise CliError(
            "No Celery app was given, so the database is unknown.",
            f"Give it before the command: celery -A proj durable {ctx.info_name} (or set CELERY_APP=proj)",
            exit_code=click.UsageError.exit_code,
        )
    raise CliError(
        f"The Celery app {app.main!r} has no Durable.",
        "Create one where you create the app: from celery_durable import Durable; durable = Durable(app)",
    )


def open_durable(ctx: click.Context) -> Durable:
    """Return the Durable of the app given by -A, after checking that its tables are up to date."""
    durable = stored_durable(ctx)
    with reaching_database():
        migrate.check_revision(durable.internals.store)
    return durable


OpenDurable = Annotated[Durable, Given(open_durable)]


def stored_durable(ctx: click.Context) -> Durable:
    """Return the Durable of the app given by -A. Without a database of its own it uses that of `durable dev`."""
    durable = attached_durable(ctx)
    with reaching_database():
        if local_servers.is_without_store(durable):
            if not local_servers.DEV_FILE.exists():
                raise CliError(
                    "durable_database_url is not set.",
                    "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db', or try "
                    "SQLite in this directory: celery -A <your app> durable dev",
                )
            local_servers.join_dev_store(durable)
            click.echo(f"durable_database_url is not set: using ./{local_servers.DEV_FILE} of `durable dev`", err=True)
    return durable


@contextmanager
def reaching_database() -> Iterator[None]:
    """Convert the errors of a first connection to CliError. Each driver raises its own errors."""
    try:
        yield
    except (DurableError, click.ClickException):
        raise
    except ModuleNotFoundError as exc:
        raise CliError(
            f"The database driver is not installed: {exc}.",
            'Install it, for example pip install "celery-durable[postgres]" or "celery-durable[mysql]"',
        ) from exc
    except Exception as exc:
        if getattr(exc, "orig", None) is None:  # no driver was asked
            raise CliError(f"durable_database_url cannot be used: {exc}") from exc
        raise _unreachable(exc) from exc


def _unreachable(exc: Exception) -> CliError:
    reason = getattr(exc, "orig", None) or exc
    hint = "Is the server running, and is durable_database_url right?"
    return CliError(f"The database cannot be reached: {reason}", hint, exit_code=UNREACHABLE)


def database_now(durable: Durable) -> datetime:
    """Return the current time of the database, whose clock wrote all stored times."""
    return durable.internals.store.read(schedule.read_next_due)[1]


class StoreConnection(Connection):
    """The connection to the database of the app given by -A."""

    def __init__(self, ctx: click.Context) -> None:
        self._ctx = ctx

    def open(self) -> StoreBackend:
        """Return the backend, after checking that the tables are up to date."""
        return StoreBackend(open_durable(self._ctx))

    def explain(self, exc: Exception) -> None:
        """Raise CliError if the database is unreachable."""
        if Store.is_transient(exc):
            raise _unreachable(exc) from exc


class StoreBackend:
    """Instances in the database of a Durable, also those of workflows that this process does not know.

    All values pass the application's redaction hook.
    """

    def __init__(self, durable: Durable) -> None:
        self.durable = durable

    @property
    def _operations(self) -> Operations:
        return self.durable.internals.operations

    def now(self) -> datetime:
        """Return the time of the database."""
        return database_now(self.durable)

    @property
    def runtime(self) -> Runtime:
        """The app's."""
        return self.durable.internals.runtime

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that a worker of this app would know."""
        self.durable.app.loader.import_default_modules()
        registry, queue = self.durable.internals.registry, self.durable.internals.settings.queue
        known = [registry.get(name) for name in sorted(registry)]
        return [WorkflowInfo(each.name, each.queue or queue, each.source_location) for each in known]

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        """Return a page of instances of a workflow, or of all workflows."""
        found = self._operations.queries.list(
            query.workflow, status=query.status, cursor=query.cursor, limit=query.limit, labels=query.labels
        )
        redaction = self.durable.internals.redaction
        items = tuple(redaction(each.workflow, each.id).redact_summary(each) for each in found.items)
        return Page(items, found.cursor)

    def read_snapshot(
        self, workflow: str, instance_id: str, *, known_version: object = None, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Read one row. Without a change, pause for one poll interval at most; the caller polls."""
        found = self._operations.queries.read_with_tag(workflow, instance_id)
        row = found.instance
        if found.tag == known_version:
            if wait_seconds > 0:
                self.runtime.sleep(min(POLL_SECONDS, wait_seconds))
            return None
        return InstanceSnapshot(row.status, row.run_number, row.pause_requested, found.tag, row.created_at)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """Read the history in one transaction."""
        found = self._operations.history.read(workflow, instance_id, run=run)
        return self.durable.internals.redaction(workflow, instance_id).redact_history(found)

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> StoredLogTail:
        """Return a reader that continues after the last line's id."""
        levels = None if level is None else _LEVELS[_LEVELS.index(level) :]
        filters = {"run": run, "levels": levels, "category": category}
        redaction = self.durable.internals.redaction(workflow, instance_id)
        return StoredLogTail(self._operations.history, (workflow, instance_id), filters, redaction)

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """Read the published values in one transaction."""
        found = self._operations.history.published(workflow, instance_id, run=run)
        return self.durable.internals.redaction(workflow, instance_id).redact_published(found)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """Diagnose the instance from the database alone."""
        facts = self._operations.queries.facts(workflow, instance_id)
        return explain(self.durable.internals.redaction(workflow, instance_id).redact_facts(facts))

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A:
        """Call the operation. If it may create an instance, import the app's workflows before."""
        if command.permission is Permission.CREATION:
            self.durable.app.loader.import_default_modules()
        return command.run(self._operations, target, body)


class StoredLogTail:
    """Reads each log line of a run once."""

    def __init__(
        self, history: HistoryOperations, target: tuple[str, str], filters: Mapping[str, Any], redaction: Redaction
    ) -> None:
        self._history, self._target, self._filters, self._redaction = history, target, filters, redaction
        self._last_id = 0

    def read_new_lines(self) -> Iterator[LogRecord]:
        """Yield the new lines, page by page, including lines that are written meanwhile."""
        while True:
            page = self._history.logs(*self._target, after_id=self._last_id, limit=LOGS_PER_PAGE, **self._filters)
            for line in page:
                self._last_id = line.id
                yield self._redaction.redact_log(line)
            if len(page) < LOGS_PER_PAGE:
                return
