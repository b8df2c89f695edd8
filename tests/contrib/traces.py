"""What the real OpenTelemetry SDK recorded."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Traces:
    """What was recorded, and a tracer of the application's own."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    @property
    def tree(self) -> list[str]:
        """Names in the order of their beginning, each under its parent."""
        by_id = {span.context.span_id: span for span in self.spans}

        def path(span: ReadableSpan) -> str:
            parent = by_id.get(span.parent.span_id) if span.parent else None
            return span.name if parent is None else f"{path(parent)} > {span.name}"

        return [path(span) for span in self.spans]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("celery_durable."): value for name, value in (span.attributes or {}).items()}


def exceptions(span: ReadableSpan) -> list[str]:
    return [str((event.attributes or {})["exception.type"]) for event in span.events if event.name == "exception"]


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def start_of(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def end_of(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time
