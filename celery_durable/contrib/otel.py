"""OpenTelemetry traces: a span for each pass over a run and for each call of a step's function.

Needs ``celery-durable[otel]``. Call `instrument` in every process. A pass belongs to the trace of the process that sent
its dispatch message, because the message's headers carry the trace context. Without these headers, the pass starts a
new trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery import current_task
from celery.signals import before_task_publish
from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from celery_durable import signals
from celery_durable.tasks import ADVANCE

__all__ = ["Tracing", "instrument"]


@dataclass(slots=True)
class _Pass:
    """A pass, its span, and the spans of its attempts whose outcome is not committed yet, by step key."""

    span: Span
    attempts: dict[str, _AttemptSpan] = field(default_factory=dict)

    def begin_attempt(self, step_key: str, span: _AttemptSpan) -> None:
        """Add the span of a body that will run now. An earlier call of the same body has no outcome."""
        self.end_without_outcome(step_key)
        self.attempts[step_key] = span

    def end_attempt(self, step_key: str, error_name: str | None, exception: BaseException | None) -> None:
        """End the span of an attempt whose outcome is committed. A step without a body, such as a sleep, has none."""
        span = self.attempts.pop(step_key, None)
        if span is not None:
            span.end(error_name, exception)

    def end_without_outcome(self, step_key: str) -> None:
        """End the span of a body that has no outcome, for example because its transaction or a race was lost."""
        span = self.attempts.pop(step_key, None)
        if span is not None:
            span.end_with_body()

    def end_all(self) -> None:
        """End the spans that are left at the end of the pass."""
        for step_key in list(self.attempts):
            self.end_without_outcome(step_key)


_current: ContextVar[_Pass | None] = ContextVar("celery_durable_pass", default=None)


class Tracing:
    """Creates spans while it is connected."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("celery_durable", tracer_provider=tracer_provider)
        self._receivers = (
            (signals.workflow_suspended, self._on_suspended),
            (signals.workflow_completed, self._on_completed),
            (signals.workflow_failed, self._on_failed),
            (signals.step_completed, self._on_attempt),
            (signals.step_retrying, self._on_attempt),
            (signals.step_failed, self._on_attempt),
        )

    def connect(self) -> None:
        """Start creating spans."""
        signals.around_pass.connect(self._pass)
        signals.around_step.connect(self._step)
        for signal, receiver in self._receivers:
            signals.listen(signal, receiver)
        before_task_publish.connect(_inject, sender=ADVANCE, weak=False)

    def disconnect(self) -> None:
        """Stop creating spans."""
        signals.around_pass.disconnect(self._pass)
        signals.around_step.disconnect(self._step)
        for signal, receiver in self._receivers:
            signals.ignore(signal, receiver)
        before_task_publish.disconnect(_inject, sender=ADVANCE)

    @contextmanager
    def _pass(self, workflow: str, instance_id: str, run_number: int, latency: timedelta) -> Iterator[None]:
        attributes = _attributes(workflow, instance_id, run_number, latency=latency.total_seconds())
        with self._tracer.start_as_current_span(
            f"durable.pass {workflow}",
            context=_woken_by(),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            pass_ = _Pass(span)
            token = _current.set(pass_)
            try:
                yield
            except Exception as exc:
                _record(span, exc)
                raise
            except BaseException as exc:  # the pass is superseded, or its worker stops
                span.set_attribute("celery_durable.outcome", type(exc).__name__)
                raise
            finally:
                pass_.end_all()
                _current.reset(token)

    def _step(
        self, *, workflow: str, instance_id: str, run_number: int, step: str, step_key: str, attempt: int
    ) -> AbstractContextManager[None]:
        attributes = _attributes(workflow, instance_id, run_number, step=step, attempt=attempt)
        # Called on the thread of the pass, whose span is the parent. The result is entered on the body's thread.
        span = _AttemptSpan(self._tracer, f"durable.step {step}", attributes)
        pass_ = _current.get()
        if pass_ is not None:
            pass_.begin_attempt(step_key, span)
        return span.around()

    def _on_attempt(
        self, step_key: str, error_name: str | None = None, exception: BaseException | None = None, **_: Any
    ) -> None:
        pass_ = _current.get()
        if pass_ is not None:
            pass_.end_attempt(step_key, error_name, exception)

    def _on_suspended(self, status: str, **_: Any) -> None:
        _mark(status)

    def _on_completed(self, **_: Any) -> None:
        _mark("complete")

    def _on_failed(self, error_name: str, exception: BaseException | None = None, **_: Any) -> None:
        span = _mark("errored")
        if span is not None:
            if exception is not None:
                span.record_exception(exception)
            span.set_status(Status(StatusCode.ERROR, error_name))


class _AttemptSpan:
    """The span of one call of a step's body.

    It ends when the outcome is committed, which may fail the attempt; without one, with the body, which may run on a
    thread of its own, and may outlive its timeout: the span has ended then.
    """

    def __init__(self, tracer: Tracer, name: str, attributes: dict[str, Any]) -> None:
        self._tracer, self._name, self._attributes = tracer, name, attributes
        self._parent, self._lock = context.get_current(), threading.Lock()
        self._span: Span | None = None
        self._is_over = False
        self._body_ended_at_ns: int | None = None
        self._raised: BaseException | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Make the span the current one while the body runs."""
        token = context.attach(self._parent)
        try:
            with self._lock:
                if not self._is_over:
                    self._span = self._tracer.start_span(self._name, attributes=self._attributes)
                span = self._span
            if span is None:  # the attempt timed out before its thread started
                yield
                return
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                try:
                    yield
                except BaseException as exc:
                    self._end_body(span, exc)
                    raise
                self._end_body(span, None)
        finally:
            context.detach(token)

    def _end_body(self, span: Span, raised: BaseException | None) -> None:
        with self._lock:
            self._body_ended_at_ns = time.time_ns()  # noqa: TID251  # the SDK's own clock, which spans begin and end by
            self._raised = raised
            if raised is not None and not self._is_over:
                _record(span, raised)

    def end(self, error_name: str | None, exception: BaseException | None) -> None:
        """End the span now, with status ERROR if the attempt failed."""
        with self._lock:
            self._is_over = True
            if self._span is None:
                return
            if error_name is not None:
                if exception is not None and self._raised is None:
                    self._span.record_exception(exception)
                self._span.set_status(Status(StatusCode.ERROR, error_name))
            self._span.end()

    def end_with_body(self) -> None:
        """End the span as of the end of its body, or now if the body still runs."""
        with self._lock:
            self._is_over = True
            if self._span is not None:
                self._span.end(self._body_ended_at_ns)


def instrument(tracer_provider: TracerProvider | None = None) -> Tracing:
    """Create spans in this process and in the processes that it forks.

    Args:
        tracer_provider: The provider of the tracer. None: the global one.

    Returns:
        The connected `Tracing`. Call its ``disconnect()`` to stop.
    """
    tracing = Tracing(tracer_provider)
    tracing.connect()
    return tracing


def _attributes(workflow: str, instance_id: str, run_number: int, **more: Any) -> dict[str, Any]:
    given = {"workflow": workflow, "instance_id": instance_id, "run_number": run_number, **more}
    return {f"celery_durable.{name}": value for name, value in given.items()}


def _record(span: Span, exc: BaseException) -> None:
    span.record_exception(exc)
    span.set_status(Status(StatusCode.ERROR, type(exc).__name__))


def _mark(outcome: str) -> Span | None:
    """Set the outcome on the span of this thread's pass, and return it. Returns None if the pass has none."""
    pass_ = _current.get()
    if pass_ is None:
        return None
    pass_.span.set_attribute("celery_durable.outcome", outcome)
    return pass_.span


def _inject(headers: dict[str, Any], **_: Any) -> None:
    """Add the current trace context to the message. Headers that another instrumentation has set are kept."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    for name, value in carrier.items():
        headers.setdefault(name, value)


def _woken_by() -> Context:
    """Return the parent context of a pass: the active span, or else the context in the message."""
    here = context.get_current()
    if trace.get_current_span(here).get_span_context().is_valid:
        return here
    if getattr(current_task, "name", None) != ADVANCE:  # a proxy; it stands for None if no task runs
        return here
    return propagate.extract(current_task.request.headers or {}, context=here)
