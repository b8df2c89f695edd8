"""`dashboard` before it serves."""

from __future__ import annotations

import socket
import sys

import pytest

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
