"""Calls the handlers of linear steps, and builds the context, transaction and log that they receive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from celery_durable import notify, values
from celery_durable.config import Settings
from celery_durable.definitions import LinearDefinition
from celery_durable.errors import NonRetryableError, WorkflowParamsInvalid
from celery_durable.linear import LinearContext, TaskType
from celery_durable.model import LogLevel, LogLine, ReceivedEvent, StepRow, to_us
from celery_durable.runner.body_runner import idempotency_key
from celery_durable.runner.execution_context import Environment, encode_log_data
from celery_durable.runner.lease import Lease
from celery_durable.runner.published_values import PublishedValues
from celery_durable.runner.step_attempt import StepAttempt
from celery_durable.step import StepLog, StepTx, TxBuffer, restore_transaction_control
from celery_durable.store import run_events
from celery_durable.store.step_rows import RunState

_PLAIN = values.Codec()


class Handlers:
    """Finds the handlers of a run's steps by name, and builds their attempts."""

    def __init__(
        self,
        definition: LinearDefinition,
        env: Environment,
        lease: Lease,
        run_state: RunState,
        published: PublishedValues,
    ) -> None:
        self._definition, self._env, self._lease, self._run_state = definition, env, lease, run_state
        self._published = published

    def has_handler(self, row: StepRow) -> bool:
        """Whether the workflow's definition in this process has a handler for the row's step."""
        return row.name in self._definition.handlers

    def build_attempt(self, row: StepRow, rows: Sequence[StepRow]) -> StepAttempt:
        """Build the next attempt of a step; ``rows``: all rows of the run."""
        attempt, ref, handler = row.attempts + 1, self._lease.claim.ref, self._definition.handlers[row.name]

        def run() -> Any:
            return self._env.runtime.run_attempt(
                lambda: handler(self._build_context(row, rows, step_attempt)),
                workflow=ref.workflow,
                instance_id=ref.instance_id,
                step=row.name,
                number=attempt,
            )

        step_attempt = StepAttempt(
            step_key=row.step_key,
            number=attempt,
            call=notify.wrap_body(run, self._lease.claim, step=row.name, attempt=attempt),
            buffer=TxBuffer(),
            close_session=self.close_session,
            abandon_session=self._abandon_session,
            stops_process=self._env.stops_process,
            monotonic=self._env.runtime.monotonic,
            lease=self._lease,
        )
        return step_attempt

    def build_tx(self, row: StepRow, step_attempt: StepAttempt) -> StepTx:
        """Build the `StepTx` of this attempt."""
        # A handler that returns Waiting is called again and commits again. The suffix gives each commit its own
        # idempotency key, from which `StepTx` derives the ids of messages, events and instances.
        suffix = ""
        if row.event_seq is not None:
            suffix = f"/event {row.event_seq}"
        elif row.wake_at is not None:
            suffix = f"/timeout {to_us(row.wake_at)}"
        return StepTx(
            name=row.name,
            attempt=step_attempt.number,
            idempotency_key=idempotency_key(self._run_state.ancestry, row.step_key, suffix),
            buffer=step_attempt.buffer,
            open_session=lambda: self._open_session(step_attempt),
            limits=self._env.settings.limits,
        )

    def close_session(self, buffer: TxBuffer) -> None:
        """Close the session of an attempt, if it has one."""
        if buffer.session is not None:
            self._env.store.close_session(buffer.session)
            restore_transaction_control(
                buffer.session
            )  # a shared session factory may return the same session to the application

    def _open_session(self, step_attempt: StepAttempt) -> Any:
        step_attempt.buffer.session = self._env.store.open_session()
        step_attempt.check_not_abandoned()
        return step_attempt.buffer.session

    def _abandon_session(self, buffer: TxBuffer) -> None:
        if buffer.session is not None:
            self._env.store.abandon_session(buffer.session)

    def _build_context(self, row: StepRow, rows: Sequence[StepRow], step_attempt: StepAttempt) -> LinearContext:
        ref, event = self._lease.claim.ref, self._read_event(row)
        if event is not None:
            task_type = TaskType.EVENT
        else:
            task_type = TaskType.RUN if row.wait_event_type is None else TaskType.WAITING_TIMEOUT
        return LinearContext(
            task_type=task_type,
            step=row.name,
            seq=row.seq,
            attempt=step_attempt.number,
            params=self._decode_params(),
            results={each.name: _PLAIN.decode(each.result or "null") for each in rows if each.seq < row.seq},
            event=event,
            workflow=ref.workflow,
            instance_id=ref.instance_id,
            run_number=ref.run_number,
            version=self._run_state.definition_version or 0,
            tx=self.build_tx(row, step_attempt),
            log=StepLog(_HandlerLog(self._env.settings, step_attempt)),
            publish=functools.partial(self._publish, step_attempt),
        )

    def _publish(self, step_attempt: StepAttempt, key: str, value: Any) -> None:
        text = self._published.encode_value(key, value)
        step_attempt.check_not_abandoned()
        self._published.publish(key, text)

    def _decode_params(self) -> Any:
        try:
            return self._definition.params.decode(self._run_state.params)
        except values.ValidationFailed as exc:
            error = WorkflowParamsInvalid(self._definition.name, exc.problems)
            raise NonRetryableError(str(error), WorkflowParamsInvalid.__name__) from exc

    def _read_event(self, row: StepRow) -> ReceivedEvent[Any] | None:
        """Read the event that the step received, for its handler; None if it received none."""
        if row.event_seq is None:
            return None
        query = functools.partial(run_events.read_event, claim=self._lease.claim, seq=row.event_seq)
        found = self._env.store.transact(query, is_single_statement=True)
        return ReceivedEvent(found.type, _PLAIN.decode(found.payload), found.created_at)


class _HandlerLog:
    """Collects the log lines of a handler, which the commit of its outcome writes."""

    def __init__(self, settings: Settings, step_attempt: StepAttempt) -> None:
        self._settings, self._step_attempt = settings, step_attempt

    def log(self, level: LogLevel, message: str, category: str, data: dict[str, Any]) -> None:
        text = encode_log_data(self._settings, message, category, data)
        message = values.sanitize_text(message, self._settings.max_log_message)
        step_attempt = self._step_attempt
        step_attempt.logs.append(
            LogLine(level, category, message, text, step_attempt.step_key, step_attempt.number, is_replay=False)
        )
