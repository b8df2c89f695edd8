"""A server that is killed while it takes a person's answer: the answer is stored or not, and a client repeats it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from celery import Celery

from celery_durable import Durable
from tests.smoke import answering
from tests.smoke.proc import Proc, free_port, python, until

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

EVENTS = "/workflows/refund/instances/r-1/events"
POINTS = {
    "before the transaction": False,
    "after the event is written": False,
    "before the commit": False,
    "after the commit": True,
}
"""Whether the answer is stored if the server dies there."""


@contextlib.contextmanager
def serve(store_url: str, folder: Path) -> Iterator[tuple[Proc, httpx.Client]]:
    port = free_port()
    words = ("-m", "uvicorn", "--factory", "--port", str(port), "--log-level", "warning")
    environment = {"DURABLE_DATABASE_URL": store_url, "ANSWERING_FOLDER": str(folder)}
    server = Proc(python(*words, "tests.smoke.answering:make_site"), log=folder / "server.log", env=environment)

    def is_ready(client: httpx.Client) -> bool:
        assert server.is_running, server.text()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/healthz").status_code == 200
        return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            until("the server is ready", lambda: is_ready(client))
            yield server, client
    finally:
        server.clean_up()


@pytest.mark.parametrize("point", POINTS)
def test_an_answer_is_stored_whole_or_not_at_all_and_the_first_one_counts(
    store_url: str, tmp_path: Path, point: str
) -> None:
    app = Celery("runner", broker="memory://", set_as_current=False)
    app.conf.durable_database_url = store_url
    with contextlib.closing(Durable(app)) as durable:
        handle = answering.define(durable).create(id="r-1")
        durable.tick()
        answer = {"answers": "approve", "payload": {"approved": True}, "by": "ada"}
        with serve(store_url, tmp_path) as (server, client):
            (tmp_path / "order").write_text(point)
            with pytest.raises(httpx.TransportError):
                client.post(EVENTS, json=answer)
            assert server.process.wait(30) == -9
        stored = [(each.event_id, each.by, each.payload) for each in handle.history().events]
        assert stored == ([("answer:approve", "ada", {"approved": True})] if POINTS[point] else [])
        (tmp_path / "order").unlink()
        with serve(store_url, tmp_path) as (_, client):
            assert client.post(EVENTS, json=answer).json()["accepted"] is not POINTS[point]
            late = client.post(EVENTS, json=answer | {"payload": {"approved": False}, "by": "bob"})
            assert (late.status_code, "was answered by 'ada'" in late.text) == (409, True)
        durable.tick()
        assert handle.result("60 seconds") == [True, "ada"]
