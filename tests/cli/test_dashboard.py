"""`dashboard` before it serves."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from celery_durable.cli.remote import celery_durable
from tests.cli.conftest import Shop


def test_a_port_that_is_in_use_is_named(shop: Shop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = shop.pipe("dashboard", "--port", str(port))
    assert (done.out, done.code) == ("", 1)
    assert done.err == (
        f"error: Port {port} of this machine cannot be used: Address already in use.\n"
        "hint: Choose another, or any free one: --port 0\n"
    )


def test_a_missing_package_names_its_extra(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("celery_durable.dashboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = shop.pipe("dashboard")
    assert done.code == 1
    assert "which is not installed" in done.err
    assert 'pip install "celery-durable[dashboard]"' in done.err


def test_without_the_app_the_database_must_have_the_tables(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.sqlite3"
    done = CliRunner().invoke(celery_durable, ["dashboard", "--database-url", url])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: The database ")
    assert done.stderr.endswith("hint: Migrate it with the app, or use the version of celery-durable of the app.\n")


def test_without_the_app_a_database_that_cannot_be_reached_is_named() -> None:
    url = "postgresql+psycopg://shop@127.0.0.1:1/shop"
    done = CliRunner().invoke(celery_durable, ["dashboard", "--database-url", url])
    assert done.exit_code == 4
    assert done.stderr.startswith("error: The database cannot be used: ")
