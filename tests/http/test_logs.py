"""What the API writes to the log: hostile names do not fill it, and clients that break off are no errors."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from celery_durable.store.engine import Store
from tests.http.conftest import Shop
from tests.http.test_access import routes
from tests.http.test_stream import site  # noqa: F401  # a fixture

LONG = "x" * 10_000
BODIES: dict[str, Any] = {
    "/instances": {"id": LONG},
    "/batch": {"instances": [{"id": LONG}]},
    "/fork": {"step": LONG, "id": LONG},
    "/rewind": {"step": LONG},
    "/set-result": {"step": LONG, "result": 1, "by": LONG},
    "/skip": {"step": LONG, "by": LONG},
    "/events": {"type": LONG, "payload": LONG, "id": LONG},
    "/emit": {"payload": 1, "id": LONG},
}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Whole lines, tracebacks included, as a handler would write them."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler, root = Keep(), logging.getLogger()
    root.addHandler(handler)
    caplog.set_level(logging.DEBUG, logger="celery_durable")
    yield found
    root.removeHandler(handler)


@pytest.mark.parametrize("fault", ["none", "unavailable", "unforeseen"])
def test_names_of_hostile_requests_do_not_fill_the_log(
    shop: Shop, order: str, lines: list[str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = TestClient(shop.client().app, raise_server_exceptions=False)
    named = list(routes(api))
    if fault == "unavailable":
        with shop.durable.internals.store.engine.begin() as connection:
            for table in ("workflow_step", "workflow_instance"):
                connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO gone_{table}")
    elif fault == "unforeseen":

        def fail(self: Store, work: Any, **_: Any) -> Any:
            raise RuntimeError(f"no {work}")

        monkeypatch.setattr(Store, "read", fail)
        monkeypatch.setattr(Store, "transact", fail)
    for method, path in named:
        body = next((body for end, body in BODIES.items() if path.endswith(end)), {})
        for workflow in (LONG, "order"):
            for instance_id in (LONG, "o-1"):
                asked = path.replace("/workflows/o-1", f"/workflows/{workflow}")
                asked = asked.replace("/instances/o-1", f"/instances/{instance_id}").replace(
                    "/topics/o-1", f"/topics/{LONG}"
                )
                if not asked.endswith("/stream") or instance_id == LONG:
                    api.request(method, asked, **({"json": body} if method == "POST" else {}))
    assert [line[:200] for line in lines if LONG[:600] in line] == []
    if fault == "unforeseen":
        assert any("Traceback" in line for line in lines)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_client_that_breaks_off_is_no_error(
    shop: Shop,
    order: str,
    site: str,  # noqa: F811
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In its body, before its answer, in a long poll, in a stream; closed, or reset."""
    address = urlsplit(site)
    posted = f"POST {order}/events HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    asked = [
        f'{posted}{{"type": "a',
        f"GET {order} HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {order}?wait=2 HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {order}/stream HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    for request in asked:
        for linger in (b"\x00" * 8, b"\x01\x00\x00\x00\x00\x00\x00\x00"):  # the second: closed with a reset
            with socket.create_connection((address.hostname, address.port), timeout=10) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                client.sendall(request.encode())
                if "stream" in request:
                    client.recv(100)
    assert shop.client().post(f"{order}/terminate").status_code == 200  # ends what is still under way
    until = time.monotonic() + 10
    while not any("broke off" in record.message for record in caplog.records):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not [line for line in lines if "Traceback" in line]
