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
from celery_durable.values.hooks import Hook, Hooks, outgoing_ending
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
from celery_durable.values.outgoing import (
    answering_task,
    map_task,
    outgoing_event,
    outgoing_task,
    route_in,
    stored_task,
)
from celery_durable.values.payloads import CHECKED, Codec, Misfit, PayloadLimits, encode
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
    "Misfit",
    "PayloadLimits",
    "Retries",
    "StepConfig",
    "StepPolicy",
    "answer_of",
    "answer_of_error",
    "answer_of_termination",
    "answering_task",
    "aware",
    "described",
    "duration",
    "encode",
    "error_in",
    "event_type",
    "few_enough",
    "forbids_retry",
    "identifier",
    "instance_id",
    "label",
    "label_changes",
    "labels",
    "map_task",
    "outgoing_ending",
    "outgoing_event",
    "outgoing_task",
    "output_in",
    "read_labels",
    "route_in",
    "storable",
    "storable_error",
    "stored_task",
    "text_of",
    "topic",
    "version_tag",
]
