"""examples/onboarding_drip.py: three weeks and a month, in no time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_durable import Status
from examples import onboarding_drip as drip


@pytest.fixture
def mails(caplog: pytest.LogCaptureFixture) -> Any:
    """The subjects sent so far."""
    caplog.set_level(logging.INFO, logger=drip.logger.name)

    class Mails:
        @property
        def subjects(self) -> list[str]:
            return [record.args[1] for record in caplog.records if record.name == drip.logger.name]

    return Mails()


def test_who_never_comes_gets_every_mail_at_its_time(world, mails) -> None:
    handle = world.workflow("onboarding").create(drip.User(name="ada"))
    assert mails.subjects == ["welcome"]
    world.advance(hours=23)
    assert mails.subjects == ["welcome"]
    world.advance(hours=1)
    assert mails.subjects[1:] == ["your first project"]
    world.advance(days=2)
    assert mails.subjects[2:] == ["invite your team"]
    world.advance(days=4)
    assert mails.subjects[3:] == ["what others built"]
    assert handle.status().status is Status.WAITING
    world.advance(days=14)
    assert mails.subjects[4:] == ["goodbye"]
    assert handle.result(timeout=0) == "cold"


def test_who_comes_in_between_gets_no_more_of_them_but_is_asked_a_month_later(world, mails) -> None:
    handle = world.workflow("onboarding").create(drip.User(name="ada"))
    world.advance(days=4)
    handle.send_event("activated")
    assert mails.subjects == ["welcome", "your first project", "invite your team", "well done"]
    world.advance(days=29)
    assert handle.status().status is Status.WAITING
    world.advance(days=1)
    assert mails.subjects[4:] == ["how is it going?"]
    assert handle.result(timeout=0) == "activated"


def test_an_activation_on_the_first_day_is_kept_for_the_first_wait(world, mails) -> None:
    handle = world.workflow("onboarding").create(drip.User(name="ada"))
    handle.send_event("activated")
    assert mails.subjects == ["welcome"]
    world.advance(days=1)
    assert mails.subjects == ["welcome", "your first project", "well done"]
    [wait] = [step for step in handle.history().steps if step.type == "waitForEvent"]
    assert handle.history().events[0].consumed_by_step_key == wait.step_key


def test_one_jump_over_all_of_it_ends_the_same(world, mails) -> None:
    handle = world.workflow("onboarding").create(drip.User(name="ada"))
    world.advance(days=21)
    assert handle.result(timeout=0) == "cold"
    assert len(mails.subjects) == 5
