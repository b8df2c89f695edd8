"""What only `celery-durable` has: the server's address, headers, and nothing of the app in its process."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from celery_durable.cli.remote import celery_durable, instances
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


def test_every_example_of_every_help_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("order.json", "approval.json"):
        (tmp_path / name).write_text("{}")
    for path in commands():
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
        instances.list_commands(click.Context(instances))
    )
    assert {"workflows", "instances"} <= set(celery_durable.commands)


def test_the_package_declares_the_script() -> None:
    declared = tomllib.loads(PROJECT.read_text())["project"]["scripts"]
    assert declared == {"celery-durable": "celery_durable.cli.remote:main"}


def test_instances_are_named_by_options_too(order: Shop) -> None:
    api = served(order)
    named = ("-w", "order", "-i", "o-1")
    assert [row[0] for row in api("workflows", "list").rows] == ["bad", "charge", "echo", "nap", "order"]
    assert api("instances", "list", "--workflow", "order", "--status", "waiting").rows[0][1] == "o-1"
    assert api("instances", "get", *named).rows == api("show", "order", "o-1").rows
    assert api("instances", "create", "--workflow", "echo", "--id", "e-1", "--params", "1").rows == [["e-1"]]
    assert api("instances", "pause", *named).rows == [["Paused", "order/o-1"]]
    sent = api("instances", "send-event", *named, "--type", "approval", "--payload", '"eve"')
    assert sent.rows == [["Sent", "approval", "order/o-1"]]
    assert api("instances", "logs", *named, "--log-level", "info").rows[0][1] == "info"
    assert api("instances", "history", *named, "--include-logs", "--log-category", "payments").code == 0


@pytest.mark.parametrize("words", [("--id", "order/o-1"), ("--id=order/o-1#1",), ("-i", "order/o-1#1")])
def test_the_option_takes_a_pasted_name(order: Shop, words: tuple[str, ...]) -> None:
    api = served(order)
    assert api("instances", "get", *words) == api("show", "order", "o-1")


def test_pasted_names_in_options_may_be_of_several_workflows_and_are_of_the_current_run(order: Shop) -> None:
    order.pipe("start", "nap", "--id", "n-1")
    api = served(order)
    paused = api("instances", "pause", "--id", "order/o-1#1", "--id", "nap/n-1")
    assert paused.rows == [["Paused", "order/o-1"], ["Paused", "nap/n-1"]]
    api("restart", "order", "o-1")
    assert api("instances", "get", "-i", "order/o-1#1").rows[0][4] == "1"
    assert api("instances", "pause", "-i", "order/o-1#1").err.startswith("error: Run 1 is not the current run of")
    assert api("instances", "create", "--id", "nap/n-2").rows == [["n-2"]]
    assert api("instances", "get", "--id", "o-1").err.endswith("Error: 'o-1' is not WORKFLOW/ID.\n")
    assert api("instances", "get").err.splitlines()[-1].startswith("Error: Missing option '--workflow'")


def test_a_server_without_the_api_is_named(shop: Shop) -> None:
    api = served(shop)
    said = remote("-b", f"{api.url}/nope", "-H", "X-Api-Key: sesame", "ls")
    assert (said.code, said.err) == (
        4,
        f"error: {api.url}/nope knows no such route.\n"
        "hint: The base URL is the one under which `GET /workflows` is served, such as https://shop.example/api\n",
    )


def test_a_command_that_only_the_app_has_says_where_it_works() -> None:
    for command in ("migrate", "emit", "leases"):
        said = remote(command)
        assert said.code == 2
        assert said.err.endswith(
            f"Error: celery-durable has no command {command!r}. Use: celery -A <your app> durable {command}\n"
        )


def test_a_request_without_time_is_wrong_usage() -> None:
    said = remote("--timeout", "0", "ls")
    assert said.code == 2
    assert said.err.endswith("Error: Invalid value for '--timeout': it must be longer than 0\n")


# --- address and headers ------------------------------------------------------------------------


def test_without_an_address_it_says_how_to_give_one() -> None:
    said = remote("show", "order", "o-1")
    assert (said.code, said.err) == (
        2,
        "error: No base URL was given.\nhint: Give its URL, -b https://shop.example/api, or set DURABLE_URL\n",
    )


def test_an_address_or_a_header_that_cannot_be_one_is_wrong_usage_and_not_repeated() -> None:
    addresses = ["shop.example/api", "ftp://shop.example", "http://", "http://eve:secret@shop.example", "http://x/?a=1"]
    headers = ["secret", "X Key: secret", "X-Key: secret\r\nX-Other: 1", ": secret", "X-Key: ключ"]
    for words in (*(["-b", each] for each in addresses), *(["-b", "http://127.0.0.1:1", "-H", it] for it in headers)):
        said = remote(*words, "workflows", "list")
        assert said.code == 2, words
        name = "'-H' / '--header'" if "-H" in words else "'-b' / '--base-url'"
        assert f"Invalid value for {name}" in said.err
        assert "secret" not in said.err


def test_address_and_headers_may_come_from_the_environment(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    api = served(shop)
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
    api = served(shop)
    said = remote("-b", api.url, "show", "nap", "n-1")
    assert (said.code, said.err) == (5, "error: Send your key as the header X-Api-Key.\n")


def test_a_server_that_is_not_there_is_no_traceback() -> None:
    said = remote("-b", "http://127.0.0.1:1/api", "--retries", "0", "show", "order", "o-1")
    assert said.code == 4
    assert said.err.startswith("error: http://127.0.0.1:1/api cannot be reached: ")
    assert said.err.endswith("hint: Is the server running, and is the base URL right?\n")


def test_each_request_is_told_as_a_line_for_curl_without_what_may_be_secret(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    api = served(shop)
    secrets = ("-H", "X-Api-Key: sesame", "-H", "Authorization: Bearer sesame")
    said = remote("-b", api.url, *secrets, "-v", "start", "echo", "--params", '"it\'s"', "--id", "e-1")
    assert said.rows == [["e-1"]]
    hidden = "curl -H 'X-Api-Key: ***' -H 'Authorization: ***'"
    body = shlex.quote('{"id": "e-1", "params": "it\'s"}')
    assert said.err == f"{hidden} --json {body} {api.url}/workflows/echo/instances\n"
    said = remote("-b", api.url, *secrets, "-v", "terminate", "echo", "e-1")
    body = shlex.quote('{"by": "ann"}')
    assert said.err == f"{hidden} --json {body} {api.url}/workflows/echo/instances/e-1/terminate\n"
    said = remote("-b", api.url, *secrets, "-v", "ls", "-w", "echo", "-s", "waiting", "--limit", "3")
    path = "/workflows/echo/instances?status=waiting&pageSize=3"
    assert said.err.splitlines()[0] == f"{hidden} '{api.url}{path}'"
