"""Requests as a server makes them, in the event loop of the test."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from celery_durable.runtime import real_monotonic


def scope(method: str, path: str) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"host", b"shop"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip


async def send(app: Any, method: str, path: str, receive: Any) -> tuple[int, Any]:
    """One request whose body comes as the test says: its status, and the JSON of its response."""
    told: list[Any] = []

    async def tell(message: Any) -> None:
        told.append(message)

    await app(scope(method, path), receive, tell)
    return told[0]["status"], json.loads(b"".join(each.get("body", b"") for each in told[1:]) or b"{}")


async def ask(app: Any, method: str, path: str, body: Any = None) -> tuple[int, str | None, float]:
    """One request: its status, its problem's code, and how long it took."""
    began = real_monotonic()
    sent = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if not sent:
            await asyncio.Event().wait()
        return sent.pop()

    status, answer = await send(app, method, path, receive)
    return status, answer.get("code"), real_monotonic() - began
