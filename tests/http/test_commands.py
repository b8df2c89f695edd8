"""The bodies that clients send."""

from __future__ import annotations

from celery_durable.wire.requests import (
    CreateInstance,
    EmptyRequest,
    Fork,
    Reason,
    RestartOrCreate,
    SendEvent,
    SetResult,
)


def test_a_body_has_the_fields_that_are_set() -> None:
    for body, data in (
        (EmptyRequest(), {}),
        (Reason(reason="x" * 3000), {"reason": "x" * 3000}),  # cut by the operation, not refused here
        (CreateInstance(params=None, id="o-1"), {"id": "o-1"}),
        (
            CreateInstance(params={"by_us": 1}, labels={}, if_exists="return"),
            {"params": {"by_us": 1}, "ifExists": "return"},
        ),
        (RestartOrCreate(labels={"tenant": "acme"}), {"labels": {"tenant": "acme"}}),
        (SetResult(step="charge", result=None, by="eve"), {"step": "charge", "by": "eve", "result": None}),
    ):
        assert body.to_dict() == data


def test_only_requests_with_an_id_may_be_repeated() -> None:
    assert CreateInstance(id="o-1").may_repeat
    assert Fork(step="charge", id="o-2").may_repeat
    assert SendEvent(type="approval", id="click-7").may_repeat
    never = [
        CreateInstance(id="o-1", if_running="queue"),
        CreateInstance(id="o-1", if_exists="postpone", delay_ms=1),
        CreateInstance(),
        Fork(step="charge"),
        SendEvent(type="approval"),
        Reason(),
        EmptyRequest(),
        RestartOrCreate(),
    ]
    assert not any(body.may_repeat for body in never)
