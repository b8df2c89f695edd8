"""OpenTelemetry traces: a span for each pass over a run and for each call of a step's function.

Needs ``celery-durable[otel]``. Call `instrument` in every process. A pass belongs to the trace of the process that sent
its dispatch message, because the message's headers carry the trace context. Without these headers, the pass starts a
new trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from celery import current_task
from celery.signals import before_task_publish
from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from celery_durable import signals
from celery_durable.tasks import ADVANCE

__all__ = ["Tracing", "instrument"]

_Run = tuple[str, str, int]
_current: ContextVar[tuple[_Run, Span] | None] = ContextVar("celery_durable_span", default=None)
"""The pass that runs on this thread, and its span."""


class Tracing:
    """Creates spans while it is connected."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("celery_durable", tracer_provider=tracer_provider)
        self._receivers = (
            (signals.workflow_suspended, self._on_suspended),
            (signals.workflow_completed, self._on_completed),
            (signals.workflow_failed, self._on_failed),
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
            token = _current.set(((workflow, instance_id, run_number), span))
            try:
                yield
            except Exception as exc:
                _record(span, exc)
                raise
            except BaseException as exc:  # the pass is superseded, or its worker stops
                span.set_attribute("celery_durable.outcome", type(exc).__name__)
                raise
            finally:
                _current.reset(token)

    def _step(
        self, workflow: str, instance_id: str, run_number: int, step: str, attempt: int
    ) -> AbstractContextManager[None]:
        attributes = _attributes(workflow, instance_id, run_number, step=step, attempt=attempt)
        # Called on the thread of the pass, whose span is the parent. The result is entered on the body's thread.
        return self._attempt(f"durable.step {step}", context.get_current(), attributes)

    @contextmanager
    def _attempt(self, name: str, parent: Context, attributes: dict[str, Any]) -> Iterator[None]:
        token = context.attach(parent)
        try:
            with self._tracer.start_as_current_span(
                name, attributes=attributes, record_exception=False, set_status_on_exception=False
            ) as span:
                try:
                    yield
                except BaseException as exc:
                    _record(span, exc)
                    raise
        finally:
            context.detach(token)

    def _on_suspended(self, status: str, **run: Any) -> None:
        _mark(run, status)

    def _on_completed(self, **run: Any) -> None:
        _mark(run, "complete")

    def _on_failed(self, error_name: str, **run: Any) -> None:
        span = _mark(run, "errored")
        if span is not None:
            span.set_status(Status(StatusCode.ERROR, error_name))


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


def _mark(run: dict[str, Any], outcome: str) -> Span | None:
    """Set the outcome on the span of this thread's pass. Returns None if the signal is about another run."""
    found = _current.get()
    if found is None or found[0] != (run["workflow"], run["instance_id"], run["run_number"]):
        return None
    found[1].set_attribute("celery_durable.outcome", outcome)
    return found[1]


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
