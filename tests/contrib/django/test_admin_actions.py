"""What each action of the admin does, says and requires. Users are on another alias."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from celery_durable import Step, StepConfig, WorkflowEvent
from celery_durable.testing import DurableHarness
from tests.contrib.django.admin_client import LIST, address, changes, start, text_of
from tests.contrib.django.site import log_in, site, users
from tests.contrib.django.workflows import wait

__all__ = ["site", "users"]


def test_pause_and_resume(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "pause_instance")
    page = text_of(client, address("a"))
    assert "Pause" in page
    assert "Terminate" not in page
    client.post(address("a"), {"action": "pause"})
    assert wait.get("a").status().status == "paused"
    assert "Resume" in text_of(client, address("a"))
    client.post(address("a"), {"action": "resume"})
    assert wait.get("a").status().status == "active"
    assert changes() == [("alice", "wait/a", "Paused."), ("alice", "wait/a", "Resumed.")]
    assert "Paused." in text_of(client, address("a").replace("change", "history"))


def test_a_pause_that_changes_nothing_says_so(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "pause_instance")
    client.post(address("a"), {"action": "resume"})
    assert "Instance wait/a: It was not paused, so nothing has changed." in text_of(client, address("a"))
    wait.get("a").pause()
    client.post(address("a"), {"action": "pause"})
    assert "Instance wait/a: It was paused before, so nothing has changed." in text_of(client, address("a"))
    assert changes() == []


def test_a_pause_of_an_instance_that_a_worker_holds_is_a_request(site: DurableHarness) -> None:
    client = log_in("view_instance", "pause_instance")
    said: list[str] = []

    @site.durable.workflow(name="busy")
    def busy(event: WorkflowEvent[Any], step: Step) -> None:
        def click() -> None:
            for action in ("pause", "pause", "resume", "resume"):
                client.post(address("b-1", "busy"), {"action": action})
                [message] = re.findall(r"Instance busy/b-1: .*?\.", text_of(client, address("b-1", "busy")))
                said.append(message.partition(": ")[2])

        step.do("click", StepConfig(retries=0), click)

    site.create(busy, id="b-1")
    site.run_until_idle()
    assert said == [
        "will pause when the running step ends.",
        "A pause was requested before, so nothing has changed.",
        "requested pause cancelled.",
        "It was not paused, so nothing has changed.",
    ]
    assert [message for _, _, message in changes()] == [
        "Will pause when the running step ends.",
        "Requested pause cancelled.",
    ]
    assert busy.get("b-1").status().status == "complete"


def test_an_action_that_the_status_forbids_is_explained(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "pause_instance", "retry_instance", "terminate_instance")
    client.post(address("a"), {"action": "retry"})
    assert "Instance wait/a: Cannot retry instance 'a'" in text_of(client, address("a"))
    wait.get("a").terminate()
    for action in ("pause", "terminate"):
        client.post(address("a"), {"action": action, "confirmed": "yes"})
        assert f"Instance wait/a: Cannot {action} instance 'a'" in text_of(client, address("a"))
    assert changes() == []


def test_retry_and_restart_name_the_user(site: DurableHarness) -> None:
    fails = [True]

    @site.durable.workflow(name="flaky")
    def flaky(event: WorkflowEvent[Any], step: Step) -> str:
        if fails:
            raise ValueError("no paper")
        return "printed"

    site.create(flaky, id="f-1")
    site.run_until_idle()
    client = log_in("view_instance", "retry_instance")
    fails.clear()
    client.post(address("f-1", "flaky"), {"action": "retry", "reason": "new paper"})
    site.run_until_idle()
    assert flaky.get("f-1").status().output == "printed"
    assert flaky.get("f-1").history().reason == "new paper (by alice)"
    client.post(address("f-1", "flaky"), {"action": "restart", "confirmed": "yes"})
    assert flaky.get("f-1").history().run_number == 3
    assert flaky.get("f-1").history().reason == "by alice"
    assert [message for _, _, message in changes()] == ["Retried: new paper", "Restarted."]
    client.post(address("f-1", "flaky"), {"action": "restart", "confirmed": "yes", "reason": "x" * 3000})
    assert flaky.get("f-1").history().reason == "x" * 1000 + " (by alice)"


def test_terminate_asks_first(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "terminate_instance")
    response = client.post(address("a"), {"action": "terminate", "reason": "stuck"})
    assert b'name="confirmed" value="yes"' in response.content
    assert b'value="stuck"' in response.content
    assert wait.get("a").status().status == "waiting"
    client.post(address("a"), {"action": "terminate", "reason": "stuck", "confirmed": "yes"})
    assert wait.get("a").status().status == "terminated"
    assert "It was terminated" in text_of(client, address("a"))
    assert [(each.action, each.by, each.reason) for each in wait.get("a").history().audit] == [
        ("terminate", "alice", "stuck")
    ]


def test_cancel_asks_first(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "terminate_instance")
    response = client.post(address("a"), {"action": "cancel", "reason": "stuck"})
    assert b'name="confirmed" value="yes"' in response.content
    client.post(address("a"), {"action": "cancel", "reason": "stuck", "confirmed": "yes"})
    assert "It was cancelled" in text_of(client, address("a"))
    site.run_until_idle()
    history = wait.get("a").history()
    assert (history.status.status, history.reason) == ("terminated", "cancelled: stuck")
    assert [(each.action, each.by, each.reason) for each in history.audit] == [("cancel", "alice", "stuck")]
    assert "Done by hand" in text_of(client, address("a"))
    assert [message for _, _, message in changes()] == ["Cancelled: stuck"]


def test_an_event_is_sent_once_for_its_id(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "send_event_instance")
    event = {"action": "send_event", "type": "answer", "payload": '"yes"', "event_id": "e-1"}
    client.post(address("a"), event)
    assert "wait/a: event sent." in text_of(client, address("a"))
    client.post(address("a"), event)
    repeated = "wait/a: An event with the id 'e-1' was accepted before, so this one is ignored."
    assert repeated in text_of(client, address("a"))
    assert len(changes()) == 1
    site.run_until_idle()
    assert wait.get("a").status().output == "yes"
    assert [event.event_id for event in wait.get("a").history().events] == ["e-1"]


def test_an_event_that_cannot_be_sent_is_explained(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance", "send_event_instance")
    client.post(address("a"), {"action": "send_event", "type": "answer", "payload": "{no json"})
    assert "wait/a: The payload is not JSON" in text_of(client, address("a"))
    client.post(address("a"), {"action": "send_event", "type": "a:b"})
    assert "wait/a: Event type 'a:b'" in text_of(client, address("a"))
    assert wait.get("a").history().events == ()
    assert changes() == []


def test_an_action_on_several_instances_does_what_it_can(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    start(site, alias, "b")
    wait.get("b").terminate()
    client = log_in("view_instance", "pause_instance")
    response = client.post(LIST, {"action": "pause", "selected": ["wait/a", "wait/b", "wait/c"]}, follow=True)
    page = html.unescape(response.content.decode())
    assert wait.get("a").status().status == "paused"
    assert "wait/a: paused." in page
    assert "Instance wait/b: " in page
    assert "wait/c: Workflow 'wait' has no instance 'c'" in page
    assert changes() == [("alice", "wait/a", "Paused.")]


@pytest.mark.parametrize(
    ("action", "permission"),
    [
        ("pause", "pause_instance"),
        ("resume", "pause_instance"),
        ("retry", "retry_instance"),
        ("restart", "retry_instance"),
        ("cancel", "terminate_instance"),
        ("terminate", "terminate_instance"),
        ("send_event", "send_event_instance"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_each_action_requires_its_permission(site: DurableHarness, alias: str, action: str, permission: str) -> None:
    start(site, alias, "a")
    others = {"pause_instance", "retry_instance", "terminate_instance", "send_event_instance"} - {permission}
    client = log_in("view_instance", *others)
    form = {"action": action, "type": "answer", "confirmed": "yes", "selected": "wait/a"}
    before = wait.get("a").history()
    assert client.post(address("a"), form).status_code == 403
    assert client.post(LIST, form).status_code == 403
    assert wait.get("a").history() == before
    assert changes() == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_unknown_action_does_nothing(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance")
    assert client.post(address("a"), {"action": "delete"}).status_code == 302
    assert client.post(LIST, {"action": "pause"}).status_code == 302
    assert "Select an action and at least one instance." in text_of(client, LIST)
