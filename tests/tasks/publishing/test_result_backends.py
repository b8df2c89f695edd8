"""Result backends that cannot be reached: sending a step's task asks them nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_durable.model import OutboxKind, OutboxMessage
from celery_durable.runtime import Runtime
from celery_durable.tasks.publishing import Publisher
from celery_durable.tasks.publishing.recorder import Recorder
from tests.support.embedded import messages

pytestmark = pytest.mark.timeout(60)

MAIL = OutboxMessage("id-1", OutboxKind.TASK, "mail", '{"args": [1], "kwargs": {}, "options": {}}')


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def app_with(backend: str) -> Celery:
    app = Celery("backends", broker="memory://", backend=backend, set_as_current=False)
    app.conf.task_default_queue = "backends"
    return app


def send(app: Celery) -> None:
    names = {"deliver": "celery_durable.deliver", "answer_task_names": ("celery_durable.done", "celery_durable.failed")}
    publisher = Publisher(app, "celery_durable.advance", Runtime(), **names, queue=lambda: "backends")
    try:
        assert [each.value for each in publisher.send([MAIL]).states] == ["sent"]
    finally:
        publisher.close()


def test_a_redis_result_backend_that_hangs_is_not_asked(silent: socket.socket) -> None:
    app = app_with(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
    send(app)
    with pytest.raises(BlockingIOError):
        silent.accept()
    sent = messages(app, "backends")
    assert [each.headers["id"] for each in sent] == ["id-1"]
    assert not sent[0].headers["ignore_result"]  # its result is stored as ever


def test_a_redis_result_backend_that_refuses_does_not_keep_a_message_back(silent: socket.socket) -> None:
    port = silent.getsockname()[1]
    silent.close()
    app = app_with(f"redis://127.0.0.1:{port}/0")
    send(app)
    assert [each.headers["id"] for each in messages(app, "backends")] == ["id-1"]


def test_what_an_application_sends_itself_subscribes_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with("redis://127.0.0.1:1/0")
    asked: list[str] = []
    monkeypatch.setattr(app.backend.result_consumer, "consume_from", asked.append)
    send(app)
    send(app)
    assert asked == []
    app.send_task("mail", task_id="own")
    assert asked == ["own"]
    messages(app, "backends")


def test_the_reply_queue_of_the_rpc_backend_is_declared() -> None:
    app = app_with("rpc://")
    send(app)
    recorder = Recorder()
    app.backend.on_task_call(recorder, "id-1")
    recorder.publish("x", exchange="", routing_key="backends")
    assert [each.name for each in recorder.messages[0].declare] == [app.backend.binding.name]
