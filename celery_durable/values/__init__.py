"""What callers write, checked before anything is stored: durations, names, JSON, retry policies.

A value is refused with an error that names it and the remedy; payloads are named by path
(``$.items[3].when``), never by content.
"""

from celery_durable.values.answers import (
    AnsweredError,
    answer_of,
    answer_of_error,
    answer_of_termination,
    error_in,
    output_in,
)
from celery_durable.values.cursors import CursorPart, Cursors, version_tag
from celery_durable.values.durations import Duration, aware, duration
from celery_durable.values.failures import described, forbids_retry, text_of
from celery_durable.values.hooks import Hook, Hooks, completion_message
from celery_durable.values.labels import few_enough, label_changes, labels, read_labels
from celery_durable.values.names import (
    LONGEST_ID,
    event_type,
    identifier,
    instance_id,
    label,
    storable,
    storable_error,
    topic,
)
from celery_durable.values.outbox_messages import (
    encode_map_task,
    event_message,
    replying_task_message,
    stored_task,
    task_message,
    task_route,
)
from celery_durable.values.payloads import CHECKED, Codec, PayloadLimits, ValidationFailed, encode
from celery_durable.values.retries import UNSET, Backoff, Retries, StepConfig, StepPolicy

__all__ = [
    "CHECKED",
    "LONGEST_ID",
    "UNSET",
    "AnsweredError",
    "Backoff",
    "Codec",
    "CursorPart",
    "Cursors",
    "Duration",
    "Hook",
    "Hooks",
    "PayloadLimits",
    "Retries",
    "StepConfig",
    "StepPolicy",
    "ValidationFailed",
    "answer_of",
    "answer_of_error",
    "answer_of_termination",
    "aware",
    "completion_message",
    "described",
    "duration",
    "encode",
    "encode_map_task",
    "error_in",
    "event_message",
    "event_type",
    "few_enough",
    "forbids_retry",
    "identifier",
    "instance_id",
    "label",
    "label_changes",
    "labels",
    "output_in",
    "read_labels",
    "replying_task_message",
    "storable",
    "storable_error",
    "stored_task",
    "task_message",
    "task_route",
    "text_of",
    "topic",
    "version_tag",
]
