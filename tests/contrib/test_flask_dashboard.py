"""The dashboard as a blueprint of Flask, in one thread of a WSGI server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flask import Flask, session
from flask.testing import FlaskClient

from celery_durable import Step, WorkflowEvent
from celery_durable.contrib.flask import FlaskDurable
from celery_durable.http import Access, Authorize, NoAuthorization, Unauthenticated
from celery_durable.model import Status
from celery_durable.store.migrations import migrate
from tests.support.databases import on_databases

database = on_databases("sqlite")
INSTANCE = "/durable/workflows/waiting/instances/w-1"


def find_user(access: Access) -> str | None:
    return session.get("user")


def is_logged_in(access: Access) -> bool:
    if find_user(access) is None:
        raise Unauthenticated("Log in first.", challenge="Session")
    return True


@pytest.fixture
def app(store_url: str) -> Any:
    app = Flask("shop")
    app.secret_key = "secret"
    app.config.from_mapping({"CELERY": {"broker_url": "memory://"}, "DURABLE_DATABASE_URL": store_url})
    flask_durable = FlaskDurable(app)
    hooks = Authorize(is_logged_in, actor=find_user)
    app.register_blueprint(flask_durable.dashboard(authorize=hooks), url_prefix="/durable")
    app.add_url_rule("/login/<name>", "login", lambda name: session.update(user=name) or "welcome")
    with app.app_context():
        durable = flask_durable.durable
    migrate.upgrade(durable.internals.store)

    @durable.workflow(name="waiting")
    def waiting(event: WorkflowEvent[None], step: Step) -> None:
        step.wait_for_event("answer", "answer")

    waiting.create(None, id="w-1")
    durable.tick()
    yield app
    durable.close()


def log_in(app: Flask) -> FlaskClient:
    client = app.test_client()
    client.get("/login/eve")
    return client


def test_hooks_read_the_session(app: Flask) -> None:
    refused = app.test_client().get("/durable/instances")
    assert refused.status_code == 401
    assert "Log in first." in refused.text
    page = log_in(app).get("/durable/instances")
    assert page.status_code == 200
    assert f'href="{INSTANCE}"' in page.text
    links = re.findall(r'(?:src|href|action|hx-get)="([^"#?][^"]*)"', page.text)
    assert all(each.startswith("/durable/") for each in links)


def test_a_page_changes_an_instance(app: Flask) -> None:
    client = log_in(app)
    token = re.search(r'name="token" value="(\w+)"', client.get(INSTANCE).text)[1]
    form = {"token": token, "reason": "sold twice"}
    sent = client.post(f"{INSTANCE}/terminate", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert (sent.status_code, sent.location) == (303, INSTANCE)
    with app.app_context():
        run = app.extensions["celery_durable"].workflows["waiting"].get("w-1").history()
    assert (run.status.status, run.reason) == (Status.TERMINATED, "sold twice")
    refused = client.post(f"{INSTANCE}/restart", data={"token": "0" * 32}, headers={"Sec-Fetch-Site": "same-origin"})
    assert refused.status_code == 403


def test_a_server_that_collects_its_responses_follows_no_run(app: Flask) -> None:
    client = log_in(app)
    assert "data-stream" not in client.get(INSTANCE).text
    assert client.get(f"{INSTANCE}/stream").status_code == 501


def test_a_blueprint_without_hooks_is_refused() -> None:
    app = Flask("open")
    flask_durable = FlaskDurable(app)
    with pytest.raises(NoAuthorization):
        app.register_blueprint(flask_durable.dashboard(), url_prefix="/durable")


def test_a_body_beyond_the_limit_is_refused(app: Flask) -> None:
    client = log_in(app)
    client.get(INSTANCE)
    sent = client.post(f"{INSTANCE}/terminate", data={"reason": "x" * 2_000_000})
    assert sent.status_code == 413
