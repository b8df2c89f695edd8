"""The admin's pages of instances: what they show, and to whom. Users are on another alias."""

from __future__ import annotations

import html
import re
from typing import Any

from django.contrib.auth.models import User
from django.test import Client
from sqlalchemy import event

from celery_durable import Step, StepConfig, WorkflowEvent
from celery_durable.redaction import RedactionContext
from celery_durable.testing import DurableHarness
from tests.contrib.django.admin_client import LIST, address, start, text_of
from tests.contrib.django.site import log_in, site, users
from tests.contrib.django.workflows import wait

__all__ = ["site", "users"]


def test_the_list_shows_instances_by_status_workflow_and_label(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a", labels={"tenant": "acme"})
    start(site, alias, "b").send_event("answer", "done")
    site.run_until_idle()
    client = log_in("view_instance")
    assert "wait/a waiting answer" in text_of(client, LIST)
    assert "wait/b complete" in text_of(client, LIST)
    assert "2 instances" in text_of(client, LIST)
    for query in (
        {"status": "waiting"},
        {"q": "tenant=acme"},
        {"q": "a"},
        {"q": "wait/a"},
        {"q": "a", "workflow": "wait"},
    ):
        page = text_of(client, LIST, **query)
        assert "wait/a" in page, query
        assert "wait/b" not in page, query
        assert "1 instance " in page, query
    for query in ({"workflow": "other"}, {"q": "nobody"}, {"q": "wait/a", "status": "complete"}, {"q": "tenant=none"}):
        assert "No instances." in text_of(client, LIST, **query), query


def test_a_search_that_cannot_be_used_is_explained(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in("view_instance")
    assert "Cursor 'forged' was not made by this list" in text_of(client, LIST, cursor="forged")
    assert "Label name" in text_of(client, LIST, q="b=1 é=2")
    for query in ({}, {"q": "a"}):
        page = text_of(client, LIST, status="nope", **query)
        assert "Status='nope' is not known: use one of active, " in page
        assert "No instances." in page


def test_the_list_continues_with_older_instances(site: DurableHarness, alias: str) -> None:
    for number in range(51):
        site.create(wait, alias, id=f"w-{number}")
    client = log_in("view_instance")
    response = client.get(LIST)
    [older] = re.findall(r'href="([^"]*cursor=[^"]*)">older', response.content.decode())
    page = text_of(client, LIST + html.unescape(older))
    assert "wait/w-0 " in page
    assert "wait/w-1 " not in page
    assert "51 instances newest" in page


def test_the_pages_send_few_statements(site: DurableHarness, alias: str) -> None:
    """An instance of a list costs no statement of its own; what they read is bounded in tests/store."""
    statements: list[str] = []
    engine = site.durable.internals.store.engine
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    client, counts = log_in("view_instance"), []
    for number in (1, 30):
        for each in range(number):
            site.create(wait, alias, id=f"w-{number}-{each}")
        statements.clear()
        client.get(LIST)
        counts.append(len([each for each in statements if "SELECT" in each]))
    assert counts[0] == counts[1] <= 8


def test_the_page_of_an_instance_says_why_it_waits_and_what_happened(site: DurableHarness, alias: str) -> None:
    instance = start(site, alias, "a", labels={"tenant": "acme"})
    instance.send_event("other", {"size": 3}, id="e-1")
    page = text_of(log_in("view_instance"), address("a"))
    assert 'waiting (WAITING_EVENT): Waits for event "answer" at step "answer"; times out in 1 d.' in page
    assert "python manage.py durable send-event wait a answer" in page
    assert f'Parameters "{alias}"' in page
    assert "tenant=acme" in page
    assert "answer waitForEvent waiting" in page
    assert 'other e-1 { "size": 3 }' in page


def test_results_errors_logs_and_runs_are_shown(site: DurableHarness) -> None:
    @site.durable.workflow(name="report")
    def report(event: WorkflowEvent[Any], step: Step) -> None:
        rows = step.do("read", lambda: {"rows": ["<b>"] * 500})
        step.log.warning("many rows", rows=len(rows["rows"]))
        raise ValueError("no paper")

    site.create(report, id="r-1")
    site.run_until_idle()
    report.get("r-1").restart(reason="again")
    site.run_until_idle()
    client = log_in("view_instance")
    page = text_of(client, address("r-1", "report"))
    assert "errored (FAILED): It failed" in page
    assert "ValueError: no paper" in page
    assert '"rows": [ "<b>"' in page
    assert re.search(r"\.\.\. \(\d+ characters\)", page)
    assert 'many rows { "rows": 500 }' in page
    assert "Run 2 Runs 2 1" in page
    assert "Reason again" in page
    assert "Run 1 Runs 2 1" in text_of(client, address("r-1", "report"), run="1")


def test_failed_attempts_are_shown_with_their_tracebacks(site: DurableHarness) -> None:
    @site.durable.workflow(name="flaky")
    def flaky(event: WorkflowEvent[Any], step: Step) -> None:
        def fail() -> None:
            raise ValueError("<no paper>")

        step.do("print", StepConfig(retries=1), fail)

    site.create(flaky, id="f-1")
    site.advance("1 minute")
    client = log_in("view_instance")
    page = client.get(address("f-1", "flaky")).content.decode()
    assert page.count("<details><summary>ValueError: &lt;no paper&gt;</summary><pre>") == 2
    assert "<details open" not in page
    text = text_of(client, address("f-1", "flaky"))
    assert re.search(r"print 1 failed ValueError: <no paper> Traceback .* raise ValueError", text)
    assert re.search(r"print 2 failed ValueError: <no paper> .*/test_admin.py:\d+ runner-1 \(pid \d+\)", text)


def test_a_search_by_id_is_one_statement_for_all_workflows(site: DurableHarness, alias: str) -> None:
    for number in range(100):
        site.durable.workflow(lambda event, step: None, name=f"other-{number}")
    start(site, alias, "a")
    statements: list[str] = []
    engine = site.durable.internals.store.engine
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert "wait/a waiting" in text_of(log_in("view_instance"), LIST, q="a")
    assert len([each for each in statements if "SELECT" in each]) <= 8
    for number in range(100, 200):
        site.durable.workflow(lambda event, step: None, name=f"other-{number}")
    page = text_of(log_in("view_instance"), LIST, q="a")
    assert "There are 202 workflows: choose one, or search for workflow/id." in page


def test_a_history_continues(site: DurableHarness) -> None:
    @site.durable.workflow(name="long")
    def long(event: WorkflowEvent[Any], step: Step) -> None:
        for number in range(30):
            step.do(f"step {number}", lambda: None)

    site.create(long, id="l-1")
    site.run_until_idle()
    client = log_in("view_instance")
    response = client.get(address("l-1", "long"))
    [more] = re.findall(r'href="([^"]*)">more steps', response.content.decode())
    page = text_of(client, address("l-1", "long") + html.unescape(more))
    assert "step 29 do completed" in page
    assert "step 24 do" not in page


def test_redacted_values_are_not_shown(site: DurableHarness, alias: str) -> None:
    def hide(value: Any, context: RedactionContext) -> Any:
        return f"hidden {context.kind}"

    site.durable.internals.redact = hide
    instance = start(site, alias, "a", labels={"tenant": "acme"})
    instance.send_event("answer", "secret")
    site.run_until_idle()
    client = log_in("view_instance")
    for page in (text_of(client, LIST), text_of(client, address("a"))):
        assert "acme" not in page
        assert "secret" not in page
        assert "hidden label" in page
    assert "hidden output" in text_of(client, address("a"))


def test_redacted_errors_are_not_quoted_by_the_explanation(site: DurableHarness) -> None:
    @site.durable.workflow(name="failing")
    def failing(event: WorkflowEvent[Any], step: Step) -> None:
        raise ValueError("the secret")

    site.durable.internals.redact = lambda value, context: f"hidden {context.kind}"
    site.create(failing, id="f-1")
    site.run_until_idle()
    client = log_in("view_instance")
    for page in (text_of(client, LIST), text_of(client, address("f-1", "failing"))):
        assert "ValueError: hidden error" in page
        assert "secret" not in page


def test_an_instance_that_does_not_exist_leads_back_to_the_list(site: DurableHarness) -> None:
    page = text_of(log_in("view_instance"), address("nobody"))
    assert "Workflow 'wait' has no instance 'nobody'" in page
    assert "Select an instance" in page


def test_an_address_without_a_workflow_is_called_wrong(site: DurableHarness) -> None:
    page = text_of(log_in("view_instance"), f"{LIST}x/change/")
    assert "The address names no instance: 'x' is not WORKFLOW/INSTANCE." in page
    assert "Select an instance" in page


def test_pages_require_the_permission_to_view(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    client = log_in()
    assert client.get(LIST).status_code == 403
    assert client.get(address("a")).status_code == 403
    assert client.post(address("a"), {"action": "pause"}).status_code == 403
    assert Client().get(LIST).status_code == 302  # to the login


def test_nothing_can_be_added_edited_or_deleted(site: DurableHarness, alias: str) -> None:
    start(site, alias, "a")
    User.objects.create_superuser("root")
    client = Client()
    client.force_login(User.objects.get(username="root"))
    assert client.get(LIST + "add/").status_code == 403
    assert client.post(address("a").replace("change", "delete"), {"post": "yes"}).status_code == 403
    client.post(address("a"), {"status": "complete"})
    assert wait.get("a").status().status == "waiting"
