"""Checks and conversions of the values that callers pass in: durations, names, JSON, retry policies.

Each is checked before anything is stored. An error about a payload names a path (``$.items[3].when``), no content.
"""

from celery_durable.values.annotations import (
    find_class,
    is_async_function,
    name_class,
    refuse_async,
    refuse_async_generator,
)
from celery_durable.values.answers import (
    AnswerError,
    encode_answer,
    encode_child_answer,
    encode_error_answer,
    encode_termination_answer,
    read_answer_error,
    read_answer_output,
)
from celery_durable.values.asks import (
    SchemaUnusable,
    check_json_schema,
    check_question,
    encode_ask,
    read_ask,
    write_addressee,
)
from celery_durable.values.cursors import CursorPart, Cursors, make_version_tag
from celery_durable.values.durations import Duration, parse_duration, parse_pause, to_utc
from celery_durable.values.labels import check_label_changes, check_label_count, check_labels, parse_labels
from celery_durable.values.limits import Limit, LimitUse, check_limits, check_numbers, rate_interval_us
from celery_durable.values.names import (
    MAX_ID_LENGTH,
    check_event_id,
    check_event_type,
    check_identifier,
    check_instance_id,
    check_text_name,
    check_topic,
    list_keywords,
    read_text,
    require_text,
    sanitize_error,
    sanitize_text,
)
from celery_durable.values.outbox_messages import (
    CompletionHooks,
    build_completion_message,
    build_event_message,
    build_replying_task_message,
    build_task_message,
    encode_map_child,
    encode_map_task,
    encode_step_task,
    read_map_child,
    read_task_route,
)
from celery_durable.values.payloads import ALREADY_CHECKED_LIMITS, Codec, PayloadLimits, ValidationFailed, encode
from celery_durable.values.retries import (
    UNSET,
    Backoff,
    DelayFunction,
    OnCancelStep,
    OnLostStep,
    Retries,
    StepConfig,
    StepPolicy,
)
from celery_durable.values.signatures import read_signed, sign
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
