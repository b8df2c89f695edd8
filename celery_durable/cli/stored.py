"""The direct way: the Durable of the app named by -A, its database, and its instances for the verbs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from celery_durable.app import Durable
from celery_durable.cli import embedded
from celery_durable.cli.backend import POLL_SECONDS, InstanceSnapshot, WorkflowInfo
from celery_durable.cli.command import UNREACHABLE, CliError
from celery_durable.errors import DurableError
from celery_durable.explain import Diagnosis, explain
from celery_durable.model import (
    History,
    InstanceSummary,
    LogLevel,
    LogRecord,
    Page,
    Published,
    RestartOrCreateResult,
    Status,
)
from celery_durable.operations import Operations
from celery_durable.redaction import Redaction
from celery_durable.store import migrate, schedule
from celery_durable.store.engine import Store

LOGS_PER_PAGE = 1000
_LEVELS = list(LogLevel)  # from the least to the most important


def attached_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A."""
    app = ctx.obj.app
    found = getattr(app, "durable", None)
    if found is None:
        app.loader.import_default_modules()  # it may be attached in a module that only workers import
        found = getattr(app, "durable", None)
    if isinstance(found, Durable):
        return found
    if ctx.find_root().params.get("app") is None and app.main == "default":
        raise CliError(
            "No Celery app was named, so there is no database to look into.",
            f"Name it before the verb: celery -A proj durable {ctx.info_name} (or set CELERY_APP=proj)",
            exit_code=click.UsageError.exit_code,
        )
    raise CliError(
        f"The Celery app {app.main!r} has no Durable.",
        "Attach one where the app is made: from celery_durable import Durable; durable = Durable(app)",
    )


def open_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A, with its database reached and its tables up to date."""
    durable = stored_durable(ctx)
    with reaching_database():
        migrate.check_revision(durable.internals.store)
    return durable


def stored_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A, with a database: its own, or else that of `durable dev` in this directory."""
    durable = attached_durable(ctx)
    with reaching_database():
        if embedded.is_without_store(durable):
            if not embedded.DEV_FILE.exists():
                raise CliError(
                    "durable_database_url is not set.",
                    "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db', or try "
                    "SQLite in this directory: celery -A <your app> durable dev",
                )
            embedded.join_dev_store(durable)
            click.echo(f"durable_database_url is not set: using ./{embedded.DEV_FILE} of `durable dev`", err=True)
    return durable


@contextmanager
def reaching_database() -> Iterator[None]:
    """Turn what the first connection may raise into a refusal: many drivers, many errors, one meaning."""
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


def raise_if_unreachable(exc: Exception) -> None:
    """Raise a refusal where an error says that the database has gone away."""
    if Store.is_transient(exc):
        raise _unreachable(exc) from exc


def _unreachable(exc: Exception) -> CliError:
    reason = getattr(exc, "orig", None) or exc
    hint = "Is the server running, and is durable_database_url right?"
    return CliError(f"The database cannot be reached: {reason}", hint, exit_code=UNREACHABLE)


def database_now(durable: Durable) -> datetime:
    """The database's time, by which everything shown was written."""
    return durable.internals.store.read(schedule.read_next_due)[1]


class StoreBackend:
    """The instances in the store of a Durable; also those of workflows that this process has never heard of.

    What it shows of values the application's redaction has let through.
    """

    def __init__(self, durable: Durable) -> None:
        self.durable = durable

    @property
    def _operations(self) -> Operations:
        return self.durable.internals.operations

    def now(self) -> datetime:
        """The database's time."""
        return database_now(self.durable)

    def monotonic(self) -> float:
        """On the app's clock."""
        return self.durable.internals.runtime.monotonic()

    def sleep(self, seconds: float) -> None:
        """On the app's clock."""
        self.durable.internals.runtime.sleep(seconds)

    def workflows(self) -> list[WorkflowInfo]:
        """Those that a worker of this app would know."""
        self.durable.app.loader.import_default_modules()
        registry, queue = self.durable.internals.registry, self.durable.internals.settings.queue
        known = [registry.get(name) for name in sorted(registry)]
        return [WorkflowInfo(each.name, each.queue or queue, each.where) for each in known]

    def list(
        self,
        workflow: str | None,
        *,
        status: Status | None,
        cursor: str | None,
        limit: int,
        labels: Mapping[str, str] | None = None,
    ) -> Page[InstanceSummary]:
        """Also of all workflows."""
        found = self._operations.list(workflow, status=status, cursor=cursor, limit=limit, labels=labels)
        return Page(
            tuple(self.durable.internals.redaction(each.workflow, each.id).summary(each) for each in found.items),
            found.cursor,
        )

    def read_snapshot(
        self, workflow: str, instance_id: str, *, known_version: object = None, wait_seconds: float = 0.0
    ) -> InstanceSnapshot | None:
        """One row; what has not changed is looked at again after a while, by the caller."""
        found = self._operations.read_with_tag(workflow, instance_id)
        row = found.instance
        if found.tag == known_version:
            if wait_seconds > 0:
                self.sleep(min(POLL_SECONDS, wait_seconds))
            return None
        return InstanceSnapshot(row.status, row.run_number, row.pause_requested, found.tag, row.created_at)

    def history(self, workflow: str, instance_id: str, *, run: int | None = None) -> History:
        """From one transaction."""
        found = self._operations.history(workflow, instance_id, run=run)
        return self.durable.internals.redaction(workflow, instance_id).history(found)

    def tail(
        self, workflow: str, instance_id: str, *, run: int, level: LogLevel | None = None, category: str | None = None
    ) -> StoredLogTail:
        """By the lines' ids."""
        levels = None if level is None else _LEVELS[_LEVELS.index(level) :]
        filters = {"run": run, "levels": levels, "category": category}
        redaction = self.durable.internals.redaction(workflow, instance_id)
        return StoredLogTail(self._operations, (workflow, instance_id), filters, redaction)

    def published(self, workflow: str, instance_id: str, *, run: int) -> dict[str, Published]:
        """From one look."""
        found = self._operations.published(workflow, instance_id, run=run)
        return self.durable.internals.redaction(workflow, instance_id).published(found)

    def explain(self, workflow: str, instance_id: str) -> Diagnosis:
        """From the database alone."""
        facts = self._operations.facts(workflow, instance_id)
        return explain(self.durable.internals.redaction(workflow, instance_id).facts(facts))

    def create(self, workflow: str, params: Any, *, id: str | None, labels: Mapping[str, str] | None = None) -> str:
        """The app's workflows are imported before."""
        self.durable.app.loader.import_default_modules()
        return self._operations.create(workflow, params, id=id, labels=labels)

    def restart_or_create(
        self, workflow: str, params: Any, *, id: str, labels: Mapping[str, str]
    ) -> RestartOrCreateResult:
        """The app's workflows are imported before."""
        self.durable.app.loader.import_default_modules()
        return self._operations.restart_or_create(workflow, params, id=id, labels=labels)

    def send_event(self, workflow: str, instance_id: str, type_: str, payload: Any, *, id: str | None) -> bool:
        """Wakes the workers over the app's broker, as all that follow."""
        return self._operations.send_event(workflow, instance_id, type_, payload, id=id)

    def pause(self, workflow: str, instance_id: str) -> None:
        """Asks, where somebody works on it."""
        self._operations.pause(workflow, instance_id)

    def resume(self, workflow: str, instance_id: str) -> None:
        """Takes back a pause that has not happened yet."""
        self._operations.resume(workflow, instance_id)

    def terminate(self, workflow: str, instance_id: str, *, reason: str | None) -> None:
        """Raises InstanceTerminal."""
        self._operations.terminate(workflow, instance_id, reason=reason)

    def restart(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """From any state."""
        return self._operations.restart(workflow, instance_id, reason=reason)

    def retry(self, workflow: str, instance_id: str, *, reason: str | None) -> int:
        """Raises InstanceNotErrored."""
        return self._operations.retry(workflow, instance_id, reason=reason)

    def rewind(self, workflow: str, instance_id: str, step: str, *, reason: str | None) -> int:
        """Raises StepNotFound."""
        return self._operations.restart(workflow, instance_id, from_step=step, reason=reason)

    def set_result(self, workflow: str, instance_id: str, step: str, value: Any, *, by: str, reason: str | None) -> int:
        """Raises StepNotFound, StepNotOpen."""
        return self._operations.set_result(workflow, instance_id, step, value, by=by, reason=reason)

    def skip(self, workflow: str, instance_id: str, step: str, *, by: str, reason: str | None) -> int:
        """Raises StepNotFound, StepNotOpen."""
        return self._operations.skip(workflow, instance_id, step, by=by, reason=reason)

    def fork(self, workflow: str, instance_id: str, step: str, *, id: str | None) -> str:
        """Raises StepNotFound, InstanceAlreadyExists."""
        return self._operations.fork(workflow, instance_id, step, id=id)


class StoredLogTail:
    """The log lines of a run, each read once."""

    def __init__(
        self, operations: Operations, target: tuple[str, str], filters: Mapping[str, Any], redaction: Redaction
    ) -> None:
        self._operations, self._target, self._filters, self._redaction = operations, target, filters, redaction
        self._last_id = 0

    def read_new_lines(self) -> Iterator[LogRecord]:
        """In pages; what is written meanwhile comes too."""
        while True:
            page = self._operations.logs(*self._target, after_id=self._last_id, limit=LOGS_PER_PAGE, **self._filters)
            for line in page:
                self._last_id = line.id
                yield self._redaction.log(line)
            if len(page) < LOGS_PER_PAGE:
                return
