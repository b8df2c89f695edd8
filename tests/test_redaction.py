from __future__ import annotations

from celery_durable.model import StepRecord, StepStatus, StepType
from celery_durable.redaction import Redaction

STEP = StepRecord(
    step_key="pay", name="pay", type=StepType.DO, status=StepStatus.COMPLETED, attempts=1, result={"card": "4111"}
)


def test_a_record_is_not_copied_without_a_hook() -> None:
    assert Redaction(None, "order", "o-1").redact_step(STEP) is STEP


def test_the_hook_of_a_record_sees_its_values() -> None:
    shown = Redaction(lambda value, context: (context.kind, context.name), "order", "o-1").redact_step(STEP)
    assert shown.result == ("result", "pay")
