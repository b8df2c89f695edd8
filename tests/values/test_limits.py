"""Limits and their numbers are checked where they are defined."""

from __future__ import annotations

import dataclasses

import pytest

from celery_durable import Limit, Retries, StepConfig
from celery_durable.errors import ConfigInvalid, LimitConflict


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Setting Limit.at_once=None cannot be used: give at_once=, rate=, or both"),
        ({"at_once": 0}, "Setting Limit.at_once=0 cannot be used: use a whole number from 1"),
        ({"at_once": True}, "Setting Limit.at_once=True cannot be used: use a whole number from 1"),
        (
            {"rate": "90/s"},
            "Setting Limit.rate='90/s' cannot be used: use text such as \"90 per second\"; the units are second, "
            "minute, hour and day",
        ),
        (
            {"rate": "0 per hour"},
            "Setting Limit.rate='0 per hour' cannot be used: use a whole number from 1, and at most one million "
            "per second",
        ),
        (
            {"at_once": 1, "by": "tenant"},
            "Setting Limit.by='tenant' cannot be used: use a function of the event, such as lambda event: "
            "event.payload['tenant']",
        ),
    ],
)
def test_a_limit_that_cannot_be_used_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Limit("stripe", **options)
    assert str(refused.value) == message


@pytest.mark.parametrize("kind", [Limit, Retries, StepConfig])
def test_an_unknown_field_is_refused_with_those_that_there_are(kind: type[Limit | Retries | StepConfig]) -> None:
    unknown = {"key": 1}
    with pytest.raises(TypeError) as refused:
        kind(**unknown)
    assert "key=" in str(refused.value)
    assert all(f"{field.name}=" in str(refused.value) for field in dataclasses.fields(kind))


shared = Limit("defined-by-this-module", at_once=1)


def test_other_numbers_under_the_name_of_a_modules_limit_are_a_conflict() -> None:
    with pytest.raises(LimitConflict) as refused:
        Limit("defined-by-this-module", at_once=2)
    assert str(refused.value) == (
        "Limit 'defined-by-this-module' is defined with at_once=1, rate=None, and again with at_once=2, rate=None. "
        "Define it once and import it, or give one of them another name."
    )
    assert Limit("defined-by-this-module", at_once=1).at_once == shared.at_once


def test_limits_of_a_step_are_named_once() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        StepConfig(limits=[Limit("stripe", at_once=1), Limit("stripe", at_once=1)])
    assert str(refused.value) == "Setting StepConfig.limits=['stripe', 'stripe'] cannot be used: name each limit once"
