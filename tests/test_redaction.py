from __future__ import annotations

from dataclasses import replace

from celery_durable.model import ErrorInfo, ItemCounts, ItemFailure, StepRecord, StepStatus, StepType
from celery_durable.redaction import Redaction

STEP = StepRecord(
    step_key="pay", name="pay", type=StepType.DO, status=StepStatus.COMPLETED, attempts=1, result={"card": "4111"}
)


def test_a_record_is_not_copied_without_a_hook() -> None:
    assert Redaction(None, "order", "o-1").redact_step(STEP) is STEP


def test_the_hook_of_a_record_sees_its_values() -> None:
    error = ErrorInfo("Declined", "4111")
    step = replace(STEP, error=error, ask="4111?", items=ItemCounts(2, 1, 1, failures=(ItemFailure(0, 1, error),)))
    shown = Redaction(lambda _, context: f"{context.kind} of {context.name}", "order", "o-1").redact_step(step)
    hidden = ErrorInfo("Declined", "error of pay")
    assert (shown.result, shown.ask, shown.error) == ("result of pay", "ask of pay", hidden)
    assert shown.items == ItemCounts(2, 1, 1, failures=(ItemFailure(0, 1, hidden),))
