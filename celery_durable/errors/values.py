"""Errors of values that callers and workflows pass in. Nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from celery_durable.errors.base import DurableError, format_limit, join_problems, quote


class ValueRefused(DurableError):
    """A value that was passed in cannot be accepted. Nothing was written.

    The base class of errors about arguments; the message says what is allowed.
    """

    code, http_status = "VALUE_REFUSED", 400


class NameInvalid(ValueRefused):
    """The name of a workflow, a step or something else breaks the rules for names.

    The message states the rule.

    Attributes:
        what: What the value is for, such as ``Step name``.
        value: The refused value.
    """

    code = "NAME_INVALID"

    def __init__(self, what: str, value: object, rule: str) -> None:
        self.what, self.value = what, value
        super().__init__(f"{what} {quote(value)} is not allowed: {rule}.")


class InvalidInstanceId(NameInvalid):
    """An instance id breaks the rules for ids.

    The message states the rule. Attributes are those of `NameInvalid`.
    """

    code = "INVALID_INSTANCE_ID"


class InvalidEventType(NameInvalid):
    """An event type breaks the rules for event types.

    The message states the rule. Attributes are those of `NameInvalid`.
    """

    code = "INVALID_EVENT_TYPE"


class InvalidTopic(NameInvalid):
    """A topic breaks the rules for topics.

    The message states the rule. Attributes are those of `NameInvalid`.
    """

    code = "INVALID_TOPIC"


class InvalidLabel(NameInvalid):
    """The name or the value of a label breaks the rules for labels.

    The message states the rule. Attributes are those of `NameInvalid`.
    """

    code = "INVALID_LABEL"


class TooManyLabels(ValueRefused):
    """An instance would have more labels than it may have.

    Remove one with ``tx.set_labels({name: None})``, or keep data that you do not search by in the parameters.

    Attributes:
        count: How many labels it would have.
        limit: How many it may have.
    """

    code = "TOO_MANY_LABELS"

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        super().__init__(
            f"{count} labels are too many: an instance may have {limit}. Remove one with "
            "tx.set_labels({name: None}), "
            "or keep data that you do not search for in the parameters."
        )


class EmissionMismatch(ValueRefused):
    """The id of an emission is in use for another topic or payload.

    Repeat an emission with the same topic and payload, and use a new id for a new one.

    Attributes:
        id: The emission's id.
        topic: The topic of the emission that has this id.
    """

    code, http_status = "EMISSION_MISMATCH", 409

    def __init__(self, id: str, topic: str) -> None:
        self.id, self.topic = id, topic
        super().__init__(
            f"Another emission with the id {quote(id)} is under way, for topic {topic!r}. "
            "Repeat an emission with the same topic and payload, and use a new id for a new one."
        )


class DurationInvalid(ValueRefused):
    """A duration cannot be read, or is outside of its range.

    Pass a timedelta, seconds as a number, or text such as ``"10 seconds"``.

    Attributes:
        value: The refused value.
    """

    code = "DURATION_INVALID"

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        super().__init__(
            f"Duration {quote(value)} cannot be used: {reason}. Write a timedelta, seconds as a number, "
            'or text such as "10 seconds", "1.5 h", "3 days".'
        )


class InstantInvalid(ValueRefused):
    """A point in time is not a datetime with a time zone.

    Pass an aware datetime, such as ``datetime(2030, 1, 31, 8, 0, tzinfo=UTC)``.

    Attributes:
        what: The name of the argument.
        value: The refused value.
    """

    code = "INSTANT_INVALID"

    def __init__(self, what: str, value: object) -> None:
        self.what, self.value = what, value
        super().__init__(
            f"{what}={quote(value)} cannot be used: write a datetime of the years 1 to 9999 with a time zone, "
            "such as datetime(2030, 1, 31, 8, 0, tzinfo=UTC)."
        )


class StartTooFar(ValueRefused):
    """``run_at`` is further ahead than ``durable_max_sleep_seconds`` allows.

    Create the instance later, or raise the setting.

    Attributes:
        run_at: The requested start.
        maximum: How far ahead a start may be.
    """

    def __init__(self, run_at: datetime, maximum: timedelta) -> None:
        self.run_at, self.maximum = run_at, maximum
        super().__init__(
            f"run_at={run_at} is too far ahead: a start can be put off by up to {format_limit(maximum)} "
            "(durable_max_sleep_seconds). Create the instance later."
        )


class SleepTooFar(DurationInvalid):
    """``sleep_until`` was given a time further ahead than ``durable_max_sleep_seconds`` allows.

    Sleep several times, or raise the setting.

    Attributes:
        until: The requested end of the sleep.
        maximum: How long a sleep may last.
    """

    def __init__(self, until: datetime, maximum: timedelta) -> None:
        self.value = self.until = until
        self.maximum = maximum
        ValueRefused.__init__(
            self,
            f"sleep_until={until} is too far ahead: a sleep can last up to {format_limit(maximum)} "
            "(durable_max_sleep_seconds). Sleep several times, or raise the setting.",
        )


class CursorInvalid(ValueRefused):
    """A page cursor does not come from this list, with this filter and this caller.

    Start again without a cursor.
    """

    code = "INVALID_CURSOR"

    def __init__(self, value: object) -> None:
        super().__init__(
            f"Cursor {quote(value)} was not made by this list with this filter, for this caller. "
            "Start again without a cursor."
        )


class NotSerializable(ValueRefused):
    """A value cannot be stored as JSON.

    Pass plain data, pydantic models, dataclasses, datetimes, Decimals, UUIDs or enums. Store anything else elsewhere
    and pass a reference.

    Attributes:
        what: What the value is, such as ``Result of step 'charge'``.
        path: Where in the value, such as ``$.items[3].when``.
        reason: What is wrong there.
    """

    code = "NOT_SERIALIZABLE"

    def __init__(self, what: str, path: str, reason: str) -> None:
        self.what, self.path, self.reason = what, path, reason
        super().__init__(
            f"{what} cannot be stored as JSON: {path} {reason}. Use plain data "
            "(or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere "
            "and store a reference."
        )


class PayloadTooLarge(ValueRefused):
    """The JSON form of a value is larger than ``durable_max_payload_bytes``.

    For all results of a map together, the setting is ``durable_max_map_result_bytes``. Store large data elsewhere and
    pass a reference, or raise the setting.

    Attributes:
        what: What the value is.
        size_bytes: Its size as JSON, in bytes.
        limit_bytes: The largest size allowed, in bytes.
        setting: The name of the setting that sets the limit.
    """

    code, http_status = "PAYLOAD_TOO_LARGE", 413

    def __init__(
        self, what: str, size_bytes: int, limit_bytes: int, setting: str = "durable_max_payload_bytes"
    ) -> None:
        self.what, self.size_bytes, self.limit_bytes, self.setting = what, size_bytes, limit_bytes, setting
        super().__init__(
            f"{what} has {size_bytes} bytes as JSON; at most {limit_bytes} are allowed. "
            f"Keep large data elsewhere and store a reference, or raise {setting}."
        )


class BatchTooLarge(ValueRefused):
    """A batch has more items than one call may create.

    Create the instances in several calls.

    Attributes:
        size: How many items the batch has.
        limit: How many it may have.
    """

    code = "BATCH_TOO_LARGE"

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"A batch of {size} is too large; create at most {limit} instances in one call.")


class TaskRefused(ValueRefused):
    """A Celery task cannot be sent by a step, for instance because of a countdown or a canvas.

    The message says why and what to do instead.

    Attributes:
        task: The task, the signature or its name.
    """

    code = "TASK_REFUSED"

    def __init__(self, task: object, why: str) -> None:
        self.task = task
        super().__init__(f"Task {quote(task)} cannot be sent with a step: {why}.")


class WorkflowParamsInvalid(DurableError):
    """The parameters do not fit the type that the workflow declares.

    When an instance is created, nothing was written. A workflow whose recorded parameters do not fit newer code fails
    with this error: give new fields a default, then restart the instance.

    Attributes:
        workflow: The workflow's name.
        problems: Pairs of a path, such as ``$.items[3]``, and what is wrong there.
        item: The id of the instance, in a batch; else None.
    """

    code, http_status = "WORKFLOW_PARAMS_INVALID", 400

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]], *, item: str | None = None) -> None:
        self.workflow, self.problems, self.item = workflow, list(problems), item
        subject = f"Parameters of workflow {workflow!r}" + (f" for instance {item!r}" if item else "")
        super().__init__(f"{subject} are not valid: {join_problems(problems)}.")


class EventRefused(DurableError):
    """The payload of an event does not fit the schema of the wait. Nothing was stored, and the wait goes on.

    Attributes:
        workflow: The workflow's name.
        instance_id: The instance's id.
        event_type: The event's type.
        problems: Pairs of a path, such as ``$.items[3]``, and what is wrong there.
    """

    code, http_status = "EVENT_REFUSED", 422

    def __init__(self, workflow: str, instance_id: str, event_type: str, problems: Sequence[tuple[str, str]]) -> None:
        self.workflow, self.instance_id, self.event_type = workflow, instance_id, event_type
        self.problems = list(problems)
        super().__init__(
            f"Event {event_type!r} is not what {workflow} {instance_id!r} waits for: {join_problems(problems)}. "
            "Nothing was stored, and the wait goes on: send the event again with a payload that fits."
        )


class WorkflowOutputInvalid(DurableError):
    """The value that a workflow returned does not fit its return annotation. The instance fails.

    Correct the value or the annotation, then restart the instance.

    Attributes:
        workflow: The workflow's name.
        problems: Pairs of a path, such as ``$.items[3]``, and what is wrong there.
    """

    code = "WORKFLOW_OUTPUT_INVALID"

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]]) -> None:
        self.workflow, self.problems = workflow, list(problems)
        super().__init__(
            f"The output of workflow {workflow!r} does not fit its return annotation: {join_problems(problems)}. "
            "Correct the return value or the annotation, then restart the instance."
        )
