"""What becomes of an item whose attempt was answered: the rule, without a database."""

from __future__ import annotations

import pytest

from celery_durable.model import ItemStatus, decide_answered


@pytest.mark.parametrize(
    ("is_error", "is_retryable", "attempt", "max_attempts", "status"),
    [
        (False, False, 9, 1, ItemStatus.DONE),  # a late success counts, however many attempts there were
        (True, True, 1, 2, ItemStatus.FAILED),
        (True, True, 2, 2, ItemStatus.DEAD),
        (True, True, 1000, None, ItemStatus.FAILED),
        (True, False, 1, None, ItemStatus.DEAD),
    ],
)
def test_an_answered_item_is_done_failed_or_dead(
    is_error: bool, is_retryable: bool, attempt: int, max_attempts: int | None, status: ItemStatus
) -> None:
    given = {"is_error": is_error, "is_retryable": is_retryable, "attempt": attempt, "max_attempts": max_attempts}
    assert decide_answered(**given) is status
