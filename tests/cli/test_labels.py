"""Labels over both connections: start with them, find by them, change instances by them, show them."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from tests.cli.conftest import Shop
from tests.cli.connections import remote, served


def listed(connection: Any, *words: str) -> list[str]:
    return [row[1] for row in connection("ls", "-w", "nap", *words).rows]


@pytest.fixture
def naps(shop: Shop, connection: Any) -> Any:
    """Four of them, three with labels."""
    connection("start", "nap", "--id", "n-1", "--label", "tenant=acme", "--label", "stage=new")
    connection("start", "nap", "--id", "n-2", "--label", "tenant=acme")
    connection("start", "nap", "--id", "n-3", "--label", "tenant=a=b c")
    connection("start", "nap", "--id", "n-4")
    return connection


def test_what_is_started_with_labels_is_listed_by_them(naps: Any) -> None:
    assert listed(naps, "--label", "tenant=acme") == ["n-2", "n-1"]
    assert listed(naps, "--label", "tenant=acme", "--label", "stage=new") == ["n-1"]
    assert listed(naps, "--label", "tenant=a=b c") == ["n-3"]
    assert listed(naps) == ["n-4", "n-3", "n-2", "n-1"]
    first = naps("ls", "-w", "nap", "--label", "tenant=acme", "--limit", "1")
    assert [row[1] for row in first.rows] == ["n-2"]
    cursor = first.err.split()[-1]
    assert listed(naps, "--label", "tenant=acme", "--cursor", cursor) == ["n-1"]
    none = naps("ls", "-w", "nap", "--label", "tenant=acme", "--label", "stage=old")
    assert (none.rows, none.err) == ([], "No instances of workflow 'nap' with tenant=acme stage=old.\n")


def test_show_and_export_tell_them(shop: Shop, naps: Any) -> None:
    assert naps("show", "nap", "n-1").rows[1:3] == [["label", "stage", "new"], ["label", "tenant", "acme"]]
    assert [row[0] for row in naps("show", "nap", "n-4").rows] == ["instance", "explain"]
    assert json.loads(naps("export", "nap", "n-1").out)["run"]["labels"] == {"stage": "new", "tenant": "acme"}
    assert json.loads(naps("export", "nap", "n-4").out)["run"]["labels"] == {}


def test_many_instances_are_changed_by_their_labels(naps: Any) -> None:
    where = ("--where", "workflow=nap label.tenant=acme")
    assert naps("terminate", *where).rows == [["Would terminate", "nap/n-2"], ["Would terminate", "nap/n-1"]]
    both = ("--where", "workflow=nap label.tenant=acme label.stage=new")
    assert naps("terminate", *both, "--yes").rows == [["Terminated", "nap/n-1"]]
    assert naps("terminate", "--where", "workflow=nap 'label.tenant=a=b c'").rows == [["Would terminate", "nap/n-3"]]


def test_the_groups_that_name_everything_by_options_take_them_too(shop: Shop) -> None:
    found = served(shop)
    to = ("-b", found.url, "-H", "X-Api-Key: sesame")
    remote(*to, "instances", "create", "-w", "nap", "--id", "n-1", "--label", "tenant=acme")
    said = remote(*to, "instances", "list", "-w", "nap", "--label", "tenant=acme")
    assert [row[1] for row in said.rows] == ["n-1"]


def test_people_see_them_on_one_line(shop: Shop) -> None:
    shop.pipe("start", "nap", "--id", "n-1", "--label", "tenant=acme", "--label", "stage=new")
    shown = click.unstyle(shop.terminal("show", "nap", "n-1")).splitlines()
    assert shown[1].split() == ["labels", "stage=new", "tenant=acme"]
