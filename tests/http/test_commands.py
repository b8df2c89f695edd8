"""The table of commands: their paths, and the bodies that clients send."""

from __future__ import annotations

import pytest

from celery_durable import commands
from celery_durable.commands import Target
from celery_durable.wire.requests import (
    CreateInstance,
    EmptyRequest,
    Fork,
    Reason,
    RequestModel,
    RestartOrCreate,
    SendEvent,
    SetResult,
)


def test_a_command_knows_the_path_of_its_target() -> None:
    assert commands.rewind.words(Target("order", "o/1")) == ("workflows", "order", "instances", "o/1", "rewind")
    assert commands.create.words(Target("order", "o-1")) == ("workflows", "order", "instances")
    assert [each.words(Target("w", "i"))[-1] for each in (commands.set_result, commands.send_event)] == [
        "set-result",
        "events",
    ]


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (EmptyRequest(), {}),
        (Reason(), {}),
        (Reason(reason="x" * 3000), {"reason": "x" * 3000}),  # cut by the operation, not refused here
        (CreateInstance(params=None, id="o-1"), {"id": "o-1"}),
        (
            CreateInstance(params={"by_us": 1}, labels={}, if_exists="return"),
            {"params": {"by_us": 1}, "ifExists": "return"},
        ),
        (RestartOrCreate(labels={"tenant": "acme"}), {"labels": {"tenant": "acme"}}),
        (SetResult(step="charge", result=None, by="eve"), {"step": "charge", "by": "eve", "result": None}),
        (SetResult(step="charge", result=False), {"step": "charge", "result": False}),
    ],
)
def test_a_body_has_the_fields_that_are_set(body: RequestModel, data: object) -> None:
    assert body.to_dict() == data


def test_only_requests_with_an_id_may_be_repeated() -> None:
    assert CreateInstance(id="o-1").may_repeat
    assert Fork(step="charge", id="o-2").may_repeat
    assert SendEvent(type="approval", id="click-7").may_repeat
    never = [
        CreateInstance(),
        Fork(step="charge"),
        SendEvent(type="approval"),
        Reason(),
        EmptyRequest(),
        RestartOrCreate(),
    ]
    assert not any(body.may_repeat for body in never)
