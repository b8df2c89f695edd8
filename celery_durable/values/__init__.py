"""Checks and conversions of the values that callers pass in: durations, names, JSON, retry policies.

Each value is checked before anything is stored. The error names the value and the remedy. An error about a payload
names a path in it (``$.items[3].when``), never its content.
"""

from celery_durable.values.annotations import find_class, name_class, refuse_async
from celery_durable.values.answers import (
    AnswerError,
    encode_answer,
    encode_error_answer,
    encode_termination_answer,
    read_answer_error,
    read_answer_output,
)
from celery_durable.values.cursors import CursorPart, Cursors, make_version_tag
from celery_durable.values.durations import Duration, parse_duration, parse_pause, to_utc
from celery_durable.values.names import (
    MAX_ID_LENGTH,
    check_event_type,
    check_identifier,
    check_instance_id,
    check_label_changes,
    check_label_count,
    check_labels,
    check_text_name,
    check_topic,
    parse_labels,
    read_text,
    require_text,
    sanitize_error,
    sanitize_text,
)
from celery_durable.values.outbox_messages import (
    CompletionHook,
    CompletionHooks,
    build_completion_message,
    build_event_message,
    build_replying_task_message,
    build_task_message,
    encode_map_task,
    encode_step_task,
    read_task_route,
)
from celery_durable.values.payloads import ALREADY_CHECKED_LIMITS, Codec, PayloadLimits, ValidationFailed, encode
from celery_durable.values.retries import UNSET, Backoff, DelayFunction, OnLostStep, Retries, StepConfig, StepPolicy
from celery_durable.values.tracebacks import (
    Tracebacks,
    describe_error,
    forbids_retry,
    get_error_text,
    hide_engine_frames,
    shorten_middle,
    trace_error,
)
from celery_durable.values.type_schemas import Parameter

__all__ = [
    "ALREADY_CHECKED_LIMITS",
    "MAX_ID_LENGTH",
    "UNSET",
    "AnswerError",
    "Backoff",
    "Codec",
    "CompletionHook",
    "CompletionHooks",
    "CursorPart",
    "Cursors",
    "DelayFunction",
    "Duration",
    "OnLostStep",
    "Parameter",
    "PayloadLimits",
    "Retries",
    "StepConfig",
    "StepPolicy",
    "Tracebacks",
    "ValidationFailed",
    "build_completion_message",
    "build_event_message",
    "build_replying_task_message",
    "build_task_message",
    "check_event_type",
    "check_identifier",
    "check_instance_id",
    "check_label_changes",
    "check_label_count",
    "check_labels",
    "check_text_name",
    "check_topic",
    "describe_error",
    "encode",
    "encode_answer",
    "encode_error_answer",
    "encode_map_task",
    "encode_step_task",
    "encode_termination_answer",
    "find_class",
    "forbids_retry",
    "get_error_text",
    "hide_engine_frames",
    "make_version_tag",
    "name_class",
    "parse_duration",
    "parse_labels",
    "parse_pause",
    "read_answer_error",
    "read_answer_output",
    "read_task_route",
    "read_text",
    "refuse_async",
    "require_text",
    "sanitize_error",
    "sanitize_text",
    "shorten_middle",
    "to_utc",
    "trace_error",
]
