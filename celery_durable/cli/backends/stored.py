"""The backend of `celery -A proj durable`: the Durable of the app given by -A, and its database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.backend import (
    POLL_SECONDS,
    AttemptTail,
    Connection,
    InstanceSnapshot,
    ListQuery,
    LogTail,
    R,
    WorkflowInfo,
    make_tail,
)
from celery_durable.cli.errors import UNREACHABLE, CliError
from celery_durable.cli.inputs import Given
from celery_durable.errors import DurableError, StoreUnavailable, WorkflowNotFound
from celery_durable.insight.explain import Diagnosis, explain
from celery_durable.insight.explain.due import find_remedy
from celery_durable.model import (
    EventWait,
    History,
    InstanceSummary,
    LimitDetails,
    LimitRecord,
    LogLevel,
    LogRecord,
    Page,
    Permission,
    Published,
    RunRef,
    Stats,
    WaitFilter,
)
from celery_durable.redaction import Redaction, redact_limit_details
from celery_durable.store.engine.faults import find_driver_error, is_transient
from celery_durable.store.instances import instances
from celery_durable.store.migrations import migrate
from celery_durable.testing import databases

if TYPE_CHECKING:
    from celery_durable.commands import A, Command, Q, Target
    from celery_durable.wire.requests import ChangeLimit

RECORDS_PER_PAGE = 1000
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
        if databases.is_without_store(durable):
            if not databases.DEV_FILE.exists():
                raise CliError(
                    "durable_database_url is not set.",
                    "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db', or try "
                    "SQLite in this directory: celery -A <your app> durable dev",
                )
            databases.join_dev_store(durable)
            click.echo(f"durable_database_url is not set: using ./{databases.DEV_FILE} of `durable dev`", err=True)
    return durable


@contextmanager
def reaching_database() -> Iterator[None]:
    """Convert the errors of a first connection to CliError. Each driver raises its own errors."""
    try:
        yield
    except StoreUnavailable as exc:
        raise _unreachable(exc) from exc
    except (DurableError, click.ClickException):
        raise
    except ModuleNotFoundError as exc:
        raise CliError(
            f"The database driver is not installed: {exc}.",
            'Begin durable_database_url with postgresql+psycopg:// and pip install "celery-durable[postgres]", or with '
            'mysql+pymysql:// and pip install "celery-durable[mysql]"',
        ) from exc
    except Exception as exc:
        if getattr(exc, "orig", None) is None:  # no driver was asked
            raise CliError(f"durable_database_url cannot be used: {exc}") from exc
        raise _unreachable(exc) from exc


def _unreachable(exc: Exception) -> CliError:
    reason = str(find_driver_error(exc))
    remedy = find_remedy(reason, of="database")
    if isinstance(exc, StoreUnavailable) and exc.is_in_doubt:
        remedy = f"The change may have been applied: look before you try again. {remedy}"
    return CliError(f"The database cannot be used: {reason}", remedy, exit_code=UNREACHABLE)


def database_now(durable: Durable) -> datetime:
    """Return the current time of the database, whose clock wrote all stored times."""
    return durable.internals.store.read(instances.read_clock)


class StoreConnection(Connection):
    def __init__(self, ctx: click.Context) -> None:
        self._ctx = ctx

    def open(self, *, needs_database: bool = True) -> StoreBackend:
        return StoreBackend(open_durable(self._ctx) if needs_database else attached_durable(self._ctx))

    def explain(self, exc: Exception) -> None:
        if is_transient(exc):
            raise _unreachable(exc) from exc


class StoreBackend:
    """Instances in the database of a Durable, of any workflow; all values pass the application's redaction hook."""

    def __init__(self, durable: Durable) -> None:
        self._durable, self._internals = durable, durable.internals
        self.runtime = self._internals.runtime

    def now(self) -> datetime:
        return database_now(self._durable)

    def workflows(self) -> list[WorkflowInfo]:
        """Return the workflows that a worker of this app would know."""
        self._durable.app.loader.import_default_modules()
        registry, queue = self._internals.registry, self._internals.settings.queue
        known = [registry.get(name) for name in sorted(registry)]
        return [
            WorkflowInfo(each.name, each.params.parameters, each.queue or queue, each.source_location) for each in known
        ]

    def list(self, query: ListQuery) -> Page[InstanceSummary]:
        found = self._internals.operations.queries.list(
            query.workflow, status=query.status, cursor=query.cursor, limit=query.limit, labels=query.labels
        )
        if not found.items and query.cursor is None and query.workflow is not None:
            self._check_workflow(query.workflow)
        redaction = self._internals.redaction
        items = tuple(redaction(each.workflow, each.id).redact_summary(each) for each in found.items)
        return Page(items, found.cursor)

    def _check_workflow(self, name: str) -> None:
        """Raise WorkflowNotFound if this app does not know the workflow and the database has no instance of it."""
        is_known = name in {each.name for each in self.workflows()}
        if not is_known and not self._internals.operations.queries.list(name, limit=1).items:
            raise WorkflowNotFound(name, [])

    def read_snapshot(self, workflow: str, instance_id: str) -> InstanceSnapshot:
        found = self._internals.operations.queries.read_with_tag(workflow, instance_id)
        row = found.instance
        return InstanceSnapshot(row.status, row.run_number, found.tag, row.created_at)

    def wait_for_change(
        self, workflow: str, instance_id: str, version: object | None, *, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """Read one row. Without a change, pause for one poll interval at most; the caller polls."""
        seen = self.read_snapshot(workflow, instance_id)
        if seen.version != version:
            return seen
        if wait_seconds > 0:
            self.runtime.sleep(min(POLL_SECONDS, wait_seconds))
        return None

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        found = self._internals.operations.history.read(workflow, instance_id, run=run)
        return self._internals.redaction(workflow, instance_id).redact_history(found)

    def tail(self, ref: RunRef, *, level: LogLevel | None = None, category: str | None = None) -> LogTail:
        levels = None if level is None else _LEVELS[_LEVELS.index(level) :]

        def read(**page: Any) -> list[LogRecord]:
            return self._internals.operations.history.logs(**page, levels=levels, category=category)

        return self._tail(ref, read, self._redaction(ref).redact_log)

    def tail_attempts(self, ref: RunRef) -> AttemptTail:
        return self._tail(ref, self._internals.operations.history.attempts, self._redaction(ref).redact_attempt)

    def _tail(
        self, ref: RunRef, read: Callable[..., Sequence[R]], redact: Callable[[R], R]
    ) -> Callable[[], Iterator[R]]:
        of_run = {"workflow": ref.workflow, "instance_id": ref.instance_id, "run": ref.run_number}

        def read_page(after_id: int | None) -> tuple[Iterable[R], int | None, bool]:
            page = read(**of_run, after_id=after_id or 0, limit=RECORDS_PER_PAGE)
            return map(redact, page), page[-1].id if page else after_id, len(page) == RECORDS_PER_PAGE

        return make_tail(read_page)

    def published(self, ref: RunRef) -> dict[str, Published]:
        found = self._internals.operations.history.published(ref.workflow, ref.instance_id, run=ref.run_number)
        return self._redaction(ref).redact_published(found)

    def _redaction(self, ref: RunRef) -> Redaction:
        return self._internals.redaction(ref.workflow, ref.instance_id)

    def stats(self) -> Stats:
        """Count in the database, and ask the broker for the queues of the workflows that a worker would know."""
        self._durable.app.loader.import_default_modules()
        return self._internals.operations.stats.read(self._internals.queue_lengths())

    def waits(self, chosen: WaitFilter, *, cursor: str | None, limit: int) -> Page[EventWait]:
        page = self._internals.operations.stats.waits(chosen, cursor=cursor, limit=limit)
        redaction = self._internals.redaction
        items = (redaction(each.workflow, each.instance_id).redact_wait(each) for each in page.items)
        return Page(tuple(items), page.cursor)

    def limits(self, *, cursor: str | None, limit: int) -> Page[LimitRecord]:
        page = self._internals.operations.limits.list(cursor=cursor, limit=limit)
        return Page(tuple(map(self._internals.redaction("", "").redact_limit, page.items)), page.cursor)

    def limit(self, name: str, key: str) -> LimitDetails:
        return redact_limit_details(self._internals.redaction, self._internals.operations.limits.get(name, key=key))

    def change_limit(self, name: str, body: ChangeLimit) -> None:
        from celery_durable import commands

        commands.change_limit(self._internals.operations, name, body)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        facts = self._internals.operations.queries.facts(workflow, instance_id)
        return explain(facts.redacted(self._internals.redaction(workflow, instance_id)))

    def call(self, command: Command[Q, A], target: Target, body: Q) -> A:
        """Call the operation. If it may create an instance, import the app's workflows before."""
        if command.permission is Permission.CREATION:
            self._durable.app.loader.import_default_modules()
        return command.run(self._internals.operations, target, body)
