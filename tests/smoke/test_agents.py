"""Agents in real workers that are killed when a tool has done its work, and before that is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from celery_durable import Status
from tests.smoke import agents
from tests.smoke.proc import until
from tests.smoke.site import REDIS_AND_POSTGRESQL, Site

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(200), REDIS_AND_POSTGRESQL]

CALL = "desk__function_toolset__<agent>.call_tool:approved_refund c1"


class Desk(Site):
    project = "tests.smoke.agents"
    build = staticmethod(agents.build)

    def noted(self) -> Counter[str]:
        return Counter((self.folder / "noted").read_text().split())


def test_a_plain_tool_is_called_again_and_a_paid_request_is_not(site_with: Callable[..., Site]) -> None:
    site = site_with(kind=Desk)
    site.worker()
    assert site.create("refunds", "refund").result("60 seconds") == "refunded"
    assert site.noted() == {"request": 2, "refund": 2}


def test_an_approved_tool_is_called_once_and_a_person_says_how_it_ended(site_with: Callable[..., Site]) -> None:
    site = site_with(kind=Desk)
    site.worker()
    instance = site.create("refunds", "approved_refund")
    until("the question", lambda: instance.status().status is Status.WAITING, 60)
    instance.answer("approval c1", {"c1": True}, by="ada")
    until("the end", lambda: instance.status().status is Status.ERRORED, 60)
    assert (instance.status().error.name, site.noted()) == ("OutcomeUnknown", {"request": 1, "refund": 1})
    instance.set_result(
        CALL, {"kind": "tool_return", "result": "refunded"}, by="ada", reason="it is in the bank's list"
    )
    assert (instance.result("60 seconds"), site.noted()) == ("refunded", {"request": 2, "refund": 1})
