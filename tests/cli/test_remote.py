"""What only `celery-durable` has: the server's address, headers, tries, and nothing of the app in its process."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from celery_durable.cli.backends.client import Client, RetryPolicy, WrongApi
from celery_durable.cli.remote import InstanceCommands, celery_durable
from tests.cli.conftest import Shop
from tests.cli.connections import remote, served
from tests.cli.test_help import PROJECT


def help_of(*words: str) -> str:
    said = remote(*words, "--help")
    assert said.code == 0, said.err
    return said.out


def commands() -> list[tuple[str, ...]]:
    def below(group: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        if isinstance(group, click.Group):
            for name in group.list_commands(click.Context(group)):
                yield from below(group.get_command(click.Context(group), name), (*path, name))

    return list(below(celery_durable, ()))


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_example_of_every_help_can_be_typed(
    path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("order.json", "approval.json"):
        (tmp_path / name).write_text("{}")
    text = help_of(*path)
    examples = re.findall(r"^ +(celery-durable .*)$", text, flags=re.MULTILINE)
    is_group = isinstance(found(path), click.Group)
    assert is_group or examples, path
    assert not path or "  Use it " in text
    for line in examples:
        parse(line)
        assert is_group or tuple(shlex.split(line)[1 : len(path) + 1]) == path


def found(path: tuple[str, ...]) -> click.Command:
    command: Any = celery_durable
    for name in path:
        command = command.get_command(click.Context(command), name)
    return command


def parse(line: str) -> None:
    """Raises where a line is not understood."""
    program, *words = shlex.split(line)
    assert program == "celery-durable"
    command: Any = celery_durable
    while isinstance(command, click.Group):
        ctx = command.make_context(program, list(words), obj=None)
        name, command, words = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
    command.make_context(name, words)


def test_the_named_form_has_every_verb_of_the_seed() -> None:
    assert {"list", "get", "history", "logs", "create", "pause", "resume", "restart", "terminate", "send-event"} <= set(
        InstanceCommands.module_by_command
    )
    assert {"workflows", "instances"} <= set(celery_durable.commands)


def test_the_package_declares_the_script() -> None:
    declared = tomllib.loads(PROJECT.read_text())["project"]["scripts"]
    assert declared == {"celery-durable": "celery_durable.cli.remote:main"}


def test_it_loads_neither_the_app_nor_celery_nor_a_database(shop: Shop) -> None:
    """In a process of its own, against a real server, through a command that reads much."""
    program = """
import sys
from celery_durable.cli.remote import celery_durable
celery_durable(sys.argv[1:], standalone_mode=False)
names = {name.partition(".")[0] for name in sys.modules}
forbidden = {"celery", "kombu", "sqlalchemy", "alembic", "psycopg", "pymysql", "sqlite3", "fastapi", "starlette"}
rooms = {name for name in sys.modules if name.startswith("celery_durable.")}
print(sorted(names & forbidden), sorted(rooms & {f"celery_durable.{it}" for it in ("app", "store", "tasks", "http")}))
"""
    shop.durable.internals.operations.create.instance("nap", id="n-1")
    with served(shop) as api:
        words = ["-b", api.url, "-H", "X-Api-Key: sesame", "show", "nap", "n-1"]
        said = subprocess.run(
            [sys.executable, "-c", program, *words], text=True, cwd=PROJECT.parent, capture_output=True, check=False
        )
    assert said.stdout.splitlines()[-1] == "[] []", said.stderr


def test_instances_are_named_by_options_too(order: Shop) -> None:
    with served(order) as api:
        named = ("-w", "order", "-i", "o-1")
        assert api("workflows", "list").rows == [[each, "", ""] for each in ("bad", "charge", "echo", "nap", "order")]
        assert api("instances", "list", "--workflow", "order", "--status", "waiting").rows[0][1] == "o-1"
        assert api("instances", "get", *named).rows == api("show", "order", "o-1").rows
        assert api("instances", "create", "--workflow", "echo", "--id", "e-1", "--params", "1").rows == [["e-1"]]
        assert api("instances", "pause", *named).rows == [["Paused", "order/o-1"]]
        sent = api("instances", "send-event", *named, "--type", "approval", "--payload", '"eve"')
        assert sent.rows == [["Sent", "approval", "order/o-1"]]
        assert api("instances", "logs", *named, "--log-level", "info").rows[0][1] == "info"
        assert api("instances", "history", *named, "--include-logs", "--log-category", "payments").code == 0


def test_an_api_lists_one_workflow_at_a_time(shop: Shop) -> None:
    with served(shop) as api:
        said = api("ls")
    assert (said.code, said.err) == (
        1,
        "error: The HTTP API lists one workflow at a time.\n"
        "hint: Name a workflow. To list them: celery-durable workflows list\n",
    )


# --- address and headers ------------------------------------------------------------------------


def test_without_an_address_it_says_how_to_give_one() -> None:
    said = remote("show", "order", "o-1")
    assert (said.code, said.err) == (
        2,
        "error: No base URL was given.\nhint: Give its URL, -b https://shop.example/api, or set DURABLE_URL\n",
    )


@pytest.mark.parametrize(
    "url", ["shop.example/api", "ftp://shop.example", "http://", "http://eve:secret@shop.example", "http://x/?a=1"]
)
def test_an_address_that_cannot_be_one_is_wrong_usage(url: str) -> None:
    said = remote("-b", url, "workflows", "list")
    assert said.code == 2
    assert "Invalid value for '-b' / '--base-url'" in said.err
    assert "secret" not in said.err


@pytest.mark.parametrize(
    "header", ["sesame", "X Key: sesame", "X-Key: sesame\r\nX-Other: 1", ": sesame", "X-Key: ключ"]
)
def test_a_header_that_cannot_be_one_is_not_repeated(header: str) -> None:
    said = remote("-b", "http://127.0.0.1:1", "-H", header, "workflows", "list")
    assert said.code == 2
    assert "Invalid value for '-H' / '--header'" in said.err
    assert "sesame" not in said.err


def test_address_and_headers_may_come_from_the_environment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(shop) as api:
        monkeypatch.setenv("DURABLE_URL", f"{api.url}/")
        assert remote("ls", "-w", "nap").code == 5
        monkeypatch.setenv("DURABLE_HEADERS", "X-Other: 1\nX-Api-Key: sesame\n")
        assert remote("ls", "-w", "nap").code == 0
        monkeypatch.setenv("DURABLE_HEADERS", "sesame")
        said = remote("ls", "-w", "nap")
        assert (said.code, said.err.splitlines()[-1]) == (
            2,
            "Error: Invalid value for DURABLE_HEADERS: write a header as 'Name: value'",
        )


def test_who_is_not_let_in_is_told_so(shop: Shop) -> None:
    with served(shop) as api:
        said = remote("-b", api.url, "show", "nap", "n-1")
    assert (said.code, said.err) == (5, "error: Send your key as the header X-Api-Key.\n")


def test_a_server_that_is_not_there_is_no_traceback() -> None:
    said = remote("-b", "http://127.0.0.1:1/api", "--retries", "0", "show", "order", "o-1")
    assert said.code == 4
    assert said.err.startswith("error: http://127.0.0.1:1/api cannot be reached: ")
    assert said.err.endswith("hint: Is the server running, and is the base URL right?\n")


def test_each_request_is_told_as_a_line_for_curl_without_what_may_be_secret(shop: Shop) -> None:
    with served(shop) as api:
        secrets = ("-H", "X-Api-Key: sesame", "-H", "Authorization: Bearer sesame")
        said = remote("-b", api.url, *secrets, "-v", "start", "echo", "--params", '"it\'s"', "--id", "e-1")
        assert said.rows == [["e-1"]]
        hidden = "curl -H 'X-Api-Key: ***' -H 'Authorization: ***'"
        body = shlex.quote('{"id": "e-1", "params": "it\'s"}')
        assert said.err == f"{hidden} --json {body} {api.url}/workflows/echo/instances\n"
        said = remote("-b", api.url, *secrets, "-v", "terminate", "echo", "e-1")
        assert said.err == f"{hidden} -X POST {api.url}/workflows/echo/instances/e-1/terminate\n"
        said = remote("-b", api.url, *secrets, "-v", "ls", "-w", "echo", "-s", "waiting", "--limit", "3")
        path = "/workflows/echo/instances?status=waiting&pageSize=3"
        assert said.err.splitlines()[0] == f"{hidden} '{api.url}{path}'"


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
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
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
        assert remote("-b", url, "workflows", "list").rows == [["order", "", ""]]
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


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_an_odd_answer_is_no_traceback(body: bytes) -> None:
    with Scripted((200, {}, body)).serve() as url:
        said = remote("-b", url, "workflows", "list")
    assert said.code == 4
    assert said.err.startswith(f"error: {url} ")
    assert "Traceback" not in said.err


def test_a_status_of_a_newer_server_is_named() -> None:
    at = "2030-01-01T00:00:00Z"
    listed = {"id": "o-1", "runNumber": 1, "details": {"status": "dreaming"}, "createdAt": at, "updatedAt": at}
    with Scripted((200, {}, {"instances": [listed], "hasNextPage": False})).serve() as url:
        said = remote("-b", url, "ls", "--workflow", "order")
    assert (said.code, said.err) == (
        4,
        f"error: {url} sent something that this version of celery-durable cannot read: "
        "ValueError: instances.0.details.status: "
        "Input should be 'active', 'waiting', 'paused', 'complete', 'errored' or 'terminated', not 'dreaming'\n"
        "hint: Is the server of the same version? --verbose shows where it failed.\n",
    )


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"message": 1}', b'{"message": "m", "code": "c", "errors": [7]}'])
def test_an_odd_problem_is_no_traceback(body: bytes) -> None:
    with Scripted((400, {"Content-Type": "application/problem+json"}, body)).serve() as url:
        said = remote("-b", url, "workflows", "list")
    assert (said.code, said.err) == (1, "error: The server answered with 400 Bad Request.\n")


def test_a_server_error_is_tried_again_where_that_can_do_nothing_twice(slept: list[float]) -> None:
    script = Scripted((500, {}, None), LIST)
    with script.serve() as url:
        assert remote("-b", url, "workflows", "list").rows == [["order", "", ""]]
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
        options: dict[str, Any] = {"timeout_seconds": 10, "retries": RetryPolicy(limit=0), "sleep": print}
        client = Client(url, [], **options, max_body_bytes=1000)
        with contextlib.closing(client), pytest.raises(WrongApi, match="answered with more than 1000 bytes"):
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


def test_a_server_that_does_not_explain_is_named() -> None:
    with Scripted((404, {}, {"detail": "Not Found"})).serve() as url:
        said = remote("-b", url, "instances", "explain", "-w", "order", "-i", "o-1")
    assert (said.code, said.err) == (
        1,
        "error: The server gives no explanations.\nhint: It runs an older version. Use show to see the status\n",
    )
