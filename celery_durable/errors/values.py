"""Errors of values that callers and workflows pass in. Nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from celery_durable.errors.base import DurableError, join_problems, quote


class ValueRefused(DurableError):
    """A value from a caller cannot be accepted; nothing was written."""

    code, http_status = "VALUE_REFUSED", 400


class NameInvalid(ValueRefused):
    """A workflow, step, category or topic name breaks the rules for names."""

    code = "NAME_INVALID"

    def __init__(self, what: str, value: object, rule: str) -> None:
        self.what, self.value = what, value
        super().__init__(f"{what} {quote(value)} is not allowed: {rule}.")


class InvalidInstanceId(NameInvalid):
    """An instance id breaks the rules for ids."""

    code = "INVALID_INSTANCE_ID"


class InvalidEventType(NameInvalid):
    """An event type breaks the rules for event types."""

    code = "INVALID_EVENT_TYPE"


class InvalidTopic(NameInvalid):
    """A topic breaks the rules for topics."""

    code = "INVALID_TOPIC"


class InvalidLabel(NameInvalid):
    """A label's name or value breaks the rules for labels."""

    code = "INVALID_LABEL"


class TooManyLabels(ValueRefused):
    """An instance would have more labels than it may."""

    code = "TOO_MANY_LABELS"

    def __init__(self, count: int, limit: int) -> None:
        self.count, self.limit = count, limit
        super().__init__(
            f"{count} labels are too many: an instance may have {limit}. Take one away, tx.set_labels({{name: None}}), "
            "or keep in the parameters what nobody searches for."
        )


class EmissionMismatch(ValueRefused):
    """The id of an emission belongs to another one that is still under way."""

    code, http_status = "EMISSION_MISMATCH", 409

    def __init__(self, id: str, topic: str) -> None:
        self.id, self.topic = id, topic
        super().__init__(
            f"Emission {quote(id)} is under way, to topic {topic!r} or with another payload. "
            "Use one id for one emission, and repeat it as it was."
        )


class DurationInvalid(ValueRefused):
    """A duration cannot be read or lies outside its range."""

    code = "DURATION_INVALID"

    def __init__(self, value: object, reason: str) -> None:
        self.value = value
        super().__init__(
            f"Duration {quote(value)} cannot be used: {reason}. Write a timedelta, seconds as a number, "
            'or text such as "10 seconds", "1.5 h", "3 days".'
        )


class InstantInvalid(ValueRefused):
    """A point in time is none, or nobody knows which: it has no time zone."""

    code = "INSTANT_INVALID"

    def __init__(self, what: str, value: object) -> None:
        self.what, self.value = what, value
        super().__init__(
            f"{what}={quote(value)} cannot be used: write a datetime of the years 1 to 9999 with a time zone, "
            "such as datetime(2030, 1, 31, 8, 0, tzinfo=UTC)."
        )


class StartTooFar(ValueRefused):
    """An instance is to start later than anything may wait."""

    def __init__(self, run_at: datetime, maximum: timedelta) -> None:
        self.run_at, self.maximum = run_at, maximum
        super().__init__(
            f"run_at={run_at} is too far ahead: a start can be put off by up to {maximum} "
            "(durable_max_sleep_seconds). Create the instance later."
        )


class CursorInvalid(ValueRefused):
    """A page cursor was not made by the list that it is handed to, for the same filter and caller."""

    code = "INVALID_CURSOR"

    def __init__(self, value: object) -> None:
        super().__init__(
            f"Cursor {quote(value)} was not made by this list with this filter, for this caller. "
            "Start again without a cursor."
        )


class NotSerializable(ValueRefused):
    """A value has no JSON form; ``path`` tells where."""

    code = "NOT_SERIALIZABLE"

    def __init__(self, what: str, path: str, reason: str) -> None:
        self.what, self.path, self.reason = what, path, reason
        super().__init__(
            f"{what} cannot be stored as JSON: {path} {reason}. Return plain data "
            "(or pydantic models, dataclasses, datetimes, Decimals, UUIDs, enums); keep other things elsewhere "
            "and store a reference."
        )


class PayloadTooLarge(ValueRefused):
    """A value's JSON form is larger than the limit."""

    code, http_status = "PAYLOAD_TOO_LARGE", 413

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.what, self.size_bytes, self.limit_bytes = what, size_bytes, limit_bytes
        super().__init__(
            f"{what} has {size_bytes} bytes as JSON; at most {limit_bytes} are allowed. "
            "Keep large data elsewhere and store a reference, or raise durable_max_payload_bytes."
        )


class BatchTooLarge(ValueRefused):
    """More items in one batch than allowed."""

    code = "BATCH_TOO_LARGE"

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"A batch of {size} is too large; create at most {limit} instances in one call.")


class TaskRefused(ValueRefused):
    """A task cannot be sent with a step."""

    code = "TASK_REFUSED"

    def __init__(self, task: object, why: str) -> None:
        self.task = task
        super().__init__(f"Task {quote(task)} cannot be sent with a step: {why}.")


class WorkflowParamsInvalid(DurableError):
    """The parameters do not fit what the workflow declares; nothing was written."""

    code, http_status = "WORKFLOW_PARAMS_INVALID", 400

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]], *, item: str | None = None) -> None:
        self.workflow, self.problems, self.item = workflow, list(problems), item
        subject = f"Parameters of workflow {workflow!r}" + (f" for instance {item!r}" if item else "")
        super().__init__(f"{subject} are not valid: {join_problems(problems)}.")


class WorkflowOutputInvalid(DurableError):
    """What the workflow returned does not fit its declared return type."""

    code = "WORKFLOW_OUTPUT_INVALID"

    def __init__(self, workflow: str, problems: Sequence[tuple[str, str]]) -> None:
        self.workflow, self.problems = workflow, list(problems)
        super().__init__(
            f"The output of workflow {workflow!r} does not fit its return annotation: {join_problems(problems)}. "
            "Mend the return value or the annotation, then restart the instance."
        )
