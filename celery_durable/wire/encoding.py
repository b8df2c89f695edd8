"""Records as JSON, and back; and that of a whole run, for HTTP's pages, `export`, `-o json` and golden histories."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from celery_durable.model import AttemptRecord, EventRecord, History, LogRecord, Record, RunRecord, StepRecord
from celery_durable.model.record import WorkflowName

T = TypeVar("T")


_get_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def to_json(record: object) -> bytes:
    """Return a record as JSON text. Fields that are None are left out."""
    return _get_adapter(type(record)).dump_json(record, by_alias=True, exclude_none=True)


def to_data(record: object) -> dict[str, Any]:
    """Return a record as JSON data. Fields that are None are left out."""
    data: dict[str, Any] = _get_adapter(type(record)).dump_python(record, mode="json", by_alias=True, exclude_none=True)
    return data


def parse(type_: type[T], data: object) -> T:
    """Return the record of JSON data. Raises ValueError, which names the first field that is wrong."""
    try:
        found: T = _get_adapter(type_).validate_python(data)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        where = ".".join(map(str, error["loc"])) or "body"
        raise ValueError(f"{where}: {error['msg']}, not {error['input']!r}") from None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory(Record):
    """A run and its lists, or parts of them.

    Attributes:
        run_number: The number of the run, from 1.
        run: Its parameters, and its status or outcome.
        steps: In the order in which the workflow called them.
        events: In the order of arrival.
        attempts: The attempts that did not succeed, in the order of their ends.
        logs: The log lines, in the order in which they were written.
    """

    run_number: int
    run: RunRecord | None = None
    steps: Sequence[StepRecord]
    events: Sequence[EventRecord]
    attempts: Sequence[AttemptRecord] | None = None
    logs: Sequence[LogRecord] | None = None

    def to_history(self, workflow: str, instance_id: str) -> History:
        """Return the history of this run, whose lists are complete."""
        assert self.run is not None
        return History(
            **{field.name: getattr(self.run, field.name) for field in fields(RunRecord)},
            workflow=workflow,
            instance_id=instance_id,
            run_number=self.run_number,
            steps=tuple(self.steps),
            events=tuple(self.events),
            attempts=tuple(self.attempts or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun(RunHistory):
    """A complete run. ``version`` is that of the format."""

    version: Literal[1]
    workflow: WorkflowName
    instance_id: str
    run: RunRecord


def export_run(history: History, logs: Sequence[LogRecord] | None = None) -> ExportedRun:
    """Return the document of a run."""
    return ExportedRun(
        version=1,
        workflow=history.workflow,
        instance_id=history.instance_id,
        run_number=history.run_number,
        run=history,
        steps=history.steps,
        events=history.events,
        attempts=history.attempts,
        logs=logs,
    )
