"""examples/onboarding_drip.py: three weeks and a month, in no time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_durable import Status
from celery_durable.testing import DurableHarness
from examples import onboarding_drip as drip

pytestmark = pytest.mark.durable(workflows=[drip.onboarding])


@pytest.fixture
def mails(caplog: pytest.LogCaptureFixture) -> Any:
    """The subjects sent so far."""
    caplog.set_level(logging.INFO, logger=drip.logger.name)

    class Mails:
        @property
        def subjects(self) -> list[str]:
            return [record.args[1] for record in caplog.records if record.name == drip.logger.name]

    return Mails()


def test_who_never_comes_gets_every_mail_at_its_time(durable_harness: DurableHarness, mails: Any) -> None:
    handle = durable_harness.create(drip.onboarding, drip.User(name="ada"))
    durable_harness.run_until_idle()
    assert mails.subjects == ["welcome"]
    durable_harness.advance("23 hours")
    assert mails.subjects == ["welcome"]
    durable_harness.advance("1 hours")
    assert mails.subjects[1:] == ["your first project"]
    durable_harness.advance("2 days")
    assert mails.subjects[2:] == ["invite your team"]
    durable_harness.advance("4 days")
    assert mails.subjects[3:] == ["what others built"]
    assert handle.status().status is Status.WAITING
    durable_harness.advance("14 days")
    assert mails.subjects[4:] == ["goodbye"]
    assert handle.result() == "cold"


def test_who_comes_in_between_gets_no_more_of_them_but_is_asked_a_month_later(
    durable_harness: DurableHarness, mails: Any
) -> None:
    handle = durable_harness.create(drip.onboarding, drip.User(name="ada"))
    durable_harness.run_until_idle()
    durable_harness.advance("4 days")
    handle.send_event("activated")
    durable_harness.run_until_idle()
    assert mails.subjects == ["welcome", "your first project", "invite your team", "well done"]
    durable_harness.advance("29 days")
    assert handle.status().status is Status.WAITING
    durable_harness.advance("1 days")
    assert mails.subjects[4:] == ["how is it going?"]
    assert handle.result() == "activated"


def test_an_activation_on_the_first_day_is_kept_for_the_first_wait(durable_harness: DurableHarness, mails: Any) -> None:
    handle = durable_harness.create(drip.onboarding, drip.User(name="ada"))
    durable_harness.run_until_idle()
    handle.send_event("activated")
    durable_harness.run_until_idle()
    assert mails.subjects == ["welcome"]
    durable_harness.advance("1 days")
    assert mails.subjects == ["welcome", "your first project", "well done"]
    [wait] = [step for step in handle.history().steps if step.type == "waitForEvent"]
    assert handle.history().events[0].consumed_by_step_key == wait.step_key


def test_one_jump_over_all_of_it_ends_the_same(durable_harness: DurableHarness, mails: Any) -> None:
    handle = durable_harness.create(drip.onboarding, drip.User(name="ada"))
    durable_harness.run_until_idle()
    durable_harness.advance("21 days")
    assert handle.result() == "cold"
    assert len(mails.subjects) == 5
