"""How `celery-durable` meets servers: what it tries again, and what it makes of odd answers."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import pytest

from celery_durable.cli.backends.client import Client
from celery_durable.cli.errors import CliError
from tests.cli.connections import remote

# --- tries --------------------------------------------------------------------------------------

LIST = (200, {}, {"workflows": [{"name": "order"}]})
BUSY = (503, {"Retry-After": "7"}, None)
MADE = (201, {}, {"id": "o-1", "details": {"status": "active"}})
TAKEN = (
    409,
    {"Content-Type": "application/problem+json"},
    {
        "code": "INSTANCE_ID_ALREADY_EXISTS",
        "message": "Workflow 'order' already has an instance 'o-1'. Use another id.",
    },
)
Answer = tuple[int, dict[str, str], Any]


class Scripted:
    """A server that says what a test wants; ``None`` hangs up."""

    def __init__(self, *answers: Answer | None) -> None:
        self.answers, self.asked = list(answers), list[str]()
        self.headers = list[dict[str, str]]()

    @contextmanager
    def serve(self) -> Iterator[str]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                script.asked.append(f"{self.command} {self.path}")
                script.headers.append(dict(self.headers))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = script.answers.pop(0)
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in ({"Content-Type": "application/json"} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(
                    body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
                )

            do_POST = do_GET  # noqa: N815  # the name that the base class looks for

            def log_message(self, *_: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    from celery_durable.runtime import Runtime

    pauses: list[float] = []
    monkeypatch.setattr(Runtime, "sleep", lambda _, seconds: pauses.append(seconds))
    return pauses


def test_reads_are_tried_again_after_a_while_that_the_server_may_name(slept: list[float]) -> None:
    script = Scripted(BUSY, None, LIST)
    with script.serve() as url:
        assert remote("-b", url, "workflows", "list").rows == [["order", "", "", ""]]
    assert script.asked == ["GET /api/workflows"] * 3
    assert slept == [7.0, 14.0]


def test_tries_have_an_end(slept: list[float]) -> None:
    script = Scripted((502, {}, None), (502, {}, None), (429, {}, None))
    with script.serve() as url:
        said = remote("-b", url, "--retries", "2", "--retry-delay", "0.25", "workflows", "list")
    assert (said.code, said.err) == (4, "error: The server answered with 429 Too Many Requests.\n")
    assert slept == [0.25, 0.5]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("start", "order"), 1),
        (("start", "order", "--id", "o-1"), 2),
        (("send-event", "order", "o-1", "approval"), 1),
        (("send-event", "order", "o-1", "approval", "--event-id", "mail-7"), 2),
        (("terminate", "order", "o-1"), 1),
    ],
)
def test_changes_are_repeated_only_where_that_can_do_nothing_twice(
    slept: list[float], words: tuple[str, ...], count: int
) -> None:
    done = {"id": "o-1", "details": {"status": "active"}, "status": {"status": "active"}, "accepted": True}
    script = Scripted(None, (200, {}, done))
    with script.serve() as url:
        said = remote("-b", url, *words)
    assert len(script.asked) == count
    assert said.code == (0 if count == 2 else 4)
    if count == 1:
        assert said.err.endswith("hint: The change may have been made. Check before you repeat it.\n")


def test_a_creation_whose_first_try_got_no_answer_says_so_where_the_id_is_taken(slept: list[float]) -> None:
    with Scripted(None, TAKEN).serve() as url:
        said = remote("-b", url, "start", "order", "--id", "o-1")
    assert (said.code, said.err) == (
        1,
        "error: Workflow 'order' already has an instance 'o-1'.\n"
        "hint: An earlier attempt of this command got no response, and may have created it. "
        "Use another --id, or inspect this one: celery-durable show order o-1\n",
    )


def test_credentials_go_nowhere_else() -> None:
    elsewhere = Scripted(LIST)
    with elsewhere.serve() as other:
        script = Scripted((307, {"Location": f"{other}/workflows"}, None))
        with script.serve() as url:
            said = remote("-b", url, "-H", "Authorization: Bearer sesame", "workflows", "list")
    assert script.headers[0]["Authorization"] == "Bearer sesame"
    assert elsewhere.asked == []
    assert said.code == 4
    assert said.err.startswith(f"error: {url} redirects to {other}/workflows.\nhint: The base URL is the one")


@pytest.mark.parametrize("answer", [(200, {"Content-Type": "text/html"}, None), (404, {}, {"detail": "Not Found"})])
def test_what_is_not_the_api_is_named(answer: Answer) -> None:
    with Scripted(answer).serve() as url:
        said = remote("-b", url, "workflows", "list")
    assert said.code == 4
    assert re.match(rf"error: {url} (answered with text/html, not with JSON|knows no such route)\.\nhint: ", said.err)


ODD = [
    b"[" * 100_000, b"[]", b"null", b"7", b'"x"', b"{}", b'{"workflows": null}', b'{"workflows": [1]}',
    b'{"workflows": [{}]}', b'{"workflows": {"name": 1}}', b"\xff\xfe", b"{", b'{"workflows": [{"name": [[]]}]}',
]  # fmt: skip


def test_an_odd_answer_is_no_traceback() -> None:
    with Scripted(*((200, {}, body) for body in ODD)).serve() as url:
        for body in ODD:
            said = remote("-b", url, "workflows", "list")
            assert said.code == 4, body
            assert said.err.startswith(f"error: {url} ")
            assert "Traceback" not in said.err


def test_an_odd_problem_is_no_traceback() -> None:
    bodies = [b"[" * 100_000, b'{"message": 1}', b'{"message": "m", "code": "c", "errors": [7]}']
    kind = {"Content-Type": "application/problem+json"}
    with Scripted(*((400, kind, body) for body in bodies)).serve() as url:
        for _ in bodies:
            said = remote("-b", url, "workflows", "list")
            assert (said.code, said.err) == (1, "error: The server answered with 400 Bad Request.\n")


def test_a_status_of_a_newer_server_is_named() -> None:
    at = "2030-01-01T00:00:00Z"
    details = {"status": "dreaming"}
    listed = {
        "workflowName": "order",
        "id": "o-1",
        "runNumber": 1,
        "details": details,
        "createdAt": at,
        "updatedAt": at,
    }
    with Scripted((200, {}, {"instances": [listed], "hasNextPage": False})).serve() as url:
        said = remote("-b", url, "ls", "--workflow", "order")
    assert (said.code, said.err) == (
        4,
        f"error: {url} sent something that this version of celery-durable cannot read: "
        "ValueError: instances.0.details.status: "
        "Input should be 'active', 'waiting', 'paused', 'complete', 'errored' or 'terminated', not 'dreaming'\n"
        "hint: Is the server of the same version? --verbose shows where it failed.\n",
    )


def test_a_server_error_is_tried_again_where_that_can_do_nothing_twice(slept: list[float]) -> None:
    script = Scripted((500, {}, None), LIST)
    with script.serve() as url:
        assert remote("-b", url, "workflows", "list").rows == [["order", "", "", ""]]
    script = Scripted((500, {}, None))
    with script.serve() as url:
        assert remote("-b", url, "terminate", "order", "o-1").code == 1
    assert len(script.asked) == 1


def test_an_answer_that_never_ends_is_given_up() -> None:
    """A byte now and then keeps every single read of the socket within its time."""
    is_over = threading.Event()

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not is_over.wait(0.05):
                self.wfile.write(b" ")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        said = remote("-b", url, "--timeout", "1", "--retries", "0", "workflows", "list")
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
    assert said.code == 4
    assert said.err.startswith(f"error: {url} cannot be reached: no complete answer within 1 s\n")


def test_an_answer_that_is_too_large_is_not_kept() -> None:
    with Scripted((200, {}, b"[" + b"1," * 1000 + b"1]")).serve() as url:
        client = Client(url, [], timeout_seconds=10, retries=0, retry_delay_seconds=0, sleep=print, max_body_bytes=1000)
        with contextlib.closing(client), pytest.raises(CliError, match="answered with more than 1000 bytes"):
            client.get("workflows")


# --- explain ------------------------------------------------------------------------------------

SAID = {
    "code": "WAITING_EVENT",
    "sentence": 'Waits for event "approval" at step "await approval".',
    "facts": {"event_type": "approval"},
    "actions": ["celery -A <your app> durable send-event order o-1 approval", "celery -A <your app> worker"],
}


def test_explain_says_what_the_server_says_with_what_can_be_typed_here() -> None:
    script = Scripted((200, {}, SAID))
    with script.serve() as url:
        said = remote("-b", url, "explain", "order/o-1")
    assert script.asked == ["GET /api/workflows/order/instances/o-1/explain"]
    assert said.rows == [
        ["WAITING_EVENT", 'Waits for event "approval" at step "await approval".'],
        ["action", "celery-durable send-event order o-1 approval"],
        ["action", "celery -A <your app> worker"],
    ]
